//! What a guest uses, as clients see it.

use sandtree::Metrics;

/// Of all its processors since its boot, with two decimals.
pub fn cpu_percent(used: &Metrics) -> f64 {
    let busy = used.cpu_busy_ms as f64 / used.uptime_ms.max(1) as f64;
    (busy * 10_000.0).round() / 100.0
}

pub fn memory_bytes(used: &Metrics) -> u64 {
    used.memory_total_bytes
        .saturating_sub(used.memory_available_bytes)
}

pub fn disk_bytes(used: &Metrics) -> u64 {
    used.disk_total_bytes
        .saturating_sub(used.disk_available_bytes)
}
