//! The service of an image: a command that each boot starts in the background, and a check that
//! the boot repeats until the service is ready.
//!
//! ```text
//!   booted ──► start, detached ──► check ── exit 0 ──► the boot is done
//!                   │                └─ otherwise: again, until its time is over
//!                   └─ fails before that: so does the boot
//! ```
//!
//! Always: both commands get the variables, the user and the directory of the image, and nothing of
//! a sandbox, because a warm image continues in every sandbox. The variables of the sandbox are in
//! [`VARIABLES`] as soon as it has some. The output of the service is kept like that of any
//! detached command.

use std::convert::Infallible;
use std::future::pending;
use std::time::Duration;

use sandtree_store::{ImageRecord, Ready, SandboxRecord};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::degradation::Degradation;
use crate::error::{Error, Result};
use crate::guest::{Defaults, Exec, ExecSpec, FileOwner, Guest, Lifetime, Tail};
use crate::hub::Gate;
use crate::machine::running::Running;

/// The pauses between two checks: short at first, because most services are ready soon.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_LAST: Duration = Duration::from_secs(1);
/// The most that an image may ask for. It may come from anyone.
const READY_MAX: Duration = Duration::from_secs(3600);

/// Where a service finds the variables of its sandbox, as a JSON object.
const VARIABLES: &str = "/run/sandtree/env.json";
const VARIABLES_DIR: &str = "/run/sandtree";

/// What a boot does with the service of the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Service {
    /// Starts it, and fails if it does not become ready.
    Required,
    /// Starts it, and notes if it does not become ready: its sandbox may be needed to repair it.
    Noted,
    /// Does not start it.
    Left,
}

/// Starts the service of an image in a booted guest, and waits until it is ready.
pub(super) async fn start(
    image: &ImageRecord,
    running: &mut Running,
    service: Service,
) -> Result<()> {
    if service == Service::Left || !image.defaults.has_service() {
        return Ok(());
    }
    let commands = Commands {
        guest: &running.guest,
        defaults: Defaults::of_image(image),
    };
    let up = tokio::select! {
        up = commands.up(image) => up,
        never = admit_all(running.gate.as_mut()) => match never {},
    };
    match up {
        Err(error @ (Error::Service { .. } | Error::NotStarted { .. }))
            if service == Service::Noted =>
        {
            let reason = error.one_line();
            running
                .degraded
                .push(Degradation::ServiceNotReady { reason });
            Ok(())
        }
        up => up,
    }
}

/// Writes the variables of a sandbox for the service of its image, which runs without them.
pub(super) async fn tell_variables(
    image: &ImageRecord,
    record: &SandboxRecord,
    guest: &Guest,
) -> Result<()> {
    if !image.defaults.has_service() || record.env.is_empty() {
        return Ok(());
    }
    let text = serde_json::to_vec(&record.env).expect("texts by name are plain data");
    let files = guest.files();
    files.make_dir(VARIABLES_DIR, 0o755).await?;
    files
        .write(VARIABLES, &mut text.as_slice(), FileOwner::default())
        .await
        .map(drop)
}

/// Admits commands of a sandbox with automatic checkpoints, which its driver does later on. There
/// is no checkpoint before the first command of a boot.
async fn admit_all(gate: Option<&mut mpsc::Receiver<Gate>>) -> Infallible {
    let Some(gate) = gate else {
        return pending().await;
    };
    while let Some(Gate { reply }) = gate.recv().await {
        // A command whose caller is gone does not need its admission.
        drop(reply.send(Ok(())));
    }
    pending().await
}

struct Commands<'a> {
    guest: &'a Guest,
    defaults: Defaults,
}

impl Commands<'_> {
    async fn up(&self, image: &ImageRecord) -> Result<()> {
        let mut printed = Tail::default();
        let up = match &image.defaults.start {
            None => self.ready(image).await,
            Some(line) => {
                let spec = ExecSpec {
                    lifetime: Lifetime::Detached,
                    ..ExecSpec::shell(line)
                };
                let exec = self.exec(spec).await?;
                tokio::select! {
                    ready = self.ready(image) => ready,
                    failed = failure(exec, line, &mut printed) => Err(failed?),
                }
            }
        };
        up.map_err(|error| with_output(error, &printed))
    }

    async fn ready(&self, image: &ImageRecord) -> Result<()> {
        let Some(Ready {
            command,
            timeout_ms,
        }) = &image.defaults.ready
        else {
            return Ok(());
        };
        let within = Duration::from_millis(*timeout_ms).min(READY_MAX);
        let end = Instant::now() + within;
        let mut pause = PAUSE_FIRST;
        loop {
            let spec = ExecSpec {
                timeout: Some(end.saturating_duration_since(Instant::now())),
                ..ExecSpec::shell(command)
            };
            let mut printed = Tail::default();
            let mut exec = self.exec(spec).await?;
            let status = exec.drained(|chunk| printed.add(chunk)).await?;
            if status.success() {
                return Ok(());
            }
            if Instant::now() + pause >= end {
                return Err(Error::Service {
                    command: command.clone(),
                    what: format!("did not succeed within {} s: {status}", within.as_secs()),
                    output: printed.text(),
                });
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_LAST);
        }
    }

    async fn exec(&self, spec: ExecSpec) -> Result<Exec> {
        self.guest.exec(self.defaults.complete(spec)).await
    }
}

/// Waits until the service fails. One that ends with success has left processes in the background.
async fn failure(mut exec: Exec, line: &str, printed: &mut Tail) -> Result<Error> {
    let status = exec.drained(|chunk| printed.add(chunk)).await?;
    if status.success() {
        return pending().await;
    }
    Ok(Error::Service {
        command: line.to_owned(),
        what: format!("failed: {status}"),
        output: String::new(),
    })
}

/// Adds the output of the service, which says more than that of its check.
fn with_output(error: Error, printed: &Tail) -> Error {
    let of_service = printed.text();
    match error {
        Error::Service {
            command,
            what,
            output,
        } => Error::Service {
            command,
            what,
            output: format!("{output}\n{of_service}").trim().to_owned(),
        },
        other => other,
    }
}
