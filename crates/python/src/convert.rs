//! Requests and results: JSON, times, and bytes.

use std::time::Duration;

use bytes::Bytes;
use pyo3::prelude::{Bound, PyResult, Python};
use pyo3::types::PyBytes;
use pyo3::{IntoPyObject, PyErr};
use sandtree::{Error, Result};
use serde::{Deserialize, Serialize};

/// Reads a request. The Python package writes it, so an error is a defect or a wrong type.
pub fn parse<'a, T: Deserialize<'a>>(what: &str, json: &'a str) -> Result<T> {
    serde_json::from_str(json).map_err(|error| Error::invalid(what, json, &error.to_string()))
}

/// A value of the library as JSON.
pub fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::io("write", "an answer", e.into()))
}

/// Errors that did not fail the whole call, as reports.
pub fn reports(errors: &[Error]) -> Vec<sandtree::Report> {
    errors.iter().map(Error::report).collect()
}

/// A time, from a number of seconds.
pub fn seconds(what: &str, seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| Error::invalid(what, seconds, &error.to_string()))
}

/// Bytes that become an object of Python.
#[derive(Debug)]
pub struct Blob(pub Bytes);

impl<'py> IntoPyObject<'py> for Blob {
    type Target = PyBytes;
    type Output = Bound<'py, PyBytes>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        Ok(PyBytes::new(py, &self.0))
    }
}
