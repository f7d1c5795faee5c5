//! Saves of Microsoft's Quicksand, as images.
//!
//! ```text
//!  NAME/manifest.json       {"version": 6, "config": {"image": "alpine", …}, "arch": "x86_64"}
//!  NAME/overlays/0.qcow2 …  what was written to the disk of the base image, oldest first
//! ```
//!
//! A bundle is a tar archive of such a directory. The base is an image of the store: the one that
//! the manifest names, or the one with the root file system that our own extension of the manifest
//! names (`"sandtree": {"rootfs": DIGEST}`).
//!
//! Always: a save is hostile. Only plain files are opened, and only those with the expected names;
//! the backing files that overlays name are ignored. The image gets kernel, init, defaults and disk
//! size of its base, and is found again when the same save is imported on the same base.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sandtree_rootfs::{DiskLayers, import_overlays};
use sandtree_store::{Arch, Digest, Image, ImageSpec, Name, Store};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::catalog;
use crate::error::{Error, Result, io_error, store_error};
use crate::hex::hex;
use crate::job::{Job, Stage};
use crate::memo;
use crate::new_image::{disk_limits, unpacking};
use crate::spec::ImportSpec;

const MANIFEST: &str = "manifest.json";
const OVERLAYS: &str = "overlays";
const SUFFIX: &str = ".qcow2";
/// The newest version that is known, and the first with this form.
const VERSION: u64 = 6;
/// Far above any manifest.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;
/// Far above any save. The rest of the directory is not listed.
const MAX_ENTRIES: usize = 1000;
/// Part of the memo's key; incremented when images are made differently.
const RECIPE: u32 = 1;

#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Manifest {
    version: u64,
    config: Config,
    #[serde(default)]
    arch: Option<String>,
    #[serde(default)]
    sandtree: Option<Extension>,
}

#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Config {
    image: String,
}

/// What our own saves add.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Extension {
    /// The digest of the root file system that the overlays lie on.
    rootfs: Digest,
}

/// Whether a directory has the form of a save. No other kind of image has both entries.
pub fn is_save(dir: &Path) -> bool {
    let kind = |name: &str| fs::symlink_metadata(dir.join(name)).map(|found| found.file_type());
    kind(MANIFEST).is_ok_and(|kind| kind.is_file())
        && kind(OVERLAYS).is_ok_and(|kind| kind.is_dir())
}

/// Makes an image, without a name, from a save.
pub(crate) fn import_save(job: &mut Job<'_>, dir: &Path, spec: &ImportSpec) -> Result<Image> {
    let manifest = read_manifest(dir)?;
    let overlays = overlays(dir)?;
    let base = find_base(job.store, &manifest)?;
    let key = memo_key(job, &base, &overlays, spec)?;
    let made = job.store.cached::<Digest>(&key).ok().flatten();
    if let Some(image) = made.and_then(|digest| job.store.pin_image(&digest).ok()) {
        return Ok(image);
    }
    let image = make(job, &base, &overlays, spec)?;
    memo::record(
        job.store,
        &key,
        &image.digest,
        "a Quicksand save cannot be recorded; it will be read again next time",
    );
    Ok(image)
}

fn make(job: &mut Job<'_>, base: &Image, overlays: &[PathBuf], spec: &ImportSpec) -> Result<Image> {
    let staged = job.store.stage()?;
    let layers = DiskLayers {
        base: &base.rootfs(),
        overlays,
    };
    let limits = disk_limits(job.store)?;
    let rootfs = staged.path().join("rootfs.raw");
    let disk = import_overlays(layers, &rootfs, limits, &mut unpacking(job))?;
    job.begin(Stage::Publish)?;
    let record = &base.record;
    let kept_bytes = record.disk_bytes.unwrap_or_default().max(disk.bytes);
    let spec = ImageSpec {
        arch: record.arch,
        kernel: record.kernel.clone(),
        init: spec.init.unwrap_or(record.init),
        defaults: record.defaults.clone(),
        disk_bytes: Some(spec.disk_bytes.unwrap_or(kept_bytes)),
    };
    Ok(job.store.publish_image(staged, spec)?)
}

