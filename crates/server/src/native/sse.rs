//! Server-sent events: answers that report what happens.

use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE};
use serde::Serialize;

use super::problem::Problem;
use crate::body::{self, Sender};
use crate::error::Fault;

pub const EVENT_STREAM: &str = "text/event-stream";
/// How often a quiet stream shows that it lives. Proxies close one that does not.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The end into which events are written.
#[derive(Debug)]
pub struct Events(Sender);

/// Events, and the answer that carries them.
pub fn channel() -> (Events, Response) {
    let (sender, body) = body::channel();
    (Events(sender), response(body))
}

fn response(body: Body) -> Response {
    let head = [(CONTENT_TYPE, EVENT_STREAM), (CACHE_CONTROL, "no-store")];
    (head, body).into_response()
}

impl Events {
    /// Returns whether there is still a client.
    pub async fn send(&self, name: &str, data: &impl Serialize) -> bool {
        self.0.send(event(name, data)).await
    }

    /// Ends the stream with an error.
    pub async fn fail(self, fault: &Fault) {
        if self.send("error", &Problem::of(fault)).await {
            self.0.finish().await;
        }
    }

    /// Ends the stream.
    pub async fn finish(self) {
        self.0.finish().await;
    }

    /// Waits for what happens next. `None`: the client is gone.
    pub async fn wait<T>(&self, next: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(next);
        loop {
            tokio::select! {
                item = &mut next => return Some(item),
                () = self.0.closed() => return None,
                () = tokio::time::sleep(KEEP_ALIVE) => {
                    if !self.0.send(": \n\n").await {
                        return None;
                    }
                }
            }
        }
    }
}

/// JSON has no newline outside of its texts, and none inside of them, so it is one line.
fn event(name: &str, data: &impl Serialize) -> String {
    let data = serde_json::to_string(data).expect("an event is plain data");
    format!("event: {name}\ndata: {data}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_two_lines() {
        let text = event("state", &serde_json::json!({ "reason": "a\nb" }));
        assert_eq!(text, "event: state\ndata: {\"reason\":\"a\\nb\"}\n\n");
    }
}
