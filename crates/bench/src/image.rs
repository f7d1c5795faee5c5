//! `sandtree-bench image`: imports, pulls and pushes of images, each compared with a plain tool on
//! the same bytes.
//!
//! Always: everything that a run writes is in one directory next to the store. The directory has
//! stores, which share kernels and images with the user's, and the files of a registry.

mod content;
mod fetch;
mod server;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use sandtree::image::{ImportSpec, Progress as Reached, Stage};
use sandtree::{
    Error, ExecSpec, Host, HostConfig, Progress, PullSpec, RegistryAccess, Result, SandboxSpec,
    SaveSpec,
};

use crate::config::Global;
use crate::crew::{Crew, IMAGE, measured, median, ms, true_once, write_random};
use crate::failure::{Measured, Outcome};
use crate::figure::Figure;
use crate::samples::Samples;
use crate::scratch::Scratch;
use crate::stores::share_images;
use crate::tool::{self, Tools};
use crate::{progress, show};
use content::{Content, lay_out};
use fetch::fetch_layers;
use server::Registry;

#[derive(Debug, clap::Args)]
pub struct ImageArgs {
    /// How often to measure each figure; the median counts
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Measure only these parts (repeatable)
    #[arg(long, value_name = "NAME")]
    pub only: Vec<ImagePart>,
}

/// The parts of this benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ImagePart {
    /// Import of a root file system from an archive, compared with tar and mke2fs
    Import,
    /// Pull of an OCI image, compared with skopeo
    Pull,
    /// From a pull of busybox to its first command
    Start,
    /// Push of a small change to a large snapshot, compared with the whole push
    Push,
    /// First command in Debian, compared with a cold boot
    Debian,
}

const MIB: u64 = 1 << 20;
const DEBIAN: &str = "debian";
const LAYERS: usize = 4;
/// The disk of a large snapshot, and how much incompressible data is on it.
const DISK: u64 = 1024 * MIB;
const LARGE_MB: u64 = 192;
const CHANGED_MB: u64 = 1;
/// Far more than the files of busybox need.
const SMALL_MAX: usize = 64 << 20;
/// Room for the metadata of a file system.
const ROOM_BYTES: u64 = 256 * MIB;

const ALL: [ImagePart; 5] = [
    ImagePart::Import,
    ImagePart::Pull,
    ImagePart::Start,
    ImagePart::Push,
    ImagePart::Debian,
];

pub async fn run(global: &Global, args: ImageArgs) -> Outcome {
    let rounds = args.rounds.max(1);
    let config = global.config()?;
    // It outlives its sandboxes, also when a signal ends the run.
    let scratch = Scratch::beside(&config.home)?;
    let tools = Tools::new(scratch.path("said"));
    let (figures, left_out) = measured(global, async |crew| {
        let bench = Bench {
            crew,
            rounds,
            scratch: &scratch,
            tools: &tools,
            config,
        };
        bench.parts(&args.only).await
    })
    .await?;
    Ok(Measured {
        figures,
        left_out,
        ..Measured::default()
    })
}

/// The programs that a part needs.
fn needed(part: ImagePart) -> &'static [&'static str] {
    match part {
        ImagePart::Import => &["tar", "mke2fs", "sync"],
        ImagePart::Pull => &["tar", "gzip", "sha256sum", "skopeo", "docker-registry"],
        ImagePart::Start => &["gzip", "sha256sum", "skopeo", "docker-registry"],
        ImagePart::Push => &["docker-registry"],
        ImagePart::Debian => &[],
    }
}

fn left_out(part: ImagePart, why: &str) -> String {
    format!("{} was left out: {why}", format!("{part:?}").to_lowercase())
}

struct Bench<'a> {
    crew: &'a Crew,
    rounds: usize,
    scratch: &'a Scratch,
    tools: &'a Tools,
    config: HostConfig,
}

