//! Tasks that share a runtime with a host: no call delays them, however long the disk takes.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use sandtree::{Forget, Host, Progress, Replace, Sandbox, SaveSpec};

use crate::support::lab::{Lab, sh, spec};

/// The longest time between two ticks of a clock that ticks every 5 ms, until it is stopped.
struct Ticker {
    is_over: Arc<AtomicBool>,
    ticking: std::thread::JoinHandle<Duration>,
}

const TICK: Duration = Duration::from_millis(5);

impl Ticker {
    /// On a thread of its own: what the machine does to everybody.
    fn on_thread() -> Self {
        Self::start(|is_over| {
            let mut gaps = Gaps::new();
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(TICK);
                gaps.tick();
            }
            gaps.longest
        })
    }

    /// As a task of a runtime.
    fn on_runtime() -> Self {
        let runtime = tokio::runtime::Handle::current();
        Self::start(move |is_over| {
            let ticking = runtime.spawn(async move {
                let mut gaps = Gaps::new();
                while !is_over.load(Ordering::Relaxed) {
                    tokio::time::sleep(TICK).await;
                    gaps.tick();
                }
                gaps.longest
            });
            runtime.block_on(ticking).expect("it ticks")
        })
    }

    fn start(tick: impl FnOnce(Arc<AtomicBool>) -> Duration + Send + 'static) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let ticking = {
            let is_over = is_over.clone();
            std::thread::spawn(move || tick(is_over))
        };
        Self { is_over, ticking }
    }

    fn longest(self) -> Duration {
        self.is_over.store(true, Ordering::Relaxed);
        self.ticking.join().expect("it ticks")
    }
}

struct Gaps {
    last: Instant,
    longest: Duration,
}

impl Gaps {
    fn new() -> Self {
        Self {
            last: Instant::now(),
            longest: Duration::ZERO,
        }
    }

    fn tick(&mut self) {
        self.longest = self.longest.max(self.last.elapsed());
        self.last = Instant::now();
    }
}

/// One worker: whatever blocks it delays every other task.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn no_verb_blocks_the_runtime() {
    const DELAY: Duration = Duration::from_millis(50);
    let lab = Lab::open().await;
    let sandbox = lab.host.create(spec("a")).await.expect("it is created");
    let machine = Ticker::on_thread();
    let runtime = Ticker::on_runtime();
    for _ in 0..5 {
        sh(
            &sandbox,
            "dd if=/dev/urandom of=/srv/data bs=1M count=8 2> /dev/null",
        )
        .await;
        sandbox
            .checkpoint(None, Replace::No)
            .await
            .expect("it is taken");
        let save = SaveSpec {
            replace: Replace::Yes,
            ..SaveSpec::new("kept").expect("it is a name")
        };
        sandbox
            .save(save, Progress::silent())
            .await
            .expect("it is saved");
    }
    sandbox
        .forget(Forget::All)
        .await
        .expect("states are removed");
    sandbox.remove().await.expect("it is removed");
    let delayed = runtime.longest();
    let usual = machine.longest();
    assert!(
        delayed < usual + DELAY,
        "a task was delayed by {delayed:?}, a thread by {usual:?}"
    );
}

/// Longer than any task waits on a machine that is busy.
const DELAYED: Duration = Duration::from_secs(20);

/// Replaces a file with a pipe: a reader waits until `hand_out` writes the content.
struct Withheld<'a> {
    path: &'a Path,
    content: Vec<u8>,
}

impl<'a> Withheld<'a> {
    fn new(path: &'a Path) -> Self {
        let content = std::fs::read(path).expect("it is read");
        std::fs::remove_file(path).expect("it is removed");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, path, mode).expect("a pipe is made");
        Self { path, content }
    }

    /// Waits until somebody reads.
    async fn read_by(&self) -> File {
        let path = self.path.to_owned();
        let opened = tokio::task::spawn_blocking(|| File::options().write(true).open(path));
        opened.await.expect("it ends").expect("it opens")
    }

    /// To the reader that waits, and as a file again to those that come later.
    fn hand_out(self, mut reader: File) {
        std::fs::remove_file(self.path).expect("it is removed");
        std::fs::write(self.path, &self.content).expect("it is written");
        reader.write_all(&self.content).expect("it is read");
    }
}

/// Does something that has to wait for a file. Meanwhile another task of the runtime must run.
async fn beside_others<T: Send + 'static>(
    file: &Path,
    work: impl Future<Output = T> + Send + 'static,
) -> T {
    let withheld = Withheld::new(file);
    let working = tokio::spawn(work);
    let reader = withheld.read_by().await;
    // Not by the runtime's clock, which stands still while its worker is blocked.
    let (runs, ran) = mpsc::channel();
    tokio::spawn(async move { runs.send(()).expect("the test waits") });
    let other = tokio::task::block_in_place(|| ran.recv_timeout(DELAYED));
    withheld.hand_out(reader);
    let done = working.await.expect("it ends");
    other.expect("another task was not delayed");
    done
}

async fn found(host: Host) -> Sandbox {
    host.sandbox("a").expect("it exists")
}

/// One worker: whatever blocks it delays every other task.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn no_lookup_creation_or_removal_blocks_the_runtime() {
    let lab = Lab::open().await;
    let sandbox = lab.host.create(spec("a")).await.expect("it is created");
    sandbox.stop(None).await.expect("it is stopped");
    let state = lab.dir(&sandbox).join("state.json");
    drop(sandbox);
    let host = lab.host.clone();
    let info = beside_others(&state, async move { host.find("a") }).await;
    assert_eq!(info.expect("it exists").name, "a");
    let host = lab.host.clone();
    let listed = beside_others(&state, async move { host.list() }).await;
    assert_eq!(listed.expect("it lists").0.len(), 1);
    let sandbox = beside_others(&state, found(lab.host.clone())).await;
    let removed = beside_others(&state, async move { sandbox.remove().await });
    removed.await.expect("it is removed");
    let image = lab.world.home().join("names/images/tiny");
    let host = lab.host.clone();
    let created = beside_others(&image, async move { host.create(spec("b")).await });
    let created = created.await.expect("it is created");
    created.remove().await.expect("it is removed");
}
