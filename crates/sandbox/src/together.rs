//! Runs several pieces of work at a time; all succeed or none.
//!
//! Always: when the future of all work is dropped, the drop waits until each piece is undone.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::blocking::in_place;
use crate::cause::Cause;
use crate::error::Result;

/// How long dropped work may take to be undone. A keeper that undoes its task has as long.
const UNDO_DEADLINE: Duration = Duration::from_secs(60);

/// Work that runs on tasks of its own. Dropping it ends the tasks and waits for that.
struct Tasks<T: 'static> {
    set: JoinSet<T>,
    /// Each task holds a sender until everything of it is dropped.
    running: Option<Sender<()>>,
    ended: Receiver<()>,
}

impl<T: Send + 'static> Tasks<T> {
    fn new() -> Self {
        let (running, ended) = channel();
        Self {
            set: JoinSet::new(),
            running: Some(running),
            ended,
        }
    }

    fn spawn(&mut self, work: impl Future<Output = T> + Send + 'static) {
        let running = self.running.clone();
        self.set.spawn(async move {
            // Declared before the work, so that it is dropped after it.
            let _running = running;
            work.await
        });
    }
}

impl<T> Drop for Tasks<T> {
    fn drop(&mut self) {
        if self.set.is_empty() {
            return;
        }
        self.set.abort_all();
        self.running = None;
        // Only another thread can end the tasks.
        let runtime = Handle::try_current().map(|runtime| runtime.runtime_flavor());
        if !matches!(runtime, Ok(RuntimeFlavor::MultiThread)) {
            return;
        }
        // No task sends anything: the channel closes with its last sender.
        let ended = in_place(|| self.ended.recv_timeout(UNDO_DEADLINE));
        if ended == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("dropped work is undone in the background");
        }
    }
}

/// As [`all`], with a limit on the number at a time.
pub(crate) async fn all_in_turns<T, W>(
    concurrency: usize,
    work: impl IntoIterator<Item = W>,
) -> Result<Vec<T>>
where
    T: Send + 'static,
    W: Future<Output = Result<T>> + Send + 'static,
{
    let limit = Arc::new(Semaphore::new(concurrency));
    let in_turn = |work: W| {
        let limit = limit.clone();
        async move {
            let _turn = limit.acquire_owned().await.expect("it is never closed");
            work.await
        }
    };
    all(work.into_iter().map(in_turn)).await
}

/// All results in order, or the first error after all other work has been dropped, which undoes it.
pub(crate) async fn all<T, W>(work: impl IntoIterator<Item = W>) -> Result<Vec<T>>
where
    T: Send + 'static,
    W: Future<Output = Result<T>> + Send + 'static,
{
    let mut tasks = Tasks::new();
    for (index, work) in work.into_iter().enumerate() {
        let work = async move { work.await.map(|done| (index, done)) };
        tasks.spawn(Cause::carried(work));
    }
    let mut results = Vec::new();
    let mut failed = None;
    while let Some(done) = tasks.set.join_next().await {
        match done {
            Ok(Ok(done)) => results.push(done),
            Ok(Err(error)) => {
                failed.get_or_insert(error);
                tasks.set.abort_all();
            }
            Err(join) if join.is_cancelled() => {}
            Err(join) => std::panic::resume_unwind(join.into_panic()),
        }
    }
    if let Some(error) = failed {
        // Undoing waits for processes and files.
        tokio::task::block_in_place(|| drop(results));
        return Err(error);
    }
    results.sort_by_key(|(index, _)| *index);
    Ok(results.into_iter().map(|(_, done)| done).collect())
}
