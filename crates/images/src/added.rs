//! Files of a recipe on top of an image, without a machine: the tree of the image is read, the
//! files are added, and all of it is written as a new file system.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use sandtree_rootfs as rootfs;
use sandtree_store::{Image, ImageSpec, Name};

use crate::built_in::{Reuse, memo_of};
use crate::error::{Result, io_error};
use crate::job::{Job, Stage};
use crate::memo;
use crate::new_image::{Content, NewImage, Node, ROOM_BYTES, put_all, unpacking};
use crate::recipe::{CopyFile, parse_mode};

/// The owners that need no list of users.
const ROOT: [&str; 4] = ["root", "0", "root:root", "0:0"];

/// Whether a file can be added without a machine: one regular file, which root will own.
pub fn is_plain(file: &CopyFile) -> bool {
    let owner = file.owner.as_deref();
    let is_of_root = owner.is_none_or(|owner| ROOT.contains(&owner));
    let found = fs::symlink_metadata(&file.source);
    is_of_root && !file.unpack && found.is_ok_and(|found| found.is_file())
}

/// Files on top of an image.
#[derive(Debug)]
pub struct AddedFiles {
    pub base: Image,
    pub files: Vec<CopyFile>,
    /// What the result is recorded under.
    pub key: Name,
    pub reuse: Reuse,
}

/// The image with these files, without a name. One that was made before is used again unless
/// `reuse` forbids it. `None`: that needs a machine, because the base has attributes that cannot be
/// written again, or a directory where a file is to be.
pub fn with_files(job: &mut Job<'_>, added: &AddedFiles) -> Result<Option<Image>> {
    let AddedFiles {
        base,
        files,
        key,
        reuse,
    } = added;
    let known = match reuse {
        Reuse::Yes => memo_of(job.store, key),
        Reuse::No => None,
    };
    if known.is_some() {
        return Ok(known);
    }
    job.begin(Stage::Unpack)?;
    let nodes: Vec<Node> = files.iter().map(node).collect::<Result<_>>()?;
    let mut image = NewImage::begin(job.store)?;
    let added = image
        .builder
        .add_file_system(&base.rootfs(), &mut unpacking(job));
    match added {
        Err(rootfs::Error::Refused { name, rule }) => {
            tracing::debug!(name, rule, "files are added in a machine");
            return Ok(None);
        }
        added => added?,
    };
    let is_dir = |node: &Node| image.builder.is_dir(node.path.as_bytes());
    if nodes.iter().any(is_dir) {
        return Ok(None);
    }
    put_all(&mut image.builder, &nodes)?;
    let record = &base.record;
    let spec = ImageSpec {
        arch: record.arch,
        kernel: record.kernel.clone(),
        init: record.init,
        defaults: record.defaults.clone(),
        disk_bytes: record.disk_bytes,
    };
    let image = image.publish(ROOM_BYTES, job, |_| spec)?;
    let consequence = "an image cannot be recorded; it will be made again next time";
    memo::record(job.store, key, &image.digest, consequence);
    Ok(Some(image))
}

fn node(file: &CopyFile) -> Result<Node> {
    let chosen = file.mode.as_deref().and_then(parse_mode);
    let mode = match chosen {
        Some(mode) => mode,
        None => {
            let found = fs::metadata(&file.source).map_err(io_error("look at", &file.source))?;
            found.permissions().mode()
        }
    };
    Ok(Node {
        path: file.target.clone(),
        mode: (mode & 0o7777) as u16,
        owner: 0,
        content: Content::HostFile(file.source.clone()),
    })
}
