//! Programs of the host that figures are compared with.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use sandtree::{Error, Result};

use crate::config::search;

/// How often to check whether a program has ended; the measured ones take tenths of a second.
const POLL: Duration = Duration::from_millis(2);
/// Directories of programs that are not on the PATH of ordinary users.
const FOR_ROOT: [&str; 2] = ["/usr/sbin", "/sbin"];
/// How much of a failed program's stderr the error contains.
const TAIL_BYTES: usize = 500;

/// The path of a program, if it is installed.
pub fn find(program: &str) -> Option<PathBuf> {
    let dirs = search().into_iter().chain(FOR_ROOT.map(PathBuf::from));
    dirs.map(|dir| dir.join(program))
        .find(|path| path.is_file())
}

/// A running program. Dropping it kills the program.
pub struct Running {
    child: Child,
    what: String,
}

impl Running {
    /// Writes stdout to the file `printed`, and stderr to a file next to it.
    pub fn start(program: &str, args: &[&OsStr], printed: &Path) -> Result<Self> {
        let path = find(program).unwrap_or_else(|| program.into());
        let created = |path: &Path| File::create(path).map_err(|e| Error::io("make", path, e));
        let output = created(printed)?;
        let complaints = created(&complaints(printed))?;
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
        // Errors have no consequence: the program has ended, or ends now.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Runs programs to their end, one at a time.
pub struct Tools {
    printed: PathBuf,
}

impl Tools {
    /// The file keeps the output of a program until the next one runs.
    pub fn new(printed: PathBuf) -> Self {
        Self { printed }
    }

    /// Runs a program, which must succeed. Returns the time in seconds.
    pub async fn run<A: AsRef<OsStr>>(&self, program: &str, args: &[A]) -> Result<f64> {
        let args: Vec<&OsStr> = args.iter().map(AsRef::as_ref).collect();
        let began = Instant::now();
        // starts: the program of tools.run(…)
        let status = Running::start(program, &args, &self.printed)?.end().await?;
        let took = began.elapsed().as_secs_f64();
        if status.success() {
            return Ok(took);
        }
        let stderr = std::fs::read(complaints(&self.printed)).unwrap_or_default();
        let tail = &stderr[stderr.len().saturating_sub(TAIL_BYTES)..];
        Err(Error::invalid(
            "exit of a tool of the host",
            format!("{program}: {status}"),
            String::from_utf8_lossy(tail).trim(),
        ))
    }

    /// Runs a program and returns its output.
    pub async fn output<A: AsRef<OsStr>>(&self, program: &str, args: &[A]) -> Result<String> {
        self.run(program, args).await?;
        std::fs::read_to_string(&self.printed).map_err(|e| Error::io("read", &self.printed, e))
    }
}

fn complaints(printed: &Path) -> PathBuf {
    printed.with_extension("complaints")
}

/// The first line that a program prints of its version.
pub fn version(program: &Path) -> Result<String> {
    // starts: our own program, or the QEMU of this run
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Error::io("run", program, e))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// The commit of the checkout that contains this program; `-dirty` if files differ from it.
pub fn commit() -> String {
    let own = std::env::current_exe().ok();
    let dir = own.as_deref().and_then(Path::parent);
    let described = Command::new("git")
        .arg("-C")
        .arg(dir.unwrap_or(Path::new(".")))
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .stdin(Stdio::null())
        .output();
    match described {
        Ok(output) if output.status.success() => {
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        }
        _ => "unknown".into(),
    }
}
