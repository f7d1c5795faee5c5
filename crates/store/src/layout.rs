//! The directories and files of a store.
//!
//! ```text
//! format                     "sandtree-store 3\n"; 2 is upgraded, any other number is refused by name
//! lock                       held for moments: to make or end a staging directory, to take a sandbox's name away
//! staging/<id>/              unfinished work: `lock`, held by its maker; `tree`, what is being made or removed; `pin`, what must stay meanwhile; `committed`, of a batch of sandboxes
//! names/images/<name>        "<digest>" of an image, "snapshot <digest>", or "reserved <sandbox id>": a save to come; replaced by rename
//! names/sandboxes/<name>     id of the sandbox; a link to the sandbox's own `claim`, so two claims cannot both win
//! kernels/<digest>/          bundle.json, kernel, modules/*.ko; initramfs if the user has one of their own
//! initramfs/<digest>.cpio    agent and modules; named by the digest of what it is made of
//! images/<digest>/           image.json, rootfs.raw
//! layers/<digest>[.zst]      a file of a snapshot, named by its content, as it is or as one zstd frame
//! snapshots/<digest>/        manifest.json, which lists its layers
//! quarantine/<kind>-<digest> what failed verification; never removed by the store
//! warm/<key>/                a captured boot: manifest.json, warm.json, devices, sealed.json, execs/, disks/, memory/
//! sandboxes/<id>/            sandbox.json, state.json, head.json, mounts.json, origin.json, claim, lock, reserve, execs/, execs-of-origin/, console.log, keeper.sock
//!   disks/<layer>.qcow2      links to every disk layer that the head or a state lists
//!   memory/<layer>.mem       likewise; with a memory directory DIR they are in DIR/<id>/ instead
//!   states/<state>/          manifest.json, devices, execs/, sealed.json once it is; a name that starts with '.' is unfinished or going
//! cache/<key>                JSON that may be deleted at any time
//! access.json                keys of the HTTP server, by hash, and the secret of its tokens
//! server/<shelf>/<name>.json what the HTTP server knows of templates, builds, their logs and uploads; made when needed
//! server/archives/<key>.tar  archives that clients sent for builds
//! volumes/<id>/              volume.json, data/; made when needed
//! index.sqlite[-journal]     what manifests of snapshots say, found faster; may be deleted at any time
//! ```
//!
//! Directories are 0700, files 0600. What is published by digest is sealed (0444): a machine that
//! runs under another user gets it as a descriptor, and may open that descriptor again, but reaches
//! nothing by path.
//!
//! Always: what is outside `staging/` and `cache/` is complete and synced; only a state of a
//! sandbox is synced later, when it is sealed. What open finds is dealt with like this:
//!
//! | found | done |
//! |---|---|
//! | a staging directory whose lock is held | left alone: someone works there |
//! | a staging directory whose lock is free | removed, once no rename to or from it can be undone any more |
//! | … and a sandbox of the same id, still `creating`, whose lock is free | sandbox, name and its part of a memory directory removed: its creation died. In a committed batch it becomes `crashed` |
//! | … with `committed` in it | judged last; kept while a sandbox of that batch is `creating` or cannot be read |
//! | … and a sandbox of the same id in any other phase | the sandbox stays: its creation or removal had not begun to matter |
//! | … with a sandbox in its `tree` | its name and its part of a memory directory are removed, too: its removal died |
//! | a name without a sandbox | the next claim takes it |
//! | a name without its snapshot | reported; a user may remove or replace it; meanwhile nothing is collected |
//! | a snapshot without a name or pin, a layer that no such one lists | collected by `gc` |
//! | a warm image whose image nothing reaches | collected by `gc`, or with the last name of its image |
//! | a layer of the wrong length, a manifest of the wrong digest | refused; moved to `quarantine/` by `verify`, or by a save or import that has it whole |
//! | a reservation whose sandbox is gone | the name is free |
//! | something else | left alone, and reported where it is in the way |

use std::path::{Path, PathBuf};

use crate::{Digest, Name, SandboxId};

/// The format this program reads and writes.
pub(crate) const FORMAT: u32 = 3;
/// The format that becomes ours by adding directories.
pub(crate) const UPGRADED: u32 = 2;
pub(crate) const FORMAT_MAGIC: &str = "sandtree-store";

const ACCESS: &str = "access.json";
const ACCESS_NEW: &str = "access.new";
const INDEX: &str = "index.sqlite";
const INDEX_JOURNAL: &str = "index.sqlite-journal";

#[derive(Debug, Clone)]
pub(crate) struct Layout {
    root: PathBuf,
}

