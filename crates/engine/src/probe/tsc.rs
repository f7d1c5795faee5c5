//! The rate of the host's time-stamp counter, which emulated guests read as it is.

use std::time::{Duration, Instant};

/// Longer than the two clocks are read apart by some ten thousand times.
const WINDOW: Duration = Duration::from_millis(20);
/// The median of so many windows: a thread that is set aside in the middle of a reading spoils one.
const WINDOWS: usize = 5;

/// Measures the rate. `None` where guests do not read such a counter.
pub(crate) async fn measure_khz() -> Option<u64> {
    if !cfg!(target_arch = "x86_64") {
        return None;
    }
    let mut rates = Vec::new();
    for _ in 0..WINDOWS {
        let counted = count();
        let began = Instant::now();
        tokio::time::sleep(WINDOW).await;
        let ended = count();
        let elapsed = began.elapsed();
        rates.push(
            (u128::from(ended.wrapping_sub(counted)) * 1_000_000 / elapsed.as_nanos()) as u64,
        );
    }
    rates.sort_unstable();
    Some(rates[WINDOWS / 2])
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "the instruction has no safe form")]
fn count() -> u64 {
    // SAFETY: it reads a counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn count() -> u64 {
    0
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[tokio::test]
    async fn two_measurements_agree() {
        let (Some(first), Some(second)) = (measure_khz().await, measure_khz().await) else {
            panic!("no rate")
        };
        assert!((100_000..20_000_000).contains(&first), "{first} kHz");
        // What counts as another rate is five times this.
        assert!(
            first.abs_diff(second) <= first / 1000,
            "{first} and {second} kHz"
        );
    }
}
