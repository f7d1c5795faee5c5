//! The server as a guest and its host see it: a client speaks the protocol over a socket pair.

mod changes;
mod confined;
mod data;
mod flow;
mod hostile;
mod list;
mod look;
mod names;
mod readonly;
mod support;
mod xattr;
