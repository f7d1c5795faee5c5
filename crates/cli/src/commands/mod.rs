//! The command line: one file per command, with its arguments and what it does.

mod attach;
mod changes;
mod checkpoint;
mod completion;
mod cp;
mod diff;
mod display;
mod doctor;
mod exec;
mod expire;
mod fork;
mod forward;
mod gc;
mod image;
mod input;
mod inspect;
mod keeper;
mod key;
mod kill;
mod log;
mod logs;
mod mount;
mod pause;
mod ps;
mod pull;
mod push;
mod registry;
mod resume;
mod revert;
mod rm;
mod run;
mod save;
mod screenshot;
mod serve;
mod session;
mod shell;
mod snapshot;
mod start;
mod stats;
mod stop;
mod view;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;

use sandtree::keeper::KeeperProgram;
use sandtree::{Error, Host, HostConfig, Result, RunIn, ToolEnv};

use crate::args::Global;
use crate::failure::Failure;

pub type Outcome = Result<ExitCode, Failure>;

/// Sandboxes for AI agents: Linux machines on stock QEMU.
#[derive(Debug, clap::Parser)]
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

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Create a sandbox and run a command in it
    Run(Box<run::RunArgs>),
    /// Run a command in a running sandbox
    Exec(exec::ExecArgs),
    /// Attach to a detached command, from the first byte of its output
    Attach(attach::AttachArgs),
    /// Open a shell in a running sandbox
    Shell(shell::ShellArgs),
    /// Copy files and directories into or out of a sandbox
    #[command(
        after_help = "One of FROM and TO is SANDBOX:PATH. The other is a path of the host, or - for a single file on standard input or output."
    )]
    Cp(cp::CpArgs),
    /// Show the guest's console
    Logs(logs::LogsArgs),
    /// List sandboxes
    Ps(ps::PsArgs),
    /// Show the details of a sandbox
    Inspect(inspect::InspectArgs),
    /// Show the memory, processor and disk usage of a sandbox
    Stats(stats::StatsArgs),
    /// Print each change of a sandbox's state, until it is removed or Ctrl-C
    Watch(watch::WatchArgs),
    /// Forward ports of the host to a sandbox until Ctrl-C
    Forward(forward::ForwardArgs),
    /// Save what a sandbox's screen shows as a PNG file
    Screenshot(screenshot::ScreenshotArgs),
    /// Type a text with a sandbox's keyboard
    Type(input::TypeArgs),
    /// Move and click a sandbox's mouse
    Mouse(input::MouseArgs),
    /// Read or set the clipboard of a sandbox with a screen
    Clipboard(display::ClipboardArgs),
    /// Show or change the size of a sandbox's screen
    Display(display::DisplayArgs),
    /// Serve a sandbox's screen to VNC clients until Ctrl-C
    View(view::ViewArgs),
    /// Mount directories of the host in a running sandbox
    Mount(mount::MountArgs),
    /// Unmount directories of the host
    Unmount(mount::UnmountArgs),
    /// Show what a sandbox changed on top of a copy-on-write mount
    Changes(changes::ChangesArgs),
    /// Write the changes of a copy-on-write mount to the host's directory
    Apply(changes::ApplyArgs),
    /// Shut down sandboxes
    Stop(stop::StopArgs),
    /// Kill the machines of sandboxes immediately, without a shutdown
    Kill(kill::KillArgs),
    /// Boot a stopped sandbox
    Start(start::StartArgs),
    /// Set when a running sandbox expires
    Expire(expire::ExpireArgs),
    /// Remove sandboxes
    Rm(rm::RmArgs),
    /// Save the state of memory, disk and processes inside the sandbox; the guest continues
    Checkpoint(checkpoint::CheckpointArgs),
    /// Return to a saved state; the abandoned state is kept
    Revert(revert::RevertArgs),
    /// Return to the previous state
    Undo(revert::UndoArgs),
    /// Reverse the last undo
    Redo(revert::RedoArgs),
    /// Show the state tree of a sandbox, or of all images, snapshots and sandboxes
    Log(log::LogArgs),
    /// Make running copies of a sandbox
    Fork(fork::ForkArgs),
    /// Write sandboxes to disk with memory and processes, and stop their machines
    Pause(pause::PauseArgs),
    /// Continue paused sandboxes exactly where they were
    Resume(resume::ResumeArgs),
    /// Publish a sandbox as a snapshot, with or without memory; the guest continues
    Save(save::SaveArgs),
    /// Manage snapshots
    Snapshot {
        #[command(subcommand)]
        what: snapshot::SnapshotCommand,
    },
    /// Build, import and manage images
    Image {
        #[command(subcommand)]
        what: image::ImageCommand,
    },
    /// Download an image or a snapshot from a registry
    Pull(Box<pull::PullArgs>),
    /// Upload an image or a snapshot to a registry
    Push(push::PushArgs),
    /// Serve E2B's and CubeSandbox's API over HTTP until Ctrl-C
    Serve(serve::ServeArgs),
    /// Press keys of a sandbox's keyboard, or manage the keys of the HTTP server
    Key(key::KeyArgs),
    /// Show the disk usage of the store
    Df,
    /// Remove unused files from the store
    Gc(gc::GcArgs),
    /// Show the capabilities of this host, and what is missing
    Doctor,
    /// Print shell completions
    Completion(completion::CompletionArgs),
    /// Run one sandbox in the background (started by `run` and `start`)
    #[command(hide = true)]
    Keeper,
}

