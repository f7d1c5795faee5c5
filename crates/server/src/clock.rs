//! The time of day.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub fn now_unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_millis() as u64
}

/// A moment as clients read it.
pub fn rfc3339(unix_ms: u64) -> String {
    let moment = UNIX_EPOCH + Duration::from_millis(unix_ms);
    humantime::format_rfc3339_millis(moment).to_string()
}
