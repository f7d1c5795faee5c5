//! Expiry: the end of a sandbox after a time. The driver keeps the time, so a sandbox also ends
//! when no client and no server runs.
//!
//! ```text
//!   start, resume ── after_ms ──► expires_at ── Expire ──► another expires_at, or none
//!                                     └── reached ──► removed | paused | stopped
//! ```
//!
//! When it fails: the sandbox continues, and the driver tries again after [`RETRY`].

use std::time::Duration;

use super::Driver;
use crate::error::Result;
use crate::moment::now_unix_ms;
use sandtree_store::{ExpiryAction, StateRecord};

/// The wait after a failed attempt, for example on a full disk.
const RETRY: Duration = Duration::from_secs(60);
/// The clock is read at least this often: a timer does not count the time in which the host sleeps.
const LOOK: Duration = Duration::from_secs(20);

/// Waits until this time.
pub(super) async fn reached(at_unix_ms: Option<u64>) {
    let Some(at) = at_unix_ms else {
        return std::future::pending().await;
    };
    loop {
        let left = Duration::from_millis(at.saturating_sub(now_unix_ms()));
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(LOOK)).await;
    }
}

impl Driver {
    pub(super) fn set_expiry(&mut self, after_ms: Option<u64>) -> Result<()> {
        self.record(StateRecord {
            expires_at_unix_ms: after_ms.map(|after| now_unix_ms().saturating_add(after)),
            ..self.state.clone()
        })
    }

    /// Does what the sandbox's record asks for at its expiry.
    pub(super) async fn expire(&mut self) {
        let expiry = self.record_of().expiry;
        let action = expiry.map(|expiry| expiry.action).unwrap_or_default();
        tracing::info!(?action, "a sandbox expires");
        let done = match action {
            ExpiryAction::Remove => self.remove().await,
            ExpiryAction::Pause => self.pause().await.map(drop),
            ExpiryAction::Stop => self.stop(None).await,
        };
        let Err(error) = done else { return };
        tracing::error!(%error, "a sandbox cannot expire");
        if self.running.is_some() && self.owned.is_some() {
            self.state.expires_at_unix_ms =
                Some(now_unix_ms().saturating_add(RETRY.as_millis() as u64));
        }
    }
}
