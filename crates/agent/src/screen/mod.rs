//! The guest's screen: one thread that is a client of the guest's X server.
//!
//! ```text
//!   loop, workers ── jobs ──► thread ══ X server        one job after the other
//!        ▲                      │  ├─ serves the clipboard at any time
//!        │                      │  └─ without an X server: input devices of the kernel
//!        └────── answers ───────┘
//! ```
//!
//! The thread begins with the first job and connects for it. It ends when it has neither a job, nor
//! a connection, nor devices; the next job begins another one.
//!
//! Always: the loop never waits for the X server. At most [`JOBS_MAX`] jobs wait, and a job ends in
//! bounded time. Jobs from before a restore are not done after it: their host is gone.
//! When it fails: a guest without an X server answers ENODEV, except to input. After an error of
//! the connection it is closed, and the next job connects again; the clipboard that the agent had
//! is then empty.

mod clipboard;
mod devices;
mod event;
mod input;
mod keyboard;
mod keysym;
mod look;
mod session;
mod size;
mod transfer;
mod us;
mod wire;

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use sandtree_proto::{Failure, Reply, ScreenRequest, ScreenState};

use self::devices::Devices;
use self::session::Session;
use crate::failure::{failure, refusal, tolerate};
use crate::workers::{Bell, Finished, guarded};

const JOBS_MAX: usize = 64;
/// Less than the host waits, and more than the limits of single steps.
const JOB_WITHIN: Duration = Duration::from_secs(85);

/// The way to the thread. Clones share it.
#[derive(Debug, Clone)]
pub struct Screen {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Wakes the thread.
    bell: OwnedFd,
    /// How often the guest was restored.
    restores: AtomicU64,
    /// Whether all keys are to be released, because the guest was restored.
    is_release_due: AtomicBool,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    has_thread: bool,
}

struct Job {
    work: Work,
    /// The restores when it was sent.
    restores: u64,
    /// When the host stops waiting for it.
    until: Instant,
    answer: Answer,
}

type Answer = Box<dyn FnOnce(Result<Answered, Failure>) + Send>;

#[derive(Debug)]
enum Work {
    Request(ScreenRequest),
    ReadClipboard,
    WriteClipboard(String),
    /// Releases all keys and buttons.
    Release,
}

#[derive(Debug)]
enum Answered {
    Done,
    Screen(ScreenState),
    Text(Option<String>),
}

impl fmt::Debug for Job {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.work.fmt(formatter)
    }
}

impl Screen {
    pub fn new() -> rustix::io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            shared: Arc::new(Shared {
                queue: Mutex::default(),
                bell,
                restores: AtomicU64::new(0),
                is_release_due: AtomicBool::new(false),
            }),
        })
    }

    /// Begins a request. Its reply reaches the loop by `bell`.
    pub fn request(&self, request: ScreenRequest, id: u32, generation: u64, bell: Bell) {
        let answer = move |answered: Result<Answered, Failure>| {
            let reply = answered.map(|answered| match answered {
                Answered::Screen(state) => Reply::Screen(state),
                Answered::Done | Answered::Text(_) => Reply::Done,
            });
            bell.ring(Finished::Request {
                id,
                generation,
                reply,
            });
        };
        self.submit(Work::Request(request), Box::new(answer));
    }

    /// Waits for the text of the clipboard. For workers, not for the loop.
    fn read_clipboard(&self) -> Result<String, Failure> {
        match self.wait_for(Work::ReadClipboard)? {
            Answered::Text(Some(text)) => Ok(text),
            _ => Err(refusal(Errno::NODATA, "the clipboard has no text")),
        }
    }

    /// Waits until the clipboard has this text. For workers, not for the loop.
    fn write_clipboard(&self, text: String) -> Result<(), Failure> {
        self.wait_for(Work::WriteClipboard(text)).map(drop)
    }

    /// The guest was restored: waiting jobs are void, and no key may stay down.
    pub fn restored(&self) {
        self.shared.restores.fetch_add(1, Ordering::Relaxed);
        self.shared.is_release_due.store(true, Ordering::Relaxed);
    }

    /// Begins to release all keys if the guest was restored. The loop calls this when it has sent
    /// the acknowledgement, which must not wait for this work.
    pub fn release_if_due(&self) {
        let is_due = self.shared.is_release_due.swap(false, Ordering::Relaxed);
        if is_due && (self.shared.lock().has_thread || session::is_likely()) {
            // Without a server no key is down.
            self.submit(Work::Release, Box::new(drop));
        }
    }

    fn wait_for(&self, work: Work) -> Result<Answered, Failure> {
        let (sender, receiver) = mpsc::channel();
        // It fails only if this thread does not wait any more.
        let answer = move |answered| tolerate(sender.send(answered));
        self.submit(work, Box::new(answer));
        let gone = |_| Err(refusal(Errno::IO, "the agent's screen failed inside"));
        receiver.recv().unwrap_or_else(gone)
    }

    fn submit(&self, work: Work, answer: Answer) {
        let job = Job {
            work,
            restores: self.shared.restores(),
            until: Instant::now() + JOB_WITHIN,
            answer,
        };
        if let Err((job, failure)) = self.enqueue(job) {
            (job.answer)(Err(failure));
        }
    }

    /// Queues a job, and starts the thread if there is none. A refused job is given back.
    fn enqueue(&self, job: Job) -> Result<(), (Job, Failure)> {
        let mut queue = self.shared.lock();
        if queue.jobs.len() >= JOBS_MAX {
            let full = format!("{JOBS_MAX} requests wait for the screen: try again");
            return Err((job, refusal(Errno::AGAIN, full)));
        }
        if !queue.has_thread {
            let shared = Arc::clone(&self.shared);
            let started = std::thread::Builder::new()
                .name("screen".into())
                .spawn(move || shared.run());
            if let Err(error) = started {
                return Err((job, failure("cannot start a thread in the guest", &error)));
            }
            queue.has_thread = true;
        }
        queue.jobs.push_back(job);
        drop(queue);
        self.shared.ring();
        Ok(())
    }
}

