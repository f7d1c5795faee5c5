//! The thread that serves the mounts of one guest.
//!
//! ```text
//!   commands ──► packets ──► send ──► wait for commands, the port and inotify ──► changes ─┐
//!      ▲                                                                                   │
//!      └───────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! ```text
//!            hold()            Held                     go()
//!   Running ────────► Holding ──────► Still ─────────────────────► Running
//!      └───────────────┴──── park() ───┘     nothing touches the port while it is still
//! ```
//!
//! Always: replies leave in the order of requests. Changes that came before a request leave before
//! its reply. A request that panics is answered with EIO. All of the state is one value, which
//! moves to another thread when the mounts change.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use sandtree_proto::Nonce;
use sandtree_proto::message::MessageError;
use sandtree_proto::mount::{
    Answer, FromGuest, FromHost, MountError, MountId, Request, Served, VERSION, decode,
};

use crate::answer::{Desk, Mount};
use crate::confine;
use crate::directory::{Access, Directory};
use crate::error::{Completion, Error, Outcome};
use crate::kept::Kept;
use crate::port::{Link, Port};
use crate::status::{Confinement, Counts, Guest, Status, Watching};
use crate::watch::{Change, Own, Refused, WATCHES_MAX, Watches};

/// Memory for the data of a reply that is kept between requests.
const DATA_KEPT: usize = 64 * 1024;

pub(crate) type StatusDone = Box<dyn FnOnce(Vec<Status>) + Send>;

pub(crate) enum Command {
    OnReady(Completion),
    Hold(Completion),
    Park(Completion),
    Go,
    Barrier(Completion),
    Status(StatusDone),
    /// Hand everything to a thread that serves other mounts.
    Move(SyncSender<Box<Service>>),
    End,
}

/// How the mounts change when a new thread takes over.
pub(crate) enum Edit {
    Add(Directory, Completion),
    Remove(MountId, Completion),
}

/// Where commands come from.
pub(crate) struct Commands {
    pub receiver: Receiver<Command>,
    /// An eventfd that is written to after each command.
    pub wake: Arc<OwnedFd>,
}

/// Everything that serves a guest.
pub(crate) struct Service {
    port: Port,
    commands: Commands,
    mounts: BTreeMap<MountId, (Mount, Counts)>,
    watches: Watches,
    kept: Kept,
    confinement: Confinement,
    flow: Flow,
    waiting: Waiting,
    marks: Marks,
    is_ready: bool,
    /// Of replies.
    data: Vec<u8>,
}

#[derive(Debug, Default)]
struct Flow {
    /// Hold was sent, and no Go after it.
    is_holding: bool,
    /// The port is left alone.
    is_still: bool,
}

/// Callers that wait for the guest.
#[derive(Debug, Default)]
struct Waiting {
    ready: Vec<Completion>,
    held: Vec<Completion>,
    /// With the mark that the guest has to reach.
    marked: Vec<(u64, Completion)>,
    /// Barriers that begin when the guest is ready, or the port is not still any longer.
    barriers: Vec<Completion>,
}

#[derive(Debug, Default)]
struct Marks {
    sent: u64,
    reached: u64,
    /// The guest got changes after the last mark.
    has_news: bool,
}

enum Next {
    Serve,
    Move(SyncSender<Box<Service>>),
    End,
}

/// Which descriptors have something.
struct Ready {
    port: bool,
    changes: bool,
}

impl Service {
    pub(crate) fn new(
        stream: UnixStream,
        nonce: Nonce,
        mounts: Vec<Mount>,
        commands: Commands,
    ) -> Self {
        let mounts = mounts.into_iter();
        let mounts = mounts.map(|mount| (mount.id(), (mount, Counts::default())));
        let mut service = Self {
            port: Port::new(stream, nonce),
            commands,
            mounts: mounts.collect(),
            watches: Watches::default(),
            kept: Kept::default(),
            confinement: Confinement::None { errno: 0 },
            flow: Flow::default(),
            waiting: Waiting::default(),
            marks: Marks::default(),
            is_ready: false,
            data: Vec::new(),
        };
        service.greet();
        service
    }