pub async fn run(args: Args) -> Outcome {
    let global = &args.global;
    match args.command {
        // These handle Ctrl-C themselves.
        Command::Run(args) => run::run(global, *args).await,
        Command::Exec(args) => exec::run(global, args).await,
        Command::Attach(args) => attach::run(global, args).await,
        Command::Shell(args) => shell::run(global, args).await,
        Command::Keeper => keeper::run().await,
        Command::Serve(args) => serve::run(global, args).await,

        Command::Cp(args) => interruptible(cp::run(global, args)).await,
        Command::Logs(args) => interruptible(logs::run(global, args)).await,
        Command::Ps(args) => interruptible(ps::run(global, args)).await,
        Command::Inspect(args) => interruptible(inspect::run(global, args)).await,
        Command::Stats(args) => interruptible(stats::run(global, args)).await,
        Command::Watch(args) => interruptible(watch::run(global, args)).await,
        Command::Forward(args) => interruptible(forward::run(global, args)).await,
        Command::Screenshot(args) => interruptible(screenshot::run(global, args)).await,
        Command::Type(args) => interruptible(input::type_text(global, args)).await,
        Command::Mouse(args) => interruptible(input::mouse(global, args)).await,
        Command::Clipboard(args) => interruptible(display::clipboard(global, args)).await,
        Command::Display(args) => interruptible(display::run(global, args)).await,
        Command::View(args) => interruptible(view::run(global, args)).await,
        Command::Mount(args) => interruptible(mount::run(global, args)).await,
        Command::Unmount(args) => interruptible(mount::unmount(global, args)).await,
        Command::Changes(args) => interruptible(changes::run(global, args)).await,
        Command::Apply(args) => interruptible(changes::apply(global, args)).await,
        Command::Stop(args) => interruptible(stop::run(global, args)).await,
        Command::Kill(args) => interruptible(kill::run(global, args)).await,
        Command::Start(args) => interruptible(start::run(global, args)).await,
        Command::Expire(args) => interruptible(expire::run(global, args)).await,
        Command::Key(args) => interruptible(key::run(global, args)).await,
        Command::Rm(args) => interruptible(rm::run(global, args)).await,
        Command::Checkpoint(args) => interruptible(checkpoint::run(global, args)).await,
        Command::Revert(args) => interruptible(revert::run(global, args)).await,
        Command::Undo(args) => interruptible(revert::undo(global, args)).await,
        Command::Redo(args) => interruptible(revert::redo(global, args)).await,
        Command::Log(args) => interruptible(log::run(global, args)).await,
        Command::Fork(args) => interruptible(fork::run(global, args)).await,
        Command::Pause(args) => interruptible(pause::run(global, args)).await,
        Command::Resume(args) => interruptible(resume::run(global, args)).await,
        Command::Save(args) => interruptible(save::run(global, args)).await,
        Command::Snapshot { what } => interruptible(snapshot::run(global, what)).await,
        Command::Image { what } => interruptible(image::run(global, what)).await,
        Command::Pull(args) => interruptible(pull::run(global, *args)).await,
        Command::Push(args) => interruptible(push::run(global, args)).await,
        Command::Df => interruptible(gc::usage(global)).await,
        Command::Gc(args) => interruptible(gc::run(global, args)).await,
        Command::Doctor => interruptible(doctor::run(global)).await,
        Command::Completion(args) => completion::run(args),
    }
}

