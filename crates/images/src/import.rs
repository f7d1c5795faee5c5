//! Images from a file or directory of the host: a root file system, a disk, an OCI image, or a save
//! of Quicksand.

use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use sandtree_rootfs::{TarRules, import_disk, looks_like_disk};
use sandtree_store::{Arch, Digest, ExecDefaults, Image, ImageSpec, Init};

use crate::error::{Error, Result, io_error};
use crate::job::{Job, Stage};
use crate::new_image::{
    NewImage, PATH, ROOM_BYTES, disk_bytes, disk_limits, unpacking, writable_bytes,
};
use crate::spec::ImportSpec;
use crate::{bundle, oci, quicksand};

/// Enough to tell a disk, an archive and a packed archive apart.
const START_BYTES: u64 = 4096;
/// Either file shows that an archive or directory is an image, and not a root file system.
const LAYOUT_FILES: [&str; 2] = ["oci-layout", "manifest.json"];
/// Suffixes that say what kind of file an image came from.
const SUFFIXES: [&str; 9] = [
    ".gz",
    ".tgz",
    ".zst",
    ".xz",
    ".tar",
    ".qcow2",
    ".raw",
    ".img",
    BUNDLE_SUFFIX,
];
/// The suffix of an archive of a Quicksand save. One with another suffix is recognised as well.
const BUNDLE_SUFFIX: &str = ".quicksand";

/// Makes an image, without a name, from a file or directory.
pub fn import(job: &mut Job<'_>, path: &Path, spec: &ImportSpec) -> Result<Image> {
    import_any(job, path, spec).map_err(|error| error.making(path.display()))
}

/// The name of an image that is imported without one: its file's name without the suffixes. Empty
/// for a path that does not end in a name, such as `..`.
pub fn default_name(path: &Path) -> String {
    let file = path.file_name().unwrap_or_default();
    let file = file.to_string_lossy().to_ascii_lowercase();
    let mut name = file.as_str();
    for suffix in SUFFIXES {
        name = name.strip_suffix(suffix).unwrap_or(name);
    }
    name.to_owned()
}

fn import_any(job: &mut Job<'_>, path: &Path, spec: &ImportSpec) -> Result<Image> {
    let found = std::fs::metadata(path).map_err(io_error("look at", path))?;
    if found.is_dir() && quicksand::is_save(path) {
        return quicksand::import_save(job, path, spec);
    }
    if found.is_dir() && is_layout(path) {
        return oci::import_layout(job, path, spec);
    }
    if found.is_dir() {
        return import_tree(job, path, spec);
    }
    if !found.is_file() {
        return Err(Error::Unknown {
            path: path.to_owned(),
            why: "it is neither a file nor a directory".into(),
        });
    }
    match looks_like_disk(&start(path)?) {
        Some(_) => import_whole_disk(job, path, spec),
        None => import_archive(job, path, spec),
    }
}

/// A root file system may have a file of either name, but not without a system's directories.
fn is_layout(dir: &Path) -> bool {
    let has_file = |name: &&str| dir.join(name).is_file();
    LAYOUT_FILES.iter().any(has_file) && !dir.join("etc").exists() && !dir.join("usr").exists()
}

fn is_packed_layout(image: &NewImage<'_>) -> bool {
    let has = |path: &str| image.builder.exists(path.as_bytes());
    LAYOUT_FILES.iter().any(|name| has(name)) && !has("etc") && !has("usr")
}

/// Whether a path is that of an archive of a Quicksand save, by its name.
pub fn is_bundle(path: &Path) -> bool {
    path.to_string_lossy().ends_with(BUNDLE_SUFFIX) && path.is_file()
}

/// Where an archive has a Quicksand save: at its top, or in its only directory.
fn packed_save(image: &NewImage<'_>) -> Option<PathBuf> {
    let only = image.builder.only_entry();
    let places = [Some(PathBuf::new()), only.map(PathBuf::from)];
    places.into_iter().flatten().find(|dir| {
        let has = |name| {
            let path = dir.join(name);
            image.builder.exists(path.as_os_str().as_bytes())
        };
        has("manifest.json") && has("overlays")
    })
}

