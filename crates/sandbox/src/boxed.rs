//! Futures behind a pointer.
//!
//! The code of an `async fn` is generated in every crate that awaits it, with that of all futures
//! inside it. A function that returns a [`Boxed`] future ends that: its code is generated in this
//! crate, once, and the programs and tests on top of the library are built in a fraction of the
//! time. The large operations of hosts and sandboxes are such functions.

use std::pin::Pin;

/// A future of this library.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
