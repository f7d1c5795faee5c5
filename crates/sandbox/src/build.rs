//! Building images from recipes.
//!
//! ```text
//!   from ──► packages ──► files ──► run … ──► the last disk, flattened ──► image ──► its name
//!             └────── each step in a machine, on the disk that the one before left ──┘
//! ```
//!
//! Always: a step's result is a snapshot without a name, noted under everything that went into it;
//! a step that was done before is not done again. `gc` removes such snapshots, and then they are
//! made anew. When it fails, or is dropped in the middle: the machine and its sandbox are gone, the
//! name is as it was, and the next build goes on after the last step that was finished.

mod steps;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sandtree_images::{
    self as images, ImageInfo, ImportSpec, Progress as ImageProgress, Recipe, RegistryAccess,
    Reuse, memo,
};
use sandtree_store::{Digest, Image, ImageSpec, Name, Named};

use crate::blocking::blocking;
use crate::ca;
use crate::error::{Error, Result, store_error};
use crate::guest::{ExecSpec, Guest};
use crate::held::Held;
use crate::host::Host;
use crate::inner::Inner;
use crate::names::parse_name;
use crate::order::Wanted;
use crate::progress::{Advance, Progress, Watched};
use crate::sandbox::Sandbox;
use crate::spec::SandboxSpec;
use steps::{Step, Steps};

/// Of the machine that runs the steps, where the recipe says nothing.
const MEMORY_BYTES: u64 = 1 << 30;
const GIB: u64 = 1 << 30;
/// What steps may add, where the recipe says nothing.
const ROOM_BYTES: u64 = 2 * GIB;
/// What is kept of a step's output for the error that tells of its failure.
const TAIL_BYTES: usize = 4 << 10;
/// How long a machine may take to go when a build is given up.
const UNDO_DEADLINE: Duration = Duration::from_secs(10);
const UNDO_POLL: Duration = Duration::from_millis(10);

/// How far a build is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BuildEvent {
    /// The image that the recipe begins from is being made.
    Image(ImageProgress),
    /// Step `number` of `of` begins, or was done before.
    Step {
        number: usize,
        of: usize,
        what: String,
        cached: bool,
    },
    /// What a step says.
    Output(Vec<u8>),
    /// The result is being written.
    Writing(Advance),
}

/// Told of every event of a build.
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

/// What a build needs beside its recipe.
#[derive(Debug, Clone, Default)]
pub struct BuildSpec {
    /// Instead of the recipe's.
    pub name: Option<String>,
    /// Does every step anew.
    pub anew: bool,
    /// For a recipe that begins from a registry.
    pub access: RegistryAccess,
}

/// What a recipe begins from.
struct Base {
    image: Image,
    /// A snapshot of it, if the recipe named one.
    snapshot: Option<Held>,
}

impl Base {
    /// Of what steps find, and the image will have at least.
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
    /// Whether the packages of a recipe are in what it begins from already: in a Debian of our own
    /// making they can be.
    fn is_made_with_packages(&self, recipe: &Recipe) -> bool {
        recipe.from == "debian"
            && !recipe.packages.is_empty()
            && images::is_debian_ours(&self.inner.store)
    }

