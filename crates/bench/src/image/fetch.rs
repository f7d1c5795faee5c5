//! Fetches the layers of an image to files, with our registry client alone.

use std::fs::File;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use sandtree::{Error, Result, image};
use sandtree_registry::{self as registry, Access, Client, Descriptor, Document, Reference};

/// As many blobs at a time as in a pull.
const THREADS: NonZeroUsize = NonZeroUsize::new(4).expect("it is not zero");

/// Fetches the layers to files in a directory. Nothing is synced: the compared tools sync nothing
/// either.
pub async fn fetch_layers(reference: &str, dir: &Path) -> Result<()> {
    let text = reference.to_owned();
    let dir = dir.to_owned();
    let fetching = tokio::task::spawn_blocking(move || {
        fetch(&text, dir).map_err(|source| Error::from(image::Error::from(source)))
    });
    fetching.await.expect("the fetch does not panic")
}

fn fetch(reference: &str, dir: PathBuf) -> Result<(), registry::Error> {
    let reference: Reference = reference.parse()?;
    let client = Client::new(&reference.registry, Access::default())?;
    let fetched = client.manifest(&reference)?;
    let layers = match Document::parse(&fetched.media_type, &fetched.bytes)? {
        Document::Manifest(manifest) => manifest.layers,
        Document::Index(_) => unreachable!("the benchmark pushed a manifest"),
    };
    let target = |layer: &Descriptor| File::create_new(dir.join(layer.digest.hex()));
    registry::fetch_all(
        &client,
        &reference.repository,
        &layers,
        THREADS,
        &target,
        &|_| Ok(()),
    )
}
