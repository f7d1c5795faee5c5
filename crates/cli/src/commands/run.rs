//! `sandtree run`: create, run, and remove or leave.

use std::ffi::OsString;
use std::process::ExitCode;

use sandtree::keeper::{Lease, Order, Task};
use sandtree::{Error, ExecSpec, Host, Lifetime, Result, SandboxInfo, SandboxSpec};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::session::{self, OnSignal};
use super::{Outcome, config, interruptible, keeper};
use crate::args::{Global, Run};
use crate::failure::Failure;
use crate::{progress, show};

pub async fn run(global: &Global, mut args: Run) -> Outcome {
    let command = std::mem::take(&mut args.command);
    if args.detach {
        return interruptible(run_detached(global, &args, command)).await;
    }
    let how = args.how.clone();
    let spec = session::spec(how, if command.is_empty() { vec!["/bin/sh".into()] } else { command })?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|e| Error::io("listen for", "signals", e))?;
    let (host, lease, info) = unless_interrupted(&mut interrupt, started(global, &args)).await?;
    let outcome = work(&host, &info, spec, global.json, &mut interrupt).await;
    // Dropping the lease removes the sandbox, and waits until it is gone.
    tokio::task::block_in_place(|| drop(lease));
    outcome
}

async fn run_detached(global: &Global, args: &Run, command: Vec<OsString>) -> Outcome {
    let (host, lease, info) = started(global, args).await?;
    let exec = if command.is_empty() {
        None
    } else {
        let mut spec = session::spec(args.how.clone(), command)?;
        spec.lifetime = Lifetime::Detached;
        Some(host.client(&info.id)?.guest().await?.exec(spec).await?.id().to_string())
    };
    lease.release().await?;
    if global.json {
        show::json(&json!({ "id": info.id, "name": info.name, "ports": info.ports, "exec": exec }));
    } else {
        show::line(&info.id);
    }
    Ok(ExitCode::SUCCESS)
}

/// Ctrl-C is ours until the command has started; then it is the command's.
async fn work(host: &Host, info: &SandboxInfo, spec: ExecSpec, as_json: bool, interrupt: &mut Signal) -> Outcome {
    let client = host.client(&info.id)?;
    let guest = unless_interrupted(interrupt, client.guest()).await?;
    if as_json {
        return tokio::select! {
            outcome = session::run(&guest, spec, as_json) => outcome,
            _ = interrupt.recv() => Err(Failure::Interrupted),
        };
    }
    let (wants_stdin, tty) = (spec.stdin, spec.terminal.is_some());
    let exec = unless_interrupted(interrupt, guest.exec(spec)).await?;
    session::relay(exec, wants_stdin, tty, OnSignal::Pass).await
}

/// One listener for all steps: a Ctrl-C between two of them is not lost. What is dropped undoes itself.
async fn unless_interrupted<T>(interrupt: &mut Signal, step: impl Future<Output = Result<T>>) -> Result<T, Failure> {
    tokio::select! {
        done = step => Ok(done?),
        _ = interrupt.recv() => Err(Failure::Interrupted),
    }
}

async fn started(global: &Global, args: &Run) -> Result<(Host, Lease, SandboxInfo)> {
    let spec = spec(args)?;
    spec.check()?;
    let config = config(global)?;
    let host = Host::open(config.clone()).await?;
    host.ensure_image(&spec.image, progress::image(&spec.image)).await?;
    let label = spec.name.clone().unwrap_or_else(|| spec.image.clone());
    let order = Order { config, task: Task::Create(Box::new(spec)) };
    let (lease, ready) = keeper::start(&order, &format!("starting {label}")).await?;
    Ok((host, lease, ready.info))
}

fn spec(args: &Run) -> Result<SandboxSpec> {
    let defaults = SandboxSpec::new(args.image.clone());
    let memory_dir = args.memory_dir.as_ref().map(std::path::absolute).transpose();
    Ok(SandboxSpec {
        name: args.name.clone(),
        memory_bytes: args.memory,
        cpus: args.cpus,
        disk_bytes: args.disk,
        network: args.network,
        accel: args.accel,
        arch: args.arch.unwrap_or(defaults.arch),
        publish: args.publish.clone(),
        qemu_args: args.qemu_arg.clone(),
        boot_timeout: args.boot_timeout,
        auto_remove: args.rm || !args.detach,
        cold: args.cold,
        memory_dir: memory_dir.map_err(|e| Error::io("resolve", "the path of --memory-dir", e))?,
        memory_mode: args.memory_mode,
        auto_checkpoint: args.auto_checkpoint.then_some(args.auto_checkpoints),
        ..defaults
    })
}
