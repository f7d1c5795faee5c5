//! The part of a request's body that its handler has not read. Before a refusal is sent, it is read
//! and dropped: a client that still sends would see a broken connection instead of the reason.
//!
//! Always: at most [`BYTES_MAX`] are read, within [`WITHIN`]. A client that asks before it sends
//! (`Expect: 100-continue`) gets its refusal at once, and sends nothing.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body as _, Frame, SizeHint};
use hyper::header::EXPECT;

use crate::locked::lock;

const BYTES_MAX: usize = 64 << 20;
const WITHIN: Duration = Duration::from_secs(5);

/// Runs a handler, and reads what it left of the body if it refuses the request.
pub async fn read_before_refusal(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    if body.is_end_stream() || parts.headers.contains_key(EXPECT) {
        return next.run(Request::from_parts(parts, body)).await;
    }
    let left = Left::default();
    let lent = Lent {
        body: Some(body),
        left: left.clone(),
    };
    let request = Request::from_parts(parts, Body::new(lent));
    let response = next.run(request).await;
    let status = response.status();
    if status.is_client_error() || status.is_server_error() {
        // What is still not read by then costs the client its connection.
        drop(tokio::time::timeout(WITHIN, left.read()).await);
    }
    response
}

/// Where a body is put when its handler drops it.
#[derive(Debug, Clone, Default)]
struct Left(Arc<Mutex<Option<Body>>>);

impl Left {
    async fn read(&self) {
        let Some(mut body) = lock(&self.0).take() else {
            return;
        };
        let mut bytes = 0;
        while let Some(Ok(frame)) = body.frame().await {
            bytes += frame.data_ref().map_or(0, Bytes::len);
            if bytes > BYTES_MAX {
                return;
            }
        }
    }
}

/// A body in the hands of a handler.
struct Lent {
    body: Option<Body>,
    left: Left,
}

impl Drop for Lent {
    fn drop(&mut self) {
        *lock(&self.left.0) = self.body.take().filter(|body| !body.is_end_stream());
    }
}

impl hyper::body::Body for Lent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let hint = self.body.as_ref().map(Body::size_hint);
        hint.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::routing::post;
    use hyper::StatusCode;
    use tower::ServiceExt;

    use super::*;
    use crate::body;

    async fn refuse() -> StatusCode {
        StatusCode::BAD_REQUEST
    }

    async fn accept() -> StatusCode {
        StatusCode::OK
    }

    /// Sends pieces for as long as they are read. Returns how many were.
    async fn sent(path: &str, expect: Option<&str>) -> usize {
        let router = Router::new()
            .route("/refuse", post(refuse))
            .route("/accept", post(accept))
            .layer(axum::middleware::from_fn(read_before_refusal));
        let (sender, body) = body::channel();
        let sending = tokio::spawn(async move {
            let mut count = 0;
            while count < 100 && sender.send("piece").await {
                count += 1;
            }
            if count == 100 {
                sender.finish().await;
            }
            count
        });
        let mut request = Request::post(path);
        if let Some(expect) = expect {
            request = request.header(EXPECT, expect);
        }
        router.oneshot(request.body(body).unwrap()).await.unwrap();
        sending.await.unwrap()
    }

    #[tokio::test]
    async fn a_body_is_read_before_it_is_refused() {
        assert_eq!(sent("/refuse", None).await, 100);
        assert!(sent("/accept", None).await < 100);
        assert!(sent("/refuse", Some("100-continue")).await < 100);
    }
}
