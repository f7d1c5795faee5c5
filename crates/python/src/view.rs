//! The live view: a port of 127.0.0.1 that serves a screen to VNC clients.
//!
//! Always: it listens until it is closed or dropped, over every stop and start of the sandbox. A
//! closed view has no port and no viewers.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::{Py, PyAny, PyResult, pyclass, pymethods};
use sandtree::{Display, Result, Viewers};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::runtime::{self, Operation};

#[pyclass(frozen)]
#[derive(Debug)]
pub struct View {
    #[pyo3(get)]
    port: u16,
    #[pyo3(get)]
    password: Option<String>,
    /// `None` once it is closed.
    listening: Mutex<Option<Listening>>,
}

/// A task that listens until `stop` is dropped.
#[derive(Debug)]
struct Listening {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl View {
    /// Listens on a port; 0 is a free one.
    pub async fn open(display: Display, port: u16, viewers: Viewers) -> Result<Self> {
        let listener = display.listen(port, viewers).await?;
        let port = listener.address().port();
        let password = listener.password().map(str::to_owned);
        let (stop, stopped) = oneshot::channel::<()>();
        // The sender is dropped and never sends. A viewer that was refused knows it.
        let stopped = async { drop(stopped.await) };
        let task = tokio::spawn(listener.serve_until(stopped, |_| {}));
        Ok(Self {
            port,
            password,
            listening: Mutex::new(Some(Listening { stop, task })),
        })
    }

    fn take(&self) -> Option<Listening> {
        let mut listening = self
            .listening
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        listening.take()
    }
}

#[pymethods]
impl View {
    /// Ends the view and its connections, and waits for their end.
    fn close(&self, done: Py<PyAny>) -> PyResult<Operation> {
        let listening = self.take();
        runtime::start(done, async move {
            if let Some(Listening { stop, task }) = listening {
                drop(stop);
                // It returns nothing, and one that panicked has ended, too.
                drop(task.await);
            }
            Ok(())
        })
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if let Some(listening) = self.take() {
            runtime::drop_later(listening);
        }
    }
}