    /// Serves in the calling thread, which is confined from now on.
    pub(crate) fn run(mut self: Box<Self>) {
        self.confine();
        loop {
            match self.obey() {
                Next::Serve => {}
                Next::End => return,
                Next::Move(to) => {
                    // The other thread failed to wait for it only if the process ends.
                    drop(to.send(self));
                    return;
                }
            }
            self.work();
            self.wait_and_hear();
        }
    }

    fn confine(&mut self) {
        let directories = self.mounts.values().map(|(mount, _)| &mount.directory);
        self.confinement = match confine::enter(directories) {
            Ok(version) => Confinement::Landlock { version },
            Err(error) => Confinement::None {
                errno: error.raw_os_error().unwrap_or(0),
            },
        };
    }

    /// Applies a change of the mounts, before the calling thread runs the service. The guest learns
    /// of it by other means: a Hello would begin everything anew.
    pub(crate) fn edit(&mut self, edit: Edit) {
        let (done, outcome) = match edit {
            Edit::Add(directory, done) => (done, self.add(directory)),
            Edit::Remove(mount, done) => (done, self.remove(mount)),
        };
        done.complete(outcome);
    }

    fn add(&mut self, directory: Directory) -> Outcome {
        let id = directory.mount;
        if self.mounts.contains_key(&id) {
            return Err(Error::Exists { mount: id });
        }
        let mount = open(directory)?;
        self.mounts.insert(id, (mount, Counts::default()));
        Ok(())
    }

    fn remove(&mut self, mount: MountId) -> Outcome {
        if self.mounts.remove(&mount).is_none() {
            return Err(Error::Unknown { mount });
        }
        self.kept.forget_mount(mount);
        self.watches.forget_mount(mount);
        Ok(())
    }

    /// Obeys all commands that have come.
    fn obey(&mut self) -> Next {
        loop {
            match self.commands.receiver.try_recv() {
                Ok(Command::Move(to)) => return Next::Move(to),
                Ok(Command::End) | Err(TryRecvError::Disconnected) => return Next::End,
                Err(TryRecvError::Empty) => return Next::Serve,
                Ok(Command::OnReady(done)) if self.is_ready => done.complete(Ok(())),
                Ok(Command::OnReady(done)) => self.waiting.ready.push(done),
                Ok(Command::Hold(done)) => self.hold(done),
                Ok(Command::Park(done)) => {
                    self.flow.is_still = true;
                    done.complete(Ok(()));
                }
                Ok(Command::Go) => self.go(),
                Ok(Command::Barrier(done)) => self.barrier(done),
                Ok(Command::Status(done)) => done(self.status()),
            }
        }
    }

    fn hold(&mut self, done: Completion) {
        if self.flow.is_holding && self.flow.is_still {
            return done.complete(Ok(()));
        }
        self.waiting.held.push(done);
        if !self.flow.is_holding && !self.flow.is_still {
            self.flow.is_holding = true;
            self.port.send(&FromHost::Hold);
        }
    }

    fn go(&mut self) {
        self.flow.is_still = false;
        if std::mem::take(&mut self.flow.is_holding) {
            self.port.send(&FromHost::Go);
        }
        for done in self.waiting.held.drain(..) {
            done.complete(Err(Error::Released));
        }
        self.begin_barriers();
    }

    fn begin_barriers(&mut self) {
        let barriers = std::mem::take(&mut self.waiting.barriers);
        barriers.into_iter().for_each(|done| self.barrier(done));
    }

    fn barrier(&mut self, done: Completion) {
        if !self.is_ready || self.flow.is_still {
            self.waiting.barriers.push(done);
            return;
        }
        self.report();
        if std::mem::take(&mut self.marks.has_news) {
            self.marks.sent += 1;
            let number = self.marks.sent;
            self.port.send(&FromHost::Mark { number });
        }
        if self.marks.reached == self.marks.sent {
            done.complete(Ok(()));
        } else {
            self.waiting.marked.push((self.marks.sent, done));
        }
    }

