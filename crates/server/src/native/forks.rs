//! Forks: running copies of one moment, all or none.

use axum::Json;
use axum::extract::State;
use hyper::StatusCode;
use sandtree::{ForkMounts, ForkReport, ForkSpec, SandboxInfo, Scope};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::request::{At, Native, OfSandbox};
use crate::auth;
use crate::control::{Body, Client};
use crate::error::Result;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ForkOptions {
    /// How many copies: 1 to 1000.
    #[schema(default = 1, minimum = 1, maximum = 1000)]
    count: usize,
    /// Copies are called `name-1`, `name-2` and so on. Unless given: after the source, with numbers
    /// that are free.
    name: Option<String>,
    /// How many are loaded at a time: twice the number of processors unless given.
    #[schema(minimum = 1)]
    concurrency: Option<usize>,
    /// What the copies may do with directories of the host. `shared` needs the scope `host-files`.
    mounts: ForkMounts,
}

impl Default for ForkOptions {
    fn default() -> Self {
        Self {
            count: 1,
            name: None,
            concurrency: None,
            mounts: ForkMounts::default(),
        }
    }
}

/// The copies, and how the fork went.
#[derive(Debug, Serialize, ToSchema)]
pub struct Forked {
    pub forks: Vec<SandboxInfo>,
    #[serde(flatten)]
    pub report: ForkReport,
}

/// Makes running copies of a sandbox: all of them, or none.
///
/// A client that leaves before the answer leaves no copies behind.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/fork", tag = "states",
    params(OfSandbox), request_body = ForkOptions,
    responses((status = 201, description = "All copies run.", body = Forked)),
)]
pub async fn fork(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    client: Client,
    Body(options): Body<ForkOptions>,
) -> Result<(StatusCode, Json<Forked>)> {
    if options.mounts == ForkMounts::Shared {
        auth::need(&client.key, Scope::HostFiles, "mounts: shared")?;
    }
    let all = ForkSpec::new(options.count);
    let spec = ForkSpec {
        name: options.name,
        concurrency: options.concurrency.unwrap_or(all.concurrency),
        mounts: options.mounts,
        ..all
    };
    spec.check()?;
    let sandbox = native.sandbox(&of.sandbox)?;
    let count = spec.count as u32;
    let _admission = native.admit(&client.key, &sandbox.info()?, count).await?;
    let (copies, report) = sandbox.fork(spec).await?;
    let forks = copies.iter().map(|copy| copy.info());
    let forks = forks.collect::<sandtree::Result<_>>()?;
    Ok((StatusCode::CREATED, Json(Forked { forks, report })))
}
