//! The figures that Prometheus reads. One set for each server: there is no global state.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use sandtree::{Phase, RestoreReport};

/// From a command's round trip to a cold boot.
const SECONDS: [f64; 14] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
];

const STATES: [Phase; 7] = [
    Phase::Creating,
    Phase::Starting,
    Phase::Running,
    Phase::Stopping,
    Phase::Stopped,
    Phase::Paused,
    Phase::Crashed,
];

/// What the server does to sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Create,
    Resume,
    Pause,
    Fork,
    Snapshot,
    Rollback,
    Kill,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Resume => "resume",
            Self::Pause => "pause",
            Self::Fork => "fork",
            Self::Snapshot => "snapshot",
            Self::Rollback => "rollback",
            Self::Kill => "kill",
        }
    }

    /// What a request of the control plane asks for. Resumes are not among them: a request to
    /// connect may resume, and so may traffic.
    pub(super) fn of_route(method: &str, route: &str) -> Option<Self> {
        match (method, route) {
            ("POST", "/sandboxes" | "/v2/sandboxes") => Some(Self::Create),
            ("POST", "/sandboxes/{id}/pause") => Some(Self::Pause),
            ("POST", "/sandboxes/{id}/fork") => Some(Self::Fork),
            ("POST", "/sandboxes/{id}/snapshots") => Some(Self::Snapshot),
            ("POST", "/sandboxes/{id}/rollback") => Some(Self::Rollback),
            ("DELETE", "/sandboxes/{id}") => Some(Self::Kill),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    Failed,
}

impl Outcome {
    pub fn of_status(status: u16) -> Self {
        if status < 400 {
            Self::Done
        } else {
            Self::Failed
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct RequestLabels {
    pub plane: &'static str,
    pub method: &'static str,
    pub route: String,
    pub status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PlaneLabel {
    plane: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabels {
    operation: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RestoreLabels {
    operation: &'static str,
    /// `host`: until the guest ran; `guest`: from then until its agent had acknowledged.
    part: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: String,
}

/// The figures of a server; clones share them.
#[derive(Debug, Clone)]
pub struct Figures {
    registry: Arc<Registry>,
    requests: Family<RequestLabels, Counter>,
    seconds: Family<PlaneLabel, Histogram>,
    operations: Family<OperationLabels, Counter>,
    restores: Family<RestoreLabels, Histogram>,
    errors: Family<CodeLabel, Counter>,
    sandboxes: Family<StateLabel, Gauge>,
    pub(crate) under_way: Gauge,
    pub(crate) connections: Gauge,
    pub(crate) received: Counter<u64, AtomicU64>,
    pub(crate) sent: Counter<u64, AtomicU64>,
}

impl Default for Figures {
    fn default() -> Self {
        let mut figures = Self {
            registry: Arc::default(),
            requests: Family::default(),
            seconds: Family::new_with_constructor(histogram),
            operations: Family::default(),
            restores: Family::new_with_constructor(histogram),
            errors: Family::default(),
            sandboxes: Family::default(),
            under_way: Gauge::default(),
            connections: Gauge::default(),
            received: Counter::default(),
            sent: Counter::default(),
        };
        figures.registry = Arc::new(figures.registered());
        figures
    }
}

fn histogram() -> Histogram {
    Histogram::new(SECONDS)
}

impl Figures {
    fn registered(&self) -> Registry {
        let mut all = Registry::with_prefix("sandtree");
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        all.register("build", "The server's version", build);
        let help = "Requests, by route and status; 499: the client left";
        all.register("requests", help, self.requests.clone());
        let help = "From the head of a request to the last byte of its answer";
        let seconds = Unit::Seconds;
        all.register_with_unit("request", help, seconds.clone(), self.seconds.clone());
        let help = "Requests that are being answered, streams among them";
        all.register("requests_under_way", help, self.under_way.clone());
        let help = "Open connections of clients";
        all.register("connections", help, self.connections.clone());
        let help = "Bytes from clients, with heads and TLS";
        all.register_with_unit("received", help, Unit::Bytes, self.received.clone());
        let help = "Bytes to clients, with heads and TLS";
        all.register_with_unit("sent", help, Unit::Bytes, self.sent.clone());
        let help = "What was done to sandboxes, and whether it succeeded";
        all.register("operations", help, self.operations.clone());
        let help = "Restores: on the host until the guest ran, in the guest until it answered";
        all.register_with_unit("restore", help, seconds, self.restores.clone());
        let help = "Requests that were refused or failed, by the code of the error";
        all.register("errors", help, self.errors.clone());
        let help = "Sandboxes of the store";
        all.register("sandboxes", help, self.sandboxes.clone());
        all
    }

    pub(super) fn answered(&self, labels: RequestLabels, took: Duration) {
        let plane = PlaneLabel {
            plane: labels.plane,
        };
        self.seconds
            .get_or_create(&plane)
            .observe(took.as_secs_f64());
        self.requests.get_or_create(&labels).inc();
    }

    pub(super) fn did(&self, operation: Operation, outcome: Outcome) {
        let labels = OperationLabels {
            operation: operation.name(),
            outcome: outcome.name(),
        };
        self.operations.get_or_create(&labels).inc();
    }

    pub(super) fn failed(&self, code: &'static str) {
        self.errors.get_or_create(&CodeLabel { code }).inc();
    }

    pub(super) fn restored(&self, operation: Operation, report: &RestoreReport) {
        let host = report.running_ms;
        let guest = (report.acknowledged_ms - host).max(0.0);
        for (part, ms) in [("host", host), ("guest", guest)] {
            let labels = RestoreLabels {
                operation: operation.name(),
                part,
            };
            self.restores.get_or_create(&labels).observe(ms / 1e3);
        }
    }

    /// All figures as text, with the sandboxes as they are now.
    pub fn text(&self, sandboxes: &[Phase]) -> String {
        for state in STATES {
            let count = sandboxes.iter().filter(|other| **other == state).count();
            let label = StateLabel {
                state: state.to_string(),
            };
            self.sandboxes.get_or_create(&label).set(count as i64);
        }
        let mut all = String::new();
        text::encode(&mut all, &self.registry).expect("a text takes everything");
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_every_figure() {
        let figures = Figures::default();
        figures.received.inc_by(7);
        figures.did(Operation::Create, Outcome::Done);
        figures.failed("sandbox_not_found");
        let report = RestoreReport {
            degraded: Vec::new(),
            hooks_failed: Vec::new(),
            from_spare: false,
            running_ms: 30.0,
            acknowledged_ms: 50.0,
            total_ms: 60.0,
        };
        figures.restored(Operation::Resume, &report);
        let text = figures.text(&[Phase::Running, Phase::Running, Phase::Paused]);
        for line in [
            "sandtree_received_bytes_total 7",
            "sandtree_operations_total{operation=\"create\",outcome=\"done\"} 1",
            "sandtree_errors_total{code=\"sandbox_not_found\"} 1",
            "sandtree_restore_seconds_sum{operation=\"resume\",part=\"host\"} 0.03",
            "sandtree_restore_seconds_sum{operation=\"resume\",part=\"guest\"} 0.02",
            "sandtree_sandboxes{state=\"running\"} 2",
            "sandtree_sandboxes{state=\"paused\"} 1",
            "sandtree_sandboxes{state=\"crashed\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }
}
