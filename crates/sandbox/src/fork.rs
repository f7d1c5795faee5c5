//! Forks: running copies of one moment.
//!
//! ```text
//!   capture (one stop of the source) -> each copy: links, loaded, standing still -> all loaded? -> continued, in turns
//!     -> commit: all exist                    \ any failure: all that was made is undone
//! ```
//!
//! Always: n copies, or none. They share every layer with each other and with the source. The state
//! they came from is listed nowhere; once they have their links, it is removed.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::boxed::Boxed;
pub use crate::create::ForkMounts;
use crate::degradation::Degradation;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::names::parse_name;
use crate::sandbox::Sandbox;
use crate::states::ms;

/// Copies per processor that are loaded at a time, unless the caller chooses: one uses the
/// processor while another waits for the disk.
const COPIES_PER_PROCESSOR: usize = 2;
const FORKS_MAX: usize = 1000;

/// How many copies, and what they are called.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkSpec {
    pub count: usize,
    /// Copies are called `name-1`, `name-2` and so on. `None`: after the source, with numbers that
    /// are free.
    pub name: Option<String>,
    /// How many are loaded, and then continued, at a time.
    pub concurrency: usize,
    /// What the copies may do with directories of the host.
    #[serde(default)]
    pub mounts: ForkMounts,
}

/// How many copies are loaded at a time, unless the caller chooses.
pub fn default_concurrency() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    processors * COPIES_PER_PROCESSOR
}

impl ForkSpec {
    pub fn new(count: usize) -> Self {
        Self {
            count,
            name: None,
            concurrency: default_concurrency(),
            mounts: ForkMounts::default(),
        }
    }

    pub fn check(&self) -> Result<()> {
        if !(1..=FORKS_MAX).contains(&self.count) {
            return Err(Error::invalid("number of forks", self.count, "1 to 1000"));
        }
        if self.concurrency == 0 {
            return Err(Error::invalid("number of forks at a time", 0, "at least 1"));
        }
        self.name.as_deref().map_or(Ok(()), |name| {
            parse_name("sandbox name", &format!("{name}-1")).map(drop)
        })
    }

    /// The names of the copies: `name-1` and so on, or the first free numbers after the source's
    /// name.
    pub(crate) fn names(&self, source: &str, host: &Host) -> Result<Vec<String>> {
        if let Some(name) = &self.name {
            return Ok((1..=self.count)
                .map(|number| format!("{name}-{number}"))
                .collect());
        }
        let (listed, _) = host.list()?;
        let is_taken = |name: &String| listed.iter().any(|sandbox| sandbox.name == *name);
        let numbered = (1..).map(|number| format!("{source}-{number}"));
        Ok(numbered
            .filter(|name| !is_taken(name))
            .take(self.count)
            .collect())
    }
}

/// How a fork went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ForkReport {
    /// How long the source was stopped.
    pub pause_ms: f64,
    pub total_ms: f64,
    pub degraded: Vec<Degradation>,
}

impl Sandbox {
    /// Makes running copies of the sandbox, whichever process runs it, if any does. The copies run
    /// in this process or in keepers, as the host is configured. All of them exist when this
    /// returns; when it fails, or is dropped in the middle, none does.
    pub fn fork(&self, spec: ForkSpec) -> Boxed<'_, Result<(Vec<Sandbox>, ForkReport)>> {
        Box::pin(async move {
            let began = Instant::now();
            let (begun, report) = self.begin_fork(spec).await?;
            let copies = begun.commit().await?.release().await;
            let total_ms = ms(began.elapsed());
            Ok((copies, ForkReport { total_ms, ..report }))
        })
    }
}
