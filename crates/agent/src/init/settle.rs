//! The end of a guest's boot: its modules are loaded and, if the image has its own init, that init
//! has started its services.
//!
//! systemd reports this itself. For any other init, the agent waits until the processors have been
//! busy and are quiet again.

use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// A guest is quiet when its processors were quiet in this many samples in a row.
const QUIET_LOOKS: u32 = 6;
const LOOK: Duration = Duration::from_millis(250);
/// The share of busy time between two samples, in percent, that still counts as quiet.
const QUIET_PERCENT: u64 = 10;
/// The longest message of an init that is read; only one line of it matters.
const MESSAGE_MAX: usize = 4096;

/// An event that happens once.
#[derive(Debug, Clone, Default)]
pub struct Latch(Arc<(Mutex<bool>, Condvar)>);

impl Latch {
    pub fn done(&self) {
        let (done, changed) = &*self.0;
        *done.lock().expect("no holder of the lock panics") = true;
        changed.notify_all();
    }

    /// Waits for the event, and returns whether it has happened.
    pub fn wait(&self, within: Duration) -> bool {
        let (done, changed) = &*self.0;
        let waiting = done.lock().expect("no holder of the lock panics");
        let waited = changed.wait_timeout_while(waiting, within, |done| !*done);
        *waited.expect("no holder of the lock panics").0
    }
}

/// The parts of the boot that run in parallel with the agent.
#[derive(Debug, Clone, Default)]
pub struct Settling {
    pub modules: Latch,
    pub image: Startup,
}

/// How the agent finds that the image's init has finished its start.
#[derive(Debug, Clone, Default)]
pub enum Startup {
    /// The agent is the only init.
    #[default]
    None,
    Reported(Latch),
    Quiet,
}

impl Settling {
    /// Waits until the guest has booted. Returns false if its modules are not loaded yet. An
    /// image's init that is not ready in time continues later.
    pub fn wait(&self, within: Duration) -> bool {
        let until = Instant::now() + within;
        if !self.modules.wait(within) {
            return false;
        }
        match &self.image {
            Startup::None => {}
            Startup::Reported(latch) => {
                latch.wait(until.saturating_duration_since(Instant::now()));
            }
            Startup::Quiet => wait_for_quiet(until),
        }
        true
    }
}

/// Reads the messages of an init until it reports that everything is started. The socket is then
/// closed, because an init that found it full would block.
pub fn listen(socket: UnixDatagram) -> Latch {
    let latch = Latch::default();
    let started = latch.clone();
    std::thread::spawn(move || {
        let mut message = [0; MESSAGE_MAX];
        while let Ok(count) = socket.recv(&mut message) {
            if is_ready(&message[..count]) {
                break;
            }
        }
        started.done();
    });
    latch
}

fn is_ready(message: &[u8]) -> bool {
    message
        .split(|&byte| byte == b'\n')
        .any(|line| line == b"READY=1")
}

fn wait_for_quiet(until: Instant) {
    let mut before = Work::now();
    let mut quiet = 0;
    while quiet < QUIET_LOOKS && Instant::now() < until {
        std::thread::sleep(LOOK);
        let now = Work::now();
        quiet = if now.is_quiet_since(&before) {
            quiet + 1
        } else {
            0
        };
        before = now;
    }
}

/// The work of the processors since the boot, in ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Work {
    busy: u64,
    idle: u64,
}

impl Work {
    fn now() -> Self {
        std::fs::read_to_string("/proc/stat")
            .map(|text| Self::parse(&text))
            .unwrap_or_default()
    }

    /// Waiting for a disk counts as work, because a boot reads programs.
    fn parse(stat: &str) -> Self {
        let line = stat
            .lines()
            .next()
            .and_then(|line| line.strip_prefix("cpu "))
            .unwrap_or_default();
        let ticks: Vec<u64> = line
            .split_whitespace()
            .map(|word| word.parse().unwrap_or(0))
            .collect();
        let idle = ticks.get(3).copied().unwrap_or(0);
        Self {
            busy: ticks
                .iter()
                .take(8)
                .fold(0, |sum: u64, tick| sum.saturating_add(*tick))
                .saturating_sub(idle),
            idle,
        }
    }

    fn is_quiet_since(&self, before: &Self) -> bool {
        let busy = self.busy.saturating_sub(before.busy);
        let idle = self.idle.saturating_sub(before.idle);
        busy.saturating_mul(100) <= busy.saturating_add(idle).saturating_mul(QUIET_PERCENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_and_waiting_for_a_disk_are_not_quiet() {
        let work = |line: &str| Work::parse(&format!("{line}\ncpu0 1 1 1 1\n"));
        let before = work("cpu  10 0 10 1000 5 0 0 0 0 0");
        assert_eq!(
            before,
            Work {
                busy: 25,
                idle: 1000
            }
        );
        assert!(work("cpu  11 0 11 1023 5 0 0 0 0 0").is_quiet_since(&before));
        assert!(!work("cpu  15 0 15 1015 5 0 0 0 0 0").is_quiet_since(&before));
        assert!(!work("cpu  10 0 10 1010 15 0 0 0 0 0").is_quiet_since(&before));
        assert_eq!(Work::parse("nonsense"), Work::default());
    }

    #[test]
    fn one_line_of_a_message_reports_that_an_init_is_ready() {
        assert!(is_ready(b"READY=1\nSTATUS=Startup finished in 1s."));
        assert!(!is_ready(b"STATUS=READY=1") && !is_ready(b"") && !is_ready(b"READY=10"));
    }

    #[test]
    fn a_guest_has_settled_when_its_init_reports_it() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let settling = Settling {
            modules: Latch::default(),
            image: Startup::Reported(listen(theirs)),
        };
        assert!(
            !settling.wait(Duration::ZERO),
            "its modules are on their way"
        );
        settling.modules.done();
        ours.send(b"STATUS=Starting").unwrap();
        ours.send(b"READY=1").unwrap();
        let Startup::Reported(latch) = &settling.image else {
            unreachable!()
        };
        assert!(latch.wait(Duration::from_secs(10)) && settling.wait(Duration::from_secs(10)));
    }
}
