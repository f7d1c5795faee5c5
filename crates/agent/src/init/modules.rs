//! Kernel modules from the initramfs, in the host's order: the most urgent ones first.
//!
//! Each takes some 15 ms under emulation, so the boot waits only for the modules that the root disk
//! needs. It opens the others before the initramfs is removed, and a thread loads them.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::io::Errno;

use super::settle::Latch;
use crate::console;
use crate::failure::{reason, tolerate};

/// Parameters by the file of their module. The kernel passes its command line only to built-in
/// modules; for others, the program that loads them has to.
const PARAMETERS: [(&str, &CStr); 1] = [
    // The text console would have a frame buffer on the screen, and every state would contain it.
    ("drm_kms_helper.ko", c"fbdev_emulation=0"),
];

/// Modules that are not loaded yet, in their order.
#[derive(Debug, Default)]
pub struct Rest(Vec<(String, File)>);

/// Loads the modules named in `dir/order`, one per line, until `enough` returns true, and opens the
/// rest.
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
    /// Loads them in a thread of low priority. An urgent module, that of the network, still loads
    /// at once: the thread that needs it waits, and so leaves the processor to this one.
    pub fn load_in_background(self) -> Latch {
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

/// A failed module is reported and skipped; the feature that needs it reports its own failure.
fn load_one(name: &str, file: &File) {
    match rustix::system::finit_module(file, parameters(name), 0) {
        // It is loaded already, or built in.
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => complain(name, &error.into()),
    }
}

fn parameters(name: &str) -> &'static CStr {
    let found = PARAMETERS.iter().find(|(file, _)| *file == name);
    found.map_or(c"", |(_, parameters)| parameters)
}

fn complain(name: &str, error: &io::Error) {
    console::say(format_args!("cannot load module {name}: {}", reason(error)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_console_of_a_screen_gets_a_parameter() {
        assert_eq!(parameters("drm_kms_helper.ko"), c"fbdev_emulation=0");
        assert_eq!(parameters("drm.ko"), c"");
        assert_eq!(parameters("virtio_blk.ko"), c"");
    }
}
