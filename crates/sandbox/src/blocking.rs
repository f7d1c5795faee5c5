//! Work that waits for the disk, off the runtime's threads.

use std::pin::Pin;
use std::task::{Context, Poll};

pub(crate) use sandtree_engine::in_place;

/// Runs `work` on a thread where it may block. If it panics, so does the caller.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work)
        .await
        .map_err(tokio::task::JoinError::try_into_panic)
    {
        Ok(done) => done,
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        // The runtime shuts down, and polls nothing any more.
        Err(Err(_)) => std::future::pending().await,
    }
}

/// A future that may block whenever it is polled: the runtime moves its other tasks to another
/// thread meanwhile.
pub(crate) fn may_block<W: Future + Send>(work: W) -> impl Future<Output = W::Output> + Send {
    struct MayBlock<W>(Pin<Box<W>>);

    impl<W: Future> Future for MayBlock<W> {
        type Output = W::Output;

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<W::Output> {
            in_place(|| self.0.as_mut().poll(context))
        }
    }

    MayBlock(Box::pin(work))
}
