//! `sandtree logs`: the guest's console.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use sandtree::{Error, Host, Phase, Result};

use super::{Outcome, open};
use crate::args::{Global, Logs};
use crate::show;

const POLL: Duration = Duration::from_millis(100);

pub async fn run(global: &Global, args: Logs) -> Outcome {
    let host = open(global).await?;
    let [before, console] = host.console(&args.sandbox)?;
    if global.json {
        let text = |path: &Path| read_from(path, &mut 0).map(|b| String::from_utf8_lossy(&b).into_owned());
        show::json(&serde_json::json!({ "console": text(&before)? + &text(&console)? }));
        return Ok(ExitCode::SUCCESS);
    }
    print(&read_from(&before, &mut 0)?)?;
    let mut position = 0;
    print(&read_from(&console, &mut position)?)?;
    if args.follow {
        follow(&host, &args.sandbox, &console, position).await?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn follow(host: &Host, sandbox: &str, console: &Path, mut position: u64) -> Result<()> {
    loop {
        // Asked before reading: what is printed last must not be missed.
        let live = is_live(host, sandbox);
        print(&read_from(console, &mut position)?)?;
        if !live {
            return Ok(());
        }
        tokio::time::sleep(POLL).await;
    }
}

fn is_live(host: &Host, sandbox: &str) -> bool {
    let state = host.find(sandbox).map(|info| info.state);
    matches!(state, Ok(Phase::Creating | Phase::Starting | Phase::Running | Phase::Stopping))
}

/// What stands behind `position`, which moves on. A log that has become shorter was begun anew.
fn read_from(path: &Path, position: &mut u64) -> Result<Vec<u8>> {
    let failed = |e| Error::io("read", path, e);
    let mut file = match File::open(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened.map_err(failed)?,
    };
    if file.metadata().map_err(failed)?.len() < *position {
        *position = 0;
    }
    file.seek(SeekFrom::Start(*position)).map_err(failed)?;
    let mut bytes = Vec::new();
    *position += file.read_to_end(&mut bytes).map_err(failed)? as u64;
    Ok(bytes)
}

fn print(bytes: &[u8]) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|e| Error::io("write to", "stdout", e))
}
