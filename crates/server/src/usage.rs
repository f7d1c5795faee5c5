//! What a guest uses, as clients see it.

use sandtree::Metrics;

/// Of all its processors since its boot, with two decimals.
pub fn cpu_percent(used: &Metrics) -> f64 {
    let busy = used.cpu_busy_ms as f64 / used.uptime_ms.max(1) as f64;
    (busy * 10_000.0).round() / 100.0
}

/// Of all its processors since an earlier moment. If the guest has gone back in time since, as a
/// revert does, since its boot.
pub fn cpu_percent_since(before: Option<&Metrics>, used: &Metrics) -> f64 {
    let is_later = |before: &&Metrics| {
        before.uptime_ms < used.uptime_ms && before.cpu_busy_ms <= used.cpu_busy_ms
    };
    let Some(before) = before.filter(is_later) else {
        return cpu_percent(used);
    };
    cpu_percent(&Metrics {
        uptime_ms: used.uptime_ms - before.uptime_ms,
        cpu_busy_ms: used.cpu_busy_ms - before.cpu_busy_ms,
        ..used.clone()
    })
}

pub fn memory_bytes(used: &Metrics) -> u64 {
    used.memory_total_bytes
        .saturating_sub(used.memory_available_bytes)
}

pub fn disk_bytes(used: &Metrics) -> u64 {
    used.disk_total_bytes
        .saturating_sub(used.disk_available_bytes)
}
