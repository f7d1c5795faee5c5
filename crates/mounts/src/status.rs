//! What a server can say of itself, and which errors of the host are worth saying.

use std::path::PathBuf;

use rustix::io::Errno;
use sandtree_proto::mount::{MountId, Node, Request};

use crate::directory::Access;

/// One mount, as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    pub mount: MountId,
    pub path: PathBuf,
    pub access: Access,
    /// The directory was removed on the host: it is empty, and nothing can be made in it.
    pub is_removed: bool,
    pub guest: Guest,
    pub requests: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    /// Descriptors of files without a name that the guest has open.
    pub kept: usize,
    /// Watched directories.
    pub watches: usize,
    pub watching: Watching,
    pub last_error: Option<HostError>,
    pub confinement: Confinement,
}

/// What the guest at the other end of the port does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guest {
    /// It has not answered the greeting.
    Silent,
    /// It compares what it knows with the host.
    Revalidating,
    Ready,
    /// It broke the protocol too often, and is not served any longer.
    Refused,
    /// The port is closed.
    Gone,
}

/// Whether changes of other programs are reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watching {
    Full,
    /// Some directories are not watched: a server watches at most so many.
    Limited {
        most: usize,
    },
    /// Some directories are not watched: the host's kernel refuses. ENOSPC is the limit of the
    /// host's user (`fs.inotify.max_user_watches`).
    Refused {
        errno: i32,
    },
    /// The host has no inotify instance left (`fs.inotify.max_user_instances`).
    Unavailable {
        errno: i32,
    },
}

/// Whether Landlock confines the server's thread to the mounted directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confinement {
    Landlock {
        version: u32,
    },
    /// The kernel refused. The thread still walks beneath the mounted directories only.
    None {
        errno: i32,
    },
}

/// An error of the host that is not the guest's doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostError {
    pub errno: i32,
    /// The request, and the path of its file.
    pub what: String,
}

/// Counts of one mount.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub requests: u64,
    pub bytes_read: u64,
    pub bytes_written: u64,
    pub last_error: Option<HostError>,
}

/// The longest path in a status, in bytes.
const SHOWN_BYTES: usize = 256;

impl Counts {
    /// What the guest gets for an error. Errors that a local disk does not give become EIO.
    pub(crate) fn judge(&mut self, errno: Errno, request: &Request) -> Errno {
        // A guest's kernel would never ask again, for any file.
        if errno == Errno::NOSYS {
            return Errno::OPNOTSUPP;
        }
        let is_usual = is_usual(errno);
        if !is_usual || is_trouble(errno) {
            self.last_error = Some(HostError {
                errno: errno.raw_os_error(),
                what: describe(request),
            });
        }
        if is_usual { errno } else { Errno::IO }
    }

    pub(crate) fn panicked(&mut self, request: &Request) {
        self.last_error = Some(HostError {
            errno: Errno::IO.raw_os_error(),
            what: format!("{}: the server failed", describe(request)),
        });
    }
}

/// What programs expect of a file system.
fn is_usual(errno: Errno) -> bool {
    is_trouble(errno)
        || matches!(
            errno,
            Errno::NOENT
                | Errno::EXIST
                | Errno::NOTDIR
                | Errno::ISDIR
                | Errno::NOTEMPTY
                | Errno::STALE
                | Errno::INVAL
                | Errno::NAMETOOLONG
                | Errno::LOOP
                | Errno::XDEV
                | Errno::MLINK
                | Errno::FBIG
                | Errno::TXTBSY
                | Errno::BUSY
                | Errno::NXIO
                | Errno::NODATA
                | Errno::RANGE
                | Errno::TOOBIG
                | Errno::AGAIN
                | Errno::OPNOTSUPP
        )
}

/// Usual errors that the host's user wants to know of.
fn is_trouble(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::IO
            | Errno::ACCESS
            | Errno::PERM
            | Errno::ROFS
            | Errno::NOSPC
            | Errno::DQUOT
            | Errno::MFILE
            | Errno::NFILE
            | Errno::NOMEM
    )
}

fn describe(request: &Request) -> String {
    let (what, node) = named(request);
    let Some(node) = node else {
        return what.to_owned();
    };
    format!("{what} {}", shown(node))
}

fn shown(node: &Node) -> String {
    if node.kept {
        return "a file without a name".to_owned();
    }
    if node.path.is_empty() {
        return "the mounted directory".to_owned();
    }
    let path = &node.path[..node.path.len().min(SHOWN_BYTES)];
    format!("{:?}", String::from_utf8_lossy(path))
}

fn named(request: &Request) -> (&'static str, Option<&Node>) {
    match request {
        Request::Root => ("look at the mounted directory", None),
        Request::Space => ("ask for the free space", None),
        Request::Revalidate => ("revalidate", None),
        Request::Lookup { directory, .. } => ("look up a name in", Some(directory)),
        Request::Stat { node } => ("look at", Some(node)),
        Request::Change { node, .. } => ("change", Some(node)),
        Request::ReadLink { node } => ("read the link", Some(node)),
        Request::Make { directory, .. } => ("make a name in", Some(directory)),
        Request::Remove { directory, .. } => ("remove a name from", Some(directory)),
        Request::Rename { from, .. } => ("rename in", Some(from)),
        Request::Link { node, .. } => ("link", Some(node)),
        Request::Read { node, .. } => ("read", Some(node)),
        Request::Write { node, .. } => ("write", Some(node)),
        Request::List { directory, .. } => ("list", Some(directory)),
        Request::Sync { node } => ("sync", Some(node)),
        Request::Allocate { node, .. } => ("allocate", Some(node)),
        Request::Copy { to, .. } => ("copy to", Some(to)),
        Request::Seek { node, .. } => ("seek in", Some(node)),
        Request::GetXattr { node, .. }
        | Request::SetXattr { node, .. }
        | Request::ListXattr { node }
        | Request::RemoveXattr { node, .. } => ("use attributes of", Some(node)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sync_of(path: &[u8], kept: bool) -> Request {
        Request::Sync {
            node: Node {
                path: path.to_vec(),
                id: Default::default(),
                kept,
            },
        }
    }

    fn sync() -> Request {
        sync_of(b"dir/\xff", false)
    }

    #[test]
    fn an_error_names_what_has_no_path() {
        let said = |request| describe(&request);
        assert_eq!(said(sync_of(b"", true)), "sync a file without a name");
        assert_eq!(said(sync_of(b"", false)), "sync the mounted directory");
    }

    #[test]
    fn the_guest_gets_errors_of_a_disk_and_the_host_learns_of_its_troubles() {
        let mut counts = Counts::default();
        assert_eq!(counts.judge(Errno::NOENT, &sync()), Errno::NOENT);
        assert_eq!(counts.judge(Errno::NOSYS, &sync()), Errno::OPNOTSUPP);
        assert_eq!(counts.last_error, None);
        assert_eq!(counts.judge(Errno::NOSPC, &sync()), Errno::NOSPC);
        assert_eq!(counts.judge(Errno::TIMEDOUT, &sync()), Errno::IO);
        let error = counts.last_error.expect("it is noted");
        assert_eq!(error.errno, Errno::TIMEDOUT.raw_os_error());
        assert_eq!(error.what, "sync \"dir/\u{fffd}\"");
    }
}