    /// Does everything that can be done without waiting.
    fn work(&mut self) {
        loop {
            self.packets();
            let was_full = !self.port.has_room();
            if !self.flow.is_still {
                self.port.flush();
            }
            // What was sent makes room for packets that have arrived already.
            if !was_full || !self.port.has_room() {
                break;
            }
        }
        self.give_up();
    }

    fn wait_and_hear(&mut self) {
        let ready = self.wait();
        if ready.port {
            self.port.flush();
        }
        if ready.port && self.port.has_room() {
            self.port.fill();
        }
        if ready.changes {
            self.report();
        }
    }

    fn wait(&self) -> Ready {
        let mut waits = vec![PollFd::new(&self.commands.wake, PollFlags::IN)];
        let is_served = !self.flow.is_still;
        let port = self.port.descriptor().filter(|_| is_served);
        if let Some(port) = port {
            waits.push(PollFd::from_borrowed_fd(port, self.port_events()));
        }
        let may_report = is_served && self.port.link() == Link::Connected && self.port.has_room();
        let changes = self.watches.descriptor().filter(|_| may_report);
        if let Some(changes) = changes {
            waits.push(PollFd::from_borrowed_fd(changes, PollFlags::IN));
        }
        // A wait that a signal ends is a turn without news.
        poll(&mut waits, None).ok();
        let mut came = waits.iter().map(|wait| !wait.revents().is_empty());
        if came.next() == Some(true) {
            // It only counts commands, and those are read until there is none.
            rustix::io::read(&self.commands.wake, &mut [0; 8]).ok();
        }
        Ready {
            port: port.is_some() && came.next() == Some(true),
            changes: changes.is_some() && came.next() == Some(true),
        }
    }

