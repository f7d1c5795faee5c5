//! Building images from recipes.
//!
//! ```text
//!   from ──► packages ──► files ──► run … ──► the last disk, flattened ──► image ──► its name
//!             └────── each step in a machine, on the disk that the one before left ──┘
//!   from ──► files, and nothing else ──► the tree of the image, with them ──► image ──► its name
//! ```
//!
//! Always: the result of a step is a snapshot without a name, recorded under the digest of all its
//! inputs; a recorded step does not run again. `gc` removes such snapshots, and then their steps
//! run again. When it fails, or the future is dropped: the machine and its sandbox are gone, the
//! name is unchanged, and the next build continues after the last finished step.

mod steps;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sandtree_images::{
    self as images, AddedFiles, CopyFile, ImageInfo, ImportSpec, Progress as ImageProgress, Recipe,
    RegistryAccess, Reuse, memo,
};
use sandtree_store::{Digest, Image, ImageSpec, Name, Named};

use crate::blocking::blocking;
use crate::boxed::Boxed;
use crate::ca;
use crate::error::{Error, Result, store_error};
use crate::guest::{ExecSpec, Guest, Tail};
use crate::held::Held;
use crate::host::Host;
use crate::inner::Inner;
use crate::names::parse_name;
use crate::order::Wanted;
use crate::progress::{Advance, Progress, Watched};
use crate::sandbox::Sandbox;
use crate::spec::SandboxSpec;
use steps::{Step, Steps};

/// The default memory of the machine that runs the steps.
const MEMORY_BYTES: u64 = 1 << 30;
const GIB: u64 = 1 << 30;
/// The default space that steps may add.
const ROOM_BYTES: u64 = 2 * GIB;
/// How long a machine may take to end when a build is cancelled.
const UNDO_DEADLINE: Duration = Duration::from_secs(10);
const UNDO_POLL: Duration = Duration::from_millis(10);

/// An event of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildEvent {
    /// The base image of the recipe is being made.
    Image(ImageProgress),
    /// Step `number` of `of` starts, or was done before.
    Step {
        number: usize,
        of: usize,
        what: String,
        cached: bool,
    },
    /// Output of a step.
    Output(Vec<u8>),
    /// The result is being written.
    Writing(Advance),
}

/// Receives every event of a build.
#[derive(Clone)]
pub struct BuildWatch {
    told: Arc<dyn Fn(BuildEvent) + Send + Sync>,
}

impl BuildWatch {
    pub fn new(told: impl Fn(BuildEvent) + Send + Sync + 'static) -> Self {
        Self {
            told: Arc::new(told),
        }
    }

    pub(crate) fn tell(&self, event: BuildEvent) {
        (self.told)(event);
    }

    fn image(&self) -> impl FnMut(ImageProgress) + Send + 'static {
        let watch = self.clone();
        move |progress| watch.tell(BuildEvent::Image(progress))
    }

    fn writing(&self) -> Progress {
        let watch = self.clone();
        Progress::new(move |advance| watch.tell(BuildEvent::Writing(advance)))
    }
}

impl fmt::Debug for BuildWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BuildWatch")
    }
}

/// The settings of a build in addition to its recipe.
#[derive(Debug, Clone, Default)]
pub struct BuildSpec {
    /// Replaces the recipe's name.
    pub name: Option<String>,
    /// Runs every step again.
    pub anew: bool,
    /// Runs this step and all after it again, counted from 0.
    pub anew_from: Option<usize>,
    /// Variables of commands in the image, and not of its steps, over those of the recipe.
    pub env: BTreeMap<String, String>,
    /// Boots a sandbox like this of the new image before the image gets its name, and keeps its
    /// warm image. A service that does not start fails the build.
    pub trial: Option<SandboxSpec>,
    /// For a recipe whose base is in a registry.
    pub access: RegistryAccess,
}

impl BuildSpec {
    /// How many steps of so many need not run again.
    fn usable(&self, steps: usize) -> usize {
        if self.anew {
            0
        } else {
            self.anew_from.map_or(steps, |from| from.min(steps))
        }
    }
}

/// The base of a recipe.
struct Base {
    image: Image,
    /// A snapshot of it, if the recipe names one.
    snapshot: Option<Held>,
}

/// What an image is made from, and the steps that are left.
struct Plan {
    base: Base,
    steps: Steps,
}

impl Base {
    /// The size of the disk that steps find, and the least size of the image.
    fn bytes(&self) -> u64 {
        self.snapshot
            .as_ref()
            .map_or(self.image.record.rootfs.bytes, |held| {
                held.manifest.disk.bytes
            })
    }

