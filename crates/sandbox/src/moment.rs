//! The host's time, and its current boot.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(crate) fn now_unix_ms() -> u64 {
    since_epoch().as_millis().try_into().unwrap_or(u64::MAX)
}

pub(crate) fn now_unix_ns() -> u64 {
    since_epoch().as_nanos().try_into().unwrap_or(u64::MAX)
}

fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Changes with every boot of the host.
pub(crate) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}