impl Layout {
    pub(crate) fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// All directories, parents first.
    pub(crate) fn dirs(&self) -> [PathBuf; 13] {
        [
            self.staging(),
            self.root.join("names"),
            self.image_names(),
            self.sandbox_names(),
            self.kernels(),
            self.initramfs_dir(),
            self.images(),
            self.layers(),
            self.snapshots(),
            self.quarantine(),
            self.warm_dir(),
            self.sandboxes(),
            self.cache(),
        ]
    }

    /// Where things are renamed to from staging, or from there to staging.
    pub(crate) fn published(&self) -> [PathBuf; 8] {
        [
            self.image_names(),
            self.kernels(),
            self.initramfs_dir(),
            self.images(),
            self.layers(),
            self.snapshots(),
            self.warm_dir(),
            self.sandboxes(),
        ]
    }

    /// Whether an entry may be in a root that has no format yet.
    pub(crate) fn is_ours(name: &str) -> bool {
        const DIRS: [&str; 13] = [
            "staging",
            "names",
            "kernels",
            "initramfs",
            "images",
            "layers",
            "snapshots",
            "quarantine",
            "warm",
            "sandboxes",
            "cache",
            "server",
            "volumes",
        ];
        // A file system of the store's own has a `lost+found`.
        const OTHERS: [&str; 8] = [
            ACCESS,
            ACCESS_NEW,
            "format",
            "format.new",
            "lock",
            INDEX,
            INDEX_JOURNAL,
            "lost+found",
        ];
        DIRS.contains(&name) || OTHERS.contains(&name)
    }

    pub(crate) fn format(&self) -> PathBuf {
        self.root.join("format")
    }

    pub(crate) fn access(&self) -> PathBuf {
        self.root.join(ACCESS)
    }

    /// What the HTTP server keeps.
    pub(crate) fn server(&self) -> PathBuf {
        self.root.join("server")
    }

    pub(crate) fn archives(&self) -> PathBuf {
        self.server().join("archives")
    }

    pub(crate) fn volumes(&self) -> PathBuf {
        self.root.join("volumes")
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    pub(crate) fn staging(&self) -> PathBuf {
        self.root.join("staging")
    }

    pub(crate) fn image_names(&self) -> PathBuf {
        self.root.join("names/images")
    }

    pub(crate) fn image_name(&self, name: &Name) -> PathBuf {
        self.image_names().join(name.as_str())
    }

    pub(crate) fn sandbox_names(&self) -> PathBuf {
        self.root.join("names/sandboxes")
    }

    pub(crate) fn sandbox_name(&self, name: &Name) -> PathBuf {
        self.sandbox_names().join(name.as_str())
    }

    pub(crate) fn kernels(&self) -> PathBuf {
        self.root.join("kernels")
    }

    pub(crate) fn kernel(&self, digest: &Digest) -> PathBuf {
        self.kernels().join(digest.as_str())
    }

    pub(crate) fn initramfs_dir(&self) -> PathBuf {
        self.root.join("initramfs")
    }

    pub(crate) fn initramfs(&self, key: &Digest) -> PathBuf {
        self.initramfs_dir().join(format!("{key}.cpio"))
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub(crate) fn image(&self, digest: &Digest) -> PathBuf {
        self.images().join(digest.as_str())
    }

    /// The pool: every file of every snapshot.
    pub(crate) fn layers(&self) -> PathBuf {
        self.root.join("layers")
    }

    pub(crate) fn layer(&self, digest: &Digest) -> PathBuf {
        self.layers().join(digest.as_str())
    }

    pub(crate) fn compressed_layer(&self, digest: &Digest) -> PathBuf {
        self.layers().join(format!("{digest}.zst"))
    }

    pub(crate) fn snapshots(&self) -> PathBuf {
        self.root.join("snapshots")
    }

    pub(crate) fn snapshot(&self, digest: &Digest) -> PathBuf {
        self.snapshots().join(digest.as_str())
    }

    pub(crate) fn quarantine(&self) -> PathBuf {
        self.root.join("quarantine")
    }

    pub(crate) fn warm_dir(&self) -> PathBuf {
        self.root.join("warm")
    }

    pub(crate) fn warm(&self, key: &Digest) -> PathBuf {
        self.warm_dir().join(key.as_str())
    }

    pub(crate) fn sandboxes(&self) -> PathBuf {
        self.root.join("sandboxes")
    }

    pub(crate) fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.as_str())
    }

    pub(crate) fn index(&self) -> PathBuf {
        self.root.join(INDEX)
    }

    /// The index and the files that SQLite may leave with it.
    pub(crate) fn index_files(&self) -> [PathBuf; 2] {
        [INDEX, INDEX_JOURNAL].map(|name| self.root.join(name))
    }

    pub(crate) fn cache(&self) -> PathBuf {
        self.root.join("cache")
    }
}