impl Bench<'_> {
    /// Returns the figures, and a note for each part that was left out.
    async fn parts(&self, only: &[ImagePart]) -> Result<(Vec<Figure>, Vec<String>)> {
        let mut figures = Vec::new();
        let mut missing = Vec::new();
        for part in ALL
            .into_iter()
            .filter(|part| only.is_empty() || only.contains(part))
        {
            let lacking: Vec<_> = needed(part)
                .iter()
                .copied()
                .filter(|tool| tool::find(tool).is_none())
                .collect();
            if !lacking.is_empty() {
                missing.push(left_out(
                    part,
                    &format!("not installed: {}", lacking.join(", ")),
                ));
                continue;
            }
            match part {
                ImagePart::Import => figures.extend(self.import().await?),
                ImagePart::Pull => figures.extend(self.pull().await?),
                ImagePart::Start => figures.extend(self.start().await?),
                ImagePart::Push => figures.extend(self.push().await?),
                ImagePart::Debian => match self.debian_store().await? {
                    Ok(host) => figures.push(self.debian(&host).await?),
                    Err(why) => missing.push(left_out(part, &why)),
                },
            }
            self.crew.clear().await?;
        }
        Ok((figures, missing))
    }

    /// Makes a store that shares the kernel and some images of the user's.
    async fn store(&self, name: &str, images: &[&str]) -> Result<Host> {
        let host = self.open(name).await?;
        share_images(
            &self.crew.host,
            &self.config.home,
            &self.scratch.path(name),
            images,
        )?;
        Ok(host)
    }

    async fn open(&self, name: &str) -> Result<Host> {
        Host::open(HostConfig {
            home: self.scratch.path(name),
            ..self.config.clone()
        })
        .await
    }

    async fn import(&self) -> Result<Vec<Figure>> {
        let content = Content::of_host();
        let archive = self.scratch.path("content.tar");
        let bytes = content.pack(self.tools, (0, 1), &archive).await?;
        let mut ours = vec![];
        let mut theirs = vec![];
        let mut note = String::new();
        for _ in 0..self.rounds {
            self.store("import", &[]).await?;
            let stages = Stages::default();
            let began = Instant::now();
            let host = self.open("import").await?;
            host.import_image(
                &archive,
                Some("content"),
                ImportSpec::default(),
                stages.watch(),
            )
            .await?;
            ours.push(began.elapsed().as_secs_f64());
            let spent = stages.summary();
            remove(&self.scratch.path("import"))?;
            let (took, their_spent) = self.by_mke2fs(&archive, bytes).await?;
            theirs.push(took);
            note = format!("{spent}; {their_spent}");
        }
        let rate =
            |seconds: Vec<f64>| Samples::from(seconds).map(|seconds| bytes as f64 / 1e6 / seconds);
        let what = format!(
            "import of {} files in a {:.0} MB tar, synced",
            content.files,
            bytes as f64 / 1e6
        );
        Ok(vec![
            Figure::new(what, rate(ours), "MB/s")
                .times("tar x + mke2fs -d, synced", rate(theirs))
                .ratio_at_least(0.8)
                .note(note),
        ])
    }

    /// Unpacks an archive to a directory and makes a file system of it. Returns the time in
    /// seconds, and how it was spent.
    async fn by_mke2fs(&self, archive: &Path, bytes: u64) -> Result<(f64, String)> {
        let tree = self.scratch.dir("tree")?;
        let disk = self.scratch.path("disk.ext4");
        let size = format!("{}k", (bytes + bytes / 2 + ROOM_BYTES) >> 10);
        let unpack = [
            "-C".as_ref(),
            tree.as_os_str(),
            "-xf".as_ref(),
            archive.as_os_str(),
        ];
        let unpacked = self.tools.run("tar", &unpack).await?;
        let fixed = ["-q", "-F", "-t", "ext4", "-d"].map(AsRef::as_ref);
        let make = [
            &fixed[..],
            &[tree.as_os_str(), disk.as_os_str(), size.as_ref()],
        ]
        .concat();
        let made = self.tools.run("mke2fs", &make).await?;
        let synced = self.tools.run("sync", &[&disk]).await?;
        remove(&tree)?;
        std::fs::remove_file(&disk).map_err(|e| Error::io("remove", &disk, e))?;
        let spent =
            format!("tar {unpacked:.2} s, mke2fs {made:.2} s, sync of its file {synced:.2} s");
        Ok((unpacked + made + synced, spent))
    }

    async fn pull(&self) -> Result<Vec<Figure>> {
        let content = Content::of_host();
        let mut archives = Vec::new();
        for part in 0..LAYERS {
            archives.push(self.scratch.path(&format!("layer-{part}.tar")));
            content
                .pack(self.tools, (part, LAYERS), &archives[part])
                .await?;
        }
        let registry = Registry::start(self.scratch).await?;
        let reference = registry.reference("content");
        let bytes = self.offer(&archives, &reference).await?;
        let mut fetches = vec![];
        let mut copies = vec![];
        let mut pulls = vec![];
        let mut note = String::new();
        for _ in 0..self.rounds {
            fetches.push(self.fetched(&reference).await?);
            copies.push(self.copied(&reference).await?);
            let stages = Stages::default();
            let host = self.store("pull", &[]).await?;
            let began = Instant::now();
            host.pull(&reference, &PullSpec::default(), stages.watch())
                .await?;
            pulls.push(began.elapsed().as_secs_f64());
            note = stages.summary();
            remove(&self.scratch.path("pull"))?;
        }
        let rate =
            |seconds: Vec<f64>| Samples::from(seconds).map(|seconds| bytes as f64 / 1e6 / seconds);
        let skopeo = rate(copies);
        let what = format!("fetch of {LAYERS} layers of {:.0} MB", bytes as f64 / 1e6);
        Ok(vec![
            Figure::new(what, rate(fetches), "MB/s")
                .times("skopeo copy to dir:", skopeo.clone())
                .ratio_at_least(0.8)
                .note("both check blobs and write them to files, unsynced"),
            Figure::new("whole pull, to a usable image, synced", rate(pulls), "MB/s")
                .times("skopeo copy to dir:", skopeo)
                .note(format!("ours also unpacks and makes ext4: {note}")),
        ])
    }

    /// Makes an OCI image of archives and lets skopeo push it to the registry. Returns the size of
    /// its layers.
    async fn offer(&self, archives: &[PathBuf], reference: &str) -> Result<u64> {
        let layout = self.scratch.dir("layout")?;
        let bytes = lay_out(self.tools, archives, &layout).await?;
        let from = format!("oci:{}", layout.display());
        let to = format!("docker://{reference}");
        self.tools
            .run(
                "skopeo",
                &[
                    "--insecure-policy",
                    "copy",
                    "-q",
                    "--dest-tls-verify=false",
                    &from,
                    &to,
                ],
            )
            .await?;
        remove(&layout)?;
        Ok(bytes)
    }

    /// Fetches blobs to files with our own client. Returns the time in seconds.
    async fn fetched(&self, reference: &str) -> Result<f64> {
        let dir = self.scratch.dir("fetched")?;
        let began = Instant::now();
        fetch_layers(reference, &dir).await?;
        let took = began.elapsed().as_secs_f64();
        remove(&dir)?;
        Ok(took)
    }

    /// Fetches blobs to files with skopeo. Returns the time in seconds.
    async fn copied(&self, reference: &str) -> Result<f64> {
        let dir = self.scratch.path("copied");
        let from = format!("docker://{reference}");
        let to = format!("dir:{}", dir.display());
        let args = [
            "--insecure-policy",
            "copy",
            "-q",
            "--src-tls-verify=false",
            &from,
            &to,
        ];
        let took = self.tools.run("skopeo", &args).await?;
        remove(&dir)?;
        Ok(took)
    }

    async fn start(&self) -> Result<Vec<Figure>> {
        let registry = Registry::start(self.scratch).await?;
        let reference = registry.reference("busybox");
        // Its first sandbox makes the files that all images of this kernel share.
        let files = self.store("files", &[IMAGE]).await?;
        let archive = self.busybox(&files).await?;
        let bytes = self.offer(&[archive], &reference).await?;
        let mut pulls = vec![];
        let mut whole = vec![];
        let mut warm = vec![];
        for _ in 0..self.rounds {
            let host = self.open("start").await?;
            share_images(
                &files,
                &self.scratch.path("files"),
                &self.scratch.path("start"),
                &[],
            )?;
            let spec = PullSpec {
                name: Some("busybox".into()),
                ..PullSpec::default()
            };
            let began = Instant::now();
            host.pull(&reference, &spec, |_| {}).await?;
            let pulled = ms(began.elapsed());
            pulls.push(pulled);
            whole.push(
                pulled
                    + self
                        .first_command(&host, SandboxSpec::new("busybox"))
                        .await?,
            );
            warm.push(
                self.first_command(&host, SandboxSpec::new("busybox"))
                    .await?,
            );
            remove(&self.scratch.path("start"))?;
        }
        let note = format!(
            "pull {:.0} ms of {:.1} MB; the kernel is there",
            median(pulls),
            bytes as f64 / 1e6
        );
        let whole = Samples::from(whole);
        Ok(vec![
            Figure::ms("pull of busybox to its first command", whole.clone()).note(note),
            Figure::ms("the next sandbox to its first command, warm", warm)
                .shorter_than("with the pull", whole),
        ])
    }

    /// Packs the files of the small image.
    async fn busybox(&self, host: &Host) -> Result<PathBuf> {
        let sandbox = self.crew.create_on(host, SandboxSpec::new(IMAGE)).await?;
        let script = "cd / && tar -cf - $(ls -d bin sbin usr etc lib lib64 2>/dev/null)";
        let output = sandbox
            .exec(ExecSpec::shell(script))
            .await?
            .output(SMALL_MAX)
            .await?;
        self.crew.remove(sandbox).await?;
        let archive = self.scratch.path("busybox.tar");
        std::fs::write(&archive, output.stdout).map_err(|e| Error::io("write", &archive, e))?;
        Ok(archive)
    }

    /// The time from the call of create to the end of `/bin/true`, in milliseconds.
    async fn first_command(&self, host: &Host, spec: SandboxSpec) -> Result<f64> {
        let began = Instant::now();
        let sandbox = self.crew.create_on(host, spec).await?;
        true_once(&sandbox.guest().await?).await?;
        let took = ms(began.elapsed());
        self.crew.remove(sandbox).await?;
        Ok(took)
    }

    async fn push(&self) -> Result<Vec<Figure>> {
        let registry = Registry::start(self.scratch).await?;
        let host = self.store("push", &[IMAGE]).await?;
        let large = SandboxSpec {
            disk_bytes: Some(DISK),
            ..SandboxSpec::new(IMAGE)
        };
        self.save_changed(&host, large, LARGE_MB, "large").await?;
        let mut first = vec![];
        let mut again = vec![];
        let mut sent = 0;
        let mut total = 0;
        for round in 0..self.rounds {
            // A push skips blobs that its repository has, so each round has its own.
            let reference = registry.reference(&format!("large-{round}"));
            let began = Instant::now();
            host.push("large", &reference, RegistryAccess::default(), |_| {})
                .await?;
            first.push(ms(began.elapsed()));
            let changed = format!("changed-{round}");
            self.save_changed(
                &host,
                SandboxSpec::from_snapshot("large"),
                CHANGED_MB,
                &changed,
            )
            .await?;
            let began = Instant::now();
            let pushed = host
                .push(&changed, &reference, RegistryAccess::default(), |_| {})
                .await?;
            again.push(ms(began.elapsed()));
            (sent, total) = (pushed.sent_bytes, pushed.total_bytes);
        }
        let what = format!("sent by a push of {CHANGED_MB} MB changed");
        Ok(vec![
            Figure::new(what, sent as f64 / 1e6, "MB")
                .times("the snapshot, packed", total as f64 / 1e6)
                .ratio_at_most(0.1)
                .note("its disk alone, without memory"),
            Figure::ms("that push", again).shorter_than("the first push", first),
        ])
    }

    /// Writes incompressible data to the disk of a new sandbox and saves it.
    async fn save_changed(
        &self,
        host: &Host,
        spec: SandboxSpec,
        megabytes: u64,
        name: &str,
    ) -> Result<()> {
        let sandbox = self.crew.create_on(host, spec).await?;
        write_random(&sandbox, &format!("/root/{name}"), megabytes).await?;
        sandbox
            .save(SaveSpec::new(name)?, Progress::silent())
            .await?;
        self.crew.remove(sandbox).await
    }

    /// A store with Debian: shared with the user's, or built now. The inner error says why it
    /// cannot be built.
    async fn debian_store(&self) -> Result<Result<Host, String>> {
        if self.crew.host.inspect_image(DEBIAN).is_ok() {
            return self.store(DEBIAN, &[DEBIAN]).await.map(Ok);
        }
        let host = self.store(DEBIAN, &[]).await?;
        let made = host.ensure_image(DEBIAN, progress::image(DEBIAN)).await;
        Ok(made.map(|_| host).map_err(|error| show::one_line(&error)))
    }

    async fn debian(&self, host: &Host) -> Result<Figure> {
        let image = host.inspect_image(DEBIAN)?;
        // The first one boots and leaves a warm image.
        self.first_command(host, SandboxSpec::new(DEBIAN)).await?;
        let mut warm = vec![];
        let mut cold = vec![];
        for _ in 0..self.rounds {
            warm.push(self.first_command(host, SandboxSpec::new(DEBIAN)).await?);
            cold.push(
                self.first_command(
                    host,
                    SandboxSpec {
                        cold: true,
                        ..SandboxSpec::new(DEBIAN)
                    },
                )
                .await?,
            );
        }
        let whole = show::mib(image.bytes);
        let used = show::mib(image.disk_bytes_used);
        let warm_bytes = show::mib(host.inspect_image(DEBIAN)?.warm_bytes);
        Ok(Figure::ms("Debian to its first command, warm", warm)
            .shorter_than("cold", cold)
            .note(format!(
                "image {whole}, {used} on disk; its booted state {warm_bytes}"
            )))
    }
}

