//! The live view: a bridge between a viewer and the machine that runs at the time.
//!
//! ```text
//!   viewer ──── bridge ──┬── QEMU of this moment
//!                        └── after a revert, a resume or a restart: the next QEMU, and a whole picture
//! ```
//!
//! Always: the viewer's connection ends when the viewer ends it, or when the sandbox stops or is
//! removed. While the sandbox is paused it stays, and shows the last picture. Any stream can be a
//! viewer, so a web page can use it, too.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sandtree_store::Phase;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::{sleep, timeout};

use super::rfb::{self, FORMAT_BYTES, FromViewer, Init, Password, Wishes};
use crate::error::{Error, Result};
use crate::sandbox::Sandbox;

/// How long a viewer may take for its password.
const GREETING_DEADLINE: Duration = Duration::from_secs(30);
/// How long QEMU may take to answer a new viewer.
const QEMU_DEADLINE: Duration = Duration::from_secs(10);
/// The interval between attempts to reach the next machine.
const RETRY: Duration = Duration::from_millis(100);
/// The interval between looks at the state of the sandbox.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What the two directions of a bridge share.
struct Bridge {
    sandbox: Sandbox,
    wishes: Mutex<Wishes>,
    /// A format that begins with the next connection to QEMU.
    next_format: Mutex<Option<[u8; FORMAT_BYTES]>>,
    /// The way to the present QEMU.
    qemu: tokio::sync::Mutex<Option<OwnedWriteHalf>>,
}

/// Serves a viewer until it leaves, or until the sandbox does not run any more.
pub(super) async fn serve<S>(
    sandbox: &Sandbox,
    mut viewer: S,
    password: Option<&Password>,
) -> Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let greeting = timeout(GREETING_DEADLINE, rfb::greet_viewer(&mut viewer, password));
    let greeted = greeting
        .await
        .unwrap_or(Err(io::ErrorKind::TimedOut.into()));
    greeted.map_err(|e| Error::io("serve", "a viewer", e))?;
    let reached = tokio::select! {
        reached = reach(sandbox) => reached?,
        // It has nothing to send before it knows the size of the screen, so it is gone.
        _ = viewer.read_u8() => return Ok(()),
    };
    let Some((qemu, init)) = reached else {
        return Ok(());
    };
    let name = format!("sandtree: {}", sandbox.name());
    if viewer.write_all(&rfb::init(&init, &name)).await.is_err() {
        return Ok(());
    }
    let (from_qemu, to_qemu) = qemu.into_split();
    let bridge = Bridge {
        sandbox: sandbox.clone(),
        wishes: Mutex::new(Wishes::of(&init)),
        next_format: Mutex::default(),
        qemu: tokio::sync::Mutex::new(Some(to_qemu)),
    };
    let (from, to) = split(viewer);
    tokio::select! {
        shown = bridge.show(to, from_qemu, init) => shown,
        () = bridge.obey(from) => Ok(()),
        // A viewer that reads nothing does not notice it.
        () = ended(sandbox) => Ok(()),
    }
}

/// Waits until the sandbox has stopped or is removed.
async fn ended(sandbox: &Sandbox) {
    while !sandbox.state().is_over() {
        sleep(LOOK_INTERVAL).await;
    }
}

/// Connects to the machine that runs, or to the next one. `None`: there will be none.
async fn reach(sandbox: &Sandbox) -> Result<Option<(UnixStream, Init)>> {
    loop {
        let state = sandbox.state();
        if state.is_over() {
            return Ok(None);
        }
        if state.phase == Some(Phase::Running) {
            match sandbox.open_view().await {
                Ok(mut qemu) => {
                    let greeting = timeout(QEMU_DEADLINE, rfb::greet_qemu(&mut qemu));
                    if let Ok(Ok(init)) = greeting.await {
                        return Ok(Some((qemu, init)));
                    }
                }
                Err(error @ Error::NoDisplay { .. }) => return Err(error),
                // The machine, or its keeper, is being exchanged.
                Err(error) => tracing::debug!(%error, "a viewer waits for the next machine"),
            }
        }
        sleep(RETRY).await;
    }
}

impl Bridge {
    /// Passes pictures on, from one machine after the other.
    async fn show<S>(
        &self,
        mut viewer: WriteHalf<S>,
        mut from: OwnedReadHalf,
        init: Init,
    ) -> Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut shown = (init.width, init.height);
        loop {
            loop {
                match rfb::pass_on(&mut from, &mut viewer, || self.wishes()).await {
                    Ok(changed) => shown = changed.unwrap_or(shown),
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                    // The viewer is gone.
                    Err(_) => return Ok(()),
                }
            }
            *self.qemu.lock().await = None;
            // A viewer that QEMU refuses again and again must not keep it busy.
            sleep(RETRY).await;
            let Some((qemu, init)) = reach(&self.sandbox).await? else {
                return Ok(());
            };
            let size = (init.width, init.height);
            if size != shown && self.wishes().resizes() {
                let resized = viewer.write_all(&rfb::resized(size.0, size.1)).await;
                if resized.is_err() {
                    return Ok(());
                }
                shown = size;
            }
            from = self.connect(qemu, size).await;
        }
    }

    /// Gives a new QEMU the viewer's wishes, and asks for a whole picture: the viewer may wait for
    /// the answer to a request that the last machine got.
    async fn connect(&self, qemu: UnixStream, size: (u16, u16)) -> OwnedReadHalf {
        let (from, mut to) = qemu.into_split();
        let mut present = self.qemu.lock().await;
        if let Some(format) = lock(&self.next_format).take() {
            lock(&self.wishes).format = format;
        }
        let greeting = [self.wishes().messages(), rfb::whole(size.0, size.1)].concat();
        // A QEMU that ended is noticed where it is read.
        if to.write_all(&greeting).await.is_ok() {
            *present = Some(to);
        }
        from
    }

    /// Carries out what the viewer sends, until it leaves or breaks the protocol.
    async fn obey<S>(&self, mut viewer: ReadHalf<S>)
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut has_asked = false;
        loop {
            let message = match FromViewer::read(&mut viewer).await {
                Ok(message) => message,
                Err(error) => return tracing::debug!(%error, "a viewer is gone"),
            };
            match message {
                // Pictures in the old format may be on their way, and only QEMU knows how many. A
                // new connection begins with the new format.
                FromViewer::Format(format) if has_asked => {
                    let mut present = self.qemu.lock().await;
                    *lock(&self.next_format) = Some(format);
                    *present = None;
                }
                FromViewer::Format(format) => {
                    lock(&self.wishes).format = format;
                    self.send(&self.wishes().messages()).await;
                }
                FromViewer::Encodings(encodings) => {
                    lock(&self.wishes).set_encodings(&encodings);
                    self.send(&self.wishes().encodings_message()).await;
                }
                FromViewer::Request(request) => {
                    has_asked = true;
                    self.send(&request).await;
                }
                // Without a machine there is nothing that could take it.
                FromViewer::Input(input) => self.send(&input).await,
                FromViewer::Other => {}
            }
        }
    }

    /// Sends to the present QEMU, if there is one. A QEMU that ended is noticed where it is read.
    async fn send(&self, message: &[u8]) {
        if let Some(qemu) = self.qemu.lock().await.as_mut()
            && qemu.write_all(message).await.is_err()
        {
            tracing::debug!("a machine ended before it took a message of a viewer");
        }
    }

    fn wishes(&self) -> Wishes {
        lock(&self.wishes).clone()
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
