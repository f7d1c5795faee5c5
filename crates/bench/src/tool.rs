//! Programs of the host that figures stand against.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use sandtree::{Error, Result};

use crate::config::search;

/// How often the end of a program is looked for: fine enough for what takes tenths of a second.
const POLL: Duration = Duration::from_millis(2);
/// Where ordinary users do not look for programs, but distributions put them.
const FOR_ROOT: [&str; 2] = ["/usr/sbin", "/sbin"];
/// What is told of a program that failed.
const TAIL_BYTES: usize = 500;

/// Where a program is, if it is installed.
pub fn find(program: &str) -> Option<PathBuf> {
    let dirs = search().into_iter().chain(FOR_ROOT.map(PathBuf::from));
    dirs.map(|dir| dir.join(program))
        .find(|path| path.is_file())
}

/// A program that runs, and ends with this value.
pub struct Running {
    child: Child,
    what: String,
}

impl Running {
    /// `said` gets what it prints, and what it complains of.
    pub fn start(program: &str, args: &[&OsStr], said: &Path) -> Result<Self> {
        let path = find(program).unwrap_or_else(|| program.into());
        let created = |path: &Path| File::create(path).map_err(|e| Error::io("make", path, e));
        let (output, complaints) = (created(said)?, created(&complaints(said))?);
        // starts: the program of tools.output(…)
        // starts: the program of Running::start(…)
        let mut command = Command::new(path);
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(complaints);
        let child = command.spawn().map_err(|e| Error::io("run", program, e))?;
        Ok(Self {
            child,
            what: program.to_owned(),
        })
    }

    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child
            .try_wait()
            .map_err(|e| Error::io("wait for", &self.what, e))
    }

    async fn end(&mut self) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already, or does so now; more cannot be done.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Programs that run to their end, each after the other.
pub struct Tools {
    said: PathBuf,
}

impl Tools {
    /// What they say is kept in this file until the next one runs.
    pub fn new(said: PathBuf) -> Self {
        Self { said }
    }

    /// How long a program takes that must succeed, in seconds.
    pub async fn run<A: AsRef<OsStr>>(&self, program: &str, args: &[A]) -> Result<f64> {
        let args: Vec<&OsStr> = args.iter().map(AsRef::as_ref).collect();
        let began = Instant::now();
        // starts: the program of tools.run(…)
        let status = Running::start(program, &args, &self.said)?.end().await?;
        let took = began.elapsed().as_secs_f64();
        match status.success() {
            true => Ok(took),
            false => {
                let said = std::fs::read(complaints(&self.said)).unwrap_or_default();
                let tail = String::from_utf8_lossy(&said[said.len().saturating_sub(TAIL_BYTES)..])
                    .into_owned();
                Err(Error::invalid(
                    "the end of a tool of the host",
                    format!("{program}: {status}"),
                    tail.trim(),
                ))
            }
        }
    }

    /// What a program prints.
    pub async fn output<A: AsRef<OsStr>>(&self, program: &str, args: &[A]) -> Result<String> {
        self.run(program, args).await?;
        std::fs::read_to_string(&self.said).map_err(|e| Error::io("read", &self.said, e))
    }
}

fn complaints(said: &Path) -> PathBuf {
    said.with_extension("complaints")
}
