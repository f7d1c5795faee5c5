//! New sandboxes that run but that other programs do not see yet: one commit makes all of them
//! exist.
//!
//! ```text
//!   begin: each one created, in this process or in a keeper, `creating` on disk
//!     -> all run? -> commit: the batch's one file -> each records that it runs -> released
//!     \ a failure, a keeper's death, Ctrl-C: none of them is left
//! ```
//!
//! Always: at any moment all of them exist or none does, even if this process or a keeper is
//! killed. Before the commit, a keeper whose lease closes removes its sandbox. After it, the keeper
//! finds the batch committed and keeps it.

use std::time::Instant;

use sandtree_store::{Batch, BatchId};

use crate::blocking::{blocking, in_place, may_block};
use crate::boxed::Boxed;
use crate::config::{KeeperProgram, RunIn};
use crate::create::{self, CopySpec, Created, Source};
use crate::driver::Existence;
use crate::error::{Error, Result, store_error};
use crate::fault::Step;
use crate::fork::{ForkReport, ForkSpec, default_concurrency};
use crate::host::Host;
use crate::info::SandboxInfo;
use crate::keeper::{Keeper, Lease, Mission, Ready, Task};
use crate::order::Wanted;
use crate::sandbox::Sandbox;
use crate::spec::SandboxSpec;
use crate::states::ms;
use crate::together::all_in_turns;

/// New sandboxes before their commit. Dropping it removes them.
#[derive(Debug)]
pub struct Begun {
    host: Host,
    /// Present if there is more than one.
    batch: Option<Batch>,
    members: Vec<Member>,
}

#[derive(Debug)]
enum Member {
    Here(Box<Created>),
    Kept {
        lease: Lease,
        sandbox: Sandbox,
        info: Box<SandboxInfo>,
    },
}

/// Whether all sandboxes of a batch have recorded that they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recorded {
    All,
    Some,
}

/// New sandboxes that exist. Dropping this removes a single sandbox in a keeper, unless it was
/// released. Sandboxes of a batch stay.
#[derive(Debug)]
pub struct Committed {
    sandboxes: Vec<Sandbox>,
    leases: Vec<Lease>,
}

