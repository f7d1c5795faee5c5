//! What can be typed.

mod image;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use sandtree::{
    AccelChoice, Arch, FORK_CONCURRENCY, MachineUser, MemoryMode, Network, PublishedPort,
    SandboxSpec,
};

pub use image::{Access, Build, ImageCommand, ImportImage, Pull, Push, Warm, own as own_kernel};

/// Sandboxes for AI agents: Linux machines on stock QEMU.
#[derive(Debug, Parser)]
#[command(
    name = "sandtree",
    version,
    propagate_version = true,
    max_term_width = 100
)]
pub struct Args {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Clone, clap::Args)]
pub struct Global {
    /// Where sandboxes and images are kept [default: ~/.local/share/sandtree]
    #[arg(long, global = true, value_name = "DIR", env = "SANDTREE_HOME")]
    pub home: Option<PathBuf>,
    /// The QEMU to use [default: the first on PATH]
    #[arg(long, global = true, value_name = "PROGRAM", env = "SANDTREE_QEMU")]
    pub qemu: Option<PathBuf>,
    /// Whom machines run as: auto (as root, a user id for each) or caller
    #[arg(
        long,
        global = true,
        value_name = "auto|caller",
        env = "SANDTREE_MACHINE_USER",
        default_value = "auto",
        hide_default_value = true
    )]
    pub machine_user: MachineUser,
    /// Answer in JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// What to log to stderr: error, warn, info, debug, or a filter
    #[arg(
        long,
        global = true,
        value_name = "FILTER",
        env = "SANDTREE_LOG",
        hide = true
    )]
    pub log: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create a sandbox and run a command in it
    Run(Box<Run>),
    /// Run a command in a running sandbox
    Exec(Exec),
    /// Join a detached command, from the first byte of its output
    Attach(Attach),
    /// Open a shell in a running sandbox
    Shell(Shell),
    /// Copy files and trees into and out of a sandbox
    #[command(
        after_help = "One of FROM and TO is SANDBOX:PATH, the other a path of the host, or - for a stream of one file."
    )]
    Cp(Copy),
    /// Show the guest's console
    Logs(Logs),
    /// List sandboxes
    Ps(Ps),
    /// Show everything known of a sandbox
    Inspect(Named),
    /// Show what a sandbox uses
    Stats(Named),
    /// Carry connections from ports of the host into a sandbox, until Ctrl-C
    Forward(Forward),
    /// Shut sandboxes down
    Stop(Stop),
    /// Start a stopped sandbox again
    Start(Start),
    /// Remove sandboxes
    Rm(Remove),
    /// Take a state of memory, disk and processes; the guest goes on
    Checkpoint(Checkpoint),
    /// Go back to a state; what is left is kept
    Revert(Revert),
    /// Go back to the newest state behind the present
    Undo(Undo),
    /// Return to what the last undo left
    Redo(Named),
    /// Show the tree of states of a sandbox, or of everything
    Log(Log),
    /// Make running copies of a sandbox
    Fork(Fork),
    /// Write sandboxes to disk with memory and processes, and end their machines
    Pause(Pause),
    /// Let paused sandboxes go on exactly where they were
    Resume(Pause),
    /// Publish a sandbox's disk, or all of it, as a snapshot; the guest goes on
    Save(Save),
    /// Look after snapshots
    Snapshot {
        #[command(subcommand)]
        what: SnapshotCommand,
    },
    /// Make images, and look after them
    Image {
        #[command(subcommand)]
        what: ImageCommand,
    },
    /// Bring an image or a snapshot from a registry
    Pull(Box<Pull>),
    /// Bring an image or a snapshot to a registry
    Push(Push),
    /// Show what uses the store's disk
    Df,
    /// Remove what nothing uses any more
    Gc(Gc),
    /// Show what this host can do, and what it lacks
    Doctor,
    /// Measure
    Bench(Bench),
    /// Print shell completions
    Completion { shell: clap_complete::Shell },
    /// Run one sandbox in the background (started by `run` and `start`)
    #[command(hide = true)]
    Keeper,
}

