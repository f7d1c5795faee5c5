//! The states of a sandbox, one after the other.

use std::sync::Arc;

use pyo3::prelude::{Py, PyAny, PyResult, pyclass, pymethods};
use sandtree::StateWatch;
use tokio::sync::Mutex;

use crate::convert::json;
use crate::runtime::{self, Operation};

#[pyclass(frozen)]
#[derive(Debug)]
pub struct Watch {
    states: Arc<Mutex<Watched>>,
}

#[derive(Debug)]
struct Watched {
    watch: StateWatch,
    is_first: bool,
}

impl Watch {
    pub fn new(watch: StateWatch) -> Self {
        let watched = Watched {
            watch,
            is_first: true,
        };
        Self {
            states: Arc::new(Mutex::new(watched)),
        }
    }
}

#[pymethods]
impl Watch {
    /// The present state, then each later one as JSON; `None` after the last.
    fn next(&self, done: Py<PyAny>) -> PyResult<Operation> {
        let states = self.states.clone();
        runtime::start(done, async move {
            let mut states = states.lock().await;
            if states.is_first {
                states.is_first = false;
                return json(states.watch.now()).map(Some);
            }
            let next = states.watch.changed().await;
            next.as_ref().map(json).transpose()
        })
    }
}
