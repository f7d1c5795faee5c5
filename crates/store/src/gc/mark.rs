//! Marking: which snapshots, layers, images and kernels are reachable.
//!
//! ```text
//! names, pins ──► snapshots ──► layers
//!                           ──► images ──► kernels
//! names, pins, sandboxes ─────► images ──► kernels
//!                                      ──► warm images   ──► kernel states
//! ```
//!
//! The parent of a snapshot is not reached: every manifest lists all of its layers itself. A warm
//! image reaches nothing, and stays as long as its image is reached; a kernel state, as long as its
//! kernel is. One that does not say of what it is stays.
//!
//! Always: what never changes (manifests, records of sandboxes and images) is read once, so that
//! marking again, under the store's lock, reads only what is new. What cannot be read might reach
//! anything: it is trouble, and with trouble nothing is removed.

use std::collections::{BTreeMap, BTreeSet};

use crate::fs::{Kind, optional};
use crate::named::Named;
use crate::pin::Pin;
use crate::publish::PIN;
use crate::{Digest, Error, SandboxId, SandboxRecord, Store, WarmOf, record};

/// What marking has read: it never changes, so the next marking uses it again.
#[derive(Debug, Default)]
pub(super) struct Marker {
    snapshots: BTreeMap<Digest, Needs>,
    sandboxes: BTreeMap<SandboxId, ImageOf>,
    /// The kernel of each image.
    images: BTreeMap<Digest, Digest>,
    /// What each warm state is of, by key.
    warm: BTreeMap<Digest, WarmOf>,
}

#[derive(Debug)]
struct Needs {
    layers: Vec<Digest>,
    image: ImageOf,
}

#[derive(Debug, Clone)]
struct ImageOf {
    image: Digest,
    kernel: Digest,
}

/// What must stay.
#[derive(Debug, Default)]
pub(super) struct Marked {
    pub snapshots: BTreeSet<Digest>,
    pub layers: BTreeSet<Digest>,
    pub images: BTreeSet<Digest>,
    pub kernels: BTreeSet<Digest>,
    pub warm: BTreeSet<Digest>,
    /// What could not be read, and why.
    pub trouble: Option<String>,
}

impl Marked {
    fn add_image(&mut self, of: &ImageOf) {
        self.images.insert(of.image.clone());
        self.kernels.insert(of.kernel.clone());
    }

    fn note(&mut self, trouble: String) {
        self.trouble.get_or_insert(trouble);
    }

    fn pin(&mut self, pin: Pin) {
        match pin {
            Pin::Snapshot(digest) => self.snapshots.insert(digest),
            Pin::Image(digest) => self.images.insert(digest),
            Pin::Kernel(digest) => self.kernels.insert(digest),
        };
    }
}

impl Marker {
    pub(super) fn mark(&mut self, store: &Store) -> Result<Marked, Error> {
        let mut marked = Marked::default();
        self.learn_snapshots(store, &mut marked)?;
        self.mark_names(store, &mut marked)?;
        mark_pins(store, &mut marked)?;
        self.mark_sandboxes(store, &mut marked)?;
        self.mark_needs(&mut marked);
        self.mark_kernels(store, &mut marked)?;
        self.mark_warm(store, &mut marked)?;
        Ok(marked)
    }

    /// The keys of the warm states of an image or a kernel, as far as they say so.
    pub(super) fn warm_of(&self, wanted: &WarmOf) -> impl Iterator<Item = &Digest> {
        self.warm
            .iter()
            .filter(move |(_, of)| *of == wanted)
            .map(|(key, _)| key)
    }

    fn learn_snapshots(&mut self, store: &Store, marked: &mut Marked) -> Result<(), Error> {
        for digest in store.snapshot_digests()? {
            if self.snapshots.contains_key(&digest) {
                continue;
            }
            match store.read_snapshot(&digest) {
                Ok(snapshot) => {
                    let layers = snapshot.blobs().map(|blob| blob.digest.clone()).collect();
                    let image = snapshot.manifest.image;
                    let image = ImageOf {
                        image: image.digest,
                        kernel: image.kernel,
                    };
                    self.snapshots.insert(digest, Needs { layers, image });
                }
                Err(Error::UnknownSnapshot { .. }) => {}
                Err(error) => marked.note(format!("snapshot {digest} cannot be read: {error}")),
            }
        }
        Ok(())
    }

