//! Real QEMU and real guests, through the doors a user uses: one program, so that the processors
//! are never idle while one file's last test runs.

mod blocking;
mod clock;
mod confined;
mod create;
mod deployed;
mod errors;
mod exact;
mod exec;
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
mod moves;
mod network;
mod registries;
mod saves;
mod shimmed;
mod snapshots;
mod states;
mod streams;
mod support;
