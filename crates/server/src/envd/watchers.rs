//! Watches that clients poll: the events wait here until they are fetched.
//!
//! Always: at most [`EVENTS_MAX`] events wait, the oldest are dropped, and a watch that nobody polls
//! for [`IDLE`] ends.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sandtree::Watch;
use serde_json::Value;
use tokio::task::AbortHandle;

use super::filesystem::shown_event;
use super::user::Users;
use crate::error::{Fault, Result, Retry};
use crate::gateway::{Connection, lock};

const EVENTS_MAX: usize = 10_000;
const WATCHERS_MAX: usize = 1000;
const IDLE: Duration = Duration::from_secs(3600);

#[derive(Debug, Default)]
pub struct Watchers(Mutex<HashMap<(String, String), Watcher>>);

#[derive(Debug)]
struct Watcher {
    events: Arc<Mutex<VecDeque<Value>>>,
    /// Ends the task that reads the events.
    task: AbortHandle,
    polled: Instant,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What a watcher reports in addition to names.
#[derive(Debug, Clone)]
pub struct Entries {
    pub directory: std::path::PathBuf,
    pub users: Users,
    /// Whether events come with the file's entry.
    pub wanted: bool,
}

impl Watchers {
    /// Keeps the events of a watch, and returns its name.
    pub fn add(&self, connection: &Connection, mut watch: Watch, entries: Entries) -> Result<String> {
        let mut all = lock(&self.0);
        all.retain(|_, watcher| watcher.polled.elapsed() < IDLE);
        if all.len() >= WATCHERS_MAX {
            let message = "this server has too many watchers";
            return Err(Fault::too_many(message, Retry::Never));
        }
        let events = Arc::new(Mutex::new(VecDeque::new()));
        let kept = events.clone();
        let files = connection.guest.files();
        let task = tokio::spawn(async move {
            while let Ok(Some(event)) = watch.next().await {
                let Some(shown) = shown_event(&files, &entries, event).await else {
                    continue;
                };
                let mut kept = lock(&kept);
                if kept.len() >= EVENTS_MAX {
                    kept.pop_front();
                }
                kept.push_back(shown);
            }
        });
        let name = name();
        let watcher = Watcher {
            events,
            task: task.abort_handle(),
            polled: Instant::now(),
        };
        all.insert((connection.id().to_owned(), name.clone()), watcher);
        Ok(name)
    }

    /// Takes the events that wait.
    pub fn take(&self, sandbox: &str, name: &str) -> Result<Vec<Value>> {
        let mut all = lock(&self.0);
        let watcher = all.get_mut(&(sandbox.to_owned(), name.to_owned()));
        let watcher = watcher.ok_or_else(|| missing(name))?;
        watcher.polled = Instant::now();
        let events = std::mem::take(&mut *lock(&watcher.events));
        Ok(events.into())
    }

    pub fn remove(&self, sandbox: &str, name: &str) -> Result<()> {
        let removed = lock(&self.0).remove(&(sandbox.to_owned(), name.to_owned()));
        removed.map(drop).ok_or_else(|| missing(name))
    }

    /// Drops the watches of a sandbox that does not run any more.
    pub fn forget(&self, sandbox: &str) {
        lock(&self.0).retain(|(of, _), _| of != sandbox);
    }
}

fn missing(name: &str) -> Fault {
    Fault::not_found(format!("watcher with id {name} not found"))
}

fn name() -> String {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("w{digits}")
}
