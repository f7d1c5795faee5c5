//! The differences between two disks: of snapshots, of sandboxes, and of their states.
//!
//! Nothing is mounted and no machine is started: both disks are read from their layers. For a
//! running sandbox, a state of its disk is borrowed meanwhile.

use std::sync::Arc;

use sandtree_diff::{self as diff, FileSystem};
pub use sandtree_diff::{Aspect, Change, ChangeKind, ContentDiff, Diff, Kind as NodeKind, Node};
use sandtree_store::disk::{Chain, changed};
use sandtree_store::{SandboxDir, SnapshotDiskFiles};

use crate::blocking::blocking;
use crate::boxed::Boxed;
use crate::chain::{Disk, diff_error};
use crate::error::{Error, Result, store_error};
use crate::held::Held;
use crate::host::Host;
use crate::inner::Inner;
use crate::lend::Loan;
use crate::order::Wanted;
use crate::progress::Progress;
use crate::reference::{Point, Reference};

/// How two disks are compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiffOptions {
    /// Whether a new modification time alone is a change.
    pub times: bool,
    /// After this many changes the comparison ends, and its result is incomplete. `None`: a
    /// million.
    pub max_changes: Option<usize>,
}

/// A readable disk, and the holds on its files.
struct Side {
    chain: Chain,
    loan: Option<Loan>,
    _snapshot: Option<(Held, SnapshotDiskFiles)>,
}

impl Host {
    /// Which files differ between two snapshots, sandboxes or states.
    pub fn diff<'a>(
        &'a self,
        before: &'a str,
        after: &'a str,
        options: DiffOptions,
    ) -> Boxed<'a, Result<Diff>> {
        Box::pin(async move {
            self.compare(before, after, move |a, b| {
                let ranges = changed(a, b).map_err(store_error("compare two disks"))?;
                let all = diff::Options::default();
                let options = diff::Options {
                    times: options.times,
                    max_changes: options.max_changes.unwrap_or(all.max_changes),
                };
                diff::diff(&Disk(a), &Disk(b), Some(&ranges), options).map_err(diff_error)
            })
            .await
        })
    }

    /// The differences in the content of one file.
    pub fn content_diff<'a>(
        &'a self,
        before: &'a str,
        after: &'a str,
        path: &'a [u8],
    ) -> Boxed<'a, Result<ContentDiff>> {
        Box::pin(async move {
            let path = diff::Path::from(path);
            self.compare(before, after, move |a, b| {
                let a = Disk(a);
                let b = Disk(b);
                let a = FileSystem::open(&a).map_err(diff_error)?;
                let b = FileSystem::open(&b).map_err(diff_error)?;
                diff::content_diff(&a, &b, &path).map_err(diff_error)
            })
            .await
        })
    }

    async fn compare<T: Send + 'static>(
        &self,
        before: &str,
        after: &str,
        work: impl FnOnce(&Chain, &Chain) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let before = self.side(before).await?;
        let after = match self.side(after).await {
            Ok(after) => after,
            Err(error) => {
                before.let_go().await;
                return Err(error);
            }
        };
        let (compared, before, after) =
            blocking(move || (work(&before.chain, &after.chain), before, after)).await;
        before.let_go().await;
        after.let_go().await;
        compared
    }

    async fn side(&self, reference: &str) -> Result<Side> {
        match self.inner.point(reference)? {
            Point::Snapshot(reference) => self.inner.snapshot_side(&reference).await,
            Point::Sandbox { sandbox, state } => {
                let wanted = state.map_or(Wanted::Disk, Wanted::State);
                let sandbox = self.sandbox(&sandbox)?;
                let loan = sandbox.borrow(wanted).await?;
                let chain = match self.inner.find(sandbox.id()) {
                    Ok(dir) => self.inner.lent_chain(&dir, &loan.lent.state),
                    Err(error) => Err(error),
                };
                match chain {
                    Ok(chain) => Ok(Side {
                        chain,
                        loan: Some(loan),
                        _snapshot: None,
                    }),
                    Err(error) => {
                        loan.give_back().await;
                        Err(error)
                    }
                }
            }
        }
    }
}

impl Side {
    async fn let_go(self) {
        if let Some(loan) = self.loan {
            loan.give_back().await;
        }
    }
}

impl Inner {
    /// The meaning of a reference: a snapshot, or else a sandbox of that name.
    pub fn point(&self, text: &str) -> Result<Point> {
        let point = Point::parse(text)?;
        let Point::Snapshot(Reference::Name(name)) = &point else {
            return Ok(point);
        };
        let named = self.store.named(name).map_err(store_error("read a name"))?;
        match (named, self.find(text)) {
            (None, Ok(_)) => Ok(Point::Sandbox {
                sandbox: text.to_owned(),
                state: None,
            }),
            _ => Ok(point),
        }
    }

    async fn snapshot_side(self: &Arc<Self>, reference: &Reference) -> Result<Side> {
        let held = self.snapshot(reference, Progress::silent()).await?;
        let image = self.image_of(&held.manifest).await?;
        let host = self.clone();
        blocking(move || {
            let files = host
                .store
                .disk_files(&held)
                .map_err(store_error("read a snapshot's disk"))?;
            let layers: Vec<String> = held
                .manifest
                .disk
                .layers
                .iter()
                .map(|layer| layer.digest.to_string())
                .collect();
            let chain =
                Chain::open(&image.rootfs(), files.paths()).map_err(store_error("read a disk"))?;
            let chain = chain.with_identities(image.digest.as_str(), &layers);
            Ok(Side {
                chain,
                loan: None,
                _snapshot: Some((held, files)),
            })
        })
        .await
    }

    /// The disk of a lent state.
    pub(crate) fn lent(&self, sandbox: &str, state: &str) -> Result<Chain> {
        self.lent_chain(&self.find(sandbox)?, state)
    }

    fn lent_chain(&self, dir: &SandboxDir, state: &str) -> Result<Chain> {
        let no_state = || Error::NoState {
            name: dir.record().name.to_string(),
            state: state.into(),
        };
        let id = state.parse().map_err(|_| no_state())?;
        let manifest = dir.manifest(&id).map_err(store_error("read a state"))?;
        self.chain(dir, &manifest.disk)
    }
}
