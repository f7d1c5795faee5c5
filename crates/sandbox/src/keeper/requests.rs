//! The lines of a keeper's log about what was carried out for requests of a server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use crate::cause::Cause;
use crate::error::Error;

/// A keeper may live for years, and its log is not cut: about 2 MB.
const LINES_MAX: u32 = 10_000;

/// Counts the lines; clones share the count.
#[derive(Debug, Clone, Default)]
pub(crate) struct Requests(Arc<AtomicU32>);

/// A verb that was carried out.
#[derive(Debug)]
pub(crate) struct Carried<'a> {
    pub verb: &'static str,
    pub began: Instant,
    pub failed: Option<&'a Error>,
}

impl Requests {
    /// Notes a verb that a request asked for. What no request asked for is not noted.
    pub fn note(&self, cause: Option<&Cause>, carried: &Carried<'_>) {
        let Some(cause) = cause else {
            return;
        };
        let line = self.0.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if line > LINES_MAX {
            // The count must not begin again.
            self.0.store(LINES_MAX + 1, Ordering::Relaxed);
            return;
        }
        tracing::info!(
            target: "request",
            request = cause.as_str(),
            verb = carried.verb,
            ms = carried.began.elapsed().as_millis() as u64,
            code = carried.failed.map_or("-".to_owned(), |error| error.report().code),
            "carried out"
        );
        if line == LINES_MAX {
            tracing::info!(target: "request", "further requests are not noted");
        }
    }
}
