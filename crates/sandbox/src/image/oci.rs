//! OCI images: layers, one over the other, and how their maker wants them to be used.
//!
//! Always: every byte of a layer is hashed twice, packed against the manifest and unpacked against
//! the configuration, and both must fit before anything is published.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sandtree_registry::{
    Descriptor, ImageConfig, LayerPacking, Layout, Manifest, Platform, RunConfig,
};
use sandtree_rootfs::{Added, TarRules};
use sandtree_store::{ExecDefaults, Image, ImageSpec, Init, Store};
use sha2::{Digest as _, Sha256};

use super::bundle;
use super::making::{Making, ROOM_BYTES, disk_bytes, unpacking};
use super::{Error, ImportSpec, Progress, Stage, Watch, hex, io_error};
use crate::spec::host_arch;

/// What these machines are to a registry.
pub(crate) const OS: &str = "linux";
pub(crate) const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") {
    "arm64"
} else {
    "amd64"
};

/// Gives the layers of an image in their order, each as a file, when it is there.
pub(crate) type NextLayer<'a> = dyn FnMut(usize, &mut Watch<'_>) -> Result<PathBuf, Error> + 'a;

/// An image as its maker describes it.
pub(crate) struct Described<'a> {
    pub manifest: &'a Manifest,
    pub config: &'a ImageConfig,
}

/// Lays the layers of an image over each other, and publishes it without a name.
pub(crate) fn image_of(
    store: &Store,
    described: &Described<'_>,
    spec: &ImportSpec,
    next: &mut NextLayer<'_>,
    watch: &mut Watch<'_>,
) -> Result<Image, Error> {
    let Described { manifest, config } = described;
    check(manifest, config)?;
    let kernel = bundle::find_or_make(store, &spec.kernel, watch)?;
    let mut making = Making::begin(store)?;
    for (index, layer) in manifest.layers.iter().enumerate() {
        let path = next(index, watch)?;
        let added = add_layer(&mut making, layer, &path, watch)?;
        if hex(&added.sha256) != config.rootfs.diff_ids[index].hex() {
            return Err(Error::WrongLayer {
                digest: layer.digest.to_string(),
            });
        }
    }
    let defaults = defaults(&config.config);
    making.publish(ROOM_BYTES, watch, |bytes| ImageSpec {
        arch: host_arch(),
        kernel: kernel.digest.clone(),
        init: spec.init.unwrap_or(Init::Agent),
        defaults,
        disk_bytes: Some(disk_bytes(spec.disk_bytes, bytes)),
    })
}

fn check(manifest: &Manifest, config: &ImageConfig) -> Result<(), Error> {
    let refused = |what: String| Err(Error::Config { what });
    if config.os != OS || config.architecture != ARCHITECTURE {
        return refused(format!(
            "it is for {}/{}, and machines here are {OS}/{ARCHITECTURE}",
            config.os, config.architecture
        ));
    }
    let (layers, listed) = (manifest.layers.len(), config.rootfs.diff_ids.len());
    if layers != listed {
        return refused(format!(
            "it has {layers} layers, and its configuration lists {listed}"
        ));
    }
    manifest
        .layers
        .iter()
        .try_for_each(|layer| LayerPacking::of(&layer.media_type).map(drop))
        .map_err(Error::from)
}

/// The packing is told by the bytes themselves; the media type was checked to be one we know.
fn add_layer(
    making: &mut Making<'_>,
    layer: &Descriptor,
    path: &Path,
    watch: &mut Watch<'_>,
) -> Result<Added, Error> {
    let file = File::open(path).map_err(io_error("open", path))?;
    let mut packed = Hashed {
        inner: io::BufReader::with_capacity(1 << 20, file),
        hash: Sha256::new(),
    };
    let mut told = unpacking(watch);
    let added = making
        .builder
        .add_tar(&mut packed, TarRules::Layer, &mut told)?;
    // What follows the archive's end counts, too.
    io::copy(&mut packed, &mut io::sink()).map_err(io_error("read", path))?;
    if hex(&packed.hash.finalize()) != layer.digest.hex() {
        return Err(Error::WrongLayer {
            digest: layer.digest.to_string(),
        });
    }
    Ok(added)
}

struct Hashed<R> {
    inner: R,
    hash: Sha256,
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(into)?;
        self.hash.update(&into[..count]);
        Ok(count)
    }
}

fn defaults(run: &RunConfig) -> ExecDefaults {
    let pairs = run.env.iter().filter_map(|entry| entry.split_once('='));
    ExecDefaults {
        env: pairs
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect(),
        user: Some(run.user.clone()).filter(|user| !user.is_empty()),
        workdir: Some(if run.working_dir.is_empty() {
            "/".to_owned()
        } else {
            run.working_dir.clone()
        }),
        entrypoint: run.entrypoint.clone(),
        cmd: run.cmd.clone(),
    }
}

/// An image in a directory: an OCI layout, or an unpacked archive of Docker's.
pub(super) fn import_layout(
    store: &Store,
    dir: &Path,
    spec: &ImportSpec,
    watch: &mut Watch<'_>,
) -> Result<Image, Error> {
    watch(Progress::begin(Stage::Unpack))?;
    let layout = Layout::open(dir)?;
    let platform = Platform {
        os: OS.to_owned(),
        architecture: ARCHITECTURE.to_owned(),
        variant: None,
    };
    let (manifest, config) = layout.choose(&platform, None)?;
    let described = Described {
        manifest: &manifest,
        config: &config,
    };
    let mut next = |index: usize, _: &mut Watch<'_>| Ok(layout.blob(&manifest.layers[index])?);
    image_of(store, &described, spec, &mut next, watch)
}
