//! When a guest has booted: its modules are loaded and, where the image brings its own init, that
//! has started what it starts.
//!
//! systemd says so itself. Of any other init only this can be seen: its guest was at work, and is
//! quiet now.

use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// A guest is quiet when its processors were for so many looks in a row.
const QUIET_LOOKS: u32 = 6;
const LOOK: Duration = Duration::from_millis(250);
/// Of the time between two looks, the share in percent that a quiet guest may work.
const QUIET_PERCENT: u64 = 10;
/// The longest message of an init that is read; what counts is one line of it.
const MESSAGE_MAX: usize = 4096;

/// Something that is done once.
#[derive(Debug, Clone, Default)]
pub struct Latch(Arc<(Mutex<bool>, Condvar)>);

impl Latch {
    pub fn done(&self) {
        let (done, changed) = &*self.0;
        *done.lock().expect("nobody panics with it") = true;
        changed.notify_all();
    }

    /// Waits until it is, and says whether it is.
    pub fn wait(&self, within: Duration) -> bool {
        let (done, changed) = &*self.0;
        let waiting = done.lock().expect("nobody panics with it");
        let waited = changed.wait_timeout_while(waiting, within, |done| !*done);
        *waited.expect("nobody panics with it").0
    }
}

/// What boots beside the agent's work.
#[derive(Debug, Clone, Default)]
pub struct Settling {
    pub modules: Latch,
    pub image: Startup,
}

/// How the end of the start of the image's init shows.
#[derive(Debug, Clone, Default)]
pub enum Startup {
    /// There is none but the agent.
    #[default]
    None,
    Told(Latch),
    Quiet,
}

impl Settling {
    /// Waits until the guest has booted. False if its modules are still on their way; an image's
    /// init that is not done in time is as far as it is, and goes on from there.
    pub fn wait(&self, within: Duration) -> bool {
        let until = Instant::now() + within;
        if !self.modules.wait(within) {
            return false;
        }
        match &self.image {
            Startup::None => {}
            Startup::Told(latch) => {
                latch.wait(until.saturating_duration_since(Instant::now()));
            }
            Startup::Quiet => wait_for_quiet(until),
        }
        true
    }
}

/// Hears an init out until it says that it has started everything. The socket goes with that: an
/// init that found it full would stand still.
pub fn listen(socket: UnixDatagram) -> Latch {
    let latch = Latch::default();
    let told = latch.clone();
    std::thread::spawn(move || {
        let mut message = [0; MESSAGE_MAX];
        while let Ok(count) = socket.recv(&mut message) {
            if is_ready(&message[..count]) {
                break;
            }
        }
        told.done();
    });
    latch
}

fn is_ready(message: &[u8]) -> bool {
    message
        .split(|&byte| byte == b'\n')
        .any(|line| line == b"READY=1")
}

fn wait_for_quiet(until: Instant) {
    let (mut before, mut quiet) = (Work::now(), 0);
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

/// What the processors have done since the boot, in ticks.
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

    /// Waiting for a disk is work: whoever boots reads programs.
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
        let (busy, idle) = (
            self.busy.saturating_sub(before.busy),
            self.idle.saturating_sub(before.idle),
        );
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
    fn an_init_says_in_one_line_that_it_is_ready() {
        assert!(is_ready(b"READY=1\nSTATUS=Startup finished in 1s."));
        assert!(!is_ready(b"STATUS=READY=1") && !is_ready(b"") && !is_ready(b"READY=10"));
    }

    #[test]
    fn a_guest_has_settled_when_its_init_says_so() {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        let settling = Settling {
            modules: Latch::default(),
            image: Startup::Told(listen(theirs)),
        };
        assert!(
            !settling.wait(Duration::ZERO),
            "its modules are on their way"
        );
        settling.modules.done();
        ours.send(b"STATUS=Starting").unwrap();
        ours.send(b"READY=1").unwrap();
        let Startup::Told(latch) = &settling.image else {
            unreachable!()
        };
        assert!(latch.wait(Duration::from_secs(10)) && settling.wait(Duration::from_secs(10)));
    }
}
