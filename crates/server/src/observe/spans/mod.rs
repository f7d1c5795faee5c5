//! Traces: a span for each request, sent to a collector over OTLP. They exist with the cargo
//! feature `otlp`, and in the tests of this crate.

#[cfg(not(any(feature = "otlp", test)))]
mod absent;
#[cfg(any(feature = "otlp", test))]
mod export;
#[cfg(any(feature = "otlp", test))]
mod otlp;
mod parent;

use std::time::Duration;

#[cfg(not(any(feature = "otlp", test)))]
pub use absent::Spans;
#[cfg(any(feature = "otlp", test))]
pub use export::Spans;
pub use parent::Parent;

/// Whether this program can send traces.
pub const IS_BUILT_IN: bool = cfg!(any(feature = "otlp", test));

/// A request that is over.
#[derive(Debug, Clone)]
#[cfg_attr(
    not(any(feature = "otlp", test)),
    expect(dead_code, reason = "spans are made and dropped without a collector")
)]
pub struct Span {
    pub parent: Option<Parent>,
    /// The status of the answer.
    pub status: u16,
    pub took: Duration,
    pub name: String,
    /// What is known of it.
    pub attributes: Vec<(&'static str, String)>,
}
