//! What a guest used in the past: samples that its keeper takes, so that they outlive the server
//! that shows them.
//!
//! ```text
//!   asked ──► a sample every 5 s for 10 minutes ──► one a minute, until the keeper ends
//! ```
//!
//! Always: a keeper that was not asked takes no samples, and so wakes neither itself nor its
//! guest. At most [`SAMPLES_MAX`] are kept, the newest. A guest that does not run, or does not
//! answer, has no sample for that time.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sandtree_proto::Metrics;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::driver::{Local, WeakLocal};
use crate::error::Result;
use crate::guest::Guest;
use crate::moment::now_unix_ms;
use crate::verb::Phase;

/// The interval after somebody has asked.
const OFTEN: Duration = Duration::from_secs(5);
const OFTEN_FOR: Duration = Duration::from_secs(600);
/// The interval when no client has asked for a while: one wake-up a minute.
const SELDOM: Duration = Duration::from_secs(60);
/// Sixteen hours of seldom ones; 100 KiB.
const SAMPLES_MAX: usize = 1000;
/// A sample that is not older is one of now.
const FRESH_MS: u64 = 1000;
/// A guest that answers later has no sample.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// What a guest used at a moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    pub at_unix_ms: u64,
    pub guest: Metrics,
}

/// The samples of a sandbox; clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    samples: VecDeque<Sample>,
    /// When a client asked for the last time. `None`: none did, and no samples are taken.
    asked: Option<Instant>,
}

impl Samples {
    /// The samples so far, with one of now. From here on more are taken.
    pub async fn asked(&self, sandbox: &Local) -> Vec<Sample> {
        let before = self.kept().asked.replace(Instant::now());
        if before.is_none() {
            tokio::spawn(self.clone().take_more(sandbox.downgrade()));
        }
        if !self.is_fresh() {
            self.take(sandbox).await;
        }
        self.kept().samples.iter().cloned().collect()
    }

    /// Whether there is a sample of now. Those who ask often must not displace the past.
    fn is_fresh(&self) -> bool {
        let kept = self.kept();
        let age_ms = |last: &Sample| now_unix_ms().saturating_sub(last.at_unix_ms);
        kept.samples
            .back()
            .map(age_ms)
            .is_some_and(|age| age < FRESH_MS)
    }

    /// Takes samples until the sandbox has no handle left: it must not live on because of this.
    async fn take_more(self, sandbox: WeakLocal) {
        loop {
            tokio::time::sleep(self.interval()).await;
            let Some(sandbox) = sandbox.upgrade() else {
                return;
            };
            self.take(&sandbox).await;
        }
    }

    fn interval(&self) -> Duration {
        let asked = self.kept().asked;
        match asked {
            Some(asked) if asked.elapsed() < OFTEN_FOR => OFTEN,
            _ => SELDOM,
        }
    }

    async fn take(&self, sandbox: &Local) {
        if sandbox.status().state.phase != Some(Phase::Running) {
            return;
        }
        // A guest that stops, pauses or is busy with something else has none.
        let taken = tokio::time::timeout(ANSWER_WITHIN, sample(sandbox)).await;
        if let Ok(Ok(sample)) = taken {
            self.add(sample);
        }
    }

    fn add(&self, sample: Sample) {
        let mut kept = self.kept();
        if kept.samples.len() == SAMPLES_MAX {
            kept.samples.pop_front();
        }
        kept.samples.push_back(sample);
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a guest uses now.
pub(crate) async fn sample(sandbox: &Local) -> Result<Sample> {
    let link = sandbox.status().link().await?;
    let guest = Guest::new(link).metrics().await?;
    let at_unix_ms = now_unix_ms();
    Ok(Sample { at_unix_ms, guest })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_unix_ms: u64) -> Sample {
        let guest = Metrics {
            uptime_ms: at_unix_ms,
            memory_total_bytes: 0,
            memory_available_bytes: 0,
            disk_total_bytes: 0,
            disk_available_bytes: 0,
            cpu_busy_ms: 0,
            processes: 1,
        };
        Sample { at_unix_ms, guest }
    }

    #[test]
    fn the_newest_samples_are_kept() {
        let all = Samples::default();
        let last = SAMPLES_MAX as u64 + 10;
        (0..=last).for_each(|at| all.add(sample(at)));
        let kept = all.kept();
        assert_eq!(kept.samples.len(), SAMPLES_MAX);
        assert_eq!(kept.samples.back().unwrap().at_unix_ms, last);
        assert_eq!(kept.samples.front().unwrap().at_unix_ms, 11);
        drop(kept);
        assert!(!all.is_fresh());
        all.add(sample(now_unix_ms()));
        assert!(all.is_fresh());
    }

    #[tokio::test(start_paused = true)]
    async fn samples_become_seldom_when_no_client_asks() {
        let all = Samples::default();
        assert_eq!(all.interval(), SELDOM);
        all.kept().asked = Some(Instant::now());
        assert_eq!(all.interval(), OFTEN);
        tokio::time::advance(OFTEN_FOR).await;
        assert_eq!(all.interval(), SELDOM);
    }
}
