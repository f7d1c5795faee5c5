//! A point that several threads pass. The last one reports it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use sandtree_proto::mount::FromGuest;

use super::session::Shared;

#[derive(Debug, Clone)]
pub struct Fence(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    left: AtomicUsize,
    shared: Arc<Shared>,
    /// The greeting after which it was raised: later hosts do not know it.
    greeting: u64,
    report: FromGuest,
}

impl Fence {
    /// `passes` more calls of [`pass`](Self::pass) send the report.
    pub fn new(passes: usize, shared: Arc<Shared>, greeting: u64, report: FromGuest) -> Self {
        Self(Arc::new(Inner {
            left: AtomicUsize::new(passes),
            shared,
            greeting,
            report,
        }))
    }

    pub fn pass(&self) {
        if self.0.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.shared.reached(self.0.greeting, &self.0.report);
        }
    }
}