impl Command {
    /// The sandboxes that are named by themselves. What a copy names stands beside paths, and is
    /// its own business.
    pub fn sandboxes(&self) -> Vec<&str> {
        match self {
            Command::Exec(Exec { sandbox, .. })
            | Command::Attach(Attach { sandbox, .. })
            | Command::Shell(Shell { sandbox, .. })
            | Command::Logs(Logs { sandbox, .. })
            | Command::Inspect(Named { sandbox })
            | Command::Stats(Named { sandbox })
            | Command::Forward(Forward { sandbox, .. })
            | Command::Start(Start { sandbox, .. })
            | Command::Revert(Revert { sandbox, .. })
            | Command::Undo(Undo { sandbox, .. })
            | Command::Redo(Named { sandbox })
            | Command::Log(Log {
                sandbox: Some(sandbox),
                ..
            })
            | Command::Save(Save { sandbox, .. })
            | Command::Snapshot {
                what: SnapshotCommand::Create(Save { sandbox, .. }),
            }
            | Command::Fork(Fork { sandbox, .. })
            | Command::Checkpoint(
                Checkpoint {
                    sandbox: Some(sandbox),
                    ..
                }
                | Checkpoint {
                    what: Some(CheckpointCommand::Rm { sandbox, .. }),
                    ..
                },
            ) => vec![sandbox],
            Command::Stop(Stop { sandboxes, .. })
            | Command::Rm(Remove { sandboxes, .. })
            | Command::Pause(Pause { sandboxes })
            | Command::Resume(Pause { sandboxes }) => {
                sandboxes.iter().map(String::as_str).collect()
            }
            Command::Run(_)
            | Command::Cp(_)
            | Command::Ps(_)
            | Command::Doctor
            | Command::Bench(_)
            | Command::Completion { .. }
            | Command::Checkpoint(_)
            | Command::Log(_)
            | Command::Snapshot { .. }
            | Command::Image { .. }
            | Command::Pull(_)
            | Command::Push(_)
            | Command::Df
            | Command::Gc(_)
            | Command::Keeper => Vec::new(),
        }
    }
}

