//! Retries: how many there are, and how long to wait before each.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::access::Limits;
use crate::error::Error;
use crate::watch::{Cancelled, Watch};

/// How often a wait notices that the transfer is cancelled.
const POLL: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(10);
/// The tries of one transfer in total, however much progress each makes.
const TRIES_IN_ALL: u32 = 50;

/// The retries of one request or one transfer.
pub(crate) struct Retry<'a> {
    limits: &'a Limits,
    watch: Watch<'a>,
    in_a_row: u32,
    in_all: u32,
    waited: Duration,
}

impl<'a> Retry<'a> {
    pub(crate) fn new(limits: &'a Limits, watch: Watch<'a>) -> Self {
        Self {
            limits,
            watch,
            in_a_row: 0,
            in_all: 0,
            waited: Duration::ZERO,
        }
    }

    /// Waits before another try. Returns false if there were enough tries.
    pub(crate) fn again(&mut self) -> Result<bool, Cancelled> {
        self.in_a_row += 1;
        self.in_all += 1;
        if self.in_a_row >= self.limits.tries || self.in_all >= TRIES_IN_ALL {
            return Ok(false);
        }
        let factor = 1 << (self.in_a_row - 1).min(10);
        pause((self.limits.backoff * factor).min(BACKOFF_MAX), self.watch)?;
        Ok(true)
    }

    /// There was progress, so the next failure is the first in a row.
    pub(crate) fn progressed(&mut self) {
        self.in_a_row = 0;
    }

    pub(crate) fn tries(&self) -> u32 {
        self.in_all
    }

    /// Waits as long as the registry asks. Fails if its waits are too long in total.
    pub(crate) fn asked(&mut self, registry: &str, wait: Option<Duration>) -> Result<(), Error> {
        let wait = wait.unwrap_or(Duration::from_secs(1)).max(POLL);
        if self.waited.saturating_add(wait) > self.limits.asked_to_wait {
            return Err(Error::TooManyRequests {
                registry: registry.to_owned(),
                waited_s: self.waited.as_secs(),
            });
        }
        self.waited += wait;
        Ok(pause(wait, self.watch)?)
    }
}

fn pause(wait: Duration, watch: Watch) -> Result<(), Cancelled> {
    let end = Instant::now() + wait;
    loop {
        watch(0)?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(POLL));
    }
}

/// The wait that a `Retry-After` header asks for, in seconds or as a date.
pub(crate) fn retry_after(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_given_in_seconds_or_as_a_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let later = httpdate::fmt_http_date(now + Duration::from_secs(7));
        let earlier = httpdate::fmt_http_date(now - Duration::from_secs(7));
        assert_eq!(retry_after("3", now), Some(Duration::from_secs(3)));
        assert_eq!(retry_after(&later, now), Some(Duration::from_secs(7)));
        assert_eq!(retry_after(&earlier, now), Some(Duration::ZERO));
        assert_eq!(retry_after("soon", now), None);
        assert_eq!(retry_after("-1", now), None);
    }

    #[test]
    fn a_wait_that_is_too_long_is_refused_at_once() {
        let limits = Limits::default();
        let mut retry = Retry::new(&limits, &|_| Ok(()));
        let refused = retry.asked("r", Some(Duration::from_secs(u64::MAX)));
        assert!(matches!(
            refused,
            Err(Error::TooManyRequests { waited_s: 0, .. })
        ));
    }

    #[test]
    fn a_wait_can_be_cancelled() {
        let limits = Limits::default();
        let mut retry = Retry::new(&limits, &|_| Err(Cancelled));
        assert!(matches!(
            retry.asked("r", Some(Duration::from_secs(30))),
            Err(Error::Cancelled)
        ));
    }
}
