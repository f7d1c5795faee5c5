//! OCI distribution: blobs and manifests in and out of registries, nothing else.
//!
//! ```text
//! Reference ── Client::manifest ──► Fetched ── Document::parse ──► Index | Manifest ──► Descriptor ── Client::blob
//! ```
//!
//! The calls block; whoever wants many at once runs them on threads ([`parallel`], [`fetch_all`]).
//!
//! Always: everything a registry says is hostile. Every answer has a limit in bytes and in time;
//! every blob is hashed on its way and has the size its descriptor says. Credentials go to the
//! registry's own host and to the token endpoint it names, never to where a redirect leads, and
//! appear in no error and no `Debug`. Files and search paths are given by the caller; only for
//! https, the certificates this host trusts are read besides: those of `SSL_CERT_FILE` and
//! `SSL_CERT_DIR`, if they are set, else those that OpenSSL would find.
//!
//! When it fails: what a blob's target holds is worthless. A push leaves blobs without a manifest
//! at the most, which the registry collects.

mod access;
mod auth;
mod challenge;
mod client;
mod digest;
pub mod docker;
mod document;
mod error;
mod layout;
mod parallel;
mod patience;
mod pull;
mod push;
mod reference;
mod url;
mod wire;

pub use access::{Access, Credentials, Limits, Protocol, Secret};
pub use client::{Client, Fetched};
pub use digest::Digest;
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

/// Whoever watches a transfer does not want it any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GivenUp;

/// Is told of every byte that comes or goes, as it does; says whether to go on. It is asked with
/// zero bytes while waiting.
pub type Watch<'a> = &'a (dyn Fn(u64) -> Result<(), GivenUp> + Sync);
