//! For tests: stops an operation at one of its awaits, so that a test can cancel it there.
//!
//! Always: exists in builds for debugging only. An operation that ends before the await is not
//! touched.

use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::{Py, PyAny, PyResult, Python, pyfunction};

/// Where the next operation stops.
static NEXT: Mutex<Option<Stop>> = Mutex::new(None);

struct Stop {
    /// The awaits that come before it.
    before: usize,
    reached: Py<PyAny>,
    then: Then,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// It waits there until it is cancelled.
    Hold,
    Continue,
}

/// Calls `reached` when the next operation that is started waits, and has waited `before` times.
/// `then` is "hold" or "continue".
#[pyfunction]
pub fn stop_next(before: usize, then: &str, reached: Py<PyAny>) -> PyResult<()> {
    let then = match then {
        "hold" => Then::Hold,
        "continue" => Then::Continue,
        other => {
            return Err(PyValueError::new_err(format!(
                "not hold or continue: {other}"
            )));
        }
    };
    let stop = Stop {
        before,
        reached,
        then,
    };
    *NEXT.lock().unwrap_or_else(PoisonError::into_inner) = Some(stop);
    Ok(())
}

/// The work of an operation, with the stop that was asked for.
pub fn work<F: Future>(work: F) -> Stopping<F> {
    let stop = NEXT.lock().unwrap_or_else(PoisonError::into_inner).take();
    Stopping {
        work: Box::pin(work),
        stop,
        is_held: false,
    }
}

pub struct Stopping<F> {
    work: Pin<Box<F>>,
    stop: Option<Stop>,
    is_held: bool,
}

impl<F: Future> Future for Stopping<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        if self.is_held {
            return Poll::Pending;
        }
        let polled = self.work.as_mut().poll(context);
        if polled.is_pending() {
            self.waits();
        }
        polled
    }
}

impl<F> Stopping<F> {
    fn waits(&mut self) {
        let Some(mut stop) = self.stop.take() else {
            return;
        };
        if stop.before > 0 {
            stop.before -= 1;
            self.stop = Some(stop);
            return;
        }
        self.is_held = stop.then == Then::Hold;
        Python::try_attach(|py| {
            if let Err(error) = stop.reached.call0(py) {
                error.write_unraisable(py, None);
            }
            drop(stop);
        });
    }
}
