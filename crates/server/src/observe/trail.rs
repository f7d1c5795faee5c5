//! What is known of a request while it is answered.

use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::extract::Request;
use hyper::StatusCode;
use sandtree::{Cause, RestoreReport, Sandbox};

use super::figures::{Figures, Operation, Outcome, RequestLabels};
use super::routes;
use super::spans::{Parent, Span, Spans};
use crate::turn::Turn;

/// The status of a request whose client left before its answer, as nginx logs it.
const CLIENT_LEFT: u16 = 499;

tokio::task_local! {
    static CURRENT: Trail;
}

/// Where a request goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Plane {
    Control,
    /// Commands and files.
    Envd,
    /// A port of a guest.
    Port,
}

impl Plane {
    pub fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Envd => "envd",
            Self::Port => "port",
        }
    }
}

/// How fast the body of a request has to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    Steady,
    /// Now and then.
    Stream,
    Free,
}

/// A request; clones share it. When the last one is dropped, the request is over: its line is
/// written to the log.
#[derive(Debug, Clone)]
pub struct Trail(Arc<Seen>);

#[derive(Debug)]
struct Seen {
    figures: Figures,
    spans: Spans,
    /// The client's trace.
    parent: Option<Parent>,
    /// Its connection.
    turn: Turn,
    cause: Cause,
    begun: Instant,
    method: &'static str,
    path: String,
    /// The route of the control plane.
    matched: Option<String>,
    plane: OnceLock<Plane>,
    sandbox: OnceLock<String>,
    key: OnceLock<String>,
    code: OnceLock<&'static str>,
    /// 0: there is no answer yet.
    status: AtomicU16,
    received: AtomicU64,
    sent: AtomicU64,
}

impl Trail {
    pub fn begin(
        figures: &Figures,
        spans: &Spans,
        request: &Request,
        (cause, matched): (Cause, Option<String>),
    ) -> Self {
        figures.under_way.inc();
        let parent = request.headers().get("traceparent");
        let parent = parent.and_then(|value| value.to_str().ok());
        Self(Arc::new(Seen {
            figures: figures.clone(),
            spans: spans.clone(),
            parent: parent.and_then(Parent::parse),
            turn: request.extensions().get().cloned().unwrap_or_default(),
            cause,
            begun: Instant::now(),
            method: routes::method(request.method()),
            path: request.uri().path().to_owned(),
            matched,
            plane: OnceLock::new(),
            sandbox: OnceLock::new(),
            key: OnceLock::new(),
            code: OnceLock::new(),
            status: AtomicU16::new(0),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        }))
    }

    #[cfg(test)]
    pub(super) fn of_test() -> Self {
        let cause = Cause::parse("test").expect("it is plain");
        let request = Request::new(axum::body::Body::empty());
        let figures = Figures::default();
        Self::begin(&figures, &Spans::new(None), &request, (cause, None))
    }

    pub async fn of<W: Future>(self, work: W) -> W::Output {
        CURRENT.scope(self, work).await
    }

