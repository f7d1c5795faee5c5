//! Kernel modules from the initramfs, in the order the host worked out: what is wanted soonest
//! comes first.
//!
//! Each costs some 15 ms under emulation, so only what the root disk needs is waited for. The rest
//! is opened before the initramfs goes, and loaded beside the agent's work.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::io::Errno;

use super::settle::Latch;
use crate::console;
use crate::failure::{reason, tolerate};

/// Modules that are still to be loaded, in their order.
#[derive(Debug, Default)]
pub struct Rest(Vec<(String, File)>);

/// Loads the modules named in `dir/order`, one a line, until `enough` says so, and opens the rest.
pub fn load(dir: &Path, enough: impl Fn() -> bool) -> Rest {
    let order = fs::read_to_string(dir.join("order")).unwrap_or_default();
    let mut rest = Vec::new();
    for name in order.lines().map(str::trim).filter(|name| !name.is_empty()) {
        match File::open(dir.join(name)) {
            Ok(file) if enough() => rest.push((name.to_owned(), file)),
            Ok(file) => load_one(name, &file),
            Err(error) => complain(name, &error),
        }
    }
    Rest(rest)
}

impl Rest {
    /// Loads them in a thread that yields to everything else. One that is wanted at once, the
    /// network's, still comes at once: whoever wants it waits, and leaves the processor to us.
    pub fn load_beside(self) -> Latch {
        let loaded = Latch::default();
        let latch = loaded.clone();
        std::thread::spawn(move || {
            tolerate(rustix::process::setpriority_process(None, 19));
            self.0.iter().for_each(|(name, file)| load_one(name, file));
            latch.done();
        });
        loaded
    }
}

/// One that fails is told and passed over: what needs it will say so.
fn load_one(name: &str, file: &File) {
    match rustix::system::finit_module(file, c"", 0) {
        // Loaded already, or built in.
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => complain(name, &error.into()),
    }
}

fn complain(name: &str, error: &io::Error) {
    console::say(format_args!("cannot load module {name}: {}", reason(error)));
}
