//! Bytes that work produces while a client reads them.
//!
//! ```text
//!   work on a thread ── Pipe ──► pieces ── pump ──► body ──► client
//! ```
//!
//! Always: some pieces wait between the two, never more. A client that leaves, or reads nothing for
//! some time, ends the work. When the work fails after its first byte, the connection is cut, so no
//! client takes a part for the whole.

use std::io::{self, Read, Write};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::{Buf, Bytes};
use futures_util::{Stream, StreamExt};
use hyper::header::CONTENT_TYPE;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::task::JoinHandle;

use super::request::IDLE;
use crate::body;
use crate::error::{Fault, Result};

/// Pieces that wait for the client.
const PIECES: usize = 4;
const PIECE_BYTES: usize = 256 * 1024;

/// Where a thread writes what a client reads.
#[derive(Debug)]
pub struct Pipe {
    pieces: mpsc::Sender<Bytes>,
    runtime: Handle,
}

/// A pipe, and what comes out of it. Called in a runtime.
pub fn pipe() -> (Pipe, mpsc::Receiver<Bytes>) {
    let (pieces, out) = mpsc::channel(PIECES);
    let runtime = Handle::current();
    (Pipe { pieces, runtime }, out)
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = &bytes[..bytes.len().min(PIECE_BYTES)];
        let sending = self.pieces.send(Bytes::copy_from_slice(taken));
        // The timer belongs to the runtime, so it starts there.
        let sent = self
            .runtime
            .block_on(async { tokio::time::timeout(IDLE, sending).await });
        match sent {
            Ok(Ok(())) => Ok(taken.len()),
            Ok(Err(_)) => Err(io::ErrorKind::BrokenPipe.into()),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The body of a request, as a thread reads it.
pub struct Intake<S> {
    pieces: S,
    runtime: Handle,
    left: Bytes,
}

impl<S> Intake<S> {
    /// Called in a runtime.
    pub fn new(pieces: S) -> Self {
        Self {
            pieces,
            runtime: Handle::current(),
            left: Bytes::new(),
        }
    }
}

impl<S: Stream<Item = io::Result<Bytes>> + Unpin> Read for Intake<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.left.is_empty() {
            match self.runtime.block_on(self.pieces.next()) {
                Some(piece) => self.left = piece?,
                None => return Ok(0),
            }
        }
        let count = self.left.len().min(buffer.len());
        self.left.copy_to_slice(&mut buffer[..count]);
        Ok(count)
    }
}

/// Work that ends when this is dropped.
pub struct Work<T>(JoinHandle<Result<T>>);

impl<T: Send + 'static> Work<T> {
    pub fn start(work: impl Future<Output = Result<T>> + Send + 'static) -> Self {
        Self(tokio::spawn(work))
    }

    pub async fn done(&mut self) -> Result<T> {
        let done = (&mut self.0).await;
        done.unwrap_or_else(|_| Err(Fault::internal("the work was ended")))
    }
}

impl<T> Drop for Work<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Answers with the bytes of work. It fails like the work if that fails before its first byte.
pub async fn answer<T: Send + 'static>(
    mut work: Work<T>,
    mut pieces: mpsc::Receiver<Bytes>,
    place: Option<OwnedSemaphorePermit>,
) -> Result<Response> {
    let head = [(CONTENT_TYPE, "application/octet-stream")];
    let Some(first) = pieces.recv().await else {
        work.done().await?;
        return Ok((head, Body::empty()).into_response());
    };
    let (sender, body) = body::channel();
    tokio::spawn(async move {
        let _place = place;
        let mut next = Some(first);
        while let Some(piece) = next {
            if !sender.send(piece).await {
                return;
            }
            next = tokio::select! {
                piece = pieces.recv() => piece,
                () = sender.closed() => return,
            };
        }
        match work.done().await {
            Ok(_) => sender.finish().await,
            Err(error) => tracing::warn!(%error, "a download is cut off"),
        }
    });
    Ok((head, body).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn bytes_pass_through_a_pipe_and_an_intake() {
        let (mut pipe, pieces) = pipe();
        let sent = vec![7; PIECE_BYTES * 3 + 5];
        let written = sent.clone();
        let work = Work::start(async move {
            let writing = tokio::task::spawn_blocking(move || pipe.write_all(&written));
            writing
                .await
                .unwrap()
                .map_err(|e| Fault::internal(e.to_string()))
        });
        let answer = answer(work, pieces, None).await.unwrap();
        let pieces = super::super::request::pieces(answer.into_body());
        let mut intake = Intake::new(pieces);
        let reading = tokio::task::spawn_blocking(move || {
            let mut read = Vec::new();
            intake.read_to_end(&mut read).map(|_| read)
        });
        assert_eq!(reading.await.unwrap().unwrap(), sent);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn work_that_fails_before_its_first_byte_is_an_error() {
        let (pipe, pieces) = pipe();
        let work: Work<()> = Work::start(async move {
            drop(pipe);
            Err(Fault::conflict("no"))
        });
        assert!(answer(work, pieces, None).await.is_err());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_client_that_leaves_ends_the_work() {
        let (mut pipe, pieces) = pipe();
        let (ended, is_ended) = tokio::sync::oneshot::channel();
        let work = Work::start(async move {
            let writing = tokio::task::spawn_blocking(move || {
                let endless = std::iter::repeat_with(|| pipe.write_all(b"x"));
                let failed = endless.into_iter().find(Result::is_err);
                drop(ended.send(failed));
            });
            writing.await.map_err(|e| Fault::internal(e.to_string()))
        });
        let answer = answer(work, pieces, None).await.unwrap();
        drop(answer);
        assert!(is_ended.await.unwrap().is_some());
    }
}
