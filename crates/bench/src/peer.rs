//! Microsoft's Quicksand as a peer: a Python process that is asked by lines of JSON.
//!
//! `scripts/quicksand DIR` installs it. `quicksand.py` is the process; it uses the same QEMU as
//! Sandtree. Its machines end with it, and it ends when this program drops its standard input.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use sandtree::{Error, Result};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::config::{Global, search};
use crate::scratch::Scratch;
use crate::tool;

const DRIVER: &str = include_str!("quicksand.py");
/// A boot without KVM on a busy machine takes minutes.
const ANSWER_DEADLINE: Duration = Duration::from_secs(1200);
/// For its machines to end.
const END_DEADLINE: Duration = Duration::from_secs(30);
const QEMU: &str = "qemu-system-x86_64";

pub struct Quicksand {
    child: Child,
    requests: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

/// Why there is no Quicksand on this host.
#[derive(Debug)]
pub struct Missing(pub String);

impl Quicksand {
    /// Starts it, if it is installed in the directory that `--quicksand` names.
    pub async fn start(
        global: &Global,
        accel: &str,
        scratch: &Scratch,
    ) -> Result<std::result::Result<Self, Missing>> {
        let Some(dir) = &global.quicksand else {
            return Ok(Err(Missing("not asked for: --quicksand DIR".into())));
        };
        if !dir.join("ready").exists() {
            let why = "it is not installed: scripts/quicksand DIR";
            return Ok(Err(Missing(why.into())));
        }
        let dir = std::path::absolute(dir).map_err(|e| Error::io("resolve", dir, e))?;
        let programs = programs(global, &dir, scratch)?;
        let driver = scratch.path("quicksand.py");
        std::fs::write(&driver, DRIVER).map_err(|e| Error::io("write", &driver, e))?;
        let python = dir.join("venv/bin/python");
        let path = [vec![programs], search()].concat();
        let path = std::env::join_paths(path).map_err(|e| {
            Error::invalid("directories of PATH", e, "without colons in their names")
        })?;
        // starts: python3
        let mut child = Command::new(&python)
            .arg(&driver)
            .env("PATH", path)
            .env("PEER_ACCEL", accel)
            .env("QUICKSAND_AUTO_INSTALL", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| Error::io("run", &python, e))?;
        let answers = child.stdout.take().expect("its output is a pipe");
        Ok(Ok(Self {
            requests: child.stdin.take(),
            answers: BufReader::new(answers).lines(),
            child,
        }))
    }

    pub async fn create(&mut self) -> Result<f64> {
        number(&self.ask(json!({ "do": "create" })).await?, "ms")
    }

    pub async fn run(&mut self, command: &str) -> Result<f64> {
        let request = json!({ "do": "run", "command": command });
        number(&self.ask(request).await?, "ms")
    }

    /// Mounts a directory of the host, by CIFS.
    pub async fn mount(&mut self, host: &Path, guest: &str) -> Result<()> {
        let request = json!({ "do": "mount", "host": host, "guest": guest });
        self.ask(request).await.map(drop)
    }

    pub async fn checkpoint(&mut self, tag: &str) -> Result<Value> {
        self.ask(json!({ "do": "checkpoint", "tag": tag })).await
    }

    pub async fn revert(&mut self, tag: &str) -> Result<Value> {
        self.ask(json!({ "do": "revert", "tag": tag })).await
    }

    pub async fn save(&mut self, name: &str) -> Result<f64> {
        let request = json!({ "do": "save", "name": name });
        number(&self.ask(request).await?, "ms")
    }

    pub async fn start_saved(&mut self, name: &str) -> Result<f64> {
        let request = json!({ "do": "start_saved", "name": name });
        number(&self.ask(request).await?, "ms")
    }

    pub async fn pss_bytes(&mut self) -> Result<f64> {
        number(&self.ask(json!({ "do": "memory" })).await?, "pss_bytes")
    }

    pub async fn version(&mut self) -> Result<String> {
        let versions = self.ask(json!({ "do": "versions" })).await?;
        let version = versions["quicksand-core"].as_str().unwrap_or("unknown");
        Ok(format!("Quicksand {version}"))
    }

    async fn ask(&mut self, request: Value) -> Result<Value> {
        let broken = |e| Error::io("ask", "the process of Quicksand", e);
        let requests = self.requests.as_mut().expect("it has not ended");
        let line = format!("{request}\n");
        requests.write_all(line.as_bytes()).await.map_err(broken)?;
        let answer = tokio::time::timeout(ANSWER_DEADLINE, self.answers.next_line()).await;
        let late = |_| Error::invalid("Quicksand", &request, "answers in 20 minutes");
        let answer = answer.map_err(late)?.map_err(broken)?;
        let ended = || broken(std::io::ErrorKind::UnexpectedEof.into());
        let answer: Value = serde_json::from_str(&answer.ok_or_else(ended)?)
            .map_err(|e| Error::invalid("answer of Quicksand", e, "is JSON"))?;
        match answer["error"].as_str() {
            Some(error) => Err(Error::invalid("Quicksand", &request, error)),
            None => Ok(answer),
        }
    }

    /// Ends it and its machines.
    pub async fn end(mut self) -> Result<()> {
        // Its standard input ends here, and so does it.
        drop(self.requests.take());
        let ended = tokio::time::timeout(END_DEADLINE, self.child.wait()).await;
        let status = ended
            .map_err(|_| Error::invalid("Quicksand", "its end", "ends in 30 s"))?
            .map_err(|e| Error::io("wait for", "the process of Quicksand", e))?;
        if status.success() {
            return Ok(());
        }
        Err(Error::invalid("exit of Quicksand", status, "is 0"))
    }
}

/// A directory with the programs that Quicksand finds on its PATH: the QEMU of this run, and
/// qemu-img.
fn programs(global: &Global, dir: &Path, scratch: &Scratch) -> Result<PathBuf> {
    let programs = scratch.dir("programs")?;
    let config = global.config()?;
    let missing = |what: &str| Error::invalid("program", what, "must be installed");
    let qemu = config.qemu.or_else(|| tool::find(QEMU));
    let qemu = qemu.ok_or_else(|| missing(QEMU))?;
    let unpacked = dir.join("unpacked/usr/bin/qemu-img");
    let unpacked = unpacked.is_file().then_some(unpacked);
    let qemu_img = unpacked.or_else(|| tool::find("qemu-img"));
    let qemu_img = qemu_img.ok_or_else(|| missing("qemu-img"))?;
    for (target, name) in [(qemu, QEMU), (qemu_img, "qemu-img")] {
        let link = programs.join(name);
        symlink(&target, &link).map_err(|e| Error::io("link", &link, e))?;
    }
    Ok(programs)
}

pub fn number(answer: &Value, name: &str) -> Result<f64> {
    let wrong = || Error::invalid("answer of Quicksand", answer, name);
    answer[name].as_f64().ok_or_else(wrong)
}
