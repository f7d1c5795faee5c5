//! The native part of the Python package `sandtree`.
//!
//! ```text
//!   Python ── call, done ──► Operation on the runtime ── the library `sandtree`
//!      ▲                            │
//!      └──── done(status, value) ◄──┘     from a thread of the runtime
//! ```
//!
//! Always: no call waits. Each starts an operation and returns; the operation calls `done` once
//! with its outcome. Requests and results are JSON, bytes or objects of this module; the Python
//! package gives them types. Python's lock is held only while values are converted.

mod command;
mod config;
mod convert;
mod display;
mod files;
mod host;
mod progress;
mod runtime;
mod sandbox;
#[cfg(debug_assertions)]
mod stopping;
mod transfers;
mod view;
mod watch;

use pyo3::prelude::{PyModule, PyResult, pyfunction, pymodule};
use pyo3::types::PyModuleMethods;
use pyo3::{Bound, wrap_pyfunction};

/// Every error code with its kind, so that the Python package can check its classes.
#[pyfunction]
fn codes() -> Vec<(&'static str, &'static str)> {
    let codes = sandtree::Code::ALL.iter();
    codes
        .map(|code| (code.as_str(), code.kind().as_str()))
        .collect()
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("KEEPER_PROTOCOL", sandtree::keeper::PROTOCOL)?;
    module.add_function(wrap_pyfunction!(codes, module)?)?;
    module.add_function(wrap_pyfunction!(host::open, module)?)?;
    module.add_function(wrap_pyfunction!(runtime::after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(runtime::shut_down, module)?)?;
    #[cfg(debug_assertions)]
    module.add_function(wrap_pyfunction!(stopping::stop_next, module)?)?;
    module.add_class::<runtime::Operation>()?;
    module.add_class::<host::Host>()?;
    module.add_class::<sandbox::Sandbox>()?;
    module.add_class::<sandbox::Forward>()?;
    module.add_class::<display::Display>()?;
    module.add_class::<display::Screenshot>()?;
    module.add_class::<files::Files>()?;
    module.add_class::<command::GuestCommand>()?;
    module.add_class::<view::View>()?;
    module.add_class::<watch::Watch>()?;
    Ok(())
}