#[derive(Debug, clap::Args)]
pub struct Run {
    /// Give the sandbox a name [default: its id]
    #[arg(long)]
    pub name: Option<String>,
    /// Leave it running in the background and print its id
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    pub detach: bool,
    /// Remove it when it stops; without --detach it always is
    #[arg(long)]
    pub rm: bool,
    /// Make this many, called NAME-1, NAME-2 and so on: all of them or none
    #[arg(
        long,
        value_name = "N",
        requires = "detach",
        requires = "name",
        conflicts_with = "save"
    )]
    pub count: Option<usize>,
    /// Save its disk under this name, or in this directory, when it stops, whatever way it stops
    #[arg(long, value_name = "NAME|./DIR")]
    pub save: Option<String>,
    /// Let that save take the place of a snapshot that has its name
    #[arg(long, requires = "save")]
    pub force: bool,
    /// Put a label on that save (repeatable)
    #[arg(long, value_name = "KEY=VALUE", requires = "save")]
    pub label: Vec<String>,
    /// Find and save snapshots as directories in DIR
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
    /// Start from this snapshot; the same as naming it in place of the image
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "image")]
    pub snapshot: Option<String>,
    #[command(flatten)]
    pub shape: Shape,
    /// Size of the disk; its file system grows to it [default: the image's, or the snapshot's]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub disk: Option<u64>,
    /// Listen on 127.0.0.1:HOST and lead connections to port GUEST (repeatable); 0 takes a free
    /// port
    #[arg(long, value_name = "HOST:GUEST", value_parser = port)]
    pub publish: Vec<PublishedPort>,
    /// Boot, even if a booted state of the image, or a snapshot's memory, is at hand
    #[arg(long)]
    pub cold: bool,
    /// Take a checkpoint before every command; `undo -n N` goes back N commands
    #[arg(long)]
    pub auto_checkpoint: bool,
    /// How many of those are kept; the oldest go first
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub auto_checkpoints: u32,
    /// Pass the guest's flushes on: what it has synced outlives a power loss of the host, and each
    /// sync takes longer
    #[arg(long)]
    pub durable: bool,
    /// Keep memory layers in this directory, on another file system perhaps
    #[arg(long, value_name = "DIR")]
    pub memory_dir: Option<PathBuf>,
    /// How written memory is found: write-protect, soft-dirty, anonymous or full [default: the best
    /// that works]
    #[arg(long, value_name = "MODE")]
    pub memory_mode: Option<MemoryMode>,
    /// Start with this kernel instead of the image's: a bzImage, or a vmlinux with a PVH entry
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// With --kernel: a cpio archive that is unpacked before ours
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initramfs: Option<PathBuf>,
    /// With --kernel: the directory of its modules, if what a guest needs is not built in
    #[arg(long, value_name = "DIR", requires = "kernel")]
    pub modules: Option<PathBuf>,
    /// Let the guest trust these certificate authorities [default: the host's]
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub ca_bundle: Option<Option<PathBuf>>,
    /// Run this instead of the image's entry point; "" for none
    #[arg(long, value_name = "PROGRAM")]
    pub entrypoint: Option<OsString>,
    #[command(flatten)]
    pub how: How,
    /// The image or snapshot to start from: a name, a digest, or the directory of a snapshot
    #[arg(required_unless_present = "snapshot", value_name = "IMAGE|SNAPSHOT")]
    pub image: Option<String>,
    /// The command, or the arguments of the image's entry point [default: the image's, or else a
    /// shell]
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// The machine, as far as its booted state depends on it.
#[derive(Debug, Clone, clap::Args)]
pub struct Shape {
    /// Memory of the guest [default: 512M, or the snapshot's]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<u64>,
    /// Processors of the guest [default: 1, or the snapshot's]
    #[arg(long, value_name = "N")]
    pub cpus: Option<u32>,
    /// What the guest can reach: nothing and no interface, nothing, or what the host can [default:
    /// isolated, or the snapshot's]
    #[arg(long, value_name = "none|isolated|full", value_parser = network)]
    pub network: Option<Network>,
    /// How the guest's processor is made
    #[arg(long, value_name = "auto|kvm|tcg", value_parser = accel)]
    pub accel: Option<AccelChoice>,
    /// The guest's architecture; the host's for now
    #[arg(long, value_name = "ARCH", value_parser = arch)]
    pub arch: Option<Arch>,
    /// A processor model of QEMU; Opteron_G3 is the same under all of them [default: the best there
    /// is]
    #[arg(long, value_name = "MODEL")]
    pub cpu: Option<String>,
    /// Let the guest run guests of its own by KVM (it then reaches more of the host's kernel)
    #[arg(long)]
    pub nested: bool,
    /// How long the guest may take to come up [default: 180s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub boot_timeout: Option<Duration>,
    /// A further argument of QEMU (repeatable)
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub qemu_arg: Vec<String>,
}

impl Shape {
    /// The same with a machine of this shape.
    pub fn of(&self, spec: SandboxSpec) -> SandboxSpec {
        SandboxSpec {
            memory_bytes: self.memory,
            cpus: self.cpus,
            network: self.network,
            accel: self.accel,
            arch: self.arch.unwrap_or(spec.arch),
            cpu: self.cpu.clone(),
            nested: self.nested,
            boot_timeout: self.boot_timeout,
            qemu_args: self.qemu_arg.clone(),
            ..spec
        }
    }
}

