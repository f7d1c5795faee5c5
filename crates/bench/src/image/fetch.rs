//! Fetches the layers of an image to files, with our registry client alone.

use std::fs::File;
use std::num::NonZeroUsize;
use std::path::Path;

use sandtree::{Error, Result, image};
use sandtree_registry::{self as registry, Access, Client, Descriptor, Document, Reference};

/// As many blobs at a time as in a pull.
const THREADS: NonZeroUsize = NonZeroUsize::new(4).expect("it is not zero");

/// Fetches the layers to files in a directory. Nothing is synced: the compared tools sync nothing
/// either.
pub async fn fetch_layers(reference: &str, dir: &Path) -> Result<()> {
    let text = reference.to_owned();
    let dir = dir.to_owned();
    let fetching = tokio::task::spawn_blocking(move || fetch(&text, &dir));
    fetching.await.expect("the fetch does not panic")
}

fn fetch(text: &str, dir: &Path) -> Result<()> {
    let failed = |source: registry::Error| Error::from(image::Error::from(source));
    let reference: Reference = text.parse().map_err(failed)?;
    let client = Client::new(&reference.registry, Access::default()).map_err(failed)?;
    let fetched = client.manifest(&reference).map_err(failed)?;
    let document = Document::parse(&fetched.media_type, &fetched.bytes).map_err(failed)?;
    let Document::Manifest(manifest) = document else {
        return Err(Error::invalid("image to fetch", text, "a manifest"));
    };
    let target = |layer: &Descriptor| File::create_new(dir.join(layer.digest.hex()));
    let watch = |_bytes| Ok(());
    registry::fetch_all(
        &client,
        &reference.repository,
        &manifest.layers,
        THREADS,
        &target,
        &watch,
    )
    .map_err(failed)
}
