//! Owners and extended attributes of files.

use std::path::Path;

use rustix::fs::{Gid, Uid, XattrFlags};
use rustix::io::Errno;
use sandtree_proto::message::Attribute;
use sandtree_proto::{Failure, Reply};

use crate::failure::{OrFailure, refusal};

/// As Linux bounds the list of names, and a value.
const LIST_MAX: usize = 64 * 1024;
const VALUE_MAX: usize = 64 * 1024;
/// All values of a reply must fit one frame.
const REPLY_MAX: usize = 48 * 1024;

/// Sets the owner of a file, or of a link itself.
pub fn set_owner(path: &Path, uid: u32, gid: u32) -> Result<Reply, Failure> {
    // Only root can give files away; in tests the agent may be any user.
    if rustix::process::geteuid().is_root() {
        let set = rustix::fs::chownat(
            rustix::fs::CWD,
            path,
            Some(Uid::from_raw(uid)),
            Some(Gid::from_raw(gid)),
            rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
        );
        set.or_failure(|| format!("cannot set the owner of {}", path.display()))?;
    }
    Ok(Reply::Done)
}

/// The attributes whose names begin with `prefix`.
pub fn attributes(path: &Path, prefix: &[u8]) -> Result<Reply, Failure> {
    let message = || format!("cannot read the attributes of {}", path.display());
    let mut found = Vec::new();
    let mut bytes = 0;
    for name in names(path, prefix)? {
        let mut value = vec![0; VALUE_MAX];
        let length = match rustix::fs::getxattr(path, name.as_slice(), &mut value) {
            // It was removed after the names were read.
            Err(Errno::NODATA) => continue,
            other => other.or_failure(message)?,
        };
        value.truncate(length);
        let name = name[prefix.len()..].to_vec();
        bytes += name.len() + value.len();
        if bytes > REPLY_MAX {
            return Err(refusal(Errno::FBIG, format!("{}: too many", message())));
        }
        found.push((name, value));
    }
    Ok(Reply::Attributes(found))
}

/// Replaces the attributes whose names begin with `prefix`.
pub fn set_attributes(
    path: &Path,
    prefix: &[u8],
    attributes: &[Attribute],
) -> Result<Reply, Failure> {
    let message = || format!("cannot set the attributes of {}", path.display());
    let full = |name: &[u8]| [prefix, name].concat();
    for name in names(path, prefix)? {
        let stays = attributes.iter().any(|(kept, _)| full(kept) == name);
        if !stays {
            rustix::fs::removexattr(path, name.as_slice()).or_failure(message)?;
        }
    }
    for (name, value) in attributes {
        let name = full(name);
        rustix::fs::setxattr(path, name.as_slice(), value, XattrFlags::empty())
            .or_failure(message)?;
    }
    Ok(Reply::Done)
}

/// The full names that begin with `prefix`. A file system without attributes has none.
fn names(path: &Path, prefix: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
    let message = || format!("cannot list the attributes of {}", path.display());
    let mut list = vec![0; LIST_MAX];
    let length = match rustix::fs::listxattr(path, &mut list) {
        Err(Errno::OPNOTSUPP) => 0,
        other => other.or_failure(message)?,
    };
    let names = list[..length].split(|byte| *byte == 0);
    let wanted = names.filter(|name| !name.is_empty() && name.starts_with(prefix));
    Ok(wanted.map(<[u8]>::to_vec).collect())
}