/// How a command runs.
#[derive(Debug, Clone, clap::Args)]
pub struct How {
    /// Pass standard input on to the command
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// Run as this user, or user:group
    #[arg(long, short, value_name = "USER")]
    pub user: Option<String>,
    /// Run in this directory [default: the user's home]
    #[arg(long, short, value_name = "DIR")]
    pub workdir: Option<OsString>,
    /// Set a variable, or pass the host's on (repeatable)
    #[arg(long, short, value_name = "KEY[=VALUE]", value_parser = variable)]
    pub env: Vec<(OsString, OsString)>,
    /// End the command and everything it started after this time; exit code 124
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub timeout: Option<Duration>,
}

#[derive(Debug, clap::Args)]
pub struct Exec {
    #[command(flatten)]
    pub how: How,
    /// Leave it running and print its id
    #[arg(short, long, conflicts_with = "tty")]
    pub detach: bool,
    pub sandbox: String,
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

#[derive(Debug, clap::Args)]
pub struct Attach {
    /// Pass standard input on to the command
    #[arg(short, long)]
    pub interactive: bool,
    pub sandbox: String,
    /// As `exec --detach` printed it; without, the detached commands are listed
    pub id: Option<String>,
}

#[derive(Debug, clap::Args)]
pub struct Shell {
    /// Run as this user
    #[arg(long, short, value_name = "USER")]
    pub user: Option<String>,
    pub sandbox: String,
}

#[derive(Debug, clap::Args)]
pub struct Copy {
    pub from: OsString,
    pub to: OsString,
}

#[derive(Debug, clap::Args)]
pub struct Logs {
    /// Go on until the sandbox ends
    #[arg(short, long)]
    pub follow: bool,
    pub sandbox: String,
}

#[derive(Debug, clap::Args)]
pub struct Ps {
    /// Also those that do not run
    #[arg(short, long)]
    pub all: bool,
}

#[derive(Debug, clap::Args)]
pub struct Named {
    pub sandbox: String,
}

#[derive(Debug, clap::Args)]
pub struct Log {
    /// Of every image, snapshot and sandbox
    #[arg(long, conflicts_with = "sandbox")]
    pub all: bool,
    #[arg(required_unless_present = "all")]
    pub sandbox: Option<String>,
}

#[derive(Debug, clap::Args)]
pub struct Save {
    pub sandbox: String,
    /// What to call it, or a directory to put it in
    #[arg(value_name = "NAME|./DIR")]
    pub target: String,
    /// With memory and processes: what starts from it goes on exactly there
    #[arg(long, conflicts_with = "from")]
    pub memory: bool,
    /// Save this checkpoint, with all it has, instead of the present
    #[arg(long, value_name = "TAG")]
    pub from: Option<String>,
    /// Store it compressed; what starts from it takes longer
    #[arg(long)]
    pub compress: bool,
    /// Take the place of a snapshot that has the name; it stays whole until the new one is there
    #[arg(long)]
    pub force: bool,
    /// Put a label on it (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
    /// Remove the sandbox's checkpoints once it is saved
    #[arg(long)]
    pub delete_checkpoints: bool,
    /// Save it as a directory in DIR
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
}

/// A snapshot, where it is.
#[derive(Debug, clap::Args)]
pub struct Which {
    /// A name, a digest, or the directory of a snapshot
    #[arg(value_name = "SNAPSHOT")]
    pub snapshot: String,
    /// Find it as a directory in DIR
    #[arg(long, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// The same as `sandtree save`
    Create(Save),
    /// List snapshots
    Ls {
        /// Only those with this label (repeatable)
        #[arg(long, value_name = "KEY[=VALUE]")]
        label: Vec<String>,
        /// Of the directories in DIR
        #[arg(long, value_name = "DIR")]
        workspace: Option<PathBuf>,
    },
    /// Show everything known of a snapshot
    Inspect(Which),
    /// Read every byte of it and of its image; what is damaged is moved aside
    Verify(Which),
    /// Remove snapshots; what others share of them stays
    Rm {
        #[arg(required = true, value_name = "SNAPSHOT")]
        snapshots: Vec<String>,
        /// Find them as directories in DIR
        #[arg(long, value_name = "DIR")]
        workspace: Option<PathBuf>,
    },
    /// Give a snapshot another name
    Tag {
        #[arg(value_name = "SNAPSHOT")]
        snapshot: String,
        name: String,
        /// Take the name from the snapshot that has it
        #[arg(long)]
        force: bool,
    },
    /// Make the index anew from what is in the store
    Reindex,
    /// Write a snapshot, or a sandbox as it is, into one file
    Export(Export),
    /// Take a snapshot in from a file, every byte of it checked
    Import(Import),
    /// Show which files differ between two snapshots or states
    Diff(Diff),
}

#[derive(Debug, clap::Args)]
pub struct Export {
    /// A snapshot, or a sandbox: `a` or `a@` as it is now, `a@TAG` as it was
    #[arg(value_name = "SNAPSHOT|SANDBOX")]
    pub what: String,
    /// The file to write; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Do not compress
    #[arg(long)]
    pub plain_tar: bool,
    /// Leave the image out: who imports it must have it
    #[arg(long)]
    pub without_image: bool,
    /// Leave out what this snapshot has: who imports it must have that
    #[arg(long, value_name = "SNAPSHOT")]
    pub since: Option<String>,
    /// Of a sandbox: with memory and processes
    #[arg(long)]
    pub memory: bool,
    /// Overwrite the file
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, clap::Args)]
pub struct Import {
    /// The file to read; `-` is standard input
    pub file: PathBuf,
    /// What to call it [default: the file's name without its endings]
    #[arg(long)]
    pub name: Option<String>,
    /// Take the name from the snapshot that has it
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, clap::Args)]
pub struct Diff {
    /// A snapshot, or a sandbox: `a` or `a@` as it is now, `a@TAG` as it was
    #[arg(value_name = "BEFORE")]
    pub before: String,
    #[arg(value_name = "AFTER")]
    pub after: String,
    /// Show how the text of this file differs
    #[arg(long, value_name = "PATH")]
    pub content: Option<OsString>,
    /// Show files of which nothing but a time differs, too
    #[arg(long)]
    pub times: bool,
}

