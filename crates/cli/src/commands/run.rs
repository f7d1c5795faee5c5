//! `sandtree run`: creates a sandbox, runs a command in it, and removes it unless it is detached.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use sandtree::{
    Arguments, Begun, Code, Committed, Error, ExecSpec, Expiry, ExpiryAction, ForkSpec, Host,
    Lifetime, MemoryMode, MountSpec, Prepared, PublishedPort, Report, Result, Sandbox, SandboxSpec,
    SaveOnStop, Unsaved, ca,
};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::session::{self, How, OnSignal};
use super::{Outcome, absolute_reference, interruptible, open, registry, save};
use crate::args::{Global, Shape, duration, expiry_action, mount, own_kernel, port, size};
use crate::failure::Failure;
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// Name of the sandbox [default: its id]
    #[arg(long)]
    pub name: Option<String>,
    /// Run the sandbox in the background and print its id
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    pub detach: bool,
    /// Remove the sandbox when it stops; always so without --detach
    #[arg(long)]
    pub rm: bool,
    /// Create N sandboxes, NAME-1, NAME-2 and so on: all of them or none
    #[arg(
        long,
        value_name = "N",
        requires = "detach",
        requires = "name",
        conflicts_with = "save"
    )]
    pub count: Option<usize>,
    /// Save the disk as a snapshot with this name, or to this directory, when the sandbox stops for
    /// any reason
    #[arg(long, value_name = "NAME|./DIR")]
    pub save: Option<String>,
    /// With --save: replace the snapshot that has this name
    #[arg(long, requires = "save")]
    pub force: bool,
    /// With --save: add a label (repeatable)
    #[arg(long, value_name = "KEY=VALUE", requires = "save")]
    pub label: Vec<String>,
    /// Find and save snapshots as directories in DIR
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
    /// Start from this snapshot; the same as its name in place of the image
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "image")]
    pub snapshot: Option<String>,
    #[command(flatten)]
    pub shape: Shape,
    /// Disk size; the file system grows to it [default: the image's, or the snapshot's]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub disk: Option<u64>,
    /// Forward 127.0.0.1:HOST to port GUEST; HOST 0 chooses a free port (repeatable)
    #[arg(long, value_name = "HOST:GUEST", value_parser = port)]
    pub publish: Vec<PublishedPort>,
    /// Mount a directory of the host at path GUEST. ro: read-only; cow: changes stay in the sandbox
    /// (repeatable)
    #[arg(long, value_name = "HOST:GUEST[:ro|:cow]", value_parser = mount)]
    pub mount: Vec<MountSpec>,
    /// End the sandbox after it has run for this time, counted from each start and resume
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub expire_after: Option<Duration>,
    /// With --expire-after: what happens then
    #[arg(long, value_name = "remove|pause|stop", requires = "expire_after", default_value = "remove", value_parser = expiry_action)]
    pub on_expiry: ExpiryAction,
    /// Boot instead of restoring the image's booted state or the snapshot's memory
    #[arg(long)]
    pub cold: bool,
    /// Take a checkpoint before every command; `undo -n N` reverses N commands
    #[arg(long)]
    pub auto_checkpoint: bool,
    /// Number of automatic checkpoints to keep; the oldest are removed first
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub auto_checkpoints: u32,
    /// Pass the guest's flushes to the host's disk: synced data survives a power loss of the host,
    /// and syncs are slower
    #[arg(long)]
    pub durable: bool,
    /// Directory for memory layers, which may be on another file system
    #[arg(long, value_name = "DIR")]
    pub memory_dir: Option<PathBuf>,
    /// How to detect written memory: write-protect, soft-dirty, anonymous or full [default: the
    /// best that works]
    #[arg(long, value_name = "MODE")]
    pub memory_mode: Option<MemoryMode>,
    /// Kernel to use instead of the image's: a bzImage, or a vmlinux with a PVH entry
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// With --kernel: a cpio archive, unpacked before ours
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initramfs: Option<PathBuf>,
    /// With --kernel: the directory of its modules, if it lacks built-in drivers
    #[arg(long, value_name = "DIR", requires = "kernel")]
    pub modules: Option<PathBuf>,
    /// Make the guest trust these certificate authorities [without FILE: the host's]
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub ca_bundle: Option<Option<PathBuf>>,
    /// Program to run instead of the image's entry point; "" for none
    #[arg(long, value_name = "PROGRAM")]
    pub entrypoint: Option<OsString>,
    #[command(flatten)]
    pub how: How,
    /// Image or snapshot to start from: a name, a digest, or the directory of a snapshot
    #[arg(required_unless_present = "snapshot", value_name = "IMAGE|SNAPSHOT")]
    pub image: Option<String>,
    /// Command, or arguments of the image's entry point [default: the image's command, or a shell]
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// The command to run, as typed. The image's defaults complete it later.
#[derive(Clone)]
struct Task {
    /// The typed command and its options.
    typed: ExecSpec,
    entrypoint: Option<Vec<OsString>>,
}

