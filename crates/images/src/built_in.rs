//! The built-in images: `tiny`, `debian` and those of embedded recipes. Each is made at its first
//! use, and made again when this program makes it differently.

use std::fmt;

use sandtree_store::{self as store, Digest, Image, Name, Store};
use serde::{Deserialize, Serialize};

use crate::catalog::{find_by_digest, no_image, set_name};
use crate::embedded::{self, Embedded};
use crate::error::{Error, Result};
use crate::job::Job;
use crate::{debian, memo, tiny};

#[derive(Debug, Clone, Copy)]
enum BuiltIn {
    Tiny,
    Debian,
    Recipe(&'static Embedded),
}

impl BuiltIn {
    fn of(name: &Name) -> Option<Self> {
        match name.as_str() {
            "tiny" => Some(Self::Tiny),
            "debian" => Some(Self::Debian),
            other => embedded::find(other).map(Self::Recipe),
        }
    }

    /// The version of the recipe. A store made by an older program gets a new image.
    fn recipe(self) -> u32 {
        match self {
            Self::Tiny => 3,
            Self::Debian => 2,
            Self::Recipe(recipe) => recipe.version(),
        }
    }

    fn name(self) -> Name {
        self.to_string().parse().expect("it is a name")
    }

    /// The key of this image's memo.
    fn memo_key(self) -> Name {
        format!("{self}-recipe").parse().expect("it is a name")
    }
}

impl fmt::Display for BuiltIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tiny => "tiny",
            Self::Debian => "debian",
            Self::Recipe(recipe) => recipe.name,
        })
    }
}

/// The memo of a built-in image: its digest, and the version of its recipe.
#[derive(Debug, Serialize, Deserialize)]
struct Built {
    recipe: u32,
    digest: Digest,
}

/// Whether an image of this name is made when it is first used.
pub fn is_built_in(name: &str) -> bool {
    name.parse().is_ok_and(|name| BuiltIn::of(&name).is_some())
}

/// The image of this name. A built-in one is made if it is missing or outdated.
pub fn ensure(job: &mut Job<'_>, name: &Name) -> Result<Image> {
    let found = find_pinned(job.store, name)?;
    match (found, BuiltIn::of(name)) {
        (Some(image), None) => Ok(image),
        (Some(image), Some(built_in)) if !is_outdated(job.store, built_in, &image) => Ok(image),
        (_, Some(built_in)) => build(job, built_in),
        (None, None) => Err(Error::NoImage {
            name: name.to_string(),
        }),
    }
}

/// Makes a built-in image again, from what its sources have today.
pub fn rebuild(job: &mut Job<'_>, name: &Name) -> Result<Image> {
    match BuiltIn::of(name) {
        Some(built_in) => build(job, built_in),
        None => Err(Error::NoImage {
            name: name.to_string(),
        }),
    }
}

/// Pinned, because another process may remove the name, and with it the image, before it is used.
fn find_pinned(store: &Store, name: &Name) -> Result<Option<Image>> {
    let found = match store.image(name) {
        Err(store::Error::UnknownImage { .. }) => return Ok(None),
        found => found.and_then(|image| store.pin_image(&image.digest)),
    };
    found.map(Some).map_err(no_image(name))
}

/// Whether another version of this program made the image. An image that the user gave a built-in
/// name is never outdated.
fn is_outdated(store: &Store, built_in: BuiltIn, image: &Image) -> bool {
    match store.cached::<Built>(&built_in.memo_key()) {
        Ok(Some(built)) => built.digest == image.digest && built.recipe != built_in.recipe(),
        Ok(None) => false,
        // Older versions wrote another form of memo.
        Err(_) => true,
    }
}

fn build(job: &mut Job<'_>, built_in: BuiltIn) -> Result<Image> {
    let made = match built_in {
        BuiltIn::Tiny => tiny::build(job),
        BuiltIn::Debian => debian::build(job, &[]),
        BuiltIn::Recipe(recipe) => recipe.build(job),
    };
    let image = made.map_err(|error| error.making(built_in))?;
    job.check().map_err(|error| error.making(built_in))?;
    set_name(job.store, &built_in.name(), &image)?;
    let built = Built {
        recipe: built_in.recipe(),
        digest: image.digest.clone(),
    };
    memo::record(
        job.store,
        &built_in.memo_key(),
        &built,
        "a built-in image cannot be recorded; later versions will not renew it",
    );
    Ok(image)
}

/// Whether the image `debian` is the one that this program made, or would make: not one that the
/// user gave this name.
pub fn is_debian_ours(store: &Store) -> bool {
    let Ok(image) = store.image(&BuiltIn::Debian.name()) else {
        return true;
    };
    match store.cached::<Built>(&BuiltIn::Debian.memo_key()) {
        Ok(Some(built)) => built.digest == image.digest,
        Ok(None) | Err(_) => false,
    }
}

/// Debian with more packages, without a name. An image that was made before is used again unless
/// `reuse` forbids it.
pub fn debian_with(job: &mut Job<'_>, packages: &[String], reuse: Reuse) -> Result<Image> {
    let key = debian_key(packages);
    let known = match reuse {
        Reuse::Yes => memo_of(job.store, &key),
        Reuse::No => None,
    };
    if let Some(image) = known {
        return Ok(image);
    }
    let made = debian::build(job, packages);
    let image = made.map_err(|error| error.making(BuiltIn::Debian))?;
    memo::record(
        job.store,
        &key,
        &image.digest,
        "an image cannot be recorded; it will be made again next time",
    );
    Ok(image)
}

/// Whether the result of earlier work may be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    Yes,
    No,
}

/// The image that was recorded under a key, if it still exists.
pub(crate) fn memo_of(store: &Store, key: &Name) -> Option<Image> {
    let digest = store.cached::<Digest>(key).ok()??;
    find_by_digest(store, &digest).ok()?
}

fn debian_key(packages: &[String]) -> Name {
    let wanted = debian::wanted(packages).join(" ");
    let recipe = BuiltIn::Debian.recipe();
    memo::key(
        "debian",
        &Digest::of(format!("{recipe} {wanted}").as_bytes()),
    )
}
