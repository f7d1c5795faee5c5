//! The threads of mounts.

use sandtree_proto::Failure;

use crate::failure::{OrFailure, tolerate};
use crate::sys;

/// Starts a thread that the kernel does not make wait for memory that only this thread can free.
pub fn start(what: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let thread = move || {
        // Without it, a guest that is short of memory may wait for its own mounts.
        tolerate(sys::serve_writers());
        work();
    };
    std::thread::Builder::new()
        .spawn(thread)
        .map(drop)
        .or_failure(|| format!("cannot start a thread for {what}"))
}
