//! What lies at a path, and how it becomes an image.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use sandtree_rootfs::{DiskLimits, TarRules, import_disk, looks_like_disk};
use sandtree_store::{ExecDefaults, Image, ImageSpec, Init, Store};

use super::making::{Making, ROOM_BYTES, disk_bytes, unpacking, writable_bytes};
use super::{Error, ImportSpec, PATH, Progress, Stage, Watch, bundle, io_error, oci};
use crate::spec::host_arch;

/// Enough to tell a disk, an archive and a packed archive apart.
const START_BYTES: u64 = 4096;
/// What an archive holds that is an image, and not a root file system.
const LAYOUT_FILES: [&str; 2] = ["oci-layout", "manifest.json"];

pub(super) fn import(
    store: &Store,
    path: &Path,
    spec: &ImportSpec,
    watch: &mut Watch<'_>,
) -> Result<Image, Error> {
    let found = std::fs::metadata(path).map_err(io_error("look at", path))?;
    if found.is_dir() {
        return match is_layout(path) {
            true => oci::import_layout(store, path, spec, watch),
            false => import_tree(store, path, spec, watch),
        };
    }
    if !found.is_file() {
        return Err(Error::Unknown {
            path: path.to_owned(),
            why: "it is neither a file nor a directory".into(),
        });
    }
    match looks_like_disk(&start(path)?) {
        Some(_) => import_whole_disk(store, path, spec, watch),
        None => import_archive(store, path, spec, watch),
    }
}

fn is_layout(dir: &Path) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    // A root file system may have a file of either name, but not without the places of a system.
    LAYOUT_FILES.iter().any(|name| has(name))
        && !dir.join("etc").exists()
        && !dir.join("usr").exists()
}

fn start(path: &Path) -> Result<Vec<u8>, Error> {
    let mut start = Vec::new();
    let file = File::open(path).map_err(io_error("open", path))?;
    file.take(START_BYTES)
        .read_to_end(&mut start)
        .map_err(io_error("read", path))?;
    Ok(start)
}

fn import_tree(
    store: &Store,
    dir: &Path,
    spec: &ImportSpec,
    watch: &mut Watch<'_>,
) -> Result<Image, Error> {
    let kernel = bundle::find_or_make(store, &spec.kernel, watch)?;
    let mut making = Making::begin(store)?;
    making.builder.add_dir(dir, &mut unpacking(watch))?;
    publish(making, kernel.digest.clone(), spec, watch)
}

/// A root file system, or an image of Docker's or OCI's: which it is, its members tell.
fn import_archive(
    store: &Store,
    path: &Path,
    spec: &ImportSpec,
    watch: &mut Watch<'_>,
) -> Result<Image, Error> {
    let mut making = Making::begin(store)?;
    let mut file =
        BufReader::with_capacity(1 << 20, File::open(path).map_err(io_error("open", path))?);
    let added = making
        .builder
        .add_tar(&mut file, TarRules::Plain, &mut unpacking(watch))?;
    if added.bytes == 0 {
        return Err(Error::Unknown {
            path: path.to_owned(),
            why: "it is empty".into(),
        });
    }
    if !is_packed_image(&making) {
        let kernel = bundle::find_or_make(store, &spec.kernel, watch)?;
        return publish(making, kernel.digest.clone(), spec, watch);
    }
    let work = store.stage()?;
    let limit_bytes = writable_bytes(store)?;
    making
        .builder
        .copy_out(work.path(), limit_bytes, &mut unpacking(watch))?;
    drop(making);
    oci::import_layout(store, work.path(), spec, watch)
}

fn is_packed_image(making: &Making<'_>) -> bool {
    let has = |path: &str| making.builder.exists(path.as_bytes());
    LAYOUT_FILES.iter().any(|name| has(name)) && !has("etc") && !has("usr")
}

fn import_whole_disk(
    store: &Store,
    path: &Path,
    spec: &ImportSpec,
    watch: &mut Watch<'_>,
) -> Result<Image, Error> {
    let kernel = bundle::find_or_make(store, &spec.kernel, watch)?;
    let staged = store.stage()?;
    let bytes = store.disk_free_bytes()?.saturating_mul(4);
    let limits = DiskLimits {
        bytes,
        written_bytes: writable_bytes(store)?,
    };
    let disk = import_disk(
        path,
        &staged.path().join("rootfs.raw"),
        limits,
        &mut unpacking(watch),
    )?;
    watch(Progress::begin(Stage::Publish))?;
    let spec = ImageSpec {
        arch: host_arch(),
        kernel: kernel.digest.clone(),
        // A disk was made to boot by itself.
        init: spec.init.unwrap_or(Init::Image),
        defaults: defaults(),
        disk_bytes: Some(disk_bytes(spec.disk_bytes, disk.bytes)),
    };
    Ok(store.publish_image(staged, spec)?)
}

fn publish(
    making: Making<'_>,
    kernel: sandtree_store::Digest,
    spec: &ImportSpec,
    watch: &mut Watch<'_>,
) -> Result<Image, Error> {
    let init = spec.init.unwrap_or(Init::Agent);
    making.publish(ROOM_BYTES, watch, |bytes| ImageSpec {
        arch: host_arch(),
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
