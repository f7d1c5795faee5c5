//! The runtime that operations run on, and the way back to Python.
//!
//! Always: an operation calls `done` exactly once: with its result, with a report as JSON, or
//! because it was cancelled, when everything that it had begun is undone. A child of `fork` has no
//! runtime: its threads stayed in the parent.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::{Py, PyAny, PyAnyMethods, PyResult, Python, pyclass, pyfunction, pymethods};
use pyo3::{Bound, IntoPyObject, IntoPyObjectExt};
use sandtree::{Code, Report, Result};
use tokio::runtime::Runtime;
use tokio::task::{AbortHandle, JoinError};

#[cfg(debug_assertions)]
use crate::stopping;

/// Operations wait most of the time. Dropping a sandbox occupies a thread until it is removed.
const WORKERS: usize = 4;
/// How long the end of the interpreter waits for sandboxes that are being removed.
const SHUTDOWN: Duration = Duration::from_secs(20);

static RUNTIME: OnceLock<Mutex<Option<Runtime>>> = OnceLock::new();
static FORKED: AtomicBool = AtomicBool::new(false);

/// What became of an operation, as `done` gets it.
#[derive(Debug, Clone, Copy)]
enum Status {
    Done = 0,
    Failed = 1,
    Cancelled = 2,
}

/// An operation that was started.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Operation {
    task: AbortHandle,
}

#[pymethods]
impl Operation {
    /// Cancels the operation, unless it has ended. Its `done` is called when it is undone.
    fn cancel(&self) {
        self.task.abort();
    }
}

/// Starts an operation.
pub fn start<T>(
    done: Py<PyAny>,
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> PyResult<Operation>
where
    T: for<'py> IntoPyObject<'py> + Send + 'static,
{
    let spawned = with_runtime(|runtime| {
        #[cfg(debug_assertions)]
        let work = stopping::work(work);
        let task = runtime.spawn(work);
        let abort = task.abort_handle();
        runtime.spawn(async move { finish(done, task.await) });
        abort
    });
    spawned.map(|task| Operation { task }).ok_or_else(|| {
        PyRuntimeError::new_err("sandtree cannot be used while the interpreter ends")
    })
}

/// Runs work whose end no caller waits for.
pub fn in_background(work: impl Future<Output = ()> + Send + 'static) {
    // Without a runtime the interpreter ends. A task needs no handle.
    with_runtime(|runtime| drop(runtime.spawn(work)));
}

/// Drops a value on the runtime, because its drop may wait.
pub fn drop_later<T: Send + 'static>(value: T) {
    if is_forked() {
        // Its descriptors are closed, and other files may have their numbers.
        return std::mem::forget(value);
    }
    // Without a runtime the value is dropped here. A task needs no handle.
    with_runtime(|runtime| drop(runtime.spawn_blocking(move || drop(value))));
}

/// Whether this process is a child of `fork`: it has none of the threads, and locks may be held by
/// threads that it does not have.
fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// `None` once the interpreter ends, and in a forked child.
fn with_runtime<T>(use_it: impl FnOnce(&Runtime) -> T) -> Option<T> {
    if is_forked() {
        return None;
    }
    let slot = RUNTIME.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(WORKERS)
            .thread_name("sandtree")
            .enable_all()
            .build()
            .expect("the system gives threads and a poll descriptor");
        Mutex::new(Some(runtime))
    });
    let slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = slot.as_ref()?;
    let _entered = runtime.enter();
    Some(use_it(runtime))
}

/// Calls `done` and drops it. What is dropped without Python's lock stays until some later call,
/// and `done` refers to the result.
fn finish<T: for<'py> IntoPyObject<'py>>(
    done: Py<PyAny>,
    ended: std::result::Result<Result<T>, JoinError>,
) {
    // Without an interpreter, no caller waits.
    Python::try_attach(|py| {
        let (status, value) = match ended {
            Ok(Ok(value)) => match value.into_bound_py_any(py) {
                Ok(value) => (Status::Done, value),
                Err(error) => (Status::Failed, panicked(py, &error.to_string())),
            },
            Ok(Err(error)) => (Status::Failed, text(py, &error.report())),
            Err(error) if error.is_cancelled() => (Status::Cancelled, py.None().into_bound(py)),
            Err(error) => (Status::Failed, panicked(py, &error.to_string())),
        };
        let done = done.into_bound(py);
        if let Err(error) = done.call1((status as u8, value)) {
            // The event loop that waited is closed.
            error.write_unraisable(py, None);
        }
    });
}

fn panicked<'py>(py: Python<'py>, message: &str) -> Bound<'py, PyAny> {
    let report = Report::new(Code::Panicked, message.to_owned(), Default::default());
    text(py, &report)
}

fn text<'py>(py: Python<'py>, report: &Report) -> Bound<'py, PyAny> {
    let json = serde_json::to_string(report).unwrap_or_default();
    json.into_bound_py_any(py)
        .expect("a string becomes an object of Python")
}

/// Marks this process as a forked child. Returns the descriptors that it must close: it would keep
/// the sandboxes of its parent.
#[pyfunction]
pub fn after_fork() -> Vec<RawFd> {
    FORKED.store(true, Ordering::Relaxed);
    sandtree::keeper::leases_in_child()
}

/// Ends the runtime, at the end of the interpreter. What was dropped is removed first.
#[pyfunction]
pub fn shut_down(py: Python<'_>) -> PyResult<()> {
    let runtime = RUNTIME.get().and_then(|slot| {
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        slot.take()
    });
    if let Some(runtime) = runtime {
        py.detach(|| runtime.shutdown_timeout(SHUTDOWN));
    }
    Ok(())
}
