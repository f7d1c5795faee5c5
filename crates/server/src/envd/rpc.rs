//! The Connect protocol with JSON, as far as E2B's clients use it.
//!
//! ```text
//!   unary   JSON ──► JSON, or a status and {"code", "message"}
//!   stream  [flags: u8][length: u32, big-endian][JSON] … then flags 2: {} or {"error": {"code", "message"}}
//! ```

use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::{Buf, Bytes, BytesMut};
use futures_util::StreamExt;
use hyper::header::CONTENT_TYPE;
use hyper::{HeaderMap, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::auth;
use crate::body::{self, Sender};
use crate::error::{Fault, Result};
use crate::observe;

/// Clients compare it to the letter.
const STREAM_TYPE: &str = "application/connect+json";
const MESSAGE: u8 = 0;
const COMPRESSED: u8 = 1;
const END: u8 = 2;
const HEAD: usize = 5;
/// The longest message of a client.
const MESSAGE_MAX: usize = 16 << 20;

/// How often a stream without messages shows that it lives, unless the client chooses.
const KEEPALIVE_S: u64 = 90;
const KEEPALIVE_MOST_S: u64 = 3600;

/// The time after which a quiet stream shows that it lives.
pub fn keepalive(headers: &HeaderMap) -> Duration {
    let asked = auth::header(headers, "keepalive-ping-interval");
    let seconds = asked.and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(KEEPALIVE_S).clamp(1, KEEPALIVE_MOST_S))
}

/// The answer of a unary call.
pub fn answer(result: Result<Value>) -> Response {
    match result {
        Ok(value) => axum::Json(value).into_response(),
        Err(fault) => refusal(&fault),
    }
}

/// A status and a code by name, which clients read.
fn refusal(fault: &Fault) -> Response {
    // Without the sandbox there is no envd that could answer by its own rules.
    if fault.status == StatusCode::BAD_GATEWAY {
        return fault.clone().into_response();
    }
    let body = error(fault);
    fault.mark((fault.status, axum::Json(body)).into_response())
}

fn error(fault: &Fault) -> Value {
    json!({ "code": fault.rpc_code(), "message": fault.message })
}

/// The message of a unary call.
pub async fn read<T: DeserializeOwned>(request: Request) -> Result<T> {
    let bytes = body::whole(request.into_body(), MESSAGE_MAX).await?;
    let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
    parse(bytes)
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes)
        .map_err(|error| Fault::bad_request(format!("invalid message: {error}")))
}

/// The messages of a client's stream.
pub struct Messages {
    body: BodyDataStream,
    begun: BytesMut,
}

impl Messages {
    pub fn new(body: Body) -> Self {
        Self {
            body: body.into_data_stream(),
            begun: BytesMut::new(),
        }
    }

    /// The next message, or `None` at the end.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        loop {
            if let Some(message) = self.take()? {
                return parse(&message).map(Some);
            }
            match self.body.next().await {
                Some(Ok(bytes)) => self.begun.extend_from_slice(&bytes),
                Some(Err(error)) if observe::is_timeout(&error) => {
                    let message = "the messages came too slowly";
                    return Err(Fault::new(StatusCode::REQUEST_TIMEOUT, message));
                }
                Some(Err(_)) => return Err(Fault::bad_request("the stream broke")),
                None if self.begun.is_empty() => return Ok(None),
                None => return Err(Fault::bad_request("the stream ends in a message")),
            }
        }
    }

    fn take(&mut self) -> Result<Option<Bytes>> {
        let Some(head) = self.begun.first_chunk::<HEAD>() else {
            return Ok(None);
        };
        let [flags, length @ ..] = *head;
        let length = u32::from_be_bytes(length) as usize;
        if length > MESSAGE_MAX {
            return Err(Fault::bad_request("a message is too long"));
        }
        if flags & COMPRESSED != 0 {
            return Err(Fault::bad_request("compressed messages are not accepted"));
        }
        if self.begun.len() < HEAD + length {
            return Ok(None);
        }
        self.begun.advance(HEAD);
        Ok(Some(self.begun.split_to(length).freeze()))
    }
}

