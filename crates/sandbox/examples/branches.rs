//! Lists, forks, reverts and uses sandboxes that keepers run, from a program of one's own.
//!
//! ```text
//! branches HOME SANDTREE SANDBOX      for example: branches ~/.local/share/sandtree /usr/local/bin/sandtree a
//! ```
//!
//! `SANDTREE` is the program that keepers run. The sandbox stays as it was; the copies are removed.

use std::path::PathBuf;

use sandtree::keeper::KeeperProgram;
use sandtree::{Error, ExecSpec, ForkSpec, Host, HostConfig, Replace, Result, RunIn, Sandbox};

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(home), Some(program), Some(name)) = (args.next(), args.next(), args.next()) else {
        return Err("usage: branches HOME SANDTREE SANDBOX".into());
    };
    let search = vec![PathBuf::from("/usr/bin"), PathBuf::from("/usr/local/bin")];
    let config = HostConfig {
        run_in: RunIn::Keeper(KeeperProgram {
            path: program.into(),
            args: vec!["keeper".into()],
        }),
        ..HostConfig::new(home, search)
    };
    let host = Host::open(config).await?;
    let (listed, broken) = host.list()?;
    for sandbox in &listed {
        println!("{}  {}  {}", sandbox.name, sandbox.state, sandbox.image);
    }
    if let Some(error) = broken.into_iter().next() {
        return Err(error.into());
    }
    Ok(explore(&host.sandbox(&name)?).await?)
}

/// Tries something in three copies, then something in the sandbox itself, and takes that back.
async fn explore(sandbox: &Sandbox) -> Result<()> {
    let (copies, report) = sandbox.fork(ForkSpec::new(3)).await?;
    println!(
        "forked in {:.0} ms, paused for {:.1} ms",
        report.total_ms, report.pause_ms
    );
    for (number, copy) in copies.iter().enumerate() {
        let said = say(copy, &format!("echo attempt {number} in $(hostname)")).await?;
        println!("{}: {said}", copy.name());
    }
    for copy in copies {
        copy.remove().await?;
    }
    let before = sandbox.checkpoint(None, Replace::No).await?;
    say(sandbox, "echo broken > /srv/attempt").await?;
    let reverted = sandbox.revert(&before.id).await?;
    println!("reverted in {:.0} ms", reverted.restore.total_ms);
    let left = say(
        sandbox,
        "cat /srv/attempt 2> /dev/null || echo nothing is left",
    )
    .await?;
    println!("{}: {left}", sandbox.name());
    Ok(())
}

async fn say(sandbox: &Sandbox, line: &str) -> Result<String> {
    let output = sandbox
        .exec(ExecSpec::shell(line))
        .await?
        .output(1 << 20)
        .await?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() {
        return Err(Error::invalid("command", line, &said));
    }
    Ok(said)
}
