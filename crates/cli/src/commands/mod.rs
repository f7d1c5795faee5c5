//! One file per command.

mod attach;
mod bench;
mod checkpoint;
mod completion;
mod cp;
mod diff;
mod doctor;
mod exec;
mod fork;
mod forward;
mod gc;
mod image;
mod inspect;
mod keeper;
mod log;
mod logs;
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
mod session;
mod shell;
mod snapshot;
mod start;
mod stats;
mod stop;

use std::path::PathBuf;
use std::process::ExitCode;

use sandtree::{Error, Goal, Host, HostConfig, Result};

use crate::args::{Args, Command, Global};
use crate::failure::Failure;

pub type Outcome = Result<ExitCode, Failure>;

pub async fn run(args: Args) -> Outcome {
    let Args { global, command } = args;
    // Before anything is touched, the store included.
    command
        .sandboxes()
        .into_iter()
        .try_for_each(sandtree::check_reference)?;
    match command {
        // These end by Ctrl-C in their own way.
        Command::Run(args) => run::run(&global, *args).await,
        Command::Exec(args) => exec::run(&global, args).await,
        Command::Attach(args) => attach::run(&global, args).await,
        Command::Shell(args) => shell::run(&global, args).await,
        Command::Bench(args) => bench::run(&global, args).await,
        Command::Keeper => keeper::run().await,
        command => interruptible(dispatch(&global, command)).await,
    }
}

async fn dispatch(global: &Global, command: Command) -> Outcome {
    match command {
        Command::Cp(args) => cp::run(global, args).await,
        Command::Logs(args) => logs::run(global, args).await,
        Command::Ps(args) => ps::run(global, args).await,
        Command::Inspect(args) => inspect::run(global, args).await,
        Command::Stats(args) => stats::run(global, args).await,
        Command::Forward(args) => forward::run(global, args).await,
        Command::Stop(args) => stop::run(global, args).await,
        Command::Start(args) => start::run(global, args).await,
        Command::Rm(args) => rm::run(global, args).await,
        Command::Checkpoint(args) => checkpoint::run(global, args).await,
        Command::Revert(args) => revert::run(global, &args.sandbox, Goal::State(args.tag)).await,
        Command::Undo(args) => {
            revert::run(global, &args.sandbox, Goal::Undo { steps: args.n }).await
        }
        Command::Redo(args) => revert::run(global, &args.sandbox, Goal::Redo).await,
        Command::Log(args) => log::run(global, args).await,
        Command::Fork(args) => fork::run(global, args).await,
        Command::Pause(args) => pause::run(global, args).await,
        Command::Resume(args) => resume::run(global, args).await,
        Command::Save(args) => save::run(global, args).await,
        Command::Snapshot { what } => snapshot::run(global, what).await,
        Command::Image { what } => image::run(global, what).await,
        Command::Pull(args) => pull::run(global, *args).await,
        Command::Push(args) => push::run(global, args).await,
        Command::Df => gc::usage(global).await,
        Command::Gc(args) => gc::run(global, args).await,
        Command::Doctor => doctor::run(global).await,
        Command::Completion { shell } => completion::run(shell),
        Command::Run(_)
        | Command::Exec(_)
        | Command::Attach(_)
        | Command::Shell(_)
        | Command::Bench(_)
        | Command::Keeper => unreachable!("they are dispatched before"),
    }
}

/// Ctrl-C drops what is under way, and dropping undoes it.
async fn interruptible(work: impl Future<Output = Outcome>) -> Outcome {
    tokio::select! {
        outcome = work => outcome,
        _ = tokio::signal::ctrl_c() => Err(Failure::Interrupted),
    }
}

/// The environment is read here and nowhere else.
fn config(global: &Global) -> Result<HostConfig> {
    let home = match &global.home {
        Some(home) => home.clone(),
        None => default_home()?,
    };
    let home = std::path::absolute(&home).map_err(|e| Error::io("resolve", &home, e))?;
    let qemu = global.qemu.as_ref().map(std::path::absolute).transpose();
    let qemu = qemu.map_err(|e| Error::io("resolve", "the path of --qemu", e))?;
    Ok(HostConfig {
        qemu,
        machine_user: global.machine_user,
        ..HostConfig::new(home, search())
    })
}

/// Where programs are looked for.
fn search() -> Vec<PathBuf> {
    std::env::var_os("PATH")
        .map(|path| std::env::split_paths(&path).collect())
        .unwrap_or_default()
}

fn default_home() -> Result<PathBuf> {
    let data = std::env::var_os("XDG_DATA_HOME")
        .filter(|dir| !dir.is_empty())
        .map(PathBuf::from);
    let local = std::env::var_os("HOME")
        .filter(|dir| !dir.is_empty())
        .map(|home| PathBuf::from(home).join(".local/share"));
    let rule = "set HOME, SANDTREE_HOME or --home";
    let base = data
        .or(local)
        .ok_or_else(|| Error::invalid("a store's place", "", rule))?;
    Ok(base.join("sandtree"))
}

async fn open(global: &Global) -> Result<Host> {
    Host::open(config(global)?).await
}
