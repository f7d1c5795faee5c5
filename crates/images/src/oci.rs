//! OCI images: layers that are applied one over the other, and a configuration that says how
//! commands run.
//!
//! Always: every layer is hashed twice, packed and unpacked. The first digest must be the
//! manifest's and the second the configuration's before the image is published.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sandtree_registry::{
    Descriptor, ImageConfig, LayerPacking, Layout, Manifest, Platform, RunConfig,
};
use sandtree_rootfs::{Added, TarRules};
use sandtree_store::{Arch, ExecDefaults, Image, ImageSpec, Init};
use sha2::{Digest as _, Sha256};

use crate::bundle;
use crate::error::{Error, Result, io_error};
use crate::hex::hex;
use crate::job::{Job, Stage};
use crate::new_image::{NewImage, ROOM_BYTES, disk_bytes, unpacking};
use crate::spec::ImportSpec;

/// The platform of our machines, in OCI's terms.
pub(crate) const OS: &str = "linux";
pub(crate) const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") {
    "arm64"
} else {
    "amd64"
};

/// Returns the file of a layer, by its index, once the file is complete. It is called for each
/// layer in order.
pub(crate) type NextLayer<'a> = dyn FnMut(usize, &mut Job<'_>) -> Result<PathBuf> + 'a;

/// The two documents that describe an image.
pub(crate) struct Described<'a> {
    pub manifest: &'a Manifest,
    pub config: &'a ImageConfig,
}

/// Applies the layers of an image one over the other, and publishes the result without a name.
pub(crate) fn image_of_layers(
    job: &mut Job<'_>,
    described: &Described<'_>,
    spec: &ImportSpec,
    next: &mut NextLayer<'_>,
) -> Result<Image> {
    let Described { manifest, config } = described;
    check(manifest, config)?;
    let kernel = bundle::find_or_make(job, &spec.kernel)?;
    let mut image = NewImage::begin(job.store)?;
    for (index, layer) in manifest.layers.iter().enumerate() {
        let path = next(index, job)?;
        let added = add_layer(job, &mut image, layer, &path)?;
        if hex(&added.sha256) != config.rootfs.diff_ids[index].hex() {
            return Err(Error::WrongLayer {
                digest: layer.digest.to_string(),
            });
        }
    }
    let defaults = defaults(&config.config);
    image.publish(ROOM_BYTES, job, |bytes| ImageSpec {
        arch: Arch::HOST,
        kernel: kernel.digest.clone(),
        init: spec.init.unwrap_or(Init::Agent),
        defaults,
        disk_bytes: Some(disk_bytes(spec.disk_bytes, bytes)),
    })
}

fn check(manifest: &Manifest, config: &ImageConfig) -> Result<()> {
    let refused = |what: String| Err(Error::Config { what });
    if config.os != OS || config.architecture != ARCHITECTURE {
        return refused(format!(
            "it is for {}/{}, and machines here are {OS}/{ARCHITECTURE}",
            config.os, config.architecture
        ));
    }
    let layers = manifest.layers.len();
    let listed = config.rootfs.diff_ids.len();
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

/// The bytes themselves show how the layer is packed; its media type is only checked to be known.
fn add_layer(
    job: &mut Job<'_>,
    image: &mut NewImage<'_>,
    layer: &Descriptor,
    path: &Path,
) -> Result<Added> {
    let file = File::open(path).map_err(io_error("open", path))?;
    let mut packed = Hashed {
        inner: io::BufReader::with_capacity(1 << 20, file),
        hash: Sha256::new(),
    };
    let mut progress = unpacking(job);
    let added = image
        .builder
        .add_tar(&mut packed, TarRules::Layer, &mut progress)?;
    // Bytes after the archive's end are part of the digest.
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
        ..ExecDefaults::default()
    }
}

/// Imports a directory that is an OCI layout, or an unpacked archive of `docker save`.
pub(crate) fn import_layout(job: &mut Job<'_>, dir: &Path, spec: &ImportSpec) -> Result<Image> {
    job.begin(Stage::Unpack)?;
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
    let mut next = |index: usize, _: &mut Job<'_>| Ok(layout.blob(&manifest.layers[index])?);
    image_of_layers(job, &described, spec, &mut next)
}