fn start(path: &Path) -> Result<Vec<u8>> {
    let mut start = Vec::new();
    let file = File::open(path).map_err(io_error("open", path))?;
    file.take(START_BYTES)
        .read_to_end(&mut start)
        .map_err(io_error("read", path))?;
    Ok(start)
}

fn import_tree(job: &mut Job<'_>, dir: &Path, spec: &ImportSpec) -> Result<Image> {
    let kernel = bundle::find_or_make(job, &spec.kernel)?;
    let mut image = NewImage::begin(job.store)?;
    image.builder.add_dir(dir, &mut unpacking(job))?;
    publish(job, image, kernel.digest.clone(), spec)
}

/// Imports a tar archive: a root file system, or an image of Docker or OCI, as its members show.
fn import_archive(job: &mut Job<'_>, path: &Path, spec: &ImportSpec) -> Result<Image> {
    let mut image = NewImage::begin(job.store)?;
    let file = File::open(path).map_err(io_error("open", path))?;
    let mut file = BufReader::with_capacity(1 << 20, file);
    let added = image
        .builder
        .add_tar(&mut file, TarRules::Plain, &mut unpacking(job))?;
    if added.bytes == 0 {
        return Err(Error::Unknown {
            path: path.to_owned(),
            why: "it is empty".into(),
        });
    }
    let save = packed_save(&image);
    if save.is_none() && !is_packed_layout(&image) {
        let kernel = bundle::find_or_make(job, &spec.kernel)?;
        return publish(job, image, kernel.digest.clone(), spec);
    }
    let work = job.store.stage()?;
    let limit_bytes = writable_bytes(job.store)?;
    image
        .builder
        .copy_out(work.path(), limit_bytes, &mut unpacking(job))?;
    drop(image);
    if let Some(dir) = save {
        return quicksand::import_save(job, &work.path().join(dir), spec);
    }
    oci::import_layout(job, work.path(), spec)
}

fn import_whole_disk(job: &mut Job<'_>, path: &Path, spec: &ImportSpec) -> Result<Image> {
    let kernel = bundle::find_or_make(job, &spec.kernel)?;
    let staged = job.store.stage()?;
    let limits = disk_limits(job.store)?;
    let rootfs = staged.path().join("rootfs.raw");
    let disk = import_disk(path, &rootfs, limits, &mut unpacking(job))?;
    job.begin(Stage::Publish)?;
    let spec = ImageSpec {
        arch: Arch::HOST,
        kernel: kernel.digest.clone(),
        // A disk boots with its own init.
        init: spec.init.unwrap_or(Init::Image),
        defaults: defaults(),
        disk_bytes: Some(disk_bytes(spec.disk_bytes, disk.bytes)),
    };
    Ok(job.store.publish_image(staged, spec)?)
}

fn publish(
    job: &mut Job<'_>,
    image: NewImage<'_>,
    kernel: Digest,
    spec: &ImportSpec,
) -> Result<Image> {
    let init = spec.init.unwrap_or(Init::Agent);
    image.publish(ROOM_BYTES, job, |bytes| ImageSpec {
        arch: Arch::HOST,
        kernel,
        init,
        defaults: defaults(),
        disk_bytes: Some(disk_bytes(spec.disk_bytes, bytes)),
    })
}

fn defaults() -> ExecDefaults {
    ExecDefaults {
        env: [("PATH".to_owned(), PATH.to_owned())].into(),
        ..ExecDefaults::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_named_after_its_file() {
        for (path, name) in [
            ("/x/rootfs.tar.gz", "rootfs"),
            ("app.tgz", "app"),
            ("env.quicksand", "env"),
            ("/x/disk.qcow2", "disk"),
            ("/x/Debian-12.raw", "debian-12"),
            ("/x/tree", "tree"),
            ("tree/.", "tree"),
        ] {
            assert_eq!(default_name(Path::new(path)), name);
        }
    }

    /// Only the caller knows the name of the current directory.
    #[test]
    fn a_path_without_a_last_name_gives_no_name() {
        for path in [".", "..", "/", "x/.."] {
            assert_eq!(default_name(Path::new(path)), "", "{path}");
        }
    }
}