impl Host {
    /// Creates sandboxes without making them exist for others, at most `concurrency` at a time.
    pub(crate) fn begin(
        &self,
        specs: Vec<SandboxSpec>,
        concurrency: usize,
    ) -> Boxed<'_, Result<Begun>> {
        Box::pin(async move {
            let batch = self.batch(specs.len()).await?;
            let id = batch.as_ref().map(|batch| batch.id().clone());
            let members = match &self.inner.config.run_in {
                RunIn::ThisProcess => {
                    let create = |spec| {
                        let host = self.inner.clone();
                        let batch = id.clone();
                        let created = may_block(create::created(host, spec, batch));
                        async move { created.await.map(Member::here) }
                    };
                    all_in_turns(concurrency, specs.into_iter().map(create)).await?
                }
                RunIn::Keeper(program) => {
                    let create = |spec: SandboxSpec| {
                        let name = spec.name.clone().unwrap_or_else(|| "that is new".into());
                        let task = Task::Create(Box::new(spec));
                        self.clone()
                            .start_keeper(program.clone(), task, id.clone(), name)
                    };
                    let started = specs.into_iter().map(|spec| {
                        let starting = create(spec);
                        let host = self.clone();
                        async move { Member::ready(&host, starting.await?).await }
                    });
                    all_in_turns(concurrency, started).await?
                }
            };
            Ok(self.begun(batch, members))
        })
    }

    /// Creates a sandbox in this process, even if the host runs its sandboxes in keepers.
    pub(crate) fn create_here(&self, spec: SandboxSpec) -> Boxed<'_, Result<Sandbox>> {
        Box::pin(async move {
            let created = may_block(create::created(self.inner.clone(), spec, None)).await?;
            let begun = self.begun(None, vec![Member::here(created)]);
            let committed = begun.commit().await?;
            Ok(committed.sandboxes()[0].clone())
        })
    }

    /// Makes copies of a state, without making them exist for others.
    pub(crate) fn begin_copies<'a>(
        &'a self,
        source: Source,
        names: Vec<String>,
        spec: &'a ForkSpec,
    ) -> Boxed<'a, Result<Begun>> {
        Box::pin(async move {
            let batch = self.batch(names.len()).await?;
            let id = batch.as_ref().map(|batch| batch.id().clone());
            let members = match &self.inner.config.run_in {
                RunIn::ThisProcess => self.copies_here(source, names, id, spec).await?,
                RunIn::Keeper(program) => {
                    self.copies_in_keepers(program, &source, names, id, spec)
                        .await?
                }
            };
            Ok(self.begun(batch, members))
        })
    }

    async fn copies_here(
        &self,
        source: Source,
        names: Vec<String>,
        batch: Option<BatchId>,
        spec: &ForkSpec,
    ) -> Result<Vec<Member>> {
        let concurrency = spec.concurrency;
        let loading = names.into_iter().map(|name| {
            let host = self.inner.clone();
            let copy = CopySpec {
                source: source.clone(),
                mounts: spec.mounts,
                name,
                batch: batch.clone(),
            };
            may_block(create::copy(host, copy))
        });
        let loaded = all_in_turns(concurrency, loading).await?;
        let continued = loaded
            .into_iter()
            .map(|copy| async move { may_block(copy.resume()).await.map(Member::here) });
        all_in_turns(concurrency, continued).await
    }

    async fn copies_in_keepers(
        &self,
        program: &KeeperProgram,
        source: &Source,
        names: Vec<String>,
        batch: Option<BatchId>,
        spec: &ForkSpec,
    ) -> Result<Vec<Member>> {
        let concurrency = spec.concurrency;
        let loading = names.into_iter().map(|name| {
            let task = Task::Copy {
                source: source.record.id.to_string(),
                state: source.state.manifest().id.to_string(),
                name: name.clone(),
                mounts: spec.mounts,
            };
            let starting = self
                .clone()
                .start_keeper(program.clone(), task, batch.clone(), name);
            async move {
                let mut lease = starting.await?;
                lease.loaded().await?;
                Ok(lease)
            }
        });
        let loaded = all_in_turns(concurrency, loading).await?;
        let continued = loaded.into_iter().map(|mut lease: Lease| {
            let host = self.clone();
            async move {
                lease.go().await?;
                Member::ready(&host, lease).await
            }
        });
        all_in_turns(concurrency, continued).await
    }

    pub(crate) fn start_keeper(
        self,
        program: KeeperProgram,
        task: Task,
        batch: Option<BatchId>,
        name: String,
    ) -> Boxed<'static, Result<Lease>> {
        Box::pin(async move {
            let mission = Mission {
                config: self.inner.config.clone(),
                task,
                batch,
            };
            Lease::start(&program, &mission, &name).await
        })
    }

    async fn batch(&self, count: usize) -> Result<Option<Batch>> {
        if count < 2 {
            return Ok(None);
        }
        let host = self.inner.clone();
        let batch = blocking(move || host.store.begin_batch()).await;
        batch.map(Some).map_err(store_error("begin a batch"))
    }

    fn begun(&self, batch: Option<Batch>, members: Vec<Member>) -> Begun {
        Begun {
            host: self.clone(),
            batch,
            members,
        }
    }
}

impl Host {
    /// Creates a sandbox and starts it. If it fails, or the future is dropped, nothing is left.
    pub async fn create(&self, spec: SandboxSpec) -> Result<Sandbox> {
        let created = self.create_all(vec![spec]).await?;
        Ok(created.into_iter().next().expect("one was created"))
    }

    /// Creates several sandboxes, all of them or none.
    pub async fn create_all(&self, specs: Vec<SandboxSpec>) -> Result<Vec<Sandbox>> {
        let begun = self.begin(specs, default_concurrency()).await?;
        Ok(begun.commit().await?.release().await)
    }

    /// Creates `count` sandboxes called `name-1`, `name-2` and so on, which run but do not exist
    /// for others yet.
    pub async fn begin_numbered(&self, spec: &SandboxSpec, numbering: &ForkSpec) -> Result<Begun> {
        numbering.check()?;
        let names = numbering.names("", self)?;
        let named = |name| SandboxSpec {
            name: Some(name),
            ..spec.clone()
        };
        let specs = names.into_iter().map(named).collect();
        self.begin(specs, numbering.concurrency).await
    }

