//! What operators see of the server: one line of the log for each request, and figures for
//! Prometheus.
//!
//! ```text
//!   request ── observed: name it, count it ──► planes ──► answer, with its name ──► body ends: one line, counted
//!                 │                              │
//!                 └── Cause ──► keeper.log       └── trail: plane, sandbox, key, restores
//! ```
//!
//! Always: labels have few values. Neither ids nor anything that a client chose is one. A request
//! whose client leaves is counted and logged, too, with status 499.

mod bodies;
mod figures;
mod routes;
mod spans;
mod trail;

pub use bodies::{is_timeout, received, sent, sources};
pub use figures::{Figures, Operation};
pub use spans::{IS_BUILT_IN as SENDS_TRACES, Spans};
pub use trail::{Plane, Trail};

use sandtree::{Cause, Sandbox};

/// The code of a refusal, for its line in the log; part of the answer's extensions.
#[derive(Debug, Clone, Copy)]
pub struct Refused(pub &'static str);

/// Lets the keeper of a sandbox that begins to run take samples of what it uses.
pub fn sample(sandbox: &Sandbox) {
    let sandbox = sandbox.clone();
    tokio::spawn(async move {
        // It may have ended already.
        if let Err(error) = sandbox.samples().await {
            tracing::debug!(%error, "no samples are taken of a sandbox");
        }
    });
}

/// Runs work on a task of its own that still belongs to the request.
pub fn spawn<W>(work: W) -> tokio::task::JoinHandle<W::Output>
where
    W: Future<Output: Send> + Send + 'static,
{
    let work = Cause::carried(work);
    match Trail::current() {
        Some(trail) => tokio::spawn(trail.of(work)),
        None => tokio::spawn(work),
    }
}
