//! Spans as OTLP has them in JSON.

use serde_json::{Value, json};

use super::Span;
use crate::digits;

/// `SPAN_KIND_SERVER`
const SERVER: u8 = 2;
/// `STATUS_CODE_ERROR`
const ERROR: u8 = 2;

/// A span that ended at a moment.
#[derive(Debug)]
pub struct Ended {
    pub span: Span,
    pub at_unix_ns: u64,
}

/// The body of a request to a collector.
pub fn body(spans: &[Ended]) -> Value {
    let service = [
        attribute("service.name", "sandtree"),
        attribute("service.version", env!("CARGO_PKG_VERSION")),
    ];
    json!({
        "resourceSpans": [{
            "resource": { "attributes": service },
            "scopeSpans": [{
                "scope": { "name": "sandtree-server" },
                "spans": spans.iter().map(encoded).collect::<Vec<_>>(),
            }],
        }],
    })
}

fn encoded(Ended { span, at_unix_ns }: &Ended) -> Value {
    let took_ns = u64::try_from(span.took.as_nanos()).unwrap_or(u64::MAX);
    let attributes = span.attributes.iter();
    let attributes = attributes.map(|(name, value)| attribute(name, value));
    let attributes: Vec<_> = attributes.chain([status(span.status)]).collect();
    let trace = match &span.parent {
        Some(parent) => parent.trace.clone(),
        None => digits::random::<16>(),
    };
    let mut encoded = json!({
        "traceId": trace,
        "spanId": digits::random::<8>(),
        "name": span.name,
        "kind": SERVER,
        "startTimeUnixNano": at_unix_ns.saturating_sub(took_ns).to_string(),
        "endTimeUnixNano": at_unix_ns.to_string(),
        "attributes": attributes,
    });
    if let Some(parent) = &span.parent {
        encoded["parentSpanId"] = parent.span.as_str().into();
    }
    // Through a fault of ours.
    if span.status >= 500 {
        encoded["status"] = json!({ "code": ERROR });
    }
    encoded
}

fn attribute(name: &str, value: &str) -> Value {
    json!({ "key": name, "value": { "stringValue": value } })
}

fn status(number: u16) -> Value {
    let value = json!({ "intValue": number.to_string() });
    json!({ "key": "http.response.status_code", "value": value })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Parent;
    use super::*;

    #[test]
    fn spans_are_those_of_the_protocol() {
        let whole = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let span = Span {
            parent: Parent::parse(whole),
            status: 503,
            took: Duration::from_millis(2),
            name: "GET /x".into(),
            attributes: vec![("http.route", "/x".into())],
        };
        let ended = Ended {
            span,
            at_unix_ns: 5_000_000,
        };
        let body = body(&[ended]);
        let span = &body["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
        assert_eq!(span["traceId"], "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(span["parentSpanId"], "00f067aa0ba902b7");
        assert_eq!(span["spanId"].as_str().unwrap().len(), 16);
        assert_eq!(span["startTimeUnixNano"], "3000000");
        assert_eq!(span["endTimeUnixNano"], "5000000");
        assert_eq!(span["status"]["code"], 2);
        assert_eq!(span["attributes"][0]["value"]["stringValue"], "/x");
        assert_eq!(span["attributes"][1]["value"]["intValue"], "503");
    }
}