#[derive(Debug, clap::Args)]
pub struct Gc {
    /// Only show what would go
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, clap::Args)]
pub struct Forward {
    pub sandbox: String,
    /// 127.0.0.1:HOST leads to port GUEST; 0 takes a free port
    #[arg(required = true, value_name = "HOST:GUEST", value_parser = port)]
    pub ports: Vec<PublishedPort>,
}

#[derive(Debug, clap::Args)]
pub struct Stop {
    /// What the guest's processes get to end by themselves [default: 10s, or 90s where the image's
    /// own init ends them]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub grace: Option<Duration>,
    #[arg(required = true)]
    pub sandboxes: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub struct Start {
    /// How long the guest may take to come up [default: 60s, 180s under emulation]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub boot_timeout: Option<Duration>,
    pub sandbox: String,
}

#[derive(Debug, clap::Args)]
pub struct Remove {
    /// Also if it runs
    #[arg(short, long)]
    pub force: bool,
    #[arg(required = true)]
    pub sandboxes: Vec<String>,
}

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Checkpoint {
    #[command(subcommand)]
    pub what: Option<CheckpointCommand>,
    #[arg(required = true)]
    pub sandbox: Option<String>,
    /// What to call it [default: c1, c2 and so on]
    pub tag: Option<String>,
    /// Take the tag from the checkpoint that has it; that one is removed when the new one is there
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, Subcommand)]
pub enum CheckpointCommand {
    /// Remove states; no other state is touched
    #[command(group = clap::ArgGroup::new("which").required(true))]
    Rm {
        sandbox: String,
        /// Tags or ids
        #[arg(group = "which", value_name = "TAG")]
        tags: Vec<String>,
        /// All of them
        #[arg(long, group = "which")]
        all: bool,
        /// All checkpoints but the newest N
        #[arg(long, group = "which", value_name = "N")]
        keep: Option<usize>,
    },
}