    /// Creates a sandbox that runs but does not exist for others yet.
    pub async fn begin_one(&self, spec: SandboxSpec) -> Result<Begun> {
        self.begin(vec![spec], 1).await
    }
}

impl Sandbox {
    /// Makes running copies of the sandbox that do not exist for others yet.
    pub fn begin_fork(&self, spec: ForkSpec) -> Boxed<'_, Result<(Begun, ForkReport)>> {
        Box::pin(async move {
            spec.check()?;
            let began = Instant::now();
            let host = self.host();
            let names = spec.names(self.name(), host)?;
            let loan = self.borrow(Wanted::Copies).await?;
            let lent = loan.lent.clone();
            let begun = match in_place(|| host.inner.copy_source(self.id(), &lent.state)) {
                Ok(source) => host.begin_copies(source, names, &spec).await,
                Err(error) => Err(error),
            };
            // Whether or not there are copies now: they have links of their own.
            loan.give_back().await;
            let begun = begun?;
            let report = ForkReport {
                pause_ms: lent.pause_ms,
                total_ms: ms(began.elapsed()),
                degraded: lent.degraded,
            };
            Ok((begun, report))
        })
    }
}

impl Member {
    fn here(created: Created) -> Self {
        Self::Here(Box::new(created))
    }

    async fn ready(host: &Host, mut lease: Lease) -> Result<Self> {
        let Ready { info, answer } = lease.ready().await?;
        let dir = in_place(|| host.inner.find(&info.id))?;
        // One that booted has none, and nor has one of an older keeper.
        let restored = serde_json::from_value(answer).ok();
        let sandbox = Sandbox::kept(host, &dir, Keeper::of(&dir), restored);
        Ok(Self::Kept {
            lease,
            sandbox,
            info: Box::new(info),
        })
    }

    /// A machine that ended by itself, or a keeper that died, prevents the commit.
    fn check(&mut self) -> Result<()> {
        match self {
            Self::Here(created) => created.check(),
            Self::Kept { lease, sandbox, .. } => {
                if lease.is_held() {
                    return Ok(());
                }
                Err(Error::Keeper {
                    name: sandbox.name().to_owned(),
                    source: std::io::ErrorKind::BrokenPipe.into(),
                })
            }
        }
    }
}