impl Task {
    /// Refuses an invalid command before anything starts.
    fn new(args: &RunArgs) -> Result<Self> {
        let typed = session::spec(args.how.clone(), args.command.clone())?;
        let words = |program: &OsString| {
            if program.is_empty() {
                Vec::new()
            } else {
                vec![program.clone()]
            }
        };
        Ok(Self {
            typed,
            entrypoint: args.entrypoint.as_ref().map(words),
        })
    }

    /// Whether there is a command to run without a terminal. A bare image command is usually a
    /// shell; a snapshot may already be running its own.
    fn runs_alone(&self, sandbox: &Sandbox) -> Result<bool> {
        match &self.entrypoint {
            _ if !self.typed.argv.is_empty() => Ok(true),
            Some(words) => Ok(!words.is_empty()),
            None if sandbox.info()?.snapshot.is_some() => Ok(false),
            None => sandbox.has_entrypoint(),
        }
    }

    fn spec(self, sandbox: &Sandbox) -> Result<ExecSpec> {
        let argv = sandbox.main_command(self.typed.argv, self.entrypoint)?;
        Ok(ExecSpec { argv, ..self.typed })
    }
}

pub async fn run(global: &Global, args: RunArgs) -> Outcome {
    args.image
        .as_deref()
        .or(args.snapshot.as_deref())
        .map_or(Ok(()), check_here)?;
    let task = Task::new(&args)?;
    if args.detach {
        return interruptible(run_detached(global, &args, task)).await;
    }
    let mut interrupt =
        signal(SignalKind::interrupt()).map_err(|e| Error::io("listen for", "signals", e))?;
    let committed = unless_interrupted(&mut interrupt, started(global, &args)).await?;
    let sandbox = committed.sandboxes()[0].clone();
    let outcome = work(&sandbox, task, global.json, &mut interrupt).await;
    // Dropping the lease removes the sandbox, and returns when it is gone.
    match &sandbox.info().ok().and_then(|info| info.save_on_stop) {
        Some(target) => saved(&sandbox, target, committed).await?,
        None => tokio::task::block_in_place(|| drop(committed)),
    }
    outcome
}

/// Creates the one sandbox of a foreground run. Other commands see it, and it is removed with its
/// lease.
async fn started(global: &Global, args: &RunArgs) -> Result<Committed> {
    let (host, prepared) = prepared(global, args).await?;
    begin(&host, args, &prepared).await?.commit().await
}

/// Stops a sandbox with `--save`, which saves it. A sandbox that could not be saved stays, unless
/// another command removed it.
async fn saved(sandbox: &Sandbox, target: &str, committed: Committed) -> Result<()> {
    let spinner = progress::spinner(format!("saving as {target}"));
    let saved = committed.end().await;
    spinner.finish_and_clear();
    if saved?.is_some() {
        show::notes(&[format!("saved as {target}")]);
        return Ok(());
    }
    let reason = match sandbox.info() {
        Ok(left) => match left.save_failed {
            Some(reason) => Unsaved::Failed { reason },
            None => Unsaved::Phase(left.state),
        },
        Err(_) => Unsaved::Removed,
    };
    Err(Error::StillUnsaved {
        name: sandbox.name().to_owned(),
        target: target.to_owned(),
        reason,
    })
}

