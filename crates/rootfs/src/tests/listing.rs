//! Complete listings of a root file system, for comparison: on the host, in a tree, in an image.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;

use sandtree_disk::Blocks;
use sandtree_disk::ext4::read::{self, FileSystem};
use sandtree_disk::ext4::write::{Kind, NodeId, Tree};
use sha2::{Digest, Sha256};

use crate::staging::Staging;

/// Entries by path. The path of the root is empty.
pub type Listing = BTreeMap<Vec<u8>, Entry>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The kind with its details: size and digest, target, device numbers.
    pub kind: String,
    pub mode: u16,
    pub owner: (u32, u32),
    pub modified: (i64, u32),
    pub xattrs: BTreeMap<String, Vec<u8>>,
    /// The number of names and the first name; 1 for a directory.
    pub names: (u64, Vec<u8>),
}

/// Asserts that two listings are equal. A failure shows only the paths that differ.
pub fn assert_same(found: &Listing, expected: &Listing) {
    let paths = found.keys().chain(expected.keys());
    let differs = |path: &&Vec<u8>| found.get(*path) != expected.get(*path);
    let shown = |path: &Vec<u8>| {
        format!(
            "{}:\n  found    {:?}\n  expected {:?}\n",
            path.escape_ascii(),
            found.get(path),
            expected.get(path)
        )
    };
    let differences: String = paths.filter(differs).map(shown).collect();
    assert!(differences.is_empty(), "{differences}");
}

/// The listing without details that some formats lack.
pub fn without(mut listing: Listing, lacks: impl Fn(&mut Entry)) -> Listing {
    listing.values_mut().for_each(lacks);
    listing
}

pub fn of_host(root: &Path) -> Listing {
    let mut all = Listing::new();
    let mut first = BTreeMap::new();
    host(root, Vec::new(), &mut |path, meta, entry: Entry| {
        if !meta.is_dir() {
            first
                .entry((meta.dev(), meta.ino()))
                .or_insert_with(Vec::new)
                .push(path.clone());
        }
        all.insert(path, entry);
    });
    for names in first.values_mut() {
        names.sort();
        for name in &*names {
            all.get_mut(name).expect("it was listed").names =
                (names.len() as u64, names[0].clone());
        }
    }
    all
}

fn host(at: &Path, path: Vec<u8>, found: &mut dyn FnMut(Vec<u8>, &fs::Metadata, Entry)) {
    let meta = fs::symlink_metadata(at).expect("it is there");
    let kind = meta.file_type();
    let numbers = format!(
        "{}:{}",
        rustix::fs::major(meta.rdev()),
        rustix::fs::minor(meta.rdev())
    );
    let text = if kind.is_dir() {
        "directory".into()
    } else if kind.is_file() {
        file_text(File::open(at).expect("it opens"))
    } else if kind.is_symlink() {
        let target = fs::read_link(at).expect("it is a link");
        link_text(target.as_os_str().as_bytes())
    } else if kind.is_char_device() {
        format!("character device {numbers}")
    } else if kind.is_block_device() {
        format!("block device {numbers}")
    } else if kind.is_fifo() {
        "fifo".into()
    } else {
        "socket".into()
    };
    let entry = Entry {
        kind: text,
        mode: (meta.mode() & 0o7777) as u16,
        owner: (meta.uid(), meta.gid()),
        modified: (meta.mtime(), meta.mtime_nsec() as u32),
        xattrs: host_xattrs(at),
        names: (1, path.clone()),
    };
    found(path.clone(), &meta, entry);
    if kind.is_dir() {
        for child in fs::read_dir(at).expect("it can be listed") {
            let name = child.expect("it can be listed").file_name().into_vec();
            let below = if path.is_empty() {
                name.clone()
            } else {
                [&path[..], b"/", &name].concat()
            };
            host(&at.join(std::ffi::OsStr::from_bytes(&name)), below, found);
        }
    }
}

fn host_xattrs(at: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut list = vec![0; 64 << 10];
    let length = rustix::fs::llistxattr(at, &mut list[..]).unwrap_or(0);
    let names = list[..length]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty());
    let value = |name: &[u8]| {
        let mut value = vec![0; 64 << 10];
        let length = rustix::fs::lgetxattr(at, name, &mut value[..]).expect("it can be read");
        value.truncate(length);
        (String::from_utf8(name.to_vec()).expect("it is text"), value)
    };
    names.map(value).collect()
}

