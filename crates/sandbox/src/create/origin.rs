//! Finds what a sandbox begins from: an image, or a snapshot with or without its memory. A save of
//! Quicksand becomes an image.

use std::sync::Arc;

use sandtree_images::{self as images, ImportSpec};
use sandtree_store::{
    self as store, DisplaySize, Image, MachineRecord, Named, Network, Settings, SnapshotManifest,
    Target,
};

use crate::blocking::{blocking, may_block};
use crate::error::{Error, Result, Setting, store_error};
use crate::held::Held;
use crate::host::Host;
use crate::image;
use crate::inner::Inner;
use crate::progress::{Progress, Watched};
use crate::reference::{Reference, no_snapshot};
use crate::spec::SandboxSpec;

#[derive(Debug)]
pub(crate) enum Beginning {
    Image(Box<Image>),
    Snapshot(Box<Held>),
}

/// A spec that a host can create without waiting. Its image or snapshot stays in the store while
/// this value lives.
#[derive(Debug)]
pub struct Prepared {
    pub spec: SandboxSpec,
    _kept: Beginning,
}

impl Host {
    /// Gets a sandbox's image or snapshot into the store, so that the creation does not wait for
    /// it. A missing image that is built in is made. A snapshot in a directory is imported, and
    /// every byte of it checked.
    pub async fn prepare(
        &self,
        mut spec: SandboxSpec,
        progress: Progress,
        image: impl FnMut(image::Progress) + Send + 'static,
    ) -> Result<Prepared> {
        let beginning = may_block(self.inner.beginning(&spec, progress, image)).await?;
        match &beginning {
            // The digest names the same content even if the name or the directory changes.
            Beginning::Snapshot(held) => {
                spec.image = None;
                spec.snapshot = Some(held.digest.to_string());
            }
            Beginning::Image(image) if is_path(&spec)? => {
                spec.image = Some(image.digest.to_string());
            }
            Beginning::Image(_) => {}
        }
        Ok(Prepared {
            spec,
            _kept: beginning,
        })
    }
}

impl Inner {
    pub async fn beginning(
        self: &Arc<Self>,
        spec: &SandboxSpec,
        progress: Progress,
        image: impl FnMut(image::Progress) + Send + 'static,
    ) -> Result<Beginning> {
        let reference = spec.beginning()?;
        if let (Reference::Digest(digest), None) = (&reference, &spec.snapshot)
            && let Some(image) = self.image_if_there(digest)?
        {
            return Ok(Beginning::Image(Box::new(image)));
        }
        if let (Reference::Name(name), None) = (&reference, &spec.snapshot) {
            let named = self.store.named(name).map_err(store_error("read a name"))?;
            if !matches!(named, Some(Named::Snapshot(_))) {
                let image = self.clone().ensure_image(name.as_str(), image).await?;
                return Ok(Beginning::Image(Box::new(image)));
            }
        }
        if let (Reference::Path(path), None) = (&reference, &spec.snapshot)
            && (images::is_save(path) || images::is_bundle(path))
        {
            let path = path.clone();
            let importing = self.image_job(image, move |job| {
                images::import(job, &path, &ImportSpec::default())
            });
            return Ok(Beginning::Image(Box::new(importing.await?)));
        }
        Ok(Beginning::Snapshot(Box::new(
            self.snapshot(&reference, progress).await?,
        )))
    }

    /// A snapshot that stays in the store while the result lives. A snapshot in a directory is
    /// imported, and every byte of it checked.
    pub async fn snapshot(
        self: &Arc<Self>,
        reference: &Reference,
        progress: Progress,
    ) -> Result<Held> {
        let Reference::Path(path) = reference else {
            let unknown = || no_snapshot(&reference.to_string());
            return self.pinned_as(&self.digest_of(reference)?.ok_or_else(unknown)?, reference);
        };
        let host = self.clone();
        let path = path.clone();
        let imported = Watched::run(progress, move |progress| {
            host.store.import_dir(&path, Target::Unnamed, progress)
        });
        let imported = imported.await.map_err(|error| match error {
            store::Error::NotASnapshotDir { path, .. } => no_snapshot(&path.to_string_lossy()),
            error => store_error("take in a snapshot")(error),
        })?;
        Ok(Held::for_one_use(imported, self))
    }

    /// A snapshot by its digest. It stays in the store while the result lives.
    pub fn pinned(&self, digest: &store::Digest) -> Result<Held> {
        self.pinned_as(digest, &Reference::Digest(digest.clone()))
    }

    fn pinned_as(&self, digest: &store::Digest, reference: &Reference) -> Result<Held> {
        self.store
            .pin(digest)
            .map(Held::lasting)
            .map_err(|error| match error {
                store::Error::UnknownSnapshot { .. } => no_snapshot(&reference.to_string()),
                error => store_error("read a snapshot")(error),
            })
    }

    /// The image of a snapshot, by its digest: by now, the image's name may belong to another
    /// image.
    pub async fn image_of(self: &Arc<Self>, manifest: &SnapshotManifest) -> Result<Image> {
        let host = self.clone();
        let image = manifest.image.clone();
        blocking(move || match host.store.image_by_digest(&image.digest) {
            Ok(found) => Ok(found),
            Err(error) if error.io_kind() == Some(std::io::ErrorKind::NotFound) => {
                let here = match host.store.named(&image.name) {
                    Ok(Some(Named::Image(digest))) => Some(digest.to_string()),
                    _ => None,
                };
                Err(Error::MissingImage {
                    name: image.name.to_string(),
                    digest: image.digest.to_string(),
                    here,
                })
            }
            Err(error) => Err(store_error("read an image")(error)),
        })
        .await
    }
}

fn is_path(spec: &SandboxSpec) -> Result<bool> {
    Ok(matches!(spec.beginning()?, Reference::Path(_)))
}

/// The network of the machine of a sandbox that asks for `asked`. A machine with the full network
/// can be isolated without another device.
fn backend(machine: Network, asked: Network) -> Network {
    if (machine, asked) == (Network::Full, Network::Isolated) {
        machine
    } else {
        asked
    }
}

/// Checks that a sandbox asks for the machine that the memory was captured in: the memory cannot
/// continue in another one.
pub(crate) fn check_as_saved(
    machine: &MachineRecord,
    saved: &Settings,
    asked: &Settings,
) -> Result<()> {
    let text = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
    let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
    let size =
        |display: Option<DisplaySize>| display.map_or("none".to_owned(), |size| size.to_string());
    let same = [
        (
            Setting::Memory,
            mib(saved.memory_bytes),
            mib(asked.memory_bytes),
        ),
        (
            Setting::Cpus,
            machine.cpus.to_string(),
            asked.cpus.to_string(),
        ),
        (
            Setting::Network,
            text(&machine.network),
            text(&backend(machine.network, asked.network)),
        ),
        (
            Setting::Processor,
            saved.cpu.clone().unwrap_or_default(),
            asked.cpu.clone().unwrap_or_default(),
        ),
        (Setting::Display, size(machine.display), size(asked.display)),
        (
            Setting::QemuArguments,
            machine.qemu_args.join(" "),
            asked.qemu_args.join(" "),
        ),
    ];
    match same.into_iter().find(|(_, saved, asked)| saved != asked) {
        None => Ok(()),
        Some((what, saved, asked)) => Err(Error::NotAsSaved { what, saved, asked }),
    }
}
