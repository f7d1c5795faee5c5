//! Watches that clients poll: the events wait here until they are fetched.
//!
//! Always: at most [`EVENTS_MAX`] events wait, and the oldest are dropped. A watch that is not
//! polled for [`IDLE`] ends when the next one begins.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::task::AbortHandle;

use crate::digits;
use crate::error::{Fault, Result, Retry};
use crate::locked::lock;

const EVENTS_MAX: usize = 10_000;
const EVENT_BYTES_MAX: usize = 8 << 20;
/// Of one sandbox.
const WATCHERS_MAX: usize = 64;
const IDLE: Duration = Duration::from_secs(3600);

#[derive(Debug, Default)]
pub struct Watchers(Mutex<HashMap<(String, String), Watcher>>);

/// Events that wait to be fetched; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Events(Arc<Mutex<Waiting>>);

#[derive(Debug, Default)]
struct Waiting {
    events: VecDeque<(Value, usize)>,
    bytes: usize,
}

impl Events {
    /// Adds an event. The oldest make room for it.
    pub fn push(&self, event: Value) {
        let size = event.to_string().len();
        let mut waiting = lock(&self.0);
        waiting.bytes += size;
        waiting.events.push_back((event, size));
        while waiting.events.len() > EVENTS_MAX || waiting.bytes > EVENT_BYTES_MAX {
            let Some((_, size)) = waiting.events.pop_front() else {
                return;
            };
            waiting.bytes -= size;
        }
    }

    fn take(&self) -> Vec<Value> {
        let waiting = std::mem::take(&mut *lock(&self.0));
        waiting.events.into_iter().map(|(event, _)| event).collect()
    }
}

#[derive(Debug)]
struct Watcher {
    events: Events,
    /// Ends the task that reads the events.
    task: AbortHandle,
    polled: Instant,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watchers {
    /// Keeps the events that a task collects, and returns the name of the watch.
    pub fn add(&self, sandbox: &str, events: Events, task: AbortHandle) -> Result<String> {
        let watcher = Watcher {
            events,
            task,
            polled: Instant::now(),
        };
        let mut all = lock(&self.0);
        all.retain(|_, watcher| watcher.polled.elapsed() < IDLE);
        let of_sandbox = all.keys().filter(|(of, _)| of == sandbox);
        if of_sandbox.count() >= WATCHERS_MAX {
            let message = "this sandbox has too many watchers";
            return Err(Fault::too_many(message, Retry::Never));
        }
        let name = format!("w{}", digits::random::<8>());
        all.insert((sandbox.to_owned(), name.clone()), watcher);
        Ok(name)
    }

    /// Takes the events that wait.
    pub fn take(&self, sandbox: &str, name: &str) -> Result<Vec<Value>> {
        let mut all = lock(&self.0);
        let watcher = all.get_mut(&(sandbox.to_owned(), name.to_owned()));
        let watcher = watcher.ok_or_else(|| missing(name))?;
        watcher.polled = Instant::now();
        Ok(watcher.events.take())
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
