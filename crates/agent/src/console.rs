//! Lines on the guest's console, for the person who reads why a sandbox did not start.

use std::fmt::Display;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use crate::failure::tolerate;

/// Writes one line. The console is opened for every line: a guest's user may have closed or hung up
/// an earlier one.
pub fn say(line: impl Display) {
    let mut options = std::fs::OpenOptions::new();
    options
        .write(true)
        .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK);
    let written = options
        .open("/dev/console")
        .and_then(|mut file| writeln!(file, "sandtree-agent: {line}\r"));
    // Without a console there is nobody left to tell.
    tolerate(written);
}
