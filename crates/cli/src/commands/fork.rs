//! `sandtree fork`: running copies, all or none.

use std::process::ExitCode;
use std::time::Instant;

use sandtree::keeper::{Lease, Order, Task};
use sandtree::{
    FORK_CONCURRENCY, ForkSpec, Host, HostConfig, LentState, Result, SandboxInfo, Wanted, all,
    all_in_turns,
};
use serde_json::json;

use super::{Outcome, config, keeper, open};
use crate::args::{Global, sandbox_ref};
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct ForkArgs {
    #[arg(value_parser = sandbox_ref)]
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

pub async fn run(global: &Global, args: ForkArgs) -> Outcome {
    let began = Instant::now();
    let spec = ForkSpec {
        count: args.n,
        name: args.name,
        concurrency: args.concurrency,
    };
    spec.check()?;
    let host = open(global).await?;
    let spinner = progress::spinner(format!("forking {}", args.sandbox));
    let forked = fork(&host, config(global)?, &args.sandbox, &spec).await;
    spinner.finish_and_clear();
    let (lent, forks) = forked?;
    let total_ms = began.elapsed().as_secs_f64() * 1e3;
    if global.json {
        let forks: Vec<_> = forks
            .iter()
            .map(
                |f| json!({ "id": f.id, "name": f.name, "ports": f.ports, "degraded": f.degraded }),
            )
            .collect();
        show::json(&json!({
            "forks": forks, "pause_ms": lent.pause_ms, "total_ms": total_ms, "degraded": lent.degraded,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    show::notes(&lent.degraded);
    for fork in &forks {
        show::notes(&fork.degraded);
        let ports: Vec<String> = fork
            .ports
            .iter()
            .map(|port| format!("  {}:{}", port.host, port.guest))
            .collect();
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
) -> Result<(LentState, Vec<SandboxInfo>)> {
    let source = host.find(sandbox)?;
    let names = host.fork_names(&source.name, spec)?;
    // Should we be killed, the state goes with our connection.
    let loan = host.borrow(sandbox, Wanted::Copies).await?;
    let lent = loan.lent.clone();
    let order = |name: String| {
        let task = Task::Copy {
            source: source.id.clone(),
            state: lent.state.clone(),
            name,
        };
        Order {
            config: config.clone(),
            task,
        }
    };
    let copies = copies(names.into_iter().map(order).collect(), spec.concurrency).await;
    // Whether or not there are copies now: they have links of their own.
    loan.give_back().await;
    Ok((lent, copies?))
}

async fn copies(orders: Vec<Order>, concurrency: usize) -> Result<Vec<SandboxInfo>> {
    let loading = orders.into_iter().map(|order| async move {
        let mut lease = keeper::spawn(&order).await?;
        lease.loaded().await?;
        Ok(lease)
    });
    let leases = all_in_turns(concurrency, loading).await?;
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