impl Begun {
    /// Makes this process the owner of the sandboxes, which run in keepers: each is removed when
    /// its [`OwnedSandbox`] is dropped, or this process ends, whatever its state is then.
    pub fn own(mut self) -> Boxed<'static, Result<Self>> {
        Box::pin(async move {
            for member in &mut self.members {
                if let Member::Kept { lease, .. } = member {
                    lease.own().await?;
                }
            }
            Ok(self)
        })
    }

    /// The sandboxes in keepers. They can be used, but do not exist for others yet.
    pub fn sandboxes(&self) -> impl Iterator<Item = &Sandbox> {
        self.members.iter().filter_map(|member| match member {
            Member::Here(_) => None,
            Member::Kept { sandbox, .. } => Some(sandbox),
        })
    }

    /// Information about all of them.
    pub fn infos(&self) -> impl Iterator<Item = &SandboxInfo> {
        self.members.iter().filter_map(|member| match member {
            Member::Here(_) => None,
            Member::Kept { info, .. } => Some(&**info),
        })
    }

    /// Removes all of them. None is saved, even with `--save`.
    pub fn give_up(mut self) -> Boxed<'static, ()> {
        Box::pin(async move {
            for member in std::mem::take(&mut self.members) {
                if let Member::Kept { lease, .. } = member {
                    lease.give_up().await;
                }
            }
        })
    }

    /// Makes all of them exist. From here on they exist, whatever happens to this process.
    pub fn commit(mut self) -> Boxed<'static, Result<Committed>> {
        Box::pin(async move {
            for member in &mut self.members {
                member.check()?;
            }
            self.host.inner.reach(Step::Commit, None)?;
            let Some(mut batch) = self.batch.take() else {
                return self.settle().await.map(|(committed, _)| committed);
            };
            // No await: the caller could drop the future there.
            tokio::task::block_in_place(|| batch.commit())
                .map_err(store_error("commit a batch"))?;
            self.host.inner.reach(Step::Committed, None)?;
            let (committed, recorded) = self.settle().await?;
            // A sandbox that could not record that it runs still needs its batch.
            if recorded == Recorded::All
                && let Err(error) = blocking(move || batch.finish()).await
            {
                tracing::warn!(%error, "a batch stays on disk until the store is next opened");
            }
            Ok(committed)
        })
    }

    /// Each sandbox records that it runs. In a batch all of them exist already, so one that cannot
    /// record it does not fail the others.
    async fn settle(mut self) -> Result<(Committed, Recorded)> {
        let is_alone = self.members.len() == 1;
        let mut recorded = Recorded::All;
        let mut sandboxes = Vec::new();
        let mut leases = Vec::new();
        for member in std::mem::take(&mut self.members) {
            let settled = match member {
                // No await: the caller could drop the future there.
                Member::Here(mut created) => {
                    let settled = tokio::task::block_in_place(|| created.record());
                    if settled.is_ok() || !is_alone {
                        let record = created.unfinished.dir().record().clone();
                        let local = created.drive(&self.host, Existence::Committed);
                        sandboxes.push(Sandbox::driven(&self.host, record, local));
                    }
                    settled
                }
                Member::Kept {
                    mut lease, sandbox, ..
                } => {
                    let settled = lease.commit().await;
                    sandboxes.push(sandbox);
                    leases.push(lease);
                    settled
                }
            };
            match settled {
                Err(error) if is_alone => return Err(error),
                Err(error) => {
                    tracing::error!(%error, "a new sandbox cannot record that it runs");
                    recorded = Recorded::Some;
                }
                Ok(()) => {}
            }
        }
        Ok((Committed { sandboxes, leases }, recorded))
    }
}

impl Committed {
    pub fn sandboxes(&self) -> &[Sandbox] {
        &self.sandboxes
    }

    /// Releases the sandboxes in keepers, which then continue by themselves.
    pub async fn release(self) -> Vec<Sandbox> {
        for lease in self.leases {
            // A keeper that is gone needs no release.
            if let Err(error) = lease.release().await {
                tracing::warn!(%error, "a keeper died right after its sandbox was created");
            }
        }
        self.sandboxes
    }

    /// The sandboxes in keepers, each with its lease, after [`Begun::own`].
    pub fn owned(self) -> Vec<OwnedSandbox> {
        let pairs = self.sandboxes.into_iter().zip(self.leases);
        pairs
            .map(|(sandbox, lease)| OwnedSandbox { sandbox, lease })
            .collect()
    }

    /// Ends the sandboxes in keepers, and waits for that. Returns the snapshot of the first one, if
    /// it was saved.
    pub async fn end(self) -> Result<Option<String>> {
        let mut saved = None;
        for lease in self.leases {
            saved = saved.or(lease.end().await?);
        }
        Ok(saved)
    }
}

/// A sandbox in a keeper that belongs to this process: its keeper stays while the sandbox rests,
/// and removes it when this is dropped, or when the process ends, however it ends. The drop waits
/// for the removal.
#[derive(Debug)]
pub struct OwnedSandbox {
    sandbox: Sandbox,
    lease: Lease,
}

impl OwnedSandbox {
    pub fn sandbox(&self) -> &Sandbox {
        &self.sandbox
    }

    /// Lets the sandbox continue by itself.
    pub async fn release(self) -> Result<Sandbox> {
        self.lease.release().await?;
        Ok(self.sandbox)
    }

    /// Ends the sandbox, and waits for that. Returns its snapshot, if it was saved. A sandbox that
    /// was to be saved and could not be stays.
    pub async fn end(self) -> Result<Option<String>> {
        let saved = self.lease.end().await?;
        match (saved, self.sandbox.info()) {
            (None, Ok(left)) => self.sandbox.unsaved(left).map_or(Ok(None), Err),
            (saved, _) => Ok(saved),
        }
    }
}