    fn port_events(&self) -> PollFlags {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, self.port.has_room());
        events.set(PollFlags::OUT, self.port.has_output());
        events
    }

    /// Answers what has arrived, as long as there is room for replies.
    fn packets(&mut self) {
        while self.port.has_room() && !self.flow.is_still {
            let Some(arrived) = self.port.next() else {
                return;
            };
            if arrived.and_then(|packet| self.packet(&packet)).is_err() {
                self.is_ready = false;
                if self.port.broken(Instant::now()) {
                    self.greet();
                }
            }
        }
    }

    fn packet(&mut self, packet: &[u8]) -> Result<(), MountError> {
        let (message, data) = decode::<FromGuest>(packet)?;
        let malformed = Err(MountError::Message(MessageError::Malformed));
        if !data.is_empty() && !has_data(&message) {
            return malformed;
        }
        match message {
            FromGuest::Request { id, .. } => {
                self.report();
                self.request(id, &message, data);
            }
            FromGuest::Forget { mount, files } => {
                for id in files {
                    self.kept.forget(mount, id);
                    self.watches.forget(mount, id);
                }
            }
            FromGuest::Ready => self.ready(),
            FromGuest::Marked { number } if number > self.marks.sent => return malformed,
            FromGuest::Marked { number } => self.marked(number),
            FromGuest::Held => self.held(),
        }
        Ok(())
    }

    fn ready(&mut self) {
        self.is_ready = true;
        for done in self.waiting.ready.drain(..) {
            done.complete(Ok(()));
        }
        self.begin_barriers();
    }

    fn marked(&mut self, number: u64) {
        self.marks.reached = self.marks.reached.max(number);
        let reached = self.marks.reached;
        let waiting = std::mem::take(&mut self.waiting.marked).into_iter();
        let (done, waiting) = waiting.partition(|(mark, _)| *mark <= reached);
        self.waiting.marked = waiting;
        let done: Vec<(u64, Completion)> = done;
        done.into_iter().for_each(|(_, done)| done.complete(Ok(())));
    }

    /// The guest may answer a Hold that was ended meanwhile, and hold from then on: it is released
    /// once more.
    fn held(&mut self) {
        if !self.flow.is_holding {
            return self.port.send(&FromHost::Go);
        }
        self.flow.is_still = true;
        for done in self.waiting.held.drain(..) {
            done.complete(Ok(()));
        }
    }

    fn request(&mut self, id: u64, message: &FromGuest, data: &[u8]) {
        let FromGuest::Request {
            mount,
            replay,
            request,
            ..
        } = message
        else {
            return;
        };
        let mut own = Own::new(*mount);
        let mut out = std::mem::take(&mut self.data);
        let result = match self.mounts.get_mut(mount) {
            None => Err(Errno::IO),
            Some((mount, counts)) => {
                let desk = Desk {
                    mount,
                    watches: &mut self.watches,
                    kept: &mut self.kept,
                    own: &mut own,
                    replay: *replay,
                    data,
                    out: &mut out,
                };
                answer(desk, counts, request)
            }
        };
        self.reply(id, result, &out);
        out.clear();
        out.shrink_to(DATA_KEPT);
        self.data = out;
        self.report_beyond(own, *mount);
    }

    fn reply(&mut self, id: u64, result: Result<Answer, Errno>, data: &[u8]) {
        let data = if result.is_ok() { data } else { &[] };
        let result = result.map_err(|errno| sandtree_proto::mount::Errno(errno.raw_os_error()));
        let message = FromHost::Reply { id, result };
        if self.port.reply(&message, data).is_err() {
            let result = Err(sandtree_proto::mount::Errno(Errno::TOOBIG.raw_os_error()));
            self.port.send(&FromHost::Reply { id, result });
        }
    }

    /// Reports what others did so far.
    fn report(&mut self) {
        if self.port.link() != Link::Connected {
            return;
        }
        let changes = self.watches.drain(&mut Own::new(MountId(u32::MAX)));
        self.send_changes(changes);
    }

    /// Reports what others did during a request.
    fn report_beyond(&mut self, mut own: Own, mount: MountId) {
        if own.is_empty() {
            return;
        }
        let changes = self.watches.drain(&mut own);
        self.send_changes(changes);
        let Some((mount, _)) = self.mounts.get(&mount) else {
            return;
        };
        let look = |file: std::os::fd::BorrowedFd<'_>, path: &std::ffi::CString| {
            mount.view.at(file, path).ok()
        };
        let changes = self.watches.recheck(own, look);
        self.send_changes(changes);
    }

    fn send_changes(&mut self, changes: Vec<Change>) {
        for change in changes {
            self.marks.has_news = true;
            match change {
                Change::At {
                    mount,
                    directory,
                    name,
                } => self.port.send(&FromHost::Changed {
                    mount,
                    directory,
                    name,
                }),
                Change::All => {
                    for mount in self.mounts.keys() {
                        self.port.send(&FromHost::ChangedAll { mount: *mount });
                    }
                }
            }
        }
    }

    /// A guest that is greeted begins anew: when it is ready, it has seen all changes.
    fn greet(&mut self) {
        let hello = self.hello();
        self.port.greet(&hello);
        if self.flow.is_holding {
            self.port.send(&FromHost::Hold);
        }
        self.marks.reached = self.marks.sent;
        let unmarked = self.waiting.marked.drain(..).map(|(_, done)| done);
        self.waiting.barriers.extend(unmarked);
    }

    fn hello(&self) -> FromHost {
        let served = self.mounts.values().map(|(mount, _)| Served {
            mount: mount.id(),
            read_only: mount.directory.access == Access::ReadOnly,
        });
        FromHost::Hello {
            version: VERSION,
            mounts: served.collect(),
        }
    }

    /// Without a guest, nothing is kept for it, and its callers do not wait.
    fn give_up(&mut self) {
        let error = match self.port.link() {
            Link::Greeting | Link::Connected => return,
            Link::Refused => || Error::Refused,
            Link::Closed => || Error::Closed,
        };
        self.is_ready = false;
        self.watches = Watches::default();
        self.kept = Kept::default();
        let waiting = std::mem::take(&mut self.waiting);
        let marked = waiting.marked.into_iter().map(|(_, done)| done);
        let all = waiting.ready.into_iter().chain(waiting.held);
        let all = all.chain(waiting.barriers).chain(marked);
        all.for_each(|done| done.complete(Err(error())));
    }

    fn watching(&self) -> Watching {
        if let Some(errno) = self.watches.unavailable() {
            let errno = errno.raw_os_error();
            return Watching::Unavailable { errno };
        }
        match self.watches.refused() {
            None => Watching::Full,
            Some(Refused::Here) => Watching::Limited { most: WATCHES_MAX },
            Some(Refused::ByKernel(errno)) => Watching::Refused {
                errno: errno.raw_os_error(),
            },
        }
    }

    fn status(&self) -> Vec<Status> {
        let guest = match self.port.link() {
            Link::Greeting => Guest::Silent,
            Link::Connected if self.is_ready => Guest::Ready,
            Link::Connected => Guest::Revalidating,
            Link::Refused => Guest::Refused,
            Link::Closed => Guest::Gone,
        };
        let watching = self.watching();
        let all = self.mounts.values().map(|(mount, counts)| Status {
            mount: mount.id(),
            path: mount.directory.path.clone(),
            access: mount.directory.access,
            is_removed: mount.is_removed(),
            guest,
            requests: counts.requests,
            bytes_read: counts.bytes_read,
            bytes_written: counts.bytes_written,
            kept: self.kept.count(mount.id()),
            watches: self.watches.count(mount.id()),
            watching,
            last_error: counts.last_error.clone(),
            confinement: self.confinement,
        });
        all.collect()
    }
}

