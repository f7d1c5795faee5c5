//! The live view: a port of 127.0.0.1 that serves a screen to VNC clients.
//!
//! Always: it listens until it is closed or dropped, over every stop and start of the sandbox. A
//! closed view has no port and no viewers. At most [`VIEWERS_MAX`] are served at a time; further
//! ones wait.

use std::net::Ipv4Addr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::{Py, PyAny, PyResult, pyclass, pymethods};
use sandtree::{Display, Error, Password, Result};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use crate::runtime::{self, Operation};

const VIEWERS_MAX: usize = 16;
/// The pause after a connection that cannot be accepted, such as one without a free descriptor.
const RETRY: Duration = Duration::from_millis(100);

#[pyclass(frozen)]
#[derive(Debug)]
pub struct View {
    #[pyo3(get)]
    port: u16,
    #[pyo3(get)]
    password: String,
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
    pub async fn open(display: Display, port: u16) -> Result<Self> {
        let address = format!("{}:{port}", Ipv4Addr::LOCALHOST);
        let listener = TcpListener::bind(&address)
            .await
            .map_err(|source| Error::Port { address, source })?;
        let address = listener
            .local_addr()
            .map_err(|e| Error::io("use", "a socket", e))?;
        // Fails now, and not at the first viewer, if the sandbox does not run.
        display.screenshot().await?;
        let password = Password::random().map_err(|e| Error::io("make", "a password", e))?;
        let (stop, stopped) = oneshot::channel();
        let shown = password.as_str().to_owned();
        let task = tokio::spawn(listen(listener, display, password, stopped));
        Ok(Self {
            port: address.port(),
            password: shown,
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

async fn listen(
    listener: TcpListener,
    display: Display,
    password: Password,
    mut stopped: oneshot::Receiver<()>,
) {
    let mut viewers = JoinSet::new();
    loop {
        tokio::select! {
            _ = &mut stopped => break,
            accepted = listener.accept(), if viewers.len() < VIEWERS_MAX => match accepted {
                Ok((viewer, _)) => {
                    viewers.spawn(serve(display.clone(), viewer, password.clone()));
                }
                Err(_) => sleep(RETRY).await,
            },
            Some(_) = viewers.join_next() => {}
        }
    }
    viewers.shutdown().await;
}

async fn serve(display: Display, viewer: TcpStream, password: Password) {
    // A viewer that was refused knows it.
    drop(display.serve_view(viewer, &password).await);
}