async fn run_detached(global: &Global, args: &RunArgs, task: Task) -> Outcome {
    let (host, prepared) = prepared(global, args).await?;
    let begun = begin(&host, args, &prepared).await?;
    let execs = match all_detached(&begun, &task).await {
        Ok(execs) => execs,
        Err(failure) => {
            begun.give_up().await;
            return Err(failure);
        }
    };
    // Until here, other commands see none of them.
    let sandboxes = begun.commit().await?.release().await;
    let mut shown = Vec::new();
    for (sandbox, exec) in sandboxes.iter().zip(execs) {
        let info = sandbox.info()?;
        if global.json {
            shown.push(
                json!({ "id": info.id, "name": info.name, "ports": info.ports, "exec": exec }),
            );
        } else {
            show::line(&info.id);
        }
    }
    match (global.json, args.count) {
        (true, Some(_)) => show::json(&shown),
        (true, None) => shown.iter().for_each(show::json),
        (false, _) => {}
    }
    Ok(ExitCode::SUCCESS)
}

async fn all_detached(begun: &Begun, task: &Task) -> Result<Vec<Option<String>>, Failure> {
    let mut execs = Vec::new();
    for sandbox in begun.sandboxes() {
        execs.push(detached(sandbox, task).await?);
    }
    Ok(execs)
}

/// Starts the typed command, or the image's entry point.
async fn detached(sandbox: &Sandbox, task: &Task) -> Result<Option<String>, Failure> {
    if !task.runs_alone(sandbox)? {
        return Ok(None);
    }
    let spec = ExecSpec {
        lifetime: Lifetime::Detached,
        ..task.clone().spec(sandbox)?
    };
    let exec = sandbox.exec(spec).await?;
    Ok(Some(exec.id().to_string()))
}

/// Creates one sandbox, or the number given by `--count`.
async fn begin(host: &Host, args: &RunArgs, prepared: &Prepared) -> Result<Begun> {
    let spec = prepared.spec.clone();
    let (message, begun) = match args.count {
        None => {
            let label = spec
                .name
                .clone()
                .or(args.image.clone())
                .or(args.snapshot.clone())
                .unwrap_or_default();
            let spinner = progress::spinner(format!("starting {label}"));
            (spinner, host.begin_one(spec).await)
        }
        Some(count) => {
            let numbering = ForkSpec {
                name: Some(args.name.clone().unwrap_or_default()),
                ..ForkSpec::new(count)
            };
            let spinner = progress::spinner(format!("starting {count} sandboxes"));
            (spinner, host.begin_numbered(&spec, &numbering).await)
        }
    };
    message.finish_and_clear();
    let begun = begun?;
    begun
        .infos()
        .for_each(|info| show::degradations(&info.degraded));
    Ok(begun)
}

/// Ctrl-C ends this program until the command has started; afterwards the command receives it.
async fn work(sandbox: &Sandbox, task: Task, as_json: bool, interrupt: &mut Signal) -> Outcome {
    let spec = task.spec(sandbox)?;
    let guest = unless_interrupted(interrupt, sandbox.guest()).await?;
    if as_json {
        return tokio::select! {
            outcome = session::run(&guest, spec, as_json) => outcome,
            _ = interrupt.recv() => Err(Failure::Interrupted),
        };
    }
    let wants_stdin = spec.stdin;
    let tty = spec.terminal.is_some();
    let exec = unless_interrupted(interrupt, guest.exec(spec)).await?;
    session::relay(exec, wants_stdin, tty, OnSignal::Pass).await
}