    /// The request that the running task answers.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Self::clone).ok()
    }

    /// Notes that the request is for a port of a sandbox.
    pub fn goes_to(plane: Plane, sandbox: &str) {
        if let Some(trail) = Self::current() {
            trail.0.plane.get_or_init(|| plane);
            trail.note_sandbox(sandbox);
        }
    }

    /// Notes which key the client has.
    pub fn has_key(id: &str) {
        if let Some(trail) = Self::current() {
            trail.0.key.get_or_init(|| id.to_owned());
        }
    }

    /// Notes how long a restore took, on the host and in the guest.
    pub fn restored(operation: Operation, report: &RestoreReport) {
        if let Some(trail) = Self::current() {
            trail.0.figures.restored(operation, report);
        }
    }

    /// Notes the sandbox that the request has created.
    pub fn created(sandbox: &Sandbox) {
        if let Some(trail) = Self::current() {
            trail.note_sandbox(sandbox.id());
        }
        if let Some(report) = sandbox.created() {
            Self::restored(Operation::Create, report);
        }
    }

    /// Notes the end of something that is not a request of its own: traffic resumes a sandbox.
    pub fn did<T, E>(operation: Operation, result: &Result<T, E>) {
        let outcome = match result {
            Ok(_) => Outcome::Done,
            Err(_) => Outcome::Failed,
        };
        if let Some(trail) = Self::current() {
            trail.0.figures.did(operation, outcome);
        }
    }

    fn note_sandbox(&self, sandbox: &str) {
        if routes::is_plain_id(sandbox) {
            self.0.sandbox.get_or_init(|| sandbox.to_owned());
        }
    }

    pub fn answered(&self, status: StatusCode, code: Option<&'static str>) {
        self.0.status.store(status.as_u16(), Ordering::Relaxed);
        if status == StatusCode::SWITCHING_PROTOCOLS {
            self.0.turn.is_free();
        }
        if let Some(code) = code {
            self.0.code.get_or_init(|| code);
        }
    }

    pub(super) fn pace(&self) -> Pace {
        match (self.0.plane(), self.0.path.as_str()) {
            (Plane::Port, _) => Pace::Free,
            (Plane::Envd, routes::STREAM_INPUT) => Pace::Stream,
            _ => Pace::Steady,
        }
    }

    pub(super) fn has_received(&self, bytes: usize) {
        self.0.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn has_sent(&self, bytes: usize) {
        self.0.sent.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Seen {
    fn plane(&self) -> Plane {
        self.plane.get().copied().unwrap_or(Plane::Control)
    }

    fn route(&self) -> &str {
        match self.plane() {
            Plane::Envd => routes::envd(&self.path),
            Plane::Port => routes::PORT,
            Plane::Control => self.matched.as_deref().unwrap_or(routes::NONE),
        }
    }

    /// The sandbox that the path of a request of the control plane names.
    fn sandbox(&self) -> Option<&str> {
        let noted = self.sandbox.get().map(String::as_str);
        let matched = self.matched.as_deref();
        noted.or_else(|| routes::sandbox(matched?, &self.path))
    }

    fn span(&self, status: u16, took: Duration) -> Span {
        let optional = [
            ("sandtree.sandbox", self.sandbox().map(str::to_owned)),
            ("sandtree.key", self.key.get().cloned()),
            ("error.type", self.code.get().map(|code| (*code).to_owned())),
        ];
        let known = [
            ("http.request.method", self.method.to_owned()),
            ("http.route", self.route().to_owned()),
            ("sandtree.request", self.cause.to_string()),
            ("sandtree.plane", self.plane().name().to_owned()),
        ];
        let optional = optional.into_iter();
        let optional = optional.filter_map(|(name, value)| Some((name, value?)));
        Span {
            parent: self.parent.clone(),
            status,
            took,
            name: format!("{} {}", self.method, self.route()),
            attributes: known.into_iter().chain(optional).collect(),
        }
    }

    fn status(&self) -> u16 {
        match self.status.load(Ordering::Relaxed) {
            0 => CLIENT_LEFT,
            status => status,
        }
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.turn.is_idle();
        self.figures.under_way.dec();
        let status = self.status();
        let labels = RequestLabels {
            plane: self.plane().name(),
            method: self.method,
            route: self.route().to_owned(),
            status,
        };
        let took = self.begun.elapsed();
        self.figures.answered(labels, took);
        let code = self.code.get().copied();
        if status >= 400 {
            self.figures.failed(code.unwrap_or("other"));
        }
        let operation = Operation::of_route(self.method, self.route());
        if let Some(operation) = operation {
            self.figures.did(operation, Outcome::of_status(status));
        }
        if self.spans.is_wanted() {
            self.spans.add(self.span(status, took));
        }
        let none = "-";
        tracing::info!(
            target: "request",
            request = self.cause.as_str(),
            method = self.method,
            route = self.route(),
            status,
            ms = took.as_millis() as u64,
            received = self.received.load(Ordering::Relaxed),
            sent = self.sent.load(Ordering::Relaxed),
            sandbox = self.sandbox().unwrap_or(none),
            key = self.key.get().map_or(none, String::as_str),
            code = code.unwrap_or(none),
            "answered"
        );
    }
}
