//! The life of a template's build.
//!
//! ```text
//!   waiting ──start──► building ──► ready        its tags lead to the image
//!                         │ ├─────► error        its tags are unchanged
//!                         │ └ the server ends: reported as error from then on
//! ```
//!
//! Always: a build is a document of the store. While it runs, its log is in memory; the document
//! names a mark that ends with this process. When it fails, or the server ends: the machine and
//! its sandbox are gone, and the next build continues after the last finished step.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sandtree::{BuildSpec, Error, Network, RegistryAccess, SandboxSpec, Shelf, Work};

use crate::builds::{Log, watch};
use crate::clock::now_unix_ms;
use crate::error::Result;
use crate::gateway::Gateway;
use crate::locked::lock;
use crate::naming;
use crate::plan::{Plan, Title};
use crate::records::{self, BuildRecord, BuildStatus, Level, LogRecord, Reason, TagRecord};

const BUILD_WITHIN: Duration = Duration::from_secs(3600);

/// A build that has a place among those that run, until it ends in whatever way.
pub(super) struct Building {
    gateway: Gateway,
    id: String,
    record: BuildRecord,
    log: Arc<Mutex<Log>>,
}

impl Drop for Building {
    fn drop(&mut self) {
        self.gateway.builds().leave(&self.id);
    }
}

impl Building {
    pub(super) fn new(gateway: &Gateway, id: String, record: BuildRecord) -> Result<Self> {
        let log = gateway.builds().enter(&id)?;
        Ok(Self {
            gateway: gateway.clone(),
            id,
            record,
            log,
        })
    }

    /// Starts it, and returns when it has begun.
    pub(super) fn start(mut self, plan: Plan, access: RegistryAccess) -> Result<()> {
        let gateway = self.gateway.clone();
        let id = self.id.clone();
        let work = gateway.host().begin_work()?;
        self.record.status = BuildStatus::Building;
        self.record.work = Some(work.id());
        let record = self.record.clone();
        gateway.host().put_document(Shelf::Builds, &id, record)?;
        let task = tokio::spawn(self.run(plan, access, work));
        gateway.builds().set_task(&id, task.abort_handle());
        Ok(())
    }

    async fn run(mut self, plan: Plan, access: RegistryAccess, _work: Work) {
        let titles = plan.titles.clone();
        let outcome = tokio::time::timeout(BUILD_WITHIN, self.build(plan, access)).await;
        let failed = match outcome {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(said(&error, self.title(&titles).as_ref())),
            Err(_) => Some("the build took more than an hour".to_owned()),
        };
        if let Err(fault) = self.record_end(failed) {
            tracing::warn!(build = self.id, error = %fault, "the end of a build is not recorded");
        }
    }

    /// The step that the build was at.
    fn title(&self, titles: &[Title]) -> Option<Title> {
        let step = lock(&self.log).step.clone()?;
        titles.iter().rfind(|title| title.step == step).cloned()
    }

    /// The machine of a sandbox that the template is for.
    fn machine(&self) -> SandboxSpec {
        SandboxSpec {
            network: Some(Network::Full),
            memory_bytes: self.record.shape.memory_bytes,
            cpus: self.record.shape.cpus,
            ..SandboxSpec::new("")
        }
    }

    async fn build(&self, plan: Plan, access: RegistryAccess) -> Result<(), Error> {
        let template = &self.record.template;
        let stored = |tag: &String| naming::stored(template, tag);
        let names: Vec<String> = self.record.tags.iter().map(stored).collect();
        let spec = BuildSpec {
            name: names.first().cloned(),
            anew_from: plan.anew_from,
            env: plan.env,
            trial: plan.has_service.then(|| self.machine()),
            access,
            ..BuildSpec::default()
        };
        let host = self.gateway.host();
        let watch = watch(self.log.clone(), plan.titles);
        let image = host.build_image(&plan.recipe, spec, watch).await?;
        for name in names.iter().skip(1) {
            host.tag_image(&image.digest, name).await?;
        }
        let user = plan.recipe.user.clone().filter(|user| is_name(user));
        let now_ms = now_unix_ms();
        let tag = |tag: &String| TagRecord {
            tag: tag.clone(),
            build: self.id.clone(),
            image: image.digest.clone(),
            assigned_at_unix_ms: now_ms,
            shape: self.record.shape,
            user: user.clone(),
            workdir: plan.recipe.workdir.clone(),
        };
        let tags = self.record.tags.iter().map(tag).collect();
        records::set_tags(host, template, tags)
    }

    /// The log comes first: a client that sees the end asks for no more of it.
    fn record_end(&mut self, failed: Option<String>) -> Result<()> {
        let step = {
            let mut log = lock(&self.log);
            match &failed {
                Some(message) => log.fail(message),
                None => {
                    log.end_line();
                    log.add(Level::Info, "the template is ready".to_owned());
                }
            }
            log.step.clone()
        };
        let entries = lock(&self.log).entries.clone();
        let host = self.gateway.host();
        host.put_document(Shelf::Logs, &self.id, LogRecord { entries })?;
        self.record.status = match failed {
            Some(_) => BuildStatus::Error,
            None => BuildStatus::Ready,
        };
        self.record.reason = failed.map(|message| Reason {
            message,
            step: step.unwrap_or_else(|| "base".to_owned()),
        });
        self.record.work = None;
        self.record.finished_at_unix_ms = Some(now_unix_ms());
        Ok(host.put_document(Shelf::Builds, &self.id, self.record.clone())?)
    }
}

/// Whether a user is named, and not numbered.
fn is_name(user: &str) -> bool {
    !user.contains(':') && !user.bytes().all(|byte| byte.is_ascii_digit())
}

/// Why a build failed, in words for its client.
fn said(error: &Error, title: Option<&Title>) -> String {
    match (error, title) {
        (Error::BuildStep { status, output, .. }, Some(title)) => {
            format!("{} failed: {status}\n{output}", title.text)
                .trim_end()
                .to_owned()
        }
        _ => error.report().one_line(),
    }
}
