//! One machine of a sandbox: its specification, its start by a boot or from a state, the parts that
//! serve it, and its end.

pub(crate) mod boot;
pub(crate) mod clock;
pub(crate) mod compat;
pub(crate) mod devices;
pub(crate) mod ending;
pub(crate) mod ground;
pub(crate) mod identity;
pub(crate) mod layers;
pub(crate) mod mounts;
pub(crate) mod ports;
pub(crate) mod restore;
pub(crate) mod running;
pub(crate) mod spec;
pub(crate) mod wait;
