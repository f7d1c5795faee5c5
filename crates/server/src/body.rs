//! Bodies of answers that grow while they are sent.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use http_body_util::LengthLimitError;
use hyper::StatusCode;
use hyper::body::Frame;
use tokio::sync::mpsc;

use crate::error::{Fault, Result};
use crate::observe::{is_timeout, sources};

/// Pieces that wait for a client. A slow client slows the source down.
const PIECES: usize = 8;

/// The end into which a body is written. A body is complete only if it was finished: the client of
/// one that was dropped sees that it is cut off.
#[derive(Debug)]
pub struct Sender(mpsc::Sender<Piece>);

#[derive(Debug)]
enum Piece {
    Data(Bytes),
    End,
}

/// A body, and the end into which it is written.
pub fn channel() -> (Sender, Body) {
    let (sender, receiver) = mpsc::channel(PIECES);
    (Sender(sender), Body::new(Pieces(receiver)))
}

impl Sender {
    /// Waits while the client is slow. Returns whether there is still a client.
    pub async fn send(&self, piece: impl Into<Bytes>) -> bool {
        self.0.send(Piece::Data(piece.into())).await.is_ok()
    }

    /// Completes the body.
    pub async fn finish(self) {
        // A client that is gone needs no end.
        drop(self.0.send(Piece::End).await);
    }

    /// Waits until the client is gone.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

/// The whole body of a request, of at most `most` bytes.
pub async fn whole(body: Body, most: usize) -> Result<Bytes> {
    let whole = axum::body::to_bytes(body, most).await;
    whole.map_err(|error| {
        if is_timeout(&error) {
            let message = "the body came too slowly";
            return Fault::new(StatusCode::REQUEST_TIMEOUT, message);
        }
        let is_long = sources(&error).any(|source| source.is::<LengthLimitError>());
        let message = format!("the body is too large: at most {most} bytes");
        if is_long {
            Fault::new(StatusCode::PAYLOAD_TOO_LARGE, message)
        } else {
            Fault::bad_request("the body broke off")
        }
    })
}

struct Pieces(mpsc::Receiver<Piece>);

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.poll_recv(context).map(|piece| match piece {
            Some(Piece::Data(bytes)) => Some(Ok(Frame::data(bytes))),
            Some(Piece::End) => None,
            // Hyper cuts the connection.
            None => Some(Err(io::ErrorKind::ConnectionAborted.into())),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_finished_body_is_complete() {
        let (sender, body) = channel();
        assert!(sender.send("a").await);
        sender.finish().await;
        assert_eq!(axum::body::to_bytes(body, 10).await.unwrap(), "a");
        let (sender, body) = channel();
        assert!(sender.send("a").await);
        drop(sender);
        assert!(axum::body::to_bytes(body, 10).await.is_err());
    }
}