    fn check_size(&self, recipe: &Recipe) -> Result<()> {
        match recipe.size {
            Some(size) if size.0 < self.bytes() => {
                let rule = format!("what the recipe begins from has {} MiB", self.bytes() >> 20);
                Err(Error::invalid(
                    "image size",
                    format!("{} MiB", size.0 >> 20),
                    &rule,
                ))
            }
            _ => Ok(()),
        }
    }
}

impl Host {
    /// Whether the base already contains the recipe's packages, which a Debian of our own can.
    fn is_made_with_packages(&self, recipe: &Recipe) -> bool {
        recipe.from == "debian"
            && !recipe.packages.is_empty()
            && images::is_debian_ours(&self.inner.store)
    }

    /// Makes an image from a recipe, and points its name at it.
    pub fn build_image<'a>(
        &'a self,
        recipe: &'a Recipe,
        spec: BuildSpec,
        watch: BuildWatch,
    ) -> Boxed<'a, Result<ImageInfo>> {
        Box::pin(async move {
            let name = spec.name.as_deref().or(recipe.name.as_deref());
            let name = parse_name("image name", name.unwrap_or_default())?;
            self.inner.check_image_name(&name)?;
            // A missing file is reported now, and not after an hour of work.
            let read = recipe.clone();
            let with_packages = self.is_made_with_packages(recipe);
            let steps = blocking(move || Steps::of(&read, with_packages)).await?;
            let base = self.base(recipe, &spec, &watch).await?;
            base.check_size(recipe)?;
            let plan = Plan { base, steps };
            let Plan { base, steps } = self.with_plain_files(recipe, plan, &spec, &watch).await?;
            let last = self.work(recipe, &base, &steps, &spec, &watch).await?;
            let mut recipe = recipe.clone();
            recipe.env.extend(spec.env.clone());
            let image = self.publish_built(&recipe, &base, last, &watch).await?;
            if let Some(trial) = spec.trial {
                let trial = SandboxSpec {
                    image: Some(image.digest.to_string()),
                    ..trial
                };
                self.warm_image(&trial).await?;
            }
            self.inner.name_image(&name, &image).await?;
            self.inner.image_info(&image.digest)
        })
    }

    async fn base(&self, recipe: &Recipe, spec: &BuildSpec, watch: &BuildWatch) -> Result<Base> {
        let whole = |image| Base {
            image,
            snapshot: None,
        };
        if self.is_made_with_packages(recipe) {
            let packages = recipe.packages.clone();
            let reuse = if spec.anew { Reuse::No } else { Reuse::Yes };
            let making = self.inner.image_job(watch.image(), move |job| {
                images::debian_with(job, &packages, reuse)
            });
            return making.await.map(whole);
        }
        let import = ImportSpec::default();
        let from = recipe.from.clone();
        if images::is_path(&from) {
            let importing = self.inner.image_job(watch.image(), move |job| {
                images::import(job, from.as_ref(), &import)
            });
            return importing.await.map(whole);
        }
        if from.contains('/') {
            let access = spec.access.clone();
            let pulling = self.inner.image_job(watch.image(), move |job| {
                images::image_from_registry(job, &from, &access, &import)
            });
            return pulling.await.map(whole);
        }
        let name = parse_name("base of a recipe", &recipe.from)?;
        match self
            .inner
            .store
            .named(&name)
            .map_err(store_error("read a name"))?
        {
            Some(Named::Snapshot(digest)) => {
                let held = self.inner.pinned(&digest)?;
                let image = self.inner.image_of(&held.manifest).await?;
                Ok(Base {
                    image,
                    snapshot: Some(held),
                })
            }
            _ => self
                .inner
                .clone()
                .ensure_image(&recipe.from, watch.image())
                .await
                .map(whole),
        }
    }

    /// Adds the files without a machine, if the recipe has nothing else to do.
    async fn with_plain_files(
        &self,
        recipe: &Recipe,
        plan: Plan,
        spec: &BuildSpec,
        watch: &BuildWatch,
    ) -> Result<Plan> {
        let Plan { base, steps } = plan;
        let files = steps.plain_files().filter(|files| !files.is_empty());
        let Some(files) = files.filter(|_| base.snapshot.is_none()) else {
            return Ok(Plan { base, steps });
        };
        let keys = steps.keys(&base.image.digest, recipe)?;
        let key = keys.last().expect("there are files");
        let key = memo::key("files", &Digest::of(key.as_str().as_bytes()));
        let reuse = if spec.usable(steps.len()) == steps.len() {
            Reuse::Yes
        } else {
            Reuse::No
        };
        let added = AddedFiles {
            base: base.image.clone(),
            files,
            key,
            reuse,
        };
        let making = self
            .inner
            .image_job(watch.image(), move |job| images::with_files(job, &added));
        let Some(image) = making.await? else {
            return Ok(Plan { base, steps });
        };
        steps.check_files_unchanged()?;
        let of = steps.len();
        for (number, step) in steps.iter().enumerate() {
            watch.tell(BuildEvent::Step {
                number: number + 1,
                of,
                what: step.to_string(),
                cached: false,
            });
        }
        let base = Base {
            image,
            snapshot: None,
        };
        Ok(Plan {
            base,
            steps: Steps::none(),
        })
    }

    /// Runs the steps that were not done before. Returns the disk of the last one, if there is any.
    async fn work(
        &self,
        recipe: &Recipe,
        base: &Base,
        steps: &Steps,
        spec: &BuildSpec,
        watch: &BuildWatch,
    ) -> Result<Option<Held>> {
        let from = base
            .snapshot
            .as_ref()
            .map_or(&base.image.digest, |held| &held.digest);
        let keys = steps.keys(from, recipe)?;
        let usable = spec.usable(keys.len());
        let (done, mut last) = match self.inner.longest_done(&keys[..usable]) {
            Some((done, held)) => (done, Some(held)),
            None => (0, None),
        };
        let of = steps.len();
        let tell = |number: usize, step: &Step, cached| {
            watch.tell(BuildEvent::Step {
                number: number + 1,
                of,
                what: step.to_string(),
                cached,
            });
        };
        steps
            .iter()
            .enumerate()
            .take(done)
            .for_each(|(number, step)| tell(number, step, true));
        if done == of {
            return Ok(last);
        }
        let start = match (&last, &base.snapshot) {
            // The snapshot has its room already.
            (Some(held), _) => SandboxSpec::from_snapshot(held.digest.to_string()),
            (None, Some(held)) => SandboxSpec {
                disk_bytes: Some(room(recipe, held.manifest.disk.bytes)),
                ..SandboxSpec::from_snapshot(held.digest.to_string())
            },
            (None, None) => SandboxSpec {
                disk_bytes: Some(room(recipe, base.image.record.rootfs.bytes)),
                ..SandboxSpec::new(base.image.digest.to_string())
            },
        };
        let machine = Workshop::open(
            self,
            recipe,
            SandboxSpec {
                network: Some(steps.network(recipe)),
                ..start
            },
        )
        .await?;
        for (number, step) in steps.iter().enumerate().skip(done) {
            tell(number, step, false);
            machine.perform(recipe, step, watch).await?;
            last = Some(machine.keep(self, &keys[number]).await?);
        }
        machine.close().await?;
        Ok(last)
    }

    async fn publish_built(
        &self,
        recipe: &Recipe,
        base: &Base,
        last: Option<Held>,
        watch: &BuildWatch,
    ) -> Result<Image> {
        let host = self.inner.clone();
        // Held until the image is published: nothing else keeps a new kernel.
        let kernel = match recipe.kernel.clone() {
            None => None,
            Some(kernel) => {
                let choice = kernel.into();
                let making = self
                    .inner
                    .image_job(watch.image(), move |job| images::kernel(job, &choice));
                Some(making.await?)
            }
        };
        let digest = kernel
            .as_ref()
            .map_or(&base.image.record.kernel, |kernel| &kernel.digest)
            .clone();
        let last = last.as_ref().or(base.snapshot.as_ref());
        let bytes = last.map_or(base.image.record.rootfs.bytes, |held| {
            held.manifest.disk.bytes
        });
        let spec = built_spec(recipe, &base.image, digest, bytes);
        let image = base.image.clone();
        let last = last.map(|held| held.digest.clone());
        let published = Watched::run(watch.writing(), move |progress| match last {
            None => host.store.derive_image(&image, spec),
            Some(digest) => {
                let staged = host.store.stage()?;
                host.store.flatten(&digest, &staged, progress)?;
                host.store.publish_image(staged, spec)
            }
        });
        published.await.map_err(store_error("publish an image"))
    }
}

