//! OCI distribution: blobs and manifests in and out of registries, and nothing else.
//!
//! ```text
//! Reference ── Client::manifest ──► Fetched ── Document::parse ──► Index | Manifest ──► Descriptor ── Client::blob
//! ```
//!
//! The calls block. [`parallel`] and [`fetch_all`] run many of them on threads.
//!
//! Always: everything that a registry sends is treated as hostile. Every answer has a limit in
//! bytes and in time; every blob is hashed during its transfer and must have the size of its
//! descriptor. Credentials are sent to the registry's own host and to the token endpoint that it
//! names, never to the target of a redirect, and appear in no error and no `Debug`. The caller
//! names all files, search paths and the environment of helpers. The one exception are the
//! certificates that this host trusts, which https needs: those of `SSL_CERT_FILE` and
//! `SSL_CERT_DIR` if they are set, and otherwise those that OpenSSL would find.
//!
//! When it fails: the content of a blob's target is worthless. A push leaves at most blobs without
//! a manifest, which the registry collects.

mod access;
mod auth;
mod challenge;
mod client;
mod digest;
pub mod docker;
mod document;
mod error;
mod file;
mod layout;
mod parallel;
mod pull;
mod push;
mod reference;
mod retry;
mod text;
mod url;
mod watch;
mod wire;

pub use access::{Access, Credentials, Limits, Protocol, Secret};
pub use client::{Client, Fetched};
pub use digest::{Digest, InvalidDigest};
pub use document::{
    Descriptor, Document, ImageConfig, Index, LayerPacking, Manifest, Platform, RootFs, RunConfig,
    media,
};
pub use error::{Error, Said};
pub use layout::Layout;
pub use parallel::{fetch_all, parallel};
pub use pull::BlobTarget;
pub use push::Open;
pub use reference::Reference;
pub use watch::{Cancelled, Watch};
