//! Lines on the guest's console, which show why a sandbox did not start.

use std::fmt::Display;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;

use crate::failure::tolerate;

/// Writes one line. Each line opens the console again, because a user of the guest may have closed
/// or hung up the earlier descriptor.
pub fn say(line: impl Display) {
    let mut options = std::fs::OpenOptions::new();
    options
        .write(true)
        .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK);
    let written = options
        .open("/dev/console")
        .and_then(|mut file| writeln!(file, "sandtree-agent: {line}\r"));
    // Without a console the line is lost.
    tolerate(written);
}