    /// Makes an image from a recipe, and points its name at it.
    pub async fn build_image(
        &self,
        recipe: &Recipe,
        spec: BuildSpec,
        watch: BuildWatch,
    ) -> Result<ImageInfo> {
        let name = spec.name.as_deref().or(recipe.name.as_deref());
        let name = parse_name("image name", name.unwrap_or_default())?;
        self.inner.check_image_name(&name)?;
        // A file that is missing is missed now, and not after an hour's work.
        let (read, with_packages) = (recipe.clone(), self.is_made_with_packages(recipe));
        let steps = blocking(move || Steps::of(&read, with_packages)).await?;
        let base = self.base(recipe, &spec, &watch).await?;
        base.check_size(recipe)?;
        let last = self.work(recipe, &base, &steps, spec.anew, &watch).await?;
        let image = self.publish_built(recipe, &base, last, &watch).await?;
        self.inner.name_image(&name, &image).await?;
        self.inner.image_info(&image.digest)
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

    /// Does the steps that were not done before; the last one's disk, if there is any step.
    async fn work(
        &self,
        recipe: &Recipe,
        base: &Base,
        steps: &Steps,
        anew: bool,
        watch: &BuildWatch,
    ) -> Result<Option<Held>> {
        let from = base
            .snapshot
            .as_ref()
            .map_or(&base.image.digest, |held| &held.digest);
        let keys = steps.keys(from, recipe)?;
        let (done, mut last) = match (!anew).then(|| self.inner.longest_done(&keys)).flatten() {
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
            // It has its room already.
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
        // Held until it is published: nothing else keeps a kernel that is new.
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
        let (image, last) = (base.image.clone(), last.map(|held| held.digest.clone()));
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

/// `bytes`: of the root file system, which no disk is smaller than.
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

/// The disk that steps work on. The image will be as large, and every byte of it is hashed, also
/// where nothing is.
fn room(recipe: &Recipe, least_bytes: u64) -> u64 {
    let usual = least_bytes.next_multiple_of(GIB) + ROOM_BYTES;
    let room = recipe.room.map_or(usual, |room| room.0);
    recipe
        .size
        .map_or(room, |size| room.min(size.0))
        .max(least_bytes)
}

impl Inner {
    /// The latest step whose result is still there, and how many steps it stands for.
    fn longest_done(&self, keys: &[Name]) -> Option<(usize, Held)> {
        let done = |key: &Name| self.pinned(&self.store.cached::<Digest>(key).ok()??).ok();
        (0..keys.len())
            .rev()
            .find_map(|index| Some((index + 1, done(&keys[index])?)))
    }
}

/// A machine on the disk so far. Dropped, it ends, and its sandbox is removed.
struct Workshop {
    guest: Guest,
    sandbox: Temporary,
}

/// A sandbox that nobody misses.
struct Temporary(Option<Sandbox>);

impl Temporary {
    fn sandbox(&self) -> &Sandbox {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Temporary {
    /// Lets go of it, which removes it, and waits until it is gone.
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
            Step::Run(run) => self.run(step, steps::command(run, recipe), watch).await,
            Step::File { file, digest } => {
                let files = self.guest.files();
                if let Some(parent) = std::path::Path::new(&file.target).parent() {
                    files.make_dir(parent, 0o755).await?;
                }
                let sent = files.place(&file.source, file.target.as_ref()).await?;
                steps::check_unchanged(file, digest)?;
                sent.skipped.iter().for_each(|line| {
                    watch.tell(BuildEvent::Output(format!("{line}\n").into_bytes()))
                });
                match steps::attributes(file) {
                    Some(spec) => self.run(step, spec, watch).await,
                    None => Ok(()),
                }
            }
        }
    }

    async fn run(&self, step: &Step, spec: ExecSpec, watch: &BuildWatch) -> Result<()> {
        let mut exec = self.guest.exec(spec).await?;
        let (mut stdout, mut stderr) = (exec.stdout.take(), exec.stderr.take());
        let mut tail = Vec::new();
        let mut take = |chunk: &[u8]| {
            tail.extend_from_slice(chunk);
            let excess = tail.len().saturating_sub(TAIL_BYTES);
            tail.drain(..excess);
            watch.tell(BuildEvent::Output(chunk.to_vec()));
        };
        let read = |source| Error::Guest {
            operation: "read a step's output".into(),
            source,
        };
        while stdout.is_some() || stderr.is_some() {
            let (from, chunk) = tokio::select! {
                chunk = next(&mut stdout), if stdout.is_some() => (&mut stdout, chunk),
                chunk = next(&mut stderr), if stderr.is_some() => (&mut stderr, chunk),
            };
            match chunk.map_err(read)? {
                Some(chunk) => take(&chunk),
                None => *from = None,
            }
        }
        let status = exec.wait().await?;
        match status.success() {
            true => Ok(()),
            false => Err(Error::BuildStep {
                step: step.to_string(),
                status: status.to_string(),
                output: String::from_utf8_lossy(&tail).trim_end().to_owned(),
            }),
        }
    }

    /// Keeps the disk as it is after a step.
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

async fn next(
    stream: &mut Option<crate::link::Output>,
) -> Result<Option<bytes::Bytes>, crate::link::LinkError> {
    match stream {
        Some(stream) => stream.next().await,
        None => Ok(None),
    }
}
