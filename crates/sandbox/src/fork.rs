//! Forks: running copies of one moment.
//!
//! ```text
//!   capture (one stop of the source) -> each copy: links, loaded, standing still -> all there? -> all go on
//!                                             \ any failure: all that was made is undone
//! ```
//!
//! Always: n copies, or none. They share every layer with each other and with the source. The state
//! they came from is listed nowhere; once they have their links, it is removed.

use std::sync::Arc;
use std::time::Instant;

use sandtree_store::{Consistency, SandboxRecord, StateKind, StateSource};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::create::{self, Copy};
use crate::error::{Error, Result};
use crate::host::{Host, Inner, store_error};
use crate::lend::{LentState, Wanted};
use crate::sandbox::Sandbox;
use crate::spec::{SandboxSpec, parse_name};
use crate::states::{self, ms};

/// Copies that are loaded at a time, unless told otherwise.
pub const FORK_CONCURRENCY: usize = 4;
const FORKS_MAX: usize = 1000;

/// How many copies, and what they are called.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkSpec {
    pub count: usize,
    /// Copies are called `name-1`, `name-2` and so on. `None`: after the source, with numbers that
    /// are free.
    pub name: Option<String>,
    /// How many are loaded at a time.
    pub concurrency: usize,
}

impl ForkSpec {
    pub fn new(count: usize) -> Self {
        Self {
            count,
            name: None,
            concurrency: FORK_CONCURRENCY,
        }
    }

    pub fn check(&self) -> Result<()> {
        if !(1..=FORKS_MAX).contains(&self.count) {
            return Err(Error::invalid(
                "the number of forks",
                self.count,
                "1 to 1000",
            ));
        }
        if self.concurrency == 0 {
            return Err(Error::invalid(
                "the number of forks at a time",
                0,
                "at least 1",
            ));
        }
        self.name.as_deref().map_or(Ok(()), |name| {
            parse_name("a sandbox's name", &format!("{name}-1")).map(drop)
        })
    }
}

/// What came of a fork.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForkReport {
    /// How long the source stood still.
    pub pause_ms: f64,
    pub total_ms: f64,
    pub degraded: Vec<String>,
}

impl Host {
    /// Makes running copies of a sandbox of this process. When it fails, or is dropped in the
    /// middle, nothing is left.
    pub async fn fork(
        &self,
        sandbox: &Sandbox,
        spec: ForkSpec,
    ) -> Result<(Vec<Sandbox>, ForkReport)> {
        spec.check()?;
        let began = Instant::now();
        let loan = Self::borrow_of(sandbox, Wanted::Copies).await?;
        let copies = self.copies(sandbox.id(), &loan.lent.state, &spec).await;
        let lent = loan.lent.clone();
        loan.give_back().await;
        let copies = copies?;
        let report = ForkReport {
            pause_ms: lent.pause_ms,
            total_ms: ms(began.elapsed()),
            degraded: lent.degraded,
        };
        Ok((copies, report))
    }

    /// Creates several sandboxes at once, all of them or none.
    pub async fn create_all(&self, specs: Vec<SandboxSpec>) -> Result<Vec<Sandbox>> {
        let creating = specs
            .into_iter()
            .map(|spec| create::born(self.inner.clone(), spec));
        create::grow(&self.inner, all_in_turns(FORK_CONCURRENCY, creating).await?)
    }

    async fn copies(&self, id: &str, state: &str, spec: &ForkSpec) -> Result<Vec<Sandbox>> {
        let (source, record) = self.inner.fork_source(id, state)?;
        let names = self.fork_names(record.name.as_str(), spec)?;
        let loading = names.into_iter().map(|name| {
            let (host, source, record) = (self.inner.clone(), source.clone(), record.clone());
            async move { create::copy(host, source, &record, name).await }
        });
        let loaded = all_in_turns(spec.concurrency, loading).await?;
        // Until all have gone on, each undoes itself when it is dropped.
        create::grow(&self.inner, all(loaded.into_iter().map(Copy::wake)).await?)
    }

    /// The state of a paused sandbox that no process runs.
    pub(crate) fn paused_state(&self, reference: &str) -> Result<LentState> {
        let (states, _) = states::of(&self.inner.find(reference)?)?;
        let paused = states
            .into_iter()
            .find(|state| state.kind == StateKind::Paused);
        let state = paused.ok_or_else(|| Error::NoState {
            name: reference.into(),
            state: "it was paused in".into(),
        })?;
        let (degraded, consistency) = (Vec::new(), Consistency::Exact);
        Ok(LentState {
            state: state.id.to_string(),
            pause_ms: 0.0,
            degraded,
            consistency,
            disk_only: false,
        })
    }

    /// Names for copies of a sandbox: `name-1` and so on, or the first numbers after the source's
    /// name that are free.
    pub fn fork_names(&self, source: &str, spec: &ForkSpec) -> Result<Vec<String>> {
        if let Some(name) = &spec.name {
            return Ok((1..=spec.count)
                .map(|number| format!("{name}-{number}"))
                .collect());
        }
        let (listed, _) = self.list()?;
        let is_taken = |name: &String| listed.iter().any(|sandbox| sandbox.name == *name);
        let numbered = (1..).map(|number| format!("{source}-{number}"));
        Ok(numbered
            .filter(|name| !is_taken(name))
            .take(spec.count)
            .collect())
    }
}

/// As [`all`], with no more than so many under way at a time.
#[doc(hidden)]
pub async fn all_in_turns<T, W>(
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
            let _turn = limit.acquire_owned().await.expect("nobody closes it");
            work.await
        }
    };
    all(work.into_iter().map(in_turn)).await
}

/// All results in order, or the first error, once everything that was begun is dropped, and thereby
/// undone.
#[doc(hidden)]
pub async fn all<T, W>(work: impl IntoIterator<Item = W>) -> Result<Vec<T>>
where
    T: Send + 'static,
    W: Future<Output = Result<T>> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    for (index, work) in work.into_iter().enumerate() {
        tasks.spawn(async move { work.await.map(|done| (index, done)) });
    }
    let (mut results, mut failed) = (Vec::new(), None);
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

impl Inner {
    /// The state that copies are made from, and what they are to be like.
    pub(crate) fn fork_source(
        &self,
        reference: &str,
        state: &str,
    ) -> Result<(StateSource, SandboxRecord)> {
        let dir = self.find(reference)?;
        let no_state = || Error::NoState {
            name: reference.into(),
            state: state.into(),
        };
        let id = state.parse().map_err(|_| no_state())?;
        let source = dir.state_source(&id).map_err(store_error("read a state"))?;
        Ok((source, dir.record().clone()))
    }
}