/// When our work reached each stage.
#[derive(Default)]
struct Stages(Arc<Mutex<Vec<(Stage, Instant)>>>);

impl Stages {
    fn watch(&self) -> impl FnMut(Reached) + Send + use<> {
        let stages = self.0.clone();
        move |reached| {
            let mut stages = stages.lock().unwrap_or_else(PoisonError::into_inner);
            if stages
                .last()
                .is_none_or(|(stage, _)| *stage != reached.stage)
            {
                stages.push((reached.stage, Instant::now()));
            }
        }
    }

    /// How long each stage took until now. A stage may occur several times.
    fn summary(&self) -> String {
        let now = Instant::now();
        let stages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ends = stages.iter().skip(1).map(|(_, began)| *began).chain([now]);
        let mut spent: Vec<(Stage, f64)> = Vec::new();
        for ((stage, began), end) in stages.iter().zip(ends) {
            let seconds = (end - *began).as_secs_f64();
            match spent.iter_mut().find(|(known, _)| known == stage) {
                Some((_, spent)) => *spent += seconds,
                None => spent.push((*stage, seconds)),
            }
        }
        let parts = spent
            .iter()
            .map(|(stage, seconds)| format!("{} {seconds:.2} s", stage.as_str()));
        parts.collect::<Vec<_>>().join(", ")
    }
}

fn remove(path: &Path) -> Result<()> {
    std::fs::remove_dir_all(path).map_err(|e| Error::io("remove", path, e))
}
