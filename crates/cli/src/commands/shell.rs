//! `sandtree shell`: a shell on the user's terminal.

use super::{Outcome, open, session};
use crate::args::{Global, How, Shell};

pub async fn run(global: &Global, args: Shell) -> Outcome {
    let (interactive, tty) = (true, crate::terminal::is_interactive());
    let how = How {
        interactive,
        tty,
        user: args.user,
        workdir: None,
        env: Vec::new(),
        timeout: None,
    };
    let spec = session::spec(how, vec!["/bin/sh".into(), "-l".into()])?;
    let guest = open(global).await?.client(&args.sandbox)?.guest().await?;
    session::run(&guest, spec, global.json).await
}
