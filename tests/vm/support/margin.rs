//! Waits that come near to their deadlines. A test must pass on a machine that is twice as slow, so
//! a wait that takes more than half of its deadline is noted: in the test's output, and in a file
//! that `make vm` prints at its end.

use std::fs::File;
use std::io::Write;
use std::panic::Location;
use std::path::Path;
use std::time::{Duration, Instant};

/// Asserts that no more than `limit` has passed since `began`.
#[track_caller]
pub fn assert_within(limit: Duration, began: Instant) {
    let took = began.elapsed();
    assert!(took < limit, "it took {took:?}, more than {limit:?}");
    note(took, limit);
}

/// Notes a wait of more than half of its limit.
#[track_caller]
pub fn note(took: Duration, limit: Duration) {
    if took * 2 <= limit {
        return;
    }
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a thread");
    let place = Location::caller();
    let line = format!(
        "narrow: {test}: {took:.1?} of {limit:?} at {}:{}",
        place.file(),
        place.line()
    );
    eprintln!("{line}");
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("narrow");
    let noted = File::options()
        .create(true)
        .append(true)
        .open(&file)
        .and_then(|mut file| writeln!(file, "{line}"));
    noted.unwrap_or_else(|e| panic!("{}: {e}", file.display()));
}