impl Shared {
    /// A thread that panicked leaves nothing half done here.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn restores(&self) -> u64 {
        self.restores.load(Ordering::Relaxed)
    }

    fn ring(&self) {
        // It fails only if the counter is full, and then the thread is awake.
        tolerate(rustix::io::write(&self.bell, &1u64.to_ne_bytes()));
    }

    fn run(&self) {
        let mut ends = Ends::default();
        while let Some(job) = self.next_job(&mut ends) {
            let Job {
                work,
                restores,
                until,
                answer,
            } = job;
            let is_void = || self.restores() != restores;
            let result = if is_void() {
                Err(refusal(Errno::CANCELED, "the guest was restored"))
            } else if Instant::now() > until {
                // The host does not wait any more, and may send it again.
                Err(refusal(Errno::TIMEDOUT, "the screen was busy for too long"))
            } else {
                let mut is_whole = false;
                let done = guarded(|| {
                    let done = ends.perform(work, until, &is_void);
                    is_whole = true;
                    done
                });
                if !is_whole {
                    // A panic may have left half a request on the connection.
                    ends = Ends::default();
                }
                done
            };
            ends.close_if_broken();
            answer(result);
        }
    }

    /// The next job. Serves the clipboard until there is one. `None`: the thread ends.
    fn next_job(&self, ends: &mut Ends) -> Option<Job> {
        loop {
            let mut queue = self.lock();
            if let Some(job) = queue.jobs.pop_front() {
                return Some(job);
            }
            if ends.session.is_none() && ends.devices.is_none() {
                queue.has_thread = false;
                return None;
            }
            drop(queue);
            let mut session = ends.session.as_mut();
            if session
                .as_mut()
                .is_none_or(|open| open.serve_pending().is_ok_and(|more| !more))
            {
                self.wait(session.as_deref());
            }
            ends.close_if_broken();
        }
    }

    /// Waits for a job or an event.
    fn wait(&self, session: Option<&Session>) {
        let mut ends = vec![PollFd::new(&self.bell, PollFlags::IN)];
        let events = |open| PollFd::from_borrowed_fd(open, PollFlags::IN);
        ends.extend(session.map(|session| events(session.wire.as_fd())));
        // An interruption only looks once more.
        tolerate(poll(&mut ends, None));
        // An empty counter only means that no job came.
        tolerate(rustix::io::read(&self.bell, &mut [0; 8]));
    }
}

/// What the thread works with.
#[derive(Default)]
struct Ends {
    session: Option<Session>,
    /// In a guest that had no X server when it got input.
    devices: Option<Devices>,
}

impl Ends {
    fn close_if_broken(&mut self) {
        self.session.take_if(|session| session.wire.is_broken());
    }

    fn perform(
        &mut self,
        work: Work,
        until: Instant,
        is_void: &dyn Fn() -> bool,
    ) -> Result<Answered, Failure> {
        if matches!(work, Work::Release) {
            self.release_devices()?;
        }
        if self.session.is_none() {
            match Session::connect() {
                Ok(session) => {
                    self.session = Some(session);
                    // From now on, input goes to the server.
                    self.release_devices()?;
                }
                Err(failure) if failure.errno == Errno::NODEV.raw_os_error() => {
                    return self.perform_alone(work, failure, until, is_void);
                }
                Err(failure) => return Err(failure),
            }
        }
        let session = self.session.as_mut().expect("it is connected");
        session.wire.limit(Some(until));
        let answered = do_work(session, work, until, is_void);
        session.wire.limit(None);
        answered
    }

    /// Does what is possible without an X server.
    fn perform_alone(
        &mut self,
        work: Work,
        failure: Failure,
        until: Instant,
        is_void: &dyn Fn() -> bool,
    ) -> Result<Answered, Failure> {
        match work {
            Work::Request(ScreenRequest::Input(inputs)) => {
                let devices = match &mut self.devices {
                    Some(devices) => devices,
                    None => self.devices.insert(Devices::add()?),
                };
                devices.input(&inputs, until, is_void).map(done)
            }
            // Keys of an X server that has ended are not down.
            Work::Release => Ok(Answered::Done),
            _ => Err(failure),
        }
    }

    fn release_devices(&mut self) -> Result<(), Failure> {
        let devices = self.devices.as_mut();
        devices.map_or(Ok(()), Devices::release_all)
    }
}

fn do_work(
    session: &mut Session,
    work: Work,
    until: Instant,
    is_void: &dyn Fn() -> bool,
) -> Result<Answered, Failure> {
    match work {
        Work::Request(ScreenRequest::Look) => session.look().map(Answered::Screen),
        Work::Request(ScreenRequest::Input(inputs)) => {
            session.input(&inputs, until, is_void).map(done)
        }
        Work::Request(ScreenRequest::SetSize { width, height }) => {
            session.set_size(width, height).map(done)
        }
        Work::ReadClipboard => session.clipboard().map(Answered::Text),
        Work::WriteClipboard(text) => session.set_clipboard(text).map(done),
        Work::Release => session.release_all().map(done),
    }
}

fn done((): ()) -> Answered {
    Answered::Done
}
