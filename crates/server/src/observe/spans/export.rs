//! Sends spans to a collector, in batches, in the background.
//!
//! Always: a collector that is slow or gone costs spans, never requests: at most [`WAITING_MAX`]
//! wait. What is lost is logged, not sent again.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use hyper::client::conn::http1::handshake;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::Span;
use super::otlp::{self, Ended};

const WAITING_MAX: usize = 4096;
const BATCH_MAX: usize = 512;
/// How long a span waits for others.
const GATHER: Duration = Duration::from_millis(500);
const SEND_WITHIN: Duration = Duration::from_secs(10);
const PATH: &str = "/v1/traces";

/// Where spans go; clones share it.
#[derive(Debug, Clone)]
pub struct Spans(Option<mpsc::Sender<Ended>>);

impl Spans {
    /// Without a collector, no spans are wanted.
    pub fn new(collector: Option<&Uri>) -> Self {
        Self(collector.map(|collector| {
            let (spans, waiting) = mpsc::channel(WAITING_MAX);
            tokio::spawn(send_all(collector.clone(), waiting));
            spans
        }))
    }

    pub fn is_wanted(&self) -> bool {
        self.0.is_some()
    }

    pub fn add(&self, span: Span) {
        let at_unix_ns = now_unix_ns();
        let Some(spans) = &self.0 else {
            return;
        };
        if spans.try_send(Ended { span, at_unix_ns }).is_err() {
            tracing::debug!("a span is lost: the collector is slow");
        }
    }
}

async fn send_all(collector: Uri, mut waiting: mpsc::Receiver<Ended>) {
    let mut batch = Vec::new();
    while waiting.recv_many(&mut batch, BATCH_MAX).await > 0 {
        tokio::time::sleep(GATHER).await;
        while batch.len() < BATCH_MAX
            && let Ok(span) = waiting.try_recv()
        {
            batch.push(span);
        }
        let body = otlp::body(&batch).to_string();
        let sent = tokio::time::timeout(SEND_WITHIN, send(&collector, body)).await;
        let sent = sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        if let Err(error) = sent {
            let spans = batch.len();
            tracing::warn!(%error, spans, %collector, "the collector does not take spans");
        }
        batch.clear();
    }
}

async fn send(collector: &Uri, body: String) -> io::Result<()> {
    let authority = collector.authority().ok_or(io::ErrorKind::InvalidInput)?;
    let port = authority.port_u16().unwrap_or(80);
    let stream = TcpStream::connect((authority.host(), port)).await?;
    let (mut sender, connection) = handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    tokio::spawn(connection);
    let base = collector.path().trim_end_matches('/');
    let request = Request::post(format!("{base}{PATH}"))
        .header(HOST, authority.as_str())
        .header(CONTENT_TYPE, "application/json")
        .body(Body::from(body))
        .map_err(io::Error::other)?;
    let answer = sender.send_request(request).await;
    let status = answer.map_err(io::Error::other)?.status();
    if status.is_success() {
        return Ok(());
    }
    Err(io::Error::other(format!("it answers {status}")))
}

fn now_unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    fn span(name: &str) -> Span {
        Span {
            parent: None,
            status: 200,
            took: Duration::from_millis(1),
            name: name.to_owned(),
            attributes: Vec::new(),
        }
    }

    #[tokio::test]
    async fn a_collector_gets_spans_together() {
        let collector = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}/base/", collector.local_addr().unwrap());
        let spans = Spans::new(Some(&address.parse().unwrap()));
        assert!(spans.is_wanted() && !Spans::new(None).is_wanted());
        spans.add(span("first"));
        spans.add(span("second"));
        let (mut stream, _) = collector.accept().await.unwrap();
        let mut request = String::new();
        while !request.contains("second") {
            let mut piece = [0; 4096];
            let count = stream.read(&mut piece).await.unwrap();
            assert_ne!(count, 0, "{request}");
            request.push_str(&String::from_utf8_lossy(&piece[..count]));
        }
        assert!(
            request.starts_with("POST /base/v1/traces HTTP/1.1\r\n"),
            "{request}"
        );
        assert!(request.contains("application/json") && request.contains("first"));
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
        stream.write_all(answer).await.unwrap();
    }

    #[tokio::test]
    async fn a_collector_that_is_gone_costs_spans_only() {
        let spans = Spans::new(Some(&"http://127.0.0.1:1".parse().unwrap()));
        for _ in 0..2 * WAITING_MAX {
            spans.add(span("lost"));
        }
    }
}
