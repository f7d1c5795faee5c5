//! The time of day.

use std::time::{SystemTime, UNIX_EPOCH};

pub fn now_unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_millis() as u64
}
