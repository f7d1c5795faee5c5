//! File systems made by e2fsprogs, and their expected content.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path as HostPath;
use std::process::{Command, Stdio};

use sandtree_diff::{Diff, FileSystem, Kind, Options, Path, diff};
use tempfile::{NamedTempFile, TempDir};

/// The features of images' root file systems.
pub const EXT4: &str = "has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,\
                        huge_file,dir_nlink,extra_isize,metadata_csum";
pub const CLUSTER: usize = 64 << 10;

/// The expected node at a path. Directories have no content; the content of a link is its target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    pub kind: Kind,
    pub mode: u16,
    pub content: Vec<u8>,
}

pub type Tree = BTreeMap<Path, Item>;

/// A tree on the host, from which a file system is made.
pub struct HostTree(pub TempDir);

impl HostTree {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: impl AsRef<HostPath>) -> std::path::PathBuf {
        self.0.path().join(name)
    }

    pub fn file(&self, name: impl AsRef<HostPath>, content: &[u8]) -> &Self {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        self
    }

    pub fn items(&self) -> Tree {
        host_items(self.0.path())
    }
}

/// Everything below a directory of the host, without the `lost+found` of mke2fs.
pub fn host_items(dir: &HostPath) -> Tree {
    let mut items = Tree::new();
    add_items(dir, &Path::from("/"), &mut items);
    items.remove(&Path::from("/lost+found"));
    items
}

fn add_items(dir: &HostPath, path: &Path, items: &mut Tree) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let host = entry.path();
        let metadata = entry.metadata().unwrap();
        let path = join(path, entry.file_name().as_bytes());
        let (kind, content) = match metadata.file_type() {
            kind if kind.is_dir() => (Kind::Directory, Vec::new()),
            kind if kind.is_symlink() => (
                Kind::Symlink,
                fs::read_link(&host)
                    .unwrap()
                    .as_os_str()
                    .as_bytes()
                    .to_vec(),
            ),
            _ => (Kind::File, fs::read(&host).unwrap()),
        };
        items.insert(
            path.clone(),
            Item {
                kind,
                mode: (metadata.mode() & 0o7777) as u16,
                content,
            },
        );
        if kind == Kind::Directory {
            add_items(&host, &path, items);
        }
    }
}

pub fn join(path: &Path, name: &[u8]) -> Path {
    let mut bytes = path.as_bytes().to_vec();
    if bytes.len() > 1 {
        bytes.push(b'/');
    }
    bytes.extend_from_slice(name);
    bytes.into()
}

/// A file system in a file.
pub struct Image(NamedTempFile);

impl Image {
    /// A file system like images' root file systems, with the tree in it.
    pub fn usual(mebibytes: u64, tree: Option<&HostTree>) -> Self {
        Self::make(&format!("{EXT4} -b 4096"), mebibytes, tree)
    }

    /// A file system with these features and options of mke2fs, with the tree in it.
    pub fn make(kind: &str, mebibytes: u64, tree: Option<&HostTree>) -> Self {
        let image = NamedTempFile::new().unwrap();
        let mut command = tool("mke2fs");
        command
            .args(["-q", "-F", "-O"])
            .args(format!("none,{kind}").split_whitespace());
        if let Some(tree) = tree {
            command.arg("-d").arg(tree.0.path());
        }
        succeed(command.arg(image.path()).arg(format!("{mebibytes}M")));
        Self(image)
    }

    pub fn path(&self) -> &HostPath {
        self.0.path()
    }

    pub fn copy(&self) -> Self {
        let copy = NamedTempFile::new().unwrap();
        fs::copy(self.path(), copy.path()).unwrap();
        Self(copy)
    }

    pub fn bytes(&self) -> Vec<u8> {
        fs::read(self.path()).unwrap()
    }

    /// Runs commands of debugfs on it, all of which must succeed. Returns the output.
    pub fn debugfs(&self, commands: &[impl AsRef<str>]) -> String {
        let (said, errors) = self.try_debugfs(commands);
        // The first line is its version.
        assert_eq!(errors.lines().skip(1).collect::<Vec<_>>(), [""; 0]);
        said
    }

    /// Runs commands of debugfs on it, which may fail. Returns the output and the errors.
    pub fn try_debugfs(&self, commands: &[impl AsRef<str>]) -> (String, String) {
        let mut child = spawn(
            tool("debugfs")
                .args(["-w", "-f", "-"])
                .arg(self.path())
                .stdin(Stdio::piped()),
        );
        let mut stdin = child.stdin.take().unwrap();
        commands
            .iter()
            .for_each(|command| writeln!(stdin, "{}", command.as_ref()).unwrap());
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let [said, errors] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (said, errors)
    }

