//! Stores of a run's own, filled from the user's, and what a sandbox uses in a store.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use sandtree::{Error, Host, Result};
use sandtree_store::Digest;

/// `stat` counts in this unit on every file system.
const STAT_BLOCK: u64 = 512;

/// Fills the store at `home` with snapshots that equal one of another store except for a label.
/// They can be listed, and nothing else; nothing is synced.
pub async fn fill_with_snapshots(from: &Host, like: &str, home: &Path, count: usize) -> Result<()> {
    let mut manifest = from.inspect_snapshot(like).await?.manifest;
    for number in 0..count {
        manifest.labels.insert("number".into(), number.to_string());
        let bytes = manifest.to_bytes();
        let digest = Digest::of(&bytes);
        let dir = home.join("snapshots").join(digest.as_str());
        std::fs::create_dir(&dir).map_err(|e| Error::io("make directory", &dir, e))?;
        write(&dir.join("manifest.json"), &bytes)?;
        let name = format!("names/images/snapshot-{number}");
        write(&home.join(name), format!("snapshot {digest}\n").as_bytes())?;
    }
    Ok(())
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    std::fs::write(path, content).map_err(|e| Error::io("write", path, e))
}

/// Links kernels, initramfs and some images of one store into another on the same file system, so
/// that a benchmark fetches nothing. Neither store ever changes these files.
pub fn share_images(from: &Host, from_home: &Path, to_home: &Path, images: &[&str]) -> Result<()> {
    let mut shared: Vec<String> = ["kernels", "initramfs", "cache"].map(String::from).into();
    for name in images {
        shared.push(format!("images/{}", from.inspect_image(name)?.digest));
        shared.push(format!("names/images/{name}"));
    }
    shared
        .iter()
        .try_for_each(|path| link(&from_home.join(path), &to_home.join(path)))
}

/// Links every file of a tree, or one file. A missing source is not needed, and an existing target
/// is the same file.
fn link(from: &Path, to: &Path) -> Result<()> {
    let dir = if from.is_dir() { Some(to) } else { to.parent() };
    dir.map_or(Ok(()), std::fs::create_dir_all)
        .map_err(|e| Error::io("make directory", to, e))?;
    if !from.is_dir() {
        return match std::fs::hard_link(from, to) {
            Err(error) if from.exists() && error.kind() != ErrorKind::AlreadyExists => {
                Err(Error::io("link", to, error))
            }
            _ => Ok(()),
        };
    }
    for entry in from.read_dir().map_err(|e| Error::io("list", from, e))? {
        let name = entry.map_err(|e| Error::io("list", from, e))?.file_name();
        link(&from.join(&name), &to.join(&name))?;
    }
    Ok(())
}

/// What a sandbox uses on the disk, including layers that it shares with others.
pub fn disk_usage(home: &Path, sandbox: &str) -> Result<u64> {
    let mut seen = HashSet::new();
    let mut open = vec![home.join("sandboxes").join(sandbox)];
    let mut bytes = 0;
    while let Some(path) = open.pop() {
        for entry in path.read_dir().map_err(|e| Error::io("list", &path, e))? {
            let entry = entry.map_err(|e| Error::io("list", &path, e))?;
            let status = entry
                .metadata()
                .map_err(|e| Error::io("look at", entry.path(), e))?;
            if status.is_dir() {
                open.push(entry.path());
            }
            if seen.insert(status.ino()) {
                bytes += status.blocks() * STAT_BLOCK;
            }
        }
    }
    Ok(bytes)
}
