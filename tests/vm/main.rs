//! Tests with real QEMU and real guests, through the command line and the library. They are one
//! program, so that no processor is idle while the last test of a file runs.

mod blocking;
mod clock;
mod confined;
mod create;
mod deployed;
mod desktop;
mod errors;
mod exact;
mod exec;
mod expiry;
mod faults;
mod files;
mod forks;
mod handles;
mod images;
mod keeper;
mod killed;
mod kvm;
mod lifecycle;
mod link;
mod loans;
mod model;
mod mounts;
mod moves;
mod network;
mod registries;
mod saves;
mod shimmed;
mod snapshots;
mod states;
mod streams;
mod support;
