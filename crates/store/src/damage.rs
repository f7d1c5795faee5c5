//! Every way in which a file of the store, or one that comes into it, breaks its format.
//!
//! The types are together and use nothing but ids, so that the store's error can hold them and the
//! modules that read the files can return that error.

pub(crate) mod artifact;
pub(crate) mod disk;
pub(crate) mod manifest;
pub(crate) mod member;
pub(crate) mod memory;
