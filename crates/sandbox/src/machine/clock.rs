//! Sends a guest the time so that its clock is right however long the message is under way.
//!
//! ```text
//!   sent ──────────── under way ────────────► set     late by the time under way
//!   asked ──► read ──► answered                       the guest's time is known within half of the round trip
//!   step ──► moved by as much                         a step is the same whenever it arrives
//! ```
//!
//! Always: a guest whose answer came within [`PROMPT`] is late by less than that, and is not asked.

use std::time::{Duration, Instant};

use crate::error::Result;
use crate::guest::Guest;
use crate::moment::now_unix_ns;

/// How late a clock may be without being corrected.
const PROMPT: Duration = Duration::from_millis(100);
/// How often a guest is asked at most, until one of its answers is prompt.
const LOOKS: usize = 8;

/// A time that is being sent to a guest.
#[derive(Debug)]
pub(crate) struct Telling {
    began: Instant,
    unix_time_ns: u64,
}

impl Telling {
    pub fn begin() -> Self {
        Self {
            began: Instant::now(),
            unix_time_ns: now_unix_ns(),
        }
    }

    pub fn unix_time_ns(&self) -> u64 {
        self.unix_time_ns
    }

    /// Corrects the clock of the guest, which has answered, if that took long.
    pub async fn correct(self, guest: &Guest) -> Result<()> {
        if self.began.elapsed() <= PROMPT {
            return Ok(());
        }
        let mut best = Look::at(guest).await?;
        for _ in 1..LOOKS {
            if best.took <= PROMPT {
                break;
            }
            let look = Look::at(guest).await?;
            best = if look.took < best.took { look } else { best };
        }
        match best.step_ns() {
            0 => Ok(()),
            step_ns => guest.clock(step_ns).await.map(drop),
        }
    }
}

/// What a guest's clock showed at some moment between a question and its answer.
#[derive(Debug, Clone, Copy)]
struct Look {
    asked_ns: u64,
    took: Duration,
    shown_ns: u64,
}

impl Look {
    async fn at(guest: &Guest) -> Result<Self> {
        let began = Instant::now();
        let asked_ns = now_unix_ns();
        let shown_ns = guest.clock(0).await?;
        Ok(Self {
            asked_ns,
            took: began.elapsed(),
            shown_ns,
        })
    }

    /// By how much the clock has to be moved: nothing, if it may be right.
    fn step_ns(&self) -> i64 {
        let nanos = |duration: Duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX);
        let middle_ns = self.asked_ns.saturating_add_signed(nanos(self.took / 2));
        let step_ns = middle_ns.wrapping_sub(self.shown_ns).cast_signed();
        if step_ns.unsigned_abs() <= nanos(PROMPT.max(self.took) / 2).unsigned_abs() {
            0
        } else {
            step_ns
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_brings_the_clock_to_the_middle_of_the_round_trip() {
        const MS: u64 = 1_000_000;
        let look = |took_ms, shown_ns| Look {
            asked_ns: 5000 * MS,
            took: Duration::from_millis(took_ms),
            shown_ns,
        };
        assert_eq!(look(20, 2000 * MS).step_ns(), 3010 * 1_000_000);
        assert_eq!(look(20, 7000 * MS).step_ns(), -1990 * 1_000_000);
        // It may have been right when it was looked at.
        assert_eq!(look(2000, 6900 * MS).step_ns(), 0);
        assert_eq!(look(0, 4951 * MS).step_ns(), 0);
    }
}