/// A directory that can be served.
pub(crate) fn open(directory: Directory) -> Result<Mount, Error> {
    let path = directory.path.clone();
    Mount::new(directory).map_err(|errno| match errno {
        Errno::NOSYS => Error::Kernel,
        errno => Error::Open {
            path,
            source: errno.into(),
        },
    })
}

fn answer(mut desk: Desk<'_>, counts: &mut Counts, request: &Request) -> Result<Answer, Errno> {
    counts.requests += 1;
    let Some(answered) = guarded(counts, request, || desk.answer(request)) else {
        return Err(Errno::IO);
    };
    match (&answered, request) {
        (Ok(Answer::Written { bytes, .. }), _) => counts.bytes_written += u64::from(*bytes),
        (Ok(_), Request::Read { .. }) => counts.bytes_read += desk.out.len() as u64,
        _ => {}
    }
    let is_read_only = desk.mount.directory.access == Access::ReadOnly;
    match answered {
        // That is no trouble of the host's.
        Err(Errno::ROFS) if is_read_only => Err(Errno::ROFS),
        Err(errno) => Err(counts.judge(errno, request)),
        Ok(answer) => Ok(answer),
    }
}

/// A panic in one request does not end the thread. None: it panicked, which the counts show.
fn guarded<T>(counts: &mut Counts, request: &Request, run: impl FnOnce() -> T) -> Option<T> {
    let answered = catch_unwind(AssertUnwindSafe(run)).ok();
    if answered.is_none() {
        counts.panicked(request);
    }
    answered
}

/// Whether bytes may follow a message.
fn has_data(message: &FromGuest) -> bool {
    matches!(
        message,
        FromGuest::Request {
            request: Request::Write { .. } | Request::SetXattr { .. } | Request::Revalidate,
            ..
        }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_ends_its_request_only() {
        let mut counts = Counts::default();
        let answered: Option<()> = guarded(&mut counts, &Request::Space, || panic!("on purpose"));
        assert_eq!(answered, None);
        let error = counts.last_error.expect("the status shows it");
        assert!(error.what.ends_with("the server failed"), "{}", error.what);
    }
}
