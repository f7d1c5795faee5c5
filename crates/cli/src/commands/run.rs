//! `sandtree run`: create, run, and remove or leave.

use std::ffi::OsString;
use std::process::ExitCode;

use sandtree::keeper::{Lease, Order, Task};
use sandtree::{Host, Lifetime, Result, SandboxInfo, SandboxSpec};
use serde_json::json;

use super::{Outcome, config, interruptible, keeper, session};
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
    let (host, lease, info) = create(global, &args).await?;
    let outcome = async {
        let guest = host.client(&info.id)?.guest().await?;
        session::run(&guest, spec, global.json).await
    };
    let outcome = outcome.await;
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

/// Creates, unless Ctrl-C comes first; then everything is undone.
async fn create(global: &Global, args: &Run) -> Result<(Host, Lease, SandboxInfo), Failure> {
    tokio::select! {
        created = started(global, args) => Ok(created?),
        _ = tokio::signal::ctrl_c() => Err(Failure::Interrupted),
    }
}

async fn started(global: &Global, args: &Run) -> Result<(Host, Lease, SandboxInfo)> {
    let spec = spec(args);
    spec.check()?;
    let config = config(global)?;
    let host = Host::open(config.clone()).await?;
    host.ensure_image(&spec.image, progress::image(&spec.image)).await?;
    let label = spec.name.clone().unwrap_or_else(|| spec.image.clone());
    let order = Order { config, task: Task::Create(Box::new(spec)) };
    let (lease, info) = keeper::start(&order, &format!("starting {label}")).await?;
    Ok((host, lease, info))
}

fn spec(args: &Run) -> SandboxSpec {
    let defaults = SandboxSpec::new(args.image.clone());
    SandboxSpec {
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
        ..defaults
    }
}