#[derive(Debug, clap::Args)]
pub struct Revert {
    pub sandbox: String,
    /// A tag, or the id of a state as `log` shows it
    pub tag: String,
}

#[derive(Debug, clap::Args)]
pub struct Undo {
    pub sandbox: String,
    /// How many states to go back
    #[arg(short, value_name = "N", default_value_t = 1)]
    pub n: usize,
}

#[derive(Debug, clap::Args)]
pub struct Fork {
    pub sandbox: String,
    /// How many copies
    #[arg(short, value_name = "N", default_value_t = 1)]
    pub n: usize,
    /// Copies are called NAME-1, NAME-2 and so on [default: the source's name]
    #[arg(long)]
    pub name: Option<String>,
    /// How many are loaded at a time
    #[arg(long, value_name = "N", default_value_t = FORK_CONCURRENCY)]
    pub concurrency: usize,
}

#[derive(Debug, clap::Args)]
pub struct Pause {
    #[arg(required = true)]
    pub sandboxes: Vec<String>,
}

#[derive(Debug, clap::Args)]
pub struct Bench {
    #[command(subcommand)]
    pub what: Benchmark,
}

#[derive(Debug, Subcommand)]
pub enum Benchmark {
    /// Round trips, throughput and boot, each against the plain-QEMU floor of the same run
    Exec {
        /// How often each is measured; the median counts
        #[arg(long, default_value_t = 5)]
        rounds: usize,
    },
    /// Checkpoint, revert, fork, pause and create, each beside its aim and against QEMU's own
    /// snapshots
    States(BenchStates),
    /// Saves, artifacts, listings and comparisons, each against plain tools over the same bytes
    Store(BenchStore),
    /// Imports, pulls, pushes and first commands of images, against tar, mke2fs and skopeo over the
    /// same bytes
    Image(BenchImage),
}

#[derive(Debug, clap::Args)]
pub struct BenchImage {
    /// How often each is measured; the median counts
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Measure these parts alone
    #[arg(long, value_name = "NAME")]
    pub only: Vec<ImagePart>,
}

/// The parts of `bench image`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ImagePart {
    /// A root file system from an archive, against tar and mke2fs
    Import,
    /// An OCI image from a registry, against skopeo
    Pull,
    /// From a pull of busybox to its first command
    Start,
    /// A small change to a large snapshot, against all of it
    Push,
    /// The first command in Debian, against a cold boot
    Debian,
}

#[derive(Debug, clap::Args)]
pub struct BenchStore {
    /// How often each is measured; the median counts
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Measure these parts alone
    #[arg(long, value_name = "NAME")]
    pub only: Vec<StorePart>,
    /// One round
    #[arg(long)]
    pub quick: bool,
}

/// The parts of `bench store`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum StorePart {
    /// Saves of the disk and with memory, and starts from them
    Save,
    /// What a save takes on the disk, against what was written
    Size,
    /// Export and import, against tar and zstd
    Artifact,
    /// Every byte, against sha256sum
    Verify,
    /// 10,000 snapshots
    List,
    /// 50 changed files among 10,000
    Diff,
}

#[derive(Debug, clap::Args)]
pub struct BenchStates {
    /// How often each is measured; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Measure these parts alone
    #[arg(long, value_name = "NAME")]
    pub only: Vec<Part>,
    /// One round, and neither 4 GB guests nor 50 forks: for a look within a minute
    #[arg(long)]
    pub quick: bool,
}

