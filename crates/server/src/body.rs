//! Bodies of answers that grow while they are sent.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use hyper::body::Frame;
use tokio::sync::mpsc;

/// Pieces that wait for a client. A slow client slows the source down.
const PIECES: usize = 8;

/// The end into which a body is written. Dropped, the body is complete.
#[derive(Debug, Clone)]
pub struct Sender(mpsc::Sender<io::Result<Bytes>>);

/// A body, and the end into which it is written.
pub fn channel() -> (Sender, Body) {
    let (sender, receiver) = mpsc::channel(PIECES);
    (Sender(sender), Body::new(Pieces(receiver)))
}

impl Sender {
    /// Waits while the client is slow. Returns whether there is still a client.
    pub async fn send(&self, piece: impl Into<Bytes>) -> bool {
        self.0.send(Ok(piece.into())).await.is_ok()
    }

    /// Cuts the connection: the client sees that the body is not complete.
    pub async fn abort(self, reason: &str) {
        let cut = io::Error::new(io::ErrorKind::ConnectionAborted, reason.to_owned());
        // A client that is gone needs no sign.
        drop(self.0.send(Err(cut)).await);
    }

    /// Waits until the client is gone.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

struct Pieces(mpsc::Receiver<io::Result<Bytes>>);

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let piece = self.0.poll_recv(context);
        piece.map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}