fn read_manifest(dir: &Path) -> Result<Manifest> {
    let path = dir.join(MANIFEST);
    let mut text = Vec::new();
    let file = File::open(&path).map_err(io_error("open", &path))?;
    file.take(MAX_MANIFEST_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(io_error("read", &path))?;
    if text.len() as u64 > MAX_MANIFEST_BYTES {
        return Err(refused("its manifest is larger than 1 MiB"));
    }
    parse_manifest(&text)
}

fn parse_manifest(text: &[u8]) -> Result<Manifest> {
    let manifest: Manifest = serde_json::from_slice(text)
        .map_err(|error| refused(format!("its manifest is malformed: {error}")))?;
    if manifest.version > VERSION {
        let version = manifest.version;
        return Err(refused(format!(
            "its version {version} is newer than {VERSION}, the newest that is known"
        )));
    }
    match manifest.arch.as_deref() {
        Some(arch) if arch != Arch::HOST.to_string() => {
            let host = Arch::HOST;
            Err(refused(format!(
                "it is for {arch}, and machines here are {host}"
            )))
        }
        _ => Ok(manifest),
    }
}

/// The overlays, oldest first.
fn overlays(dir: &Path) -> Result<Vec<PathBuf>> {
    let dir = dir.join(OVERLAYS);
    let mut names = Vec::new();
    for entry in fs::read_dir(&dir).map_err(io_error("list", &dir))? {
        let entry = entry.map_err(io_error("list", &dir))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
        if names.len() > MAX_ENTRIES {
            return Err(refused("its directory of overlays has too many entries"));
        }
    }
    let ordered = in_order(&names)?;
    let paths: Vec<_> = ordered.iter().map(|name| dir.join(name)).collect();
    paths.iter().try_for_each(|path| require_plain(path))?;
    Ok(paths)
}

/// The names `0.qcow2`, `1.qcow2` and so on, by their numbers: as texts, 10 would precede 2. Other
/// files are ignored.
fn in_order(names: &[String]) -> Result<Vec<&String>> {
    let overlay = |name: &&String| name.ends_with(SUFFIX);
    let mut numbered = Vec::new();
    for name in names.iter().filter(overlay) {
        let digits = name.trim_end_matches(SUFFIX);
        let number = digits.parse::<u64>().ok();
        let number = number.filter(|number| number.to_string() == digits);
        let number = number.ok_or_else(|| refused(format!("{name:?} is no name of an overlay")))?;
        numbered.push((number, name));
    }
    numbered.sort();
    if numbered.is_empty() {
        return Err(refused("it has no overlays"));
    }
    let gap = (0..)
        .zip(&numbered)
        .find(|(wanted, (number, _))| wanted != number);
    match gap {
        Some((missing, _)) => Err(refused(format!("its overlay {missing}{SUFFIX} is missing"))),
        None => Ok(numbered.into_iter().map(|(_, name)| name).collect()),
    }
}

fn require_plain(path: &Path) -> Result<()> {
    let found = fs::symlink_metadata(path).map_err(io_error("look at", path))?;
    if found.is_file() {
        return Ok(());
    }
    let name = path.file_name().unwrap_or_default().display();
    Err(refused(format!("its overlay {name} is not a plain file")))
}

fn find_base(store: &Store, manifest: &Manifest) -> Result<Image> {
    let found = match &manifest.sandtree {
        Some(extension) => with_rootfs(store, &extension.rootfs)?,
        None => named(store, &manifest.config.image)?,
    };
    found.ok_or_else(|| Error::NoSaveBase {
        name: manifest.config.image.clone(),
    })
}

fn named(store: &Store, name: &str) -> Result<Option<Image>> {
    let Ok(name) = name.parse::<Name>() else {
        return Ok(None);
    };
    match catalog::find(store, &catalog::ImageRef::Name(name)) {
        Ok(image) => pinned(store, &image.digest).map(Some),
        Err(Error::NoImage { .. } | Error::NotAnImage { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn with_rootfs(store: &Store, rootfs: &Digest) -> Result<Option<Image>> {
    let images = store
        .list_images()
        .map_err(store_error("list its images"))?;
    let mut readable = images.into_iter().filter_map(|summary| summary.image.ok());
    let found = readable.find(|image| image.record.rootfs.digest == *rootfs);
    found.map(|image| pinned(store, &image.digest)).transpose()
}

/// Pinned, because another process may remove the image before it is read.
fn pinned(store: &Store, digest: &Digest) -> Result<Image> {
    store
        .pin_image(digest)
        .map_err(store_error("read an image"))
}

fn memo_key(
    job: &mut Job<'_>,
    base: &Image,
    overlays: &[PathBuf],
    spec: &ImportSpec,
) -> Result<Name> {
    let mut layers = Vec::new();
    for path in overlays {
        layers.push(sha256(path)?);
        job.check()?;
    }
    let inputs = (RECIPE, &base.digest, layers, spec.init, spec.disk_bytes);
    let inputs = serde_json::to_vec(&inputs).expect("plain data");
    Ok(memo::key("quicksand", &Digest::of(&inputs)))
}

fn sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path).map_err(io_error("open", path))?;
    let mut hash = Sha256::new();
    io::copy(&mut file, &mut HashedInto(&mut hash)).map_err(io_error("read", path))?;
    Ok(hex(&hash.finalize()))
}

struct HashedInto<'h>(&'h mut Sha256);

impl io::Write for HashedInto<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn refused(what: impl Into<String>) -> Error {
    Error::Save { what: what.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message<T: std::fmt::Debug>(result: Result<T>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn a_manifest_of_quicksand_is_read() {
        let text = br#"{"version": 6, "arch": "x86_64", "new": 1, "config": {"image": "alpine",
            "memory": "512M", "mounts": [], "port_forwards": []}}"#;
        let manifest = parse_manifest(text).unwrap();
        assert_eq!(manifest.config.image, "alpine");
        assert_eq!(manifest.sandtree, None);
    }

    #[test]
    fn a_wrong_manifest_is_refused() {
        let refusals = [
            (&b""[..], "its manifest is malformed: EOF"),
            (b"[]", "its manifest is malformed: invalid length 0"),
            (
                br#"{"version": 6}"#,
                "its manifest is malformed: missing field `config`",
            ),
            (
                br#"{"version": 6, "config": {"image": 7}}"#,
                "its manifest is malformed: invalid type: integer `7`",
            ),
            (
                br#"{"version": 7, "config": {"image": "a"}}"#,
                "its version 7 is newer than 6, the newest that is known",
            ),
            (
                br#"{"version": 6, "config": {"image": "a"}, "arch": "riscv64"}"#,
                "it is for riscv64, and machines here are",
            ),
            (
                br#"{"version": 6, "config": {"image": "a"}, "sandtree": {"rootfs": "../x"}}"#,
                "its manifest is malformed",
            ),
        ];
        for (text, why) in refusals {
            let message = message(parse_manifest(text));
            let expected = format!("the Quicksand save is refused: {why}");
            assert!(message.starts_with(&expected), "{message}");
        }
    }

    #[test]
    fn a_large_manifest_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(MANIFEST), vec![b' '; (1 << 20) + 1]).unwrap();
        assert!(message(read_manifest(dir.path())).ends_with("larger than 1 MiB"));
    }

    #[test]
    fn overlays_are_ordered_by_number() {
        let names: Vec<String> = (0..12).rev().map(|at| format!("{at}.qcow2")).collect();
        let expected: Vec<String> = (0..12).map(|at| format!("{at}.qcow2")).collect();
        assert_eq!(
            in_order(&names).unwrap(),
            expected.iter().collect::<Vec<_>>()
        );
    }

    #[test]
    fn overlays_with_other_names_are_refused() {
        let refusals = [
            (&["notes"][..], "it has no overlays"),
            (&["1.qcow2"], "its overlay 0.qcow2 is missing"),
            (&["0.qcow2", "2.qcow2"], "its overlay 1.qcow2 is missing"),
            (&["00.qcow2"], r#""00.qcow2" is no name of an overlay"#),
            (&["+1.qcow2"], r#""+1.qcow2" is no name of an overlay"#),
            (&["../0.qcow2"], r#""../0.qcow2" is no name of an overlay"#),
        ];
        for (names, why) in refusals {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            let expected = format!("the Quicksand save is refused: {why}");
            assert_eq!(message(in_order(&names)), expected);
        }
    }

    #[test]
    fn a_link_is_no_overlay_and_no_manifest() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(OVERLAYS)).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join(MANIFEST)).unwrap();
        assert!(!is_save(dir.path()));
        let overlay = dir.path().join(OVERLAYS).join("0.qcow2");
        std::os::unix::fs::symlink("/etc/passwd", overlay).unwrap();
        assert!(message(overlays(dir.path())).ends_with("0.qcow2 is not a plain file"));
    }
}
