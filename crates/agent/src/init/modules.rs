//! Kernel modules from the initramfs, in the order the host worked out.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::io::Errno;

use crate::console;
use crate::failure::reason;

/// Loads the modules named in `order`, one a line. One that fails is told and passed over: what needs it will say so.
pub fn load(dir: &Path) {
    let Ok(order) = fs::read_to_string(dir.join("order")) else { return };
    for name in order.lines().map(str::trim).filter(|name| !name.is_empty()) {
        if let Err(error) = load_one(&dir.join(name)) {
            console::say(format_args!("cannot load module {name}: {}", reason(&error)));
        }
    }
}

fn load_one(path: &Path) -> io::Result<()> {
    match rustix::system::finit_module(File::open(path)?, c"", 0) {
        // Loaded already, or built in.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
