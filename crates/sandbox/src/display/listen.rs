//! A port of 127.0.0.1 on which VNC clients find a screen.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{Display, Password};
use crate::error::{Error, Result};

/// Viewers at a time. Further ones wait.
const VIEWERS_MAX: usize = 16;
/// The wait after a failed accept, so that the loop does not spin. Most likely, the process has no
/// free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Who may see a screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Viewers {
    /// Those who know the password of the port.
    WithPassword,
    /// Every program of this host, of every user.
    All,
}

/// A port that is open, with the password that its viewers need.
#[derive(Debug)]
pub struct ViewListener {
    display: Display,
    listener: TcpListener,
    address: SocketAddr,
    password: Option<Password>,
}

impl ViewListener {
    /// Fails now, and not at the first viewer, if the sandbox does not run.
    pub(super) async fn open(display: Display, port: u16, viewers: Viewers) -> Result<Self> {
        display.screenshot().await?;
        let address = format!("{}:{port}", Ipv4Addr::LOCALHOST);
        let listener = TcpListener::bind(&address)
            .await
            .map_err(|source| Error::Port { address, source })?;
        let address = listener
            .local_addr()
            .map_err(|e| Error::io("use", "a socket", e))?;
        let password = match viewers {
            Viewers::WithPassword => {
                Some(Password::random().map_err(|e| Error::io("make", "a password", e))?)
            }
            Viewers::All => None,
        };
        Ok(Self {
            display,
            listener,
            address,
            password,
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn password(&self) -> Option<&str> {
        self.password.as_ref().map(Password::as_str)
    }

    /// Serves viewers until `stop` is done, and ends all of them then. `refused` gets the errors of
    /// viewers that were not served.
    pub async fn serve_until(self, stop: impl Future<Output = ()>, refused: impl Fn(&Error)) {
        let mut viewers = JoinSet::new();
        let mut stop = std::pin::pin!(stop);
        loop {
            let has_room = viewers.len() < VIEWERS_MAX;
            tokio::select! {
                () = &mut stop => break,
                accepted = self.listener.accept(), if has_room => match accepted {
                    Ok((viewer, _)) => {
                        let display = self.display.clone();
                        viewers.spawn(serve(display, viewer, self.password.clone()));
                    }
                    Err(_) => sleep(ACCEPT_PAUSE).await,
                },
                Some(ended) = viewers.join_next() => {
                    if let Ok(Err(error)) = ended {
                        refused(&error);
                    }
                }
            }
        }
        viewers.shutdown().await;
    }
}

async fn serve(display: Display, viewer: TcpStream, password: Option<Password>) -> Result<()> {
    display.serve_view(viewer, password.as_ref()).await
}
