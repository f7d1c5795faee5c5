//! Bodies whose bytes are counted while they pass, and whose senders have a limited time.
//!
//! A client may let the server wait for [`WAIT`] in all, and for one second more with each
//! [`BYTES_A_SECOND`] that it has sent. Time in which the guest is slow does not count. Streams of
//! input may be quiet for [`QUIET`]; what goes to a port of a guest has no limit here, because the
//! guest's service has its own.

use std::error::Error;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as _, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};

use super::trail::{Pace, Trail};

const WAIT: Duration = Duration::from_secs(60);
const BYTES_A_SECOND: u64 = 1024;
/// Clients show every 50 s that they are there.
const QUIET: Duration = Duration::from_secs(600);

type Polled = Poll<Option<Result<Frame<Bytes>, axum::Error>>>;

/// The body of a request.
pub fn received(body: Body, trail: &Trail) -> Body {
    if body.is_end_stream() {
        return body;
    }
    Body::new(Received {
        body,
        trail: trail.clone(),
        bytes: 0,
        waited: Duration::ZERO,
        waiting: None,
    })
}

struct Received {
    body: Body,
    trail: Trail,
    bytes: u64,
    /// How long the client has let us wait, in all.
    waited: Duration,
    waiting: Option<Waiting>,
}

struct Waiting {
    since: Instant,
    limit: Pin<Box<Sleep>>,
}

impl Received {
    /// How much longer the client may let us wait. `None`: as long as it wants to.
    fn patience(&self) -> Option<Duration> {
        match self.trail.pace() {
            Pace::Steady => {
                let earned = Duration::from_secs(self.bytes / BYTES_A_SECOND);
                Some((WAIT + earned).saturating_sub(self.waited))
            }
            Pace::Stream => Some(QUIET),
            Pace::Free => None,
        }
    }

    fn wait(&mut self, context: &mut Context<'_>) -> Polled {
        let Some(patience) = self.patience() else {
            return Poll::Pending;
        };
        let waiting = self.waiting.get_or_insert_with(|| Waiting {
            since: Instant::now(),
            limit: Box::pin(sleep(patience)),
        });
        ready!(waiting.limit.as_mut().poll(context));
        let slow = io::Error::new(io::ErrorKind::TimedOut, "the client is too slow");
        Poll::Ready(Some(Err(axum::Error::new(slow))))
    }

    fn note(&mut self, frame: &Frame<Bytes>) {
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        self.bytes += bytes as u64;
        self.trail.has_received(bytes);
    }
}

impl hyper::body::Body for Received {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Polled {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if polled.is_pending() {
            return self.wait(context);
        }
        if let Some(waiting) = self.waiting.take() {
            self.waited += waiting.since.elapsed();
        }
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            self.note(frame);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer. Its end, or its loss, is the end of the request.
pub fn sent(body: Body, trail: Trail) -> Body {
    Body::new(Sent { body, trail })
}

struct Sent {
    body: Body,
    trail: Trail,
}

impl hyper::body::Body for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Polled {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if let Some(Ok(frame)) = &frame {
            self.trail.has_sent(frame.data_ref().map_or(0, Bytes::len));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Whether a body ended because its client was too slow.
pub fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    let mut all = sources(error).filter_map(|source| source.downcast_ref::<io::Error>());
    all.any(|error| error.kind() == io::ErrorKind::TimedOut)
}

/// An error, and what it was caused by.
pub fn sources<'a>(
    error: &'a (dyn Error + 'static),
) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| {
        (*error).source()
    })
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    fn slow(piece: usize, every: Duration) -> Body {
        let pieces = stream::unfold((), move |()| async move {
            sleep(every).await;
            Some((Ok::<_, io::Error>(Bytes::from(vec![0; piece])), ()))
        });
        Body::from_stream(pieces)
    }

    async fn time_of(body: Body, most: usize) -> (bool, Duration) {
        let trail = Trail::of_test();
        let began = Instant::now();
        let whole = axum::body::to_bytes(received(body, &trail), most).await;
        let is_timeout = whole.is_err_and(|error| is_timeout(&error));
        (is_timeout, began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_drips_is_cut_off() {
        let (is_timeout, took) = time_of(slow(1, Duration::from_secs(10)), 1 << 20).await;
        assert!(is_timeout);
        assert!(took <= WAIT + Duration::from_secs(1), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_slow_and_steady_is_not() {
        let steady = slow(2 * BYTES_A_SECOND as usize, Duration::from_secs(1));
        let (is_timeout, took) = time_of(steady, 1 << 20).await;
        assert!(!is_timeout);
        assert!(took > 4 * WAIT, "{took:?}");
    }
}
