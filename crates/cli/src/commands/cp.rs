//! `sandtree cp`: files and trees into and out of a sandbox.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::ExitCode;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use sandtree::{Error, FileOwner, Files, Result, Transfer};
use serde_json::json;
use tokio::io::{AsyncRead, ReadBuf};

use super::{Outcome, open};
use crate::args::Global;
use crate::{progress, show, stdin};

#[derive(Debug, clap::Args)]
pub struct CpArgs {
    pub from: OsString,
    pub to: OsString,
}

const REFRESH: Duration = Duration::from_millis(100);

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Guest { sandbox: String, path: PathBuf },
    Host(PathBuf),
    Stream,
}

impl Place {
    /// `NAME:PATH` is in a sandbox. Write `./NAME:PATH` for a path of the host that looks like it.
    fn parse(text: &OsStr) -> Place {
        let bytes = text.as_bytes();
        let colon = bytes.iter().position(|b| *b == b':');
        let slash = bytes.iter().position(|b| *b == b'/').unwrap_or(bytes.len());
        match colon {
            _ if bytes == b"-" => Place::Stream,
            Some(at) if at < slash => {
                let sandbox = String::from_utf8_lossy(&bytes[..at]).into_owned();
                Place::Guest {
                    sandbox,
                    path: OsStr::from_bytes(&bytes[at + 1..]).into(),
                }
            }
            _ => Place::Host(text.into()),
        }
    }
}

pub async fn run(global: &Global, args: CpArgs) -> Outcome {
    let transfer = copy(global, &args.from, &args.to).await?;
    for skipped in &transfer.skipped {
        eprintln!("sandtree: left out: {skipped}");
    }
    if global.json {
        show::json(&json!({ "bytes": transfer.bytes, "skipped": transfer.skipped }));
    }
    Ok(ExitCode::SUCCESS)
}

async fn copy(global: &Global, from: &OsString, to: &OsString) -> Result<Transfer> {
    match (Place::parse(from), Place::parse(to)) {
        (Place::Host(from), Place::Guest { sandbox, path }) => {
            let files = files(global, &sandbox).await?;
            shown(&files, &from, files.upload(&from, &path)).await
        }
        (Place::Guest { sandbox, path }, Place::Host(to)) => {
            let files = files(global, &sandbox).await?;
            shown(&files, &path, files.download(&path, &to)).await
        }
        (Place::Guest { sandbox, path }, Place::Stream) => {
            let bytes = files(global, &sandbox)
                .await?
                .read(&path, &mut tokio::io::stdout())
                .await?;
            Ok(Transfer {
                bytes,
                skipped: Vec::new(),
            })
        }
        (Place::Stream, Place::Guest { sandbox, path }) => {
            let files = files(global, &sandbox).await?;
            let bytes = files
                .write(&path, &mut Stdin::open(), FileOwner::default())
                .await?;
            Ok(Transfer {
                bytes,
                skipped: Vec::new(),
            })
        }
        _ => Err(Error::invalid(
            "copy",
            format!("{from:?} to {to:?}"),
            "one side is SANDBOX:PATH, the other is not",
        )),
    }
}

async fn files(global: &Global, sandbox: &str) -> Result<Files> {
    sandtree::check_reference(sandbox)?;
    Ok(open(global).await?.sandbox(sandbox)?.guest().await?.files())
}

/// Shows the progress of a copy.
async fn shown(
    files: &Files,
    what: &Path,
    copy: impl Future<Output = Result<Transfer>>,
) -> Result<Transfer> {
    let bar = progress::bytes(what.display().to_string());
    let mut copy = std::pin::pin!(copy);
    loop {
        tokio::select! {
            done = &mut copy => return done,
            () = tokio::time::sleep(REFRESH) => bar.set_position(files.carried()),
        }
    }
}

/// Standard input, read by a separate thread: an error of the guest ends the copy even while no
/// input arrives.
struct Stdin {
    chunks: stdin::Chunks,
    chunk: io::Cursor<Vec<u8>>,
}

impl Stdin {
    fn open() -> Self {
        Self {
            chunks: stdin::read(),
            chunk: io::Cursor::default(),
        }
    }
}

impl AsyncRead for Stdin {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.chunk.position() == self.chunk.get_ref().len() as u64 {
            match ready!(self.chunks.poll_recv(cx)) {
                None => return Poll::Ready(Ok(())),
                Some(chunk) => self.chunk = io::Cursor::new(chunk?),
            }
        }
        let count = io::Read::read(&mut self.chunk, buffer.initialize_unfilled())?;
        buffer.advance(count);
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        let guest = |sandbox: &str, path: &str| Place::Guest {
            sandbox: sandbox.into(),
            path: path.into(),
        };
        assert_eq!(Place::parse("a:/srv".as_ref()), guest("a", "/srv"));
        assert_eq!(Place::parse("./a:b".as_ref()), Place::Host("./a:b".into()));
        assert_eq!(Place::parse("/x:/y".as_ref()), Place::Host("/x:/y".into()));
        assert_eq!(Place::parse("-".as_ref()), Place::Stream);
    }
}
