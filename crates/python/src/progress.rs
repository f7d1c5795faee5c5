//! Reports the progress of long work to a function of Python.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::{Py, PyAny, Python};
use pyo3::types::PyBytes;
use sandtree::image;
use sandtree::{Advance, BuildEvent, BuildWatch, Progress};

/// The shortest time between two reports of the same stage.
const INTERVAL: Duration = Duration::from_millis(100);

/// Calls `function(stage, done_bytes, total_bytes, output)`, if there is a function.
#[derive(Clone)]
pub struct Meter {
    function: Option<Arc<Function>>,
    state: Arc<Mutex<State>>,
}

/// A function of Python, dropped with Python's lock: without it, the drop would wait for some later
/// call.
struct Function(Option<Py<PyAny>>);

impl Drop for Function {
    fn drop(&mut self) {
        let function = self.0.take();
        Python::try_attach(|_| drop(function));
    }
}

#[derive(Debug, Default)]
struct State {
    stage: String,
    done_bytes: u64,
    total_bytes: Option<u64>,
    reported: Option<Instant>,
}

impl Meter {
    pub fn new(function: Option<Py<PyAny>>) -> Self {
        Self {
            function: function.map(|function| Arc::new(Function(Some(function)))),
            state: Arc::default(),
        }
    }

    /// For work that counts bytes.
    pub fn transfer(&self, stage: &str) -> Progress {
        let meter = self.clone();
        let stage = stage.to_owned();
        Progress::new(move |advance| meter.advance(&stage, advance))
    }

    /// For work on an image.
    pub fn image(&self) -> impl FnMut(image::Progress) + Send + 'static {
        let meter = self.clone();
        move |progress| {
            let stage = progress.stage.as_str();
            meter.set(stage, progress.done_bytes, progress.total_bytes);
        }
    }

    /// For a build from a recipe.
    pub fn build(&self) -> BuildWatch {
        let meter = self.clone();
        let mut_image = Mutex::new(self.image());
        BuildWatch::new(move |event| match event {
            BuildEvent::Image(progress) => {
                let mut image = mut_image.lock().unwrap_or_else(PoisonError::into_inner);
                image(progress);
            }
            BuildEvent::Step {
                number,
                of,
                what,
                cached,
            } => {
                let end = if cached { ": cached" } else { "" };
                meter.set(&format!("[{number}/{of}] {what}{end}"), 0, None);
            }
            BuildEvent::Output(bytes) => meter.call("output", 0, None, Some(&bytes)),
            BuildEvent::Writing(advance) => meter.advance("writing the image", advance),
        })
    }

    fn advance(&self, stage: &str, advance: Advance) {
        let (done, total) = {
            let state = self.lock();
            (state.done_bytes, state.total_bytes)
        };
        match advance {
            Advance::Begin { total_bytes } => self.set(stage, 0, Some(total_bytes)),
            Advance::Bytes(bytes) => self.set(stage, done + bytes, total),
        }
    }

    fn set(&self, stage: &str, done_bytes: u64, total_bytes: Option<u64>) {
        if self.is_due(stage, done_bytes, total_bytes) {
            self.call(stage, done_bytes, total_bytes, None);
        }
    }

    /// A new stage and its end are always reported.
    fn is_due(&self, stage: &str, done_bytes: u64, total_bytes: Option<u64>) -> bool {
        let mut state = self.lock();
        let is_new = state.stage != stage || state.total_bytes != total_bytes;
        let is_last = total_bytes == Some(done_bytes);
        if is_new {
            state.stage = stage.to_owned();
        }
        state.done_bytes = done_bytes;
        state.total_bytes = total_bytes;
        let is_due = state
            .reported
            .is_none_or(|reported| reported.elapsed() >= INTERVAL);
        if is_new || is_last || is_due {
            state.reported = Some(Instant::now());
            return true;
        }
        false
    }

    fn call(&self, stage: &str, done: u64, total: Option<u64>, output: Option<&[u8]>) {
        let function = self.function.as_ref().and_then(|held| held.0.as_ref());
        let Some(function) = function else {
            return;
        };
        Python::try_attach(|py| {
            let output = output.map(|bytes| PyBytes::new(py, bytes));
            if let Err(error) = function.call1(py, (stage, done, total, output)) {
                error.write_unraisable(py, None);
            }
        });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