pub fn of_tree(staging: &Staging) -> Listing {
    let mut all = Listing::new();
    let mut names = BTreeMap::<NodeId, Vec<Vec<u8>>>::new();
    let mut pending = vec![(Vec::new(), Tree::ROOT)];
    while let Some((path, id)) = pending.pop() {
        let node = staging.tree.node(id);
        let kind = match &node.kind {
            Kind::Dir(entries) => {
                let below = |name: &[u8]| {
                    if path.is_empty() {
                        name.to_vec()
                    } else {
                        [&path[..], b"/", name].concat()
                    }
                };
                pending.extend(entries.iter().map(|(name, id)| (below(name), *id)));
                "directory".into()
            }
            Kind::File(content) => file_text(
                &staging
                    .area
                    .read(content, u64::MAX)
                    .expect("it can be read")[..],
            ),
            Kind::Symlink(target) => link_text(target),
            Kind::CharDevice(device) => {
                format!("character device {}:{}", device.major, device.minor)
            }
            Kind::BlockDevice(device) => format!("block device {}:{}", device.major, device.minor),
            Kind::Fifo => "fifo".into(),
            Kind::Socket => "socket".into(),
        };
        let attributes = &node.attributes;
        let text = |name: &[u8]| String::from_utf8(name.to_vec()).expect("it is text");
        let entry = Entry {
            kind,
            mode: attributes.mode,
            owner: (attributes.uid, attributes.gid),
            modified: (attributes.modified.seconds, attributes.modified.nanoseconds),
            xattrs: attributes
                .xattrs
                .iter()
                .map(|(name, value)| (text(name), value.clone()))
                .collect(),
            names: (u64::from(node.names), Vec::new()),
        };
        names.entry(id).or_default().push(path.clone());
        all.insert(path, entry);
    }
    for paths in names.into_values() {
        let first = paths.iter().min().expect("there is one").clone();
        assert_eq!(all[&first].names.0, paths.len() as u64, "names are counted");
        paths.iter().for_each(|path| {
            all.get_mut(path)
                .expect("it was listed")
                .names
                .1
                .clone_from(&first)
        });
    }
    all
}

/// The listing of an image by our own ext4 reader. It has whole seconds, no extended attributes,
/// and does not tell which names share a node.
pub fn of_image(image: &Path) -> Listing {
    let disk = Disk(File::open(image).expect("it opens"));
    let system = FileSystem::open(&disk).expect("it is an ext4");
    let mut all = Listing::new();
    let mut pending = vec![Vec::new()];
    while let Some(path) = pending.pop() {
        let at = read::Path::from([b"/", &path[..]].concat());
        let node = system
            .stat(&at)
            .expect("it can be read")
            .expect("it is there");
        let numbers = node
            .device
            .map(|(major, minor)| format!("{major}:{minor}"))
            .unwrap_or_default();
        let kind = match node.kind {
            read::Kind::Directory => {
                let names = system.list(&at).expect("it can be listed");
                let below = |name: &[u8]| {
                    if path.is_empty() {
                        name.to_vec()
                    } else {
                        [&path[..], b"/", name].concat()
                    }
                };
                pending.extend(names.iter().map(|name| below(name)));
                "directory".into()
            }
            read::Kind::File => file_text(system.read_file(&at).expect("it can be read")),
            read::Kind::Symlink => link_text(node.target.expect("it has a target").as_bytes()),
            read::Kind::CharDevice => format!("character device {numbers}"),
            read::Kind::BlockDevice => format!("block device {numbers}"),
            read::Kind::Fifo => "fifo".into(),
            read::Kind::Socket => "socket".into(),
        };
        let is_dir = node.kind == read::Kind::Directory;
        let entry = Entry {
            kind,
            mode: node.mode,
            owner: (node.uid, node.gid),
            modified: (node.modified_unix_s, 0),
            xattrs: BTreeMap::new(),
            names: (if is_dir { 1 } else { u64::from(node.links) }, Vec::new()),
        };
        all.insert(path, entry);
    }
    all.remove(&b"lost+found"[..]);
    all
}

struct Disk(File);

impl Blocks for Disk {
    fn bytes(&self) -> u64 {
        self.0.metadata().map_or(0, |meta| meta.len())
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(into, offset)
    }
}

fn file_text(mut from: impl Read) -> String {
    let mut hasher = Sha256::new();
    let mut bytes = 0;
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer).expect("it can be read") {
            0 => break,
            some => {
                hasher.update(&buffer[..some]);
                bytes += some;
            }
        }
    }
    let digest: [u8; 32] = hasher.finalize().into();
    format!("file of {bytes} bytes, {:02x?}", &digest[..8])
}

fn link_text(target: &[u8]) -> String {
    format!("link to {}", target.escape_ascii())
}