/// Ctrl-C drops the work, and dropping it undoes it.
async fn interruptible(work: impl Future<Output = Outcome>) -> Outcome {
    tokio::select! {
        outcome = work => outcome,
        _ = tokio::signal::ctrl_c() => Err(Failure::Interrupted),
    }
}

/// What a user calls a snapshot, with a path made absolute: the library does not read our working
/// directory.
fn absolute_reference(text: &str) -> Result<String> {
    let cwd = std::env::current_dir();
    sandtree::absolute_reference(
        text,
        &cwd.map_err(|e| Error::io("find", "our directory", e))?,
    )
}

/// Reads the environment and the options into the configuration of a host.
fn config(global: &Global) -> Result<HostConfig> {
    let home = match &global.home {
        Some(home) => home.clone(),
        None => HostConfig::default_home(|name| std::env::var_os(name))?,
    };
    let home = std::path::absolute(&home).map_err(|e| Error::io("resolve", &home, e))?;
    let qemu = global.qemu.as_ref().map(std::path::absolute).transpose();
    let qemu = qemu.map_err(|e| Error::io("resolve", "the path of --qemu", e))?;
    let program = std::env::current_exe().map_err(|e| Error::io("find", "our own program", e))?;
    let keeper = KeeperProgram {
        path: program,
        args: vec!["keeper".into()],
    };
    Ok(HostConfig {
        qemu,
        tool_env: ToolEnv::from_lookup(|name| std::env::var(name).ok()),
        machine_user: global.machine_user,
        spares: global.spares,
        run_in: RunIn::Keeper(keeper),
        ..HostConfig::new(home, search())
    })
}

/// The directories of PATH.
fn search() -> Vec<PathBuf> {
    std::env::var_os("PATH")
        .map(|path| std::env::split_paths(&path).collect())
        .unwrap_or_default()
}

async fn open(global: &Global) -> Result<Host> {
    Host::open(config(global)?).await
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::args::BadSandboxRef;

    #[test]
    fn the_command_line_is_well_formed() {
        Args::command().debug_assert();
    }

    /// The words before each argument that names a sandbox.
    fn sandbox_arguments(command: &clap::Command, words: &[String]) -> Vec<Vec<String>> {
        let mut found = Vec::new();
        for (index, argument) in command.get_positionals().enumerate() {
            if matches!(argument.get_id().as_str(), "sandbox" | "sandboxes") {
                let others = vec!["x".to_owned(); index];
                found.push([words, &others].concat());
            }
        }
        for command in command.get_subcommands() {
            let words = [words, &[command.get_name().to_owned()]].concat();
            found.extend(sandbox_arguments(command, &words));
        }
        found
    }

    #[test]
    fn every_command_refuses_a_sandbox_name_that_is_a_path() {
        let all = sandbox_arguments(&Args::command(), &["sandtree".to_owned()]);
        assert!(all.len() >= 20, "{all:?}");
        for words in all {
            let refused = Args::try_parse_from(words.iter().map(String::as_str).chain(["../x"]))
                .expect_err("a path names no sandbox");
            let source = refused
                .source()
                .and_then(|e| e.downcast_ref::<BadSandboxRef>());
            assert!(source.is_some(), "{words:?}: {refused}");
        }
    }
}