    fn mark_names(&self, store: &Store, marked: &mut Marked) -> Result<(), Error> {
        for (name, named) in store.names()? {
            match named {
                Ok(Named::Snapshot(digest)) => {
                    // Its manifest may be in quarantine, and worth more than the room its layers
                    // take.
                    if !self.snapshots.contains_key(&digest) {
                        marked.note(format!(
                            "name {name} points at snapshot {digest}, which is not there"
                        ));
                    }
                    marked.snapshots.insert(digest);
                }
                Ok(Named::Image(digest)) => {
                    marked.images.insert(digest);
                }
                Ok(Named::Reserved(_)) => {}
                Err(error) => marked.note(format!("name {name} cannot be read: {error}")),
            }
        }
        Ok(())
    }

    fn mark_sandboxes(&mut self, store: &Store, marked: &mut Marked) -> Result<(), Error> {
        for id in store.sandbox_ids()? {
            if !self.sandboxes.contains_key(&id) {
                match store.sandbox_by_id(&id) {
                    Ok(sandbox) => {
                        let image = image_of(sandbox.record());
                        self.sandboxes.insert(id.clone(), image);
                    }
                    Err(Error::UnknownSandbox { .. }) => {}
                    Err(error) => marked.note(format!("sandbox {id} cannot be read: {error}")),
                }
            }
            self.sandboxes
                .get(&id)
                .into_iter()
                .for_each(|image| marked.add_image(image));
        }
        Ok(())
    }

    fn mark_needs(&self, marked: &mut Marked) {
        let needs: Vec<_> = marked
            .snapshots
            .iter()
            .filter_map(|digest| self.snapshots.get(digest))
            .collect();
        for needed in needs {
            marked.layers.extend(needed.layers.iter().cloned());
            marked.add_image(&needed.image);
        }
    }

    fn mark_kernels(&mut self, store: &Store, marked: &mut Marked) -> Result<(), Error> {
        for digest in marked.images.clone() {
            if !self.images.contains_key(&digest)
                && store.files.kind(&store.layout.image(&digest))?.is_some()
            {
                match store.image_by_digest(&digest) {
                    Ok(image) => {
                        self.images.insert(digest.clone(), image.record.kernel);
                    }
                    Err(error) => marked.note(format!("image {digest} cannot be read: {error}")),
                }
            }
            marked.kernels.extend(self.images.get(&digest).cloned());
        }
        Ok(())
    }

    /// Reaching nothing, one that cannot be read is no trouble: it stays itself, and that is all.
    fn mark_warm(&mut self, store: &Store, marked: &mut Marked) -> Result<(), Error> {
        for key in store.warm_keys()? {
            if !self.warm.contains_key(&key)
                && let Ok(Some(record)) = store.warm_record(&key)
            {
                self.warm.insert(key.clone(), record.of);
            }
            let is_reached = match self.warm.get(&key) {
                None => true,
                Some(WarmOf::Image(image)) => marked.images.contains(image),
                Some(WarmOf::Kernel(kernel)) => marked.kernels.contains(kernel),
            };
            if is_reached {
                marked.warm.insert(key);
            }
        }
        Ok(())
    }
}

/// Pins, and sandboxes that are being made. Looked at before sandboxes, which a sandbox moves to
/// from here.
fn mark_pins(store: &Store, marked: &mut Marked) -> Result<(), Error> {
    let entries = store.files.list(&store.layout.staging())?;
    for entry in entries.iter().filter(|entry| entry.kind == Kind::Dir) {
        let dir = store.layout.staging().join(&entry.name);
        if let Some(bytes) = optional(store.files.read(&dir.join(PIN)))? {
            match Pin::parse(&bytes) {
                Some(pin) => marked.pin(pin),
                None => marked.note(format!("{} holds a pin that cannot be read", dir.display())),
            }
        }
        match optional(record::read::<SandboxRecord>(
            &store.files,
            &dir.join("tree/sandbox.json"),
        )) {
            Ok(found) => found
                .iter()
                .for_each(|record| marked.add_image(&image_of(record))),
            Err(error) => marked.note(error.to_string()),
        }
    }
    Ok(())
}

fn image_of(record: &SandboxRecord) -> ImageOf {
    ImageOf {
        image: record.image_digest.clone(),
        kernel: record.kernel_digest.clone(),
    }
}
