//! The builds of templates that run in this server, and what they write.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use sandtree::{BuildEvent, BuildWatch};
use tokio::task::AbortHandle;

use crate::clock::now_unix_ms;
use crate::error::{Fault, Result, Retry};
use crate::locked::lock;
use crate::plan::Title;
use crate::records::{Level, LogEntry};

/// Builds at a time; each is a machine.
const BUILDING_MAX: usize = 4;
const ENTRIES_MAX: usize = 10_000;
const LOG_BYTES_MAX: usize = 2 << 20;
const LINE_MAX: usize = 4 << 10;

/// The builds that this server runs, by id.
#[derive(Debug, Default)]
pub struct Builds(Mutex<HashMap<String, Running>>);

#[derive(Debug)]
struct Running {
    log: Arc<Mutex<Log>>,
    /// Nothing until its task has started.
    task: Option<AbortHandle>,
}

impl Builds {
    /// Takes a place for a build.
    pub fn enter(&self, id: &str) -> Result<Arc<Mutex<Log>>> {
        let mut all = lock(&self.0);
        if all.len() >= BUILDING_MAX {
            let message = format!("{BUILDING_MAX} templates are being built: try again later");
            return Err(Fault::too_many(message, Retry::AfterSeconds(10)));
        }
        if all.contains_key(id) {
            return Err(Fault::conflict("the build has been started"));
        }
        let log = Arc::<Mutex<Log>>::default();
        let running = Running {
            log: log.clone(),
            task: None,
        };
        all.insert(id.to_owned(), running);
        Ok(log)
    }

    pub fn leave(&self, id: &str) {
        lock(&self.0).remove(id);
    }

    pub fn set_task(&self, id: &str, task: AbortHandle) {
        if let Some(running) = lock(&self.0).get_mut(id) {
            running.task = Some(task);
        }
    }

    /// What a build has written so far, if it runs here.
    pub fn log(&self, id: &str) -> Option<Vec<LogEntry>> {
        let log = lock(&self.0).get(id)?.log.clone();
        let entries = lock(&log).entries.clone();
        Some(entries)
    }

    /// Ends all builds.
    pub fn cancel_all(&self) {
        let all = lock(&self.0);
        let tasks = all.values().filter_map(|running| running.task.as_ref());
        tasks.for_each(AbortHandle::abort);
    }
}

/// What a build writes, in bounded memory.
#[derive(Debug, Default)]
pub struct Log {
    pub entries: Vec<LogEntry>,
    bytes: usize,
    /// The beginning of a line whose end has not come yet.
    line: Vec<u8>,
    /// `base`, `finalize`, or the number of a step.
    pub step: Option<String>,
    is_full: bool,
}

impl Log {
    pub fn add(&mut self, level: Level, message: String) {
        if self.is_full {
            return;
        }
        self.bytes += message.len();
        self.is_full = self.entries.len() + 1 >= ENTRIES_MAX || self.bytes > LOG_BYTES_MAX;
        let message = if self.is_full {
            "further output is not kept".to_owned()
        } else {
            message
        };
        self.entries.push(LogEntry {
            at_unix_ms: now_unix_ms(),
            level,
            step: self.step.clone(),
            message,
        });
    }

    /// Adds output: one entry for each line.
    fn output(&mut self, bytes: &[u8]) {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = LINE_MAX - self.line.len().min(LINE_MAX);
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            self.line.extend_from_slice(&text[..text.len().min(room)]);
            if part.ends_with(b"\n") {
                self.end_line();
            }
        }
    }

    pub fn end_line(&mut self) {
        if !self.line.is_empty() {
            let line = std::mem::take(&mut self.line);
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            self.add(Level::Info, line);
        }
    }

    /// `mark` comes before the title.
    fn begin_step(&mut self, title: &Title, of: usize, mark: &str) {
        self.end_line();
        self.step = Some(title.step.clone());
        let text = title.text.lines().next().unwrap_or_default();
        let text: String = text.chars().take(200).collect();
        self.add(Level::Info, format!("{mark}[{}/{of}] {text}", title.step));
    }

    pub fn fail(&mut self, message: &str) {
        self.end_line();
        message
            .lines()
            .for_each(|line| self.add(Level::Error, line.to_owned()));
    }
}

/// Writes down what a build reports.
pub fn watch(log: Arc<Mutex<Log>>, titles: Vec<Title>) -> BuildWatch {
    let of = titles.len();
    BuildWatch::new(move |event| {
        let mut log = lock(&log);
        match event {
            BuildEvent::Step { number, cached, .. } => {
                if let Some(title) = titles.get(number - 1) {
                    let mark = if cached { "CACHED " } else { "" };
                    log.begin_step(title, of, mark);
                }
            }
            BuildEvent::Output(bytes) => log.output(&bytes),
            BuildEvent::Image(_) => {}
            BuildEvent::Writing(_) => {
                if log.step.as_deref() != Some(FINALIZE) {
                    log.end_line();
                    log.step = Some(FINALIZE.to_owned());
                    log.add(Level::Info, "writing the image".to_owned());
                }
            }
        }
    })
}

/// E2B's word for what follows the steps.
const FINALIZE: &str = "finalize";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_an_entry_for_each_line_and_an_end() {
        let mut log = Log::default();
        log.output(b"one\ntw");
        log.output(b"o\n\xff\n");
        let messages: Vec<&str> = log.entries.iter().map(|e| e.message.as_str()).collect();
        assert_eq!(messages, ["one", "two", "\u{fffd}"]);
        log.output(&vec![b'x'; LINE_MAX * 2]);
        log.end_line();
        assert_eq!(log.entries.last().unwrap().message.len(), LINE_MAX);
        for _ in 0..2 * ENTRIES_MAX {
            log.output(b"line\n");
        }
        assert_eq!(log.entries.len(), ENTRIES_MAX);
        assert_eq!(
            log.entries.last().unwrap().message,
            "further output is not kept"
        );
    }

    #[test]
    fn a_place_is_free_again_and_there_are_few() {
        let builds = Builds::default();
        for id in 0..BUILDING_MAX {
            builds.enter(&id.to_string()).unwrap();
        }
        assert!(builds.enter("more").is_err());
        builds.leave("0");
        assert!(builds.enter("1").is_err());
        builds.enter("more").unwrap();
    }
}
