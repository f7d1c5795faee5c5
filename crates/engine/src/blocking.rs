//! Work that blocks, in the middle of a task.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Runs `work` in the middle of a task: the runtime moves its other tasks to another thread
/// meanwhile. A caller without such a runtime has no other tasks to delay, or delays them itself.
pub fn in_place<T>(work: impl FnOnce() -> T) -> T {
    let runtime = Handle::try_current();
    if runtime.is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread) {
        tokio::task::block_in_place(work)
    } else {
        work()
    }
}