/// The single message of a call that answers with a stream.
pub async fn read_one<T: DeserializeOwned>(request: Request) -> Result<T> {
    let mut messages = Messages::new(request.into_body());
    let message = messages.next().await?;
    message.ok_or_else(|| Fault::bad_request("the message is missing"))
}

fn frame(flags: u8, message: &impl Serialize) -> Bytes {
    let body = serde_json::to_vec(message).expect("messages are always JSON");
    let mut bytes = Vec::with_capacity(HEAD + body.len());
    bytes.push(flags);
    bytes.extend((body.len() as u32).to_be_bytes());
    bytes.extend(body);
    bytes.into()
}

/// The answering end of a stream.
pub struct Answers(Sender);

impl Answers {
    /// A stream, and the response that carries it.
    pub fn new() -> (Self, Response) {
        let (sender, body) = body::channel();
        (Self(sender), carrier(body))
    }

    /// Returns whether there is still a client.
    pub async fn send(&self, message: &Value) -> bool {
        self.0.send(frame(MESSAGE, message)).await
    }

    /// Ends the stream as it should end. A stream that is dropped instead is cut off: clients then
    /// ask whether the sandbox still runs.
    pub async fn end(self) {
        self.end_with(&json!({})).await;
    }

    pub async fn fail(self, fault: &Fault) {
        self.end_with(&json!({ "error": error(fault) })).await;
    }

    async fn end_with(self, message: &Value) {
        if self.0.send(frame(END, message)).await {
            self.0.finish().await;
        }
    }

    /// Waits until the client is gone.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

fn carrier(body: Body) -> Response {
    let mut response = Response::new(body);
    let kind = hyper::header::HeaderValue::from_static(STREAM_TYPE);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// A stream that consists of its failure. A sandbox that is gone is reported as on other paths.
pub fn failed_stream(fault: &Fault) -> Response {
    if matches!(
        fault.status,
        StatusCode::BAD_GATEWAY | StatusCode::UNAUTHORIZED
    ) {
        return refusal(fault);
    }
    let end = json!({ "error": error(fault) });
    fault.mark(carrier(Body::from(frame(END, &end))))
}

/// A complete stream of one message.
pub fn single(message: &Value) -> Response {
    let frames = [frame(MESSAGE, message), frame(END, &json!({}))].concat();
    carrier(Body::from(frames))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_come_whole_from_any_pieces() {
        let frames = [
            frame(MESSAGE, &json!({"a": 1})),
            frame(MESSAGE, &json!({"a": 2})),
        ];
        let bytes: Vec<u8> = frames.concat();
        for size in 1..bytes.len() {
            let pieces: Vec<_> = bytes
                .chunks(size)
                .map(|piece| Ok::<_, std::io::Error>(Bytes::copy_from_slice(piece)))
                .collect();
            let body = Body::from_stream(futures_util::stream::iter(pieces));
            let mut messages = Messages::new(body);
            for number in 1..=2 {
                let message: Value = messages.next().await.unwrap().unwrap();
                assert_eq!(message["a"], number);
            }
            assert!(messages.next::<Value>().await.unwrap().is_none());
        }
    }

    #[tokio::test]
    async fn hostile_frames_are_refused() {
        let hostile: [&[u8]; 4] = [
            &[0, 0xff, 0xff, 0xff, 0xff],
            &[1, 0, 0, 0, 2, b'{', b'}'],
            &[0, 0, 0, 0, 9, b'{'],
            &[0, 0, 0, 0, 1, b'{'],
        ];
        for bytes in hostile {
            let mut messages = Messages::new(Body::from(bytes.to_vec()));
            assert!(messages.next::<Value>().await.is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_quiet_stream_shows_life_within_bounds() {
        let every = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("keepalive-ping-interval", text.parse().unwrap());
            keepalive(&headers).as_secs()
        };
        assert_eq!(every("50"), 50);
        assert_eq!(every("0"), 1);
        assert_eq!(every("18446744073709551615"), 3600);
        assert_eq!(every("x"), 90);
    }

    #[test]
    fn frames_are_those_of_the_protocol() {
        let bytes = frame(MESSAGE, &json!({"event": {"start": {"pid": 7}}}));
        assert_eq!(&bytes[..5], [0, 0, 0, 0, 0x1d]);
        assert_eq!(&bytes[5..], br#"{"event":{"start":{"pid":7}}}"#);
    }
}
