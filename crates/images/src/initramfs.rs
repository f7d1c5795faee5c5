//! The initramfs: our agent as `/init` and the modules that it loads, as an uncompressed `newc`
//! cpio archive. If the kernel bundle has the user's own archive, that comes first.
//!
//! ```text
//! header: "070701", then 13 numbers of 8 hexadecimal digits | name, NUL | pad to 4 | content | pad to 4
//! ```
//!
//! Always: the same agent and modules give the same bytes: times are 0, everything belongs to root.

use std::path::PathBuf;

use sandtree_store::{Digest, KernelBundle, Store};

use crate::error::Result;
use crate::files::read;

/// Part of the key: changed when the same agent and kernel are packed differently.
const RECIPE: &str = "sandtree initramfs 1";

const DIR: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const CHAR: u32 = 0o020_000;

/// The initramfs of a kernel and an agent: made once per pair, then found in the store.
pub fn initramfs(store: &Store, agent: &[u8], kernel: &KernelBundle) -> Result<PathBuf> {
    let inputs = format!("{RECIPE}\n{}\n{}\n", Digest::of(agent), kernel.digest);
    let key = Digest::of(inputs.as_bytes());
    match store.initramfs(&key)? {
        Some(path) => Ok(path),
        None => Ok(store.publish_initramfs(&key, &make(agent, kernel)?)?),
    }
}

fn make(agent: &[u8], kernel: &KernelBundle) -> Result<Vec<u8>> {
    // Of two files with one path the later one counts, so /init is ours even if the user's archive
    // has one.
    let below = kernel
        .initramfs()
        .map(|path| read(&path))
        .transpose()?
        .unwrap_or_default();
    let mut archive = Archive {
        bytes: below,
        entries: 0,
    };
    for dir in ["dev", "proc", "sys", "run", "root", "newroot", "modules"] {
        archive.dir(dir);
    }
    archive.device("dev/console", 0o600, (5, 1));
    archive.device("dev/null", 0o666, (1, 3));
    archive.file("init", 0o755, agent);
    let mut order = String::new();
    for (file, path) in kernel.modules() {
        archive.file(&format!("modules/{file}"), 0o644, &read(&path)?);
        order.push_str(&format!("{file}\n"));
    }
    archive.file("modules/order", 0o644, order.as_bytes());
    Ok(archive.finish())
}

#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn dir(&mut self, name: &str) {
        self.entry(name, DIR | 0o755, (0, 0), &[]);
    }

    fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entry(name, FILE | mode, (0, 0), content);
    }

    fn device(&mut self, name: &str, mode: u32, number: (u32, u32)) {
        self.entry(name, CHAR | mode, number, &[]);
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        self.entries += 1;
        let inode = self.entries;
        let links = 1;
        let size = content.len() as u32;
        let name_size = name.len() as u32 + 1;
        self.bytes.extend_from_slice(b"070701");
        for number in [
            inode, mode, 0, 0, links, 0, size, 0, 0, major, minor, name_size, 0,
        ] {
            self.bytes
                .extend_from_slice(format!("{number:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_the_format_says() {
        let mut archive = Archive::default();
        archive.file("init", 0o755, b"hello");
        let bytes = archive.finish();
        let header = "070701000000010000\
                      81ed00000000000000000000000100000000000000050000000000000000000000000000000000000005000000\
                      00init\0\0";
        assert_eq!(&bytes[..116], header.as_bytes());
        assert_eq!(&bytes[116..124], b"hello\0\0\0");
        assert!(bytes[124..].starts_with(b"070701") && bytes.ends_with(b"TRAILER!!!\0\0\0\0"));
        assert_eq!(bytes.len() % 4, 0);
    }
}
