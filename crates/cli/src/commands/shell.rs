//! `sandtree shell`: a shell on the user's terminal.

use super::session::{self, How};
use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};

#[derive(Debug, clap::Args)]
pub struct ShellArgs {
    /// Run as this user
    #[arg(long, short, value_name = "USER")]
    pub user: Option<String>,
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
}

pub async fn run(global: &Global, args: ShellArgs) -> Outcome {
    let how = How {
        interactive: true,
        tty: crate::terminal::is_interactive(),
        user: args.user,
        workdir: None,
        env: Vec::new(),
        timeout: None,
    };
    let spec = session::spec(how, vec!["/bin/sh".into(), "-l".into()])?;
    let guest = open(global).await?.sandbox(&args.sandbox)?.guest().await?;
    session::run(&guest, spec, global.json).await
}
