//! The connection of a client: its bytes are counted, and the head of a request has to come in
//! time.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use crate::observe::Figures;
use crate::turn::Turn;

/// How long the head of a request may take from its first byte.
const HEAD_WITHIN: Duration = Duration::from_secs(30);

pub struct Wire<S> {
    stream: S,
    turn: Turn,
    figures: Figures,
    /// Runs while a head is read.
    limit: Option<Pin<Box<Sleep>>>,
}

impl<S> Wire<S> {
    pub fn new(stream: S, turn: Turn, figures: Figures) -> Self {
        figures.connections.inc();
        Self {
            stream,
            turn,
            figures,
            limit: None,
        }
    }

    /// Completes when the head that is being read takes too long.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<io::Error> {
        if !self.turn.is_in_head() {
            self.limit = None;
            return Poll::Pending;
        }
        let limit = self
            .limit
            .get_or_insert_with(|| Box::pin(sleep(HEAD_WITHIN)));
        ready!(limit.as_mut().poll(context));
        let late = "the head of a request took too long";
        Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, late))
    }
}

impl<S> Drop for Wire<S> {
    fn drop(&mut self) {
        self.figures.connections.dec();
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Wire<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(late) = self.poll_late(context) {
            return Poll::Ready(Err(late));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let bytes = buffer.filled().len() - before;
        if bytes > 0 {
            self.figures.received.inc_by(bytes as u64);
            self.turn.has_read();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> Wire<S> {
    fn note_sent(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = &written {
            self.figures.sent.inc_by(*bytes as u64);
        }
        written
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Wire<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.note_sent(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, pieces);
        self.note_sent(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_head_takes_no_longer_than_it_may() {
        let (mut client, server) = duplex(64);
        let turn = Turn::default();
        let mut wire = Wire::new(server, turn.clone(), Figures::default());
        let dripping = tokio::spawn(async move {
            // An idle connection may wait as long as it wants to.
            sleep(10 * HEAD_WITHIN).await;
            while client.write_all(b"x").await.is_ok() {
                sleep(Duration::from_secs(7)).await;
            }
        });
        let mut byte = [0];
        wire.read_exact(&mut byte).await.unwrap();
        let began = Instant::now();
        let late = loop {
            if let Err(error) = wire.read_exact(&mut byte).await {
                break error;
            }
        };
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() <= HEAD_WITHIN, "{:?}", began.elapsed());
        drop(wire);
        dripping.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn only_heads_are_limited() {
        let (mut client, server) = duplex(64);
        let turn = Turn::default();
        let mut wire = Wire::new(server, turn.clone(), Figures::default());
        let mut byte = [0];
        for step in [Turn::answers, Turn::is_idle, Turn::is_free] {
            client.write_all(b"x").await.unwrap();
            wire.read_exact(&mut byte).await.unwrap();
            step(&turn);
            let quiet = tokio::time::timeout(3 * HEAD_WITHIN, wire.read_exact(&mut byte));
            assert!(quiet.await.is_err());
        }
        turn.is_idle();
        client.write_all(b"x").await.unwrap();
        wire.read_exact(&mut byte).await.unwrap();
        assert!(!turn.is_in_head(), "another protocol has no heads");
    }
}