/// One listener for all steps, so that a Ctrl-C between two of them is not lost. Dropping a step
/// undoes it.
async fn unless_interrupted<T>(
    interrupt: &mut Signal,
    step: impl Future<Output = Result<T>>,
) -> Result<T, Failure> {
    tokio::select! {
        done = step => Ok(done?),
        _ = interrupt.recv() => Err(Failure::Interrupted),
    }
}

/// A reference to a registry is no local name until it is pulled.
fn check_here(reference: &str) -> Result<(), Failure> {
    if !registry::is_reference(reference) || Path::new(reference).exists() {
        return Ok(());
    }
    let message = format!("there is no image or snapshot {reference} here");
    let arguments = Arguments::from([("reference".to_owned(), reference.into())]);
    Err(Failure::Reported(Report::new(
        Code::NotPulled,
        message,
        arguments,
    )))
}

/// Whether a workspace has a snapshot of that name; otherwise it is the name of an image.
fn is_saved(name: &str, workspace: Option<&Path>) -> bool {
    workspace.is_some_and(|dir| dir.join(name).join("manifest.json").is_file())
}

/// Prepares what a keeper needs: builds a missing image, and imports a snapshot from a directory,
/// with progress on the terminal.
async fn prepared(global: &Global, args: &RunArgs) -> Result<(Host, Prepared)> {
    let spec = spec(args)?;
    spec.check()?;
    let host = open(global).await?;
    let reference = spec
        .image
        .as_ref()
        .or(spec.snapshot.as_ref())
        .cloned()
        .unwrap_or_default();
    let (bar, telling) = progress::transfer(format!("reading {reference}"));
    let prepared = host
        .prepare(spec, telling, progress::image(&reference))
        .await;
    bar.finish_and_clear();
    Ok((host, prepared?))
}

fn spec(args: &RunArgs) -> Result<SandboxSpec> {
    let workspace = args.workspace.as_deref();
    let placed = |reference: &Option<String>| match reference {
        Some(reference) if workspace.is_some() && !is_saved(reference, workspace) => {
            Ok(Some(reference.clone()))
        }
        Some(reference) => absolute_reference(&save::placed(reference, workspace)?).map(Some),
        None => Ok(None),
    };
    let save_on_stop = match &args.save {
        None => None,
        Some(name) => Some(SaveOnStop {
            target: save::target(name, workspace)?,
            replace: args.force,
            labels: save::labels(&args.label)?,
            compress: false,
        }),
    };
    let memory_dir = args
        .memory_dir
        .as_ref()
        .map(std::path::absolute)
        .transpose();
    let ca_bundle = match &args.ca_bundle {
        None => None,
        Some(None) => Some(ca::host_bundle()?),
        Some(Some(file)) => {
            Some(std::path::absolute(file).map_err(|e| Error::io("resolve", file, e))?)
        }
    };
    let own = |kernel| own_kernel(kernel, &args.initramfs, &args.modules);
    let spec = SandboxSpec {
        image: placed(&args.image)?,
        snapshot: placed(&args.snapshot)?,
        save_on_stop,
        name: args.name.clone(),
        disk_bytes: args.disk,
        publish: args.publish.clone(),
        mounts: args.mount.clone(),
        auto_remove: args.rm || !args.detach,
        expiry: args.expire_after.map(|after| Expiry {
            after_ms: after.as_millis().try_into().unwrap_or(u64::MAX),
            action: args.on_expiry,
        }),
        cold: args.cold,
        memory_dir: memory_dir.map_err(|e| Error::io("resolve", "the path of --memory-dir", e))?,
        memory_mode: args.memory_mode,
        durable: args.durable,
        auto_checkpoint: args.auto_checkpoint.then_some(args.auto_checkpoints),
        ca_bundle,
        kernel: args.kernel.as_ref().map(own).transpose()?,
        ..SandboxSpec::new("")
    };
    Ok(args.shape.of(spec))
}
