//! Runs several pieces of work at a time; all succeed or none.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::error::Result;

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
    let mut tasks = JoinSet::new();
    for (index, work) in work.into_iter().enumerate() {
        tasks.spawn(async move { work.await.map(|done| (index, done)) });
    }
    let mut results = Vec::new();
    let mut failed = None;
    while let Some(done) = tasks.join_next().await {
        match done {
            Ok(Ok(done)) => results.push(done),
            Ok(Err(error)) => {
                failed.get_or_insert(error);
                tasks.abort_all();
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