/// `bytes` is the size of the root file system, which is the least size of a disk.
fn built_spec(recipe: &Recipe, base: &Image, kernel: Digest, bytes: u64) -> ImageSpec {
    ImageSpec {
        arch: base.record.arch,
        kernel,
        init: recipe.init.unwrap_or(base.record.init),
        defaults: recipe.defaults_over(&base.record.defaults),
        disk_bytes: recipe
            .size
            .map(|size| size.0)
            .or(base.record.disk_bytes)
            .map(|disk| disk.max(bytes)),
    }
}

/// The size of the disk that steps work on. The image gets the same size, and every byte of it is
/// hashed, also the unused ones.
fn room(recipe: &Recipe, least_bytes: u64) -> u64 {
    let usual = least_bytes.next_multiple_of(GIB) + ROOM_BYTES;
    let room = recipe.room.map_or(usual, |room| room.0);
    recipe
        .size
        .map_or(room, |size| room.min(size.0))
        .max(least_bytes)
}

impl Inner {
    /// The latest step whose result still exists, and the number of steps up to it.
    fn longest_done(&self, keys: &[Name]) -> Option<(usize, Held)> {
        let done = |key: &Name| self.pinned(&self.store.cached::<Digest>(key).ok()??).ok();
        (0..keys.len())
            .rev()
            .find_map(|index| Some((index + 1, done(&keys[index])?)))
    }
}

