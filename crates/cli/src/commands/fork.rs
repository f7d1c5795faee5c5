//! `sandtree fork`: running copies, all or none.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use sandtree::keeper::{Lease, Order, Task};
use sandtree::{ForkPoint, ForkSpec, Host, HostConfig, Result, SandboxInfo, all};
use serde_json::json;
use tokio::sync::Semaphore;

use super::{Outcome, config, keeper, open};
use crate::args::{Fork, Global};
use crate::{progress, show};

pub async fn run(global: &Global, args: Fork) -> Outcome {
    let began = Instant::now();
    let spec = ForkSpec { count: args.n, name: args.name, concurrency: args.concurrency };
    spec.check()?;
    let host = open(global).await?;
    let spinner = progress::spinner(format!("forking {}", args.sandbox));
    let forked = fork(&host, config(global)?, &args.sandbox, &spec).await;
    spinner.finish_and_clear();
    let (point, forks) = forked?;
    let total_ms = began.elapsed().as_secs_f64() * 1e3;
    if global.json {
        let forks: Vec<_> = forks
            .iter()
            .map(|f| json!({ "id": f.id, "name": f.name, "ports": f.ports, "degraded": f.degraded }))
            .collect();
        show::json(&json!({
            "forks": forks, "pause_ms": point.pause_ms, "total_ms": total_ms, "degraded": point.degraded,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    show::notes(&point.degraded);
    for fork in &forks {
        show::notes(&fork.degraded);
        let ports: Vec<String> = fork.ports.iter().map(|port| format!("  {}:{}", port.host, port.guest)).collect();
        show::line(&format!("{}  {}{}", fork.name, fork.id, ports.concat()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Each copy has a keeper of its own. Leases that are dropped undo what they were given for.
async fn fork(
    host: &Host,
    config: HostConfig,
    sandbox: &str,
    spec: &ForkSpec,
) -> Result<(ForkPoint, Vec<SandboxInfo>)> {
    let source = host.find(sandbox)?;
    let names = host.fork_names(&source.name, spec)?;
    let keeper = host.keeper_of(sandbox).await?;
    // Should we be killed, the state goes with our connection.
    let loan = match &keeper {
        Some(keeper) => Some(keeper.fork_point().await?),
        None => None,
    };
    let point = match &loan {
        Some(loan) => loan.point.clone(),
        None => host.paused_point(sandbox)?,
    };
    let order = |name: String| {
        let task = Task::Copy { source: source.id.clone(), state: point.state.clone(), name };
        Order { config: config.clone(), task }
    };
    let copies = copies(names.into_iter().map(order).collect(), spec.concurrency).await;
    // Whether or not there are copies now: they have links of their own.
    if let Some(keeper) = keeper
        && let Err(error) = keeper.end_fork(&point.state).await
    {
        tracing::warn!(%error, "what copies were made from stays until its keeper sees that we are gone");
    }
    Ok((point, copies?))
}

async fn copies(orders: Vec<Order>, concurrency: usize) -> Result<Vec<SandboxInfo>> {
    let limit = Arc::new(Semaphore::new(concurrency));
    let leases = all(orders.into_iter().map(|order| {
        let limit = limit.clone();
        async move {
            let _turn = limit.acquire_owned().await.expect("nobody closes it");
            let mut lease = keeper::spawn(&order).await?;
            lease.loaded().await?;
            Ok(lease)
        }
    }))
    .await?;
    let running = all(leases.into_iter().map(|mut lease: Lease| async move {
        lease.go().await?;
        let info = lease.ready().await?.info;
        Ok((lease, info))
    }))
    .await?;
    let mut infos = Vec::new();
    for (lease, info) in running {
        lease.release().await?;
        infos.push(info);
    }
    Ok(infos)
}
