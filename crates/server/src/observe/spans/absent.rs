//! A server without traces.

use super::Span;

#[derive(Debug, Clone)]
pub struct Spans;

impl Spans {
    /// The configuration refuses a collector.
    pub fn new(_collector: Option<&hyper::Uri>) -> Self {
        Self
    }

    pub fn is_wanted(&self) -> bool {
        false
    }

    pub fn add(&self, span: Span) {
        drop(span);
    }
}