/// A machine on the disk so far. Dropping it ends the machine and removes its sandbox.
struct Workshop {
    guest: Guest,
    sandbox: Temporary,
}

/// A temporary sandbox.
struct Temporary(Option<Sandbox>);

impl Temporary {
    fn sandbox(&self) -> &Sandbox {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Temporary {
    /// Removes the sandbox, and waits until it is gone.
    fn drop(&mut self) {
        let Some(driver) = self.0.take().and_then(|sandbox| sandbox.weak()) else {
            return;
        };
        let end = Instant::now() + UNDO_DEADLINE;
        tokio::task::block_in_place(|| {
            while driver.is_driven() && Instant::now() < end {
                std::thread::sleep(UNDO_POLL);
            }
        });
    }
}

impl Workshop {
    async fn open(host: &Host, recipe: &Recipe, start: SandboxSpec) -> Result<Self> {
        let spec = SandboxSpec {
            memory_bytes: Some(recipe.memory.map_or(MEMORY_BYTES, |size| size.0)),
            ca_bundle: if recipe.host_ca {
                Some(ca::host_bundle()?)
            } else {
                None
            },
            cold: true,
            without_start: true,
            auto_remove: true,
            ..start
        };
        let sandbox = host.create_here(spec).await?;
        let sandbox = Temporary(Some(sandbox));
        let guest = sandbox.sandbox().guest().await?;
        Ok(Self { guest, sandbox })
    }

    async fn perform(&self, recipe: &Recipe, step: &Step, watch: &BuildWatch) -> Result<()> {
        match step {
            Step::Packages(packages) => self.run(step, steps::install(packages), watch).await,
            Step::Run { run, digests } => {
                for (file, digest) in run.files.iter().zip(digests) {
                    self.place(step, file, digest, watch).await?;
                }
                self.run(step, steps::command(run, recipe), watch).await
            }
            Step::File { file, digest } => self.place(step, file, digest, watch).await,
        }
    }

    /// Copies a file or a tree of the host, or what is in an archive.
    async fn place(
        &self,
        step: &Step,
        file: &CopyFile,
        digest: &str,
        watch: &BuildWatch,
    ) -> Result<()> {
        let files = self.guest.files();
        let target = std::path::Path::new(&file.target);
        if let Some(parent) = target.parent() {
            files.make_dir(parent, 0o755).await?;
        }
        let sent = if file.unpack {
            files.unpack(&file.source, target).await?
        } else {
            files.place(&file.source, target).await?
        };
        steps::check_unchanged(file, digest)?;
        for line in &sent.skipped {
            watch.tell(BuildEvent::Output(format!("{line}\n").into_bytes()));
        }
        match steps::attributes(file) {
            Some(spec) => self.run(step, spec, watch).await,
            None => Ok(()),
        }
    }

    async fn run(&self, step: &Step, spec: ExecSpec, watch: &BuildWatch) -> Result<()> {
        let mut exec = self.guest.exec(spec).await?;
        let mut tail = Tail::default();
        let status = exec
            .drained(|chunk| {
                tail.add(chunk);
                watch.tell(BuildEvent::Output(chunk.to_vec()));
            })
            .await?;
        if status.success() {
            return Ok(());
        }
        Err(Error::BuildStep {
            step: step.to_string(),
            status: status.to_string(),
            output: tail.text(),
        })
    }

    /// Saves the disk after a step.
    async fn keep(&self, host: &Host, key: &Name) -> Result<Held> {
        let loan = self.sandbox.sandbox().borrow(Wanted::Disk).await?;
        let dir = host.inner.find(self.sandbox.sandbox().id())?;
        let kept = host
            .inner
            .unnamed(dir, &loan.lent, Progress::silent())
            .await;
        loan.give_back().await;
        let held = kept?.into_lasting();
        let consequence = "a finished step cannot be recorded; it will run again next time";
        memo::record(&host.inner.store, key, &held.digest, consequence);
        Ok(held)
    }

    async fn close(self) -> Result<()> {
        self.sandbox.sandbox().remove().await
    }
}