/// The parts of `bench states`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Pause and total by what was written and by the size of the guest
    Checkpoint,
    /// The 1st checkpoint and the 50th
    Depth,
    /// What an idle checkpoint takes on the disk
    Size,
    /// Against QEMU's snapshot-save and snapshot-load
    Qemu,
    /// Back to a checkpoint, against a bare start of QEMU
    Revert,
    /// To disk and back, against a bare start of QEMU
    Pause,
    /// From the warm state, against a cold boot
    Create,
    /// 1, 10 and 50 copies, until all have answered
    Fork,
    /// What a copy has of the host's memory to itself
    Memory,
}

/// A size such as 512M or 2G; the units are powers of 1024.
fn size(text: &str) -> Result<u64, String> {
    let rule = || format!("{text:?} is no size: write a number with K, M, G or T behind it");
    let (digits, unit) = text.split_at(
        text.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len()),
    );
    let shift = match unit
        .to_ascii_uppercase()
        .trim_end_matches('B')
        .trim_end_matches('I')
    {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(rule()),
    };
    let number: u64 = digits.parse().map_err(|_| rule())?;
    number.checked_mul(1 << shift).ok_or_else(rule)
}

fn duration(text: &str) -> Result<Duration, String> {
    let seconds = text
        .parse::<f64>()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let parsed = seconds.or_else(|| humantime::parse_duration(text).ok());
    let rule = || format!("{text:?} is no time: write 5s, 200ms or 1m30s, more than zero");
    parsed.filter(|time| !time.is_zero()).ok_or_else(rule)
}

fn network(text: &str) -> Result<Network, String> {
    match text {
        "none" => Ok(Network::None),
        "isolated" => Ok(Network::Isolated),
        "full" => Ok(Network::Full),
        _ => Err("it is none, isolated or full".into()),
    }
}

fn accel(text: &str) -> Result<AccelChoice, String> {
    match text {
        "auto" => Ok(AccelChoice::Auto),
        "kvm" => Ok(AccelChoice::Kvm),
        "tcg" => Ok(AccelChoice::Tcg),
        _ => Err("it is auto, kvm or tcg".into()),
    }
}

fn arch(text: &str) -> Result<Arch, String> {
    match text {
        "x86_64" => Ok(Arch::X86_64),
        "aarch64" => Ok(Arch::Aarch64),
        _ => Err("it is x86_64 or aarch64".into()),
    }
}

fn port(text: &str) -> Result<PublishedPort, String> {
    let rule = || format!("{text:?} is no pair of ports: write HOST:GUEST, each up to 65535");
    let (host, guest) = text.split_once(':').ok_or_else(rule)?;
    let port = PublishedPort {
        host: host.parse().map_err(|_| rule())?,
        guest: guest.parse().map_err(|_| rule())?,
    };
    if port.guest == 0 {
        Err(rule())
    } else {
        Ok(port)
    }
}

/// `K=V`, or `K` for the value it has here.
fn variable(text: &str) -> Result<(OsString, OsString), String> {
    match text.split_once('=') {
        Some(("", _)) => Err(format!("{text:?} names no variable")),
        Some((key, value)) => Ok((key.into(), value.into())),
        None => std::env::var_os(text)
            .map(|value| (text.into(), value))
            .ok_or(format!("{text} is not set here")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn sizes_and_times() {
        assert_eq!(size("512M"), Ok(512 << 20));
        assert_eq!(size("2GiB"), Ok(2 << 30));
        assert_eq!(size("4096"), Ok(4096));
        for bad in ["", "M", "-1M", "1.5G", "9999999999T", "2X", "1 G"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!(duration("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(duration("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "0", "0s", "-3s", "soon", "nan"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ports() {
        assert_eq!(
            port("8080:80"),
            Ok(PublishedPort {
                host: 8080,
                guest: 80
            })
        );
        for bad in ["80", ":80", "80:", "70000:80", "80:0", "a:b"] {
            assert!(port(bad).is_err(), "{bad}");
        }
    }
}
