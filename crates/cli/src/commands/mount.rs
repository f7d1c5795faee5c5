//! `sandtree mount` and `unmount`: directories of the host in a running sandbox.

use std::process::ExitCode;

use sandtree::{InUse, MountAccess, MountInfo, MountSpec};
use serde_json::json;

use super::{Outcome, open};
use crate::args::{Global, mount, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct MountArgs {
    #[command(subcommand)]
    pub what: Option<MountCommand>,
    /// Name or id of the sandbox
    #[arg(required = true, value_parser = sandbox_ref)]
    pub sandbox: Option<String>,
    /// Directory of the host, path in the guest, and how it is used. ro: read-only; cow: changes
    /// stay in the sandbox
    #[arg(required = true, value_name = "HOST:GUEST[:ro|:cow]", value_parser = mount)]
    pub mounts: Vec<MountSpec>,
}

#[derive(Debug, clap::Subcommand)]
pub enum MountCommand {
    /// List the mounts of a sandbox
    Ls {
        /// Name or id of the sandbox
        #[arg(value_parser = sandbox_ref)]
        sandbox: String,
    },
}

#[derive(Debug, clap::Args)]
pub struct UnmountArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Path of the mount in the guest
    #[arg(required = true, value_name = "GUEST")]
    pub paths: Vec<String>,
    /// Unmount even if programs in the guest use the directory; they get errors
    #[arg(long)]
    pub force: bool,
}

pub async fn run(global: &Global, args: MountArgs) -> Outcome {
    let host = open(global).await?;
    if let Some(MountCommand::Ls { sandbox }) = args.what {
        return list(global, &host.sandbox(&sandbox)?.mounts().await?);
    }
    let sandbox = host.sandbox(&args.sandbox.unwrap_or_default())?;
    for mount in args.mounts {
        sandbox.mount(mount).await?;
    }
    if global.json {
        show::json(&json!({ "mounts": sandbox.info()?.mounts }));
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn unmount(global: &Global, args: UnmountArgs) -> Outcome {
    let sandbox = open(global).await?.sandbox(&args.sandbox)?;
    let in_use = if args.force {
        InUse::Detach
    } else {
        InUse::Refuse
    };
    for path in &args.paths {
        sandbox.unmount(path, in_use).await?;
    }
    if global.json {
        show::json(&json!({ "mounts": sandbox.info()?.mounts }));
    }
    Ok(ExitCode::SUCCESS)
}

fn list(global: &Global, mounts: &[MountInfo]) -> Outcome {
    if global.json {
        show::json(&json!({ "mounts": mounts }));
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<Vec<String>> = mounts.iter().map(|mount| row(mount).to_vec()).collect();
    show::table(&["GUEST", "HOST", "ACCESS", "PROBLEM"], &rows);
    Ok(ExitCode::SUCCESS)
}

fn row(mount: &MountInfo) -> [String; 4] {
    let host = mount.host.as_ref();
    [
        mount.guest.clone(),
        host.map_or_else(|| "-".to_owned(), |host| host.display().to_string()),
        access(mount.access).to_owned(),
        trouble(mount).unwrap_or_else(|| "-".to_owned()),
    ]
}

fn trouble(mount: &MountInfo) -> Option<String> {
    let last = mount.last_error.as_ref();
    let last = last.map(|error| format!("last error: {error}"));
    let all: Vec<String> = mount.problem.clone().into_iter().chain(last).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// One mount, as `inspect` shows it.
pub fn describe(mount: &MountInfo) -> String {
    let [guest, host, access, _] = row(mount);
    let problem = match trouble(mount) {
        Some(trouble) => format!(": {trouble}"),
        None => String::new(),
    };
    format!("{host}:{guest} ({access}){problem}")
}

fn access(access: MountAccess) -> &'static str {
    match access {
        MountAccess::ReadWrite => "read-write",
        MountAccess::ReadOnly => "read-only",
        MountAccess::CopyOnWrite => "copy-on-write",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_does_not_hide_the_last_error() {
        let mount = json!({ "guest": "/work", "host": null, "access": "read_write" });
        let mut mount: MountInfo = serde_json::from_value(mount).expect("it is a mount");
        assert_eq!(trouble(&mount), None);
        mount.last_error = Some("cannot write".into());
        assert_eq!(trouble(&mount).as_deref(), Some("last error: cannot write"));
        mount.problem = Some("slow".into());
        let both = trouble(&mount);
        assert_eq!(both.as_deref(), Some("slow; last error: cannot write"));
    }
}