    /// A copy that e2fsck recovered: its journal is replayed.
    pub fn recovered(&self) -> Self {
        self.checked("-fy")
    }

    pub fn checked(&self, options: &str) -> Self {
        let copy = self.copy();
        let status = spawn(tool("e2fsck").arg(options).arg(copy.path()))
            .wait_with_output()
            .unwrap()
            .status;
        assert!(matches!(status.code(), Some(0 | 1)), "{status}");
        copy
    }
}

pub fn tool(name: &str) -> Command {
    // starts: the program of tool(…)
    let mut command = Command::new(name);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

fn spawn(command: &mut Command) -> std::process::Child {
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("e2fsprogs is installed")
}

pub fn succeed(command: &mut Command) {
    let output = spawn(command).wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Everything that the reader finds, without the `lost+found` of mke2fs.
pub fn items(fs: &FileSystem<'_>) -> Tree {
    let mut items = Tree::new();
    add_read(fs, &Path::from("/"), &mut items);
    items.remove(&Path::from("/lost+found"));
    items
}

fn add_read(fs: &FileSystem<'_>, dir: &Path, items: &mut Tree) {
    for name in fs.list(dir).unwrap() {
        let path = join(dir, &name);
        let node = fs.stat(&path).unwrap().unwrap();
        let content = match node.kind {
            Kind::File => read(fs, &path),
            Kind::Symlink => node.target.unwrap().as_bytes().to_vec(),
            _ => Vec::new(),
        };
        items.insert(
            path.clone(),
            Item {
                kind: node.kind,
                mode: node.mode,
                content,
            },
        );
        if node.kind == Kind::Directory {
            add_read(fs, &path, items);
        }
    }
}

pub fn read(fs: &FileSystem<'_>, path: &Path) -> Vec<u8> {
    let mut content = Vec::new();
    let mut reader = fs.read_file(path).unwrap();
    reader.read_to_end(&mut content).unwrap();
    assert_eq!(content.len() as u64, reader.size());
    content
}

/// The clusters in which two disks differ, as a chain of layers reports them.
pub fn changed(a: &[u8], b: &[u8]) -> Vec<Range<u64>> {
    let clusters = a.chunks(CLUSTER).zip(b.chunks(CLUSTER)).enumerate();
    let starts = clusters
        .filter(|(_, (a, b))| a != b)
        .map(|(index, _)| (index * CLUSTER) as u64);
    starts.map(|start| start..start + CLUSTER as u64).collect()
}

/// The changes, found with and without known ranges. Both results must be equal.
pub fn both_ways(a: &Image, b: &Image) -> Diff {
    let a = a.bytes();
    let b = b.bytes();
    let slow = diff(&a, &b, None, Options::default()).unwrap();
    let fast = diff(&a, &b, Some(&changed(&a, &b)), Options::default()).unwrap();
    assert_eq!(fast, slow);
    slow
}

/// One line for each change: `+ path`, `- path`, `M path: what`.
pub fn lines(diff: &Diff) -> Vec<String> {
    use sandtree_diff::ChangeKind::{Added, Changed, Removed};
    let line = |change: &sandtree_diff::Change| match change.change {
        Added => format!("+ {}", change.path),
        Removed => format!("- {}", change.path),
        Changed => format!("M {}: {:?}", change.path, change.what),
    };
    diff.changes.iter().map(line).collect()
}

/// The differences between two trees, in the format of `lines`.
pub fn expected(before: &Tree, after: &Tree) -> Vec<String> {
    let mut paths: Vec<_> = before.keys().chain(after.keys()).collect();
    // In the order of a walk, part by part.
    paths.sort_by_key(|path| {
        path.as_bytes()
            .split(|byte| *byte == b'/')
            .collect::<Vec<_>>()
    });
    paths.dedup();
    paths
        .into_iter()
        .filter_map(|path| line(path, before.get(path), after.get(path)))
        .collect()
}

fn line(path: &Path, before: Option<&Item>, after: Option<&Item>) -> Option<String> {
    let (Some(x), Some(y)) = (before, after) else {
        return Some(format!(
            "{} {path}",
            if before.is_some() { "-" } else { "+" }
        ));
    };
    let mut what = Vec::new();
    match (x.kind, y.kind) {
        (Kind::File, Kind::File) if x.content.len() != y.content.len() => {
            what.extend(["Size", "Content"])
        }
        (Kind::File, Kind::File) if x.content != y.content => what.push("Content"),
        (Kind::Symlink, Kind::Symlink) if x.content != y.content => what.push("Target"),
        _ if x.kind != y.kind => what.push("Kind"),
        _ => {}
    }
    what.extend((x.mode != y.mode).then_some("Mode"));
    Some(format!("M {path}: [{}]", what.join(", "))).filter(|_| !what.is_empty())
}
