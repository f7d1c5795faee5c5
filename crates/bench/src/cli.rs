//! The program `sandtree`, as users run it: one process a verb, and a keeper for each sandbox.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Instant;

use sandtree::{Error, HostConfig, MachineUser, Result, Sandbox};
use serde_json::Value;
use tokio::process::Command;

use crate::config::Global;
use crate::crew::{Crew, IMAGE};

/// Output of a failed verb that its error contains.
const TAIL_CHARS: usize = 500;

pub struct Cli {
    program: PathBuf,
    options: Vec<String>,
}

/// A verb that has succeeded.
pub struct Done {
    pub ms: f64,
    /// What it printed, if that was JSON.
    pub printed: Value,
}

impl Done {
    /// A number that the verb has printed.
    pub fn number(&self, name: &str) -> Result<f64> {
        let wrong = || Error::invalid("answer of sandtree", &self.printed, name);
        self.printed[name].as_f64().ok_or_else(wrong)
    }
}

impl Cli {
    /// The program that `--sandtree` names, or the one next to this program.
    pub fn find(global: &Global) -> Result<Self> {
        let program = global.sandtree()?;
        if !program.is_file() {
            let rule = "build it (cargo build --release -p sandtree-cli) or name it: --sandtree";
            return Err(Error::invalid("program", program.display(), rule));
        }
        Ok(Self {
            program,
            options: options(&global.config()?),
        })
    }

    /// The program with a verb.
    pub fn command(&self, words: &[&str]) -> Command {
        // starts: our own program
        let mut command = Command::new(&self.program);
        command.args(&self.options).args(words);
        command
    }

    /// Runs a verb, which must succeed.
    pub async fn run(&self, words: &[&str]) -> Result<Done> {
        let began = Instant::now();
        let output = self
            .command(words)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await
            .map_err(|e| Error::io("run", &self.program, e))?;
        let ms = began.elapsed().as_secs_f64() * 1e3;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let stdout = String::from_utf8_lossy(&output.stdout);
            let said: String = format!("{stdout}{stderr}")
                .chars()
                .take(TAIL_CHARS)
                .collect();
            return Err(Error::invalid("verb", words.join(" "), said.trim()));
        }
        let printed = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        Ok(Done { ms, printed })
    }

    /// Creates a sandbox, which the crew removes, and runs a first command in it. Returns the
    /// milliseconds of both.
    pub async fn create(&self, crew: &Crew, name: &str, from: &str) -> Result<(Sandbox, f64)> {
        let run = self.run(&["run", "--detach", "--name", name, from]).await?;
        let sandbox = crew.adopt(name)?;
        let first = self.first_command(name).await?;
        Ok((sandbox, run.ms + first))
    }

    pub async fn first_command(&self, sandbox: &str) -> Result<f64> {
        Ok(self.run(&["exec", sandbox, "--", "/bin/true"]).await?.ms)
    }

    /// A sandbox of the usual image.
    pub async fn sandbox(&self, crew: &Crew, what: &str) -> Result<Sandbox> {
        Ok(self.create(crew, &name(what), IMAGE).await?.0)
    }
}

/// A name that no user gives.
pub fn name(what: &str) -> String {
    format!("bench-{}-{what}", std::process::id())
}

fn options(config: &HostConfig) -> Vec<String> {
    let mut options = vec!["--json".into(), "--home".into()];
    options.push(config.home.display().to_string());
    if let Some(qemu) = &config.qemu {
        options.extend(["--qemu".into(), qemu.display().to_string()]);
    }
    if config.machine_user == MachineUser::Caller {
        options.extend(["--machine-user".into(), "caller".into()]);
    }
    options
}
