//! Builds trees, writes images of them, and reads these with other programs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::blocks::Blocks;
use crate::ext4::read::FileSystem;
use crate::ext4::write::{
    Attributes, Content, DataArea, Error, Kind, Made, Node, NodeId, Options, Time, Tree, finish,
};

pub(super) struct Maker {
    pub dir: tempfile::TempDir,
    pub area: DataArea,
    pub tree: Tree,
}

pub(super) fn attributes(mode: u16) -> Attributes {
    let modified = Time {
        seconds: 1_600_000_000,
        nanoseconds: 123_456_789,
    };
    Attributes {
        mode,
        uid: 1000,
        gid: 100,
        modified,
        xattrs: BTreeMap::new(),
    }
}

impl Maker {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let area = DataArea::create(&dir.path().join("image"), u64::MAX).unwrap();
        Self {
            dir,
            area,
            tree: Tree::new(),
        }
    }

    pub(super) fn add(&mut self, parent: NodeId, name: impl AsRef<[u8]>, kind: Kind) -> NodeId {
        let mode = if matches!(kind, Kind::Symlink(_)) {
            0o777
        } else {
            0o755
        };
        let node = Node {
            kind,
            attributes: attributes(mode),
            names: 0,
        };
        let id = self.tree.add(node).unwrap();
        self.link(parent, name, id);
        id
    }

    pub(super) fn link(&mut self, parent: NodeId, name: impl AsRef<[u8]>, id: NodeId) {
        let Kind::Dir(names) = &mut self.node(parent).kind else {
            panic!("{parent:?} is not a directory")
        };
        assert_eq!(names.insert(name.as_ref().to_vec(), id), None);
        self.node(id).names += 1;
    }

    pub(super) fn node(&mut self, id: NodeId) -> &mut Node {
        self.tree.node_mut(id).unwrap()
    }

    pub(super) fn dir(&mut self, parent: NodeId, name: impl AsRef<[u8]>) -> NodeId {
        self.add(parent, name, Kind::Dir(BTreeMap::new()))
    }

    pub(super) fn file(&mut self, parent: NodeId, name: impl AsRef<[u8]>, bytes: &[u8]) -> NodeId {
        let content = self.content(bytes);
        self.add(parent, name, Kind::File(content))
    }

    pub(super) fn content(&mut self, bytes: &[u8]) -> Content {
        let mut writer = self.area.file(bytes.len() as u64, u64::MAX).unwrap();
        bytes
            .chunks(70_001)
            .for_each(|chunk| writer.write(chunk).unwrap());
        writer.finish().unwrap()
    }

    /// Blocks of data, each followed by a block of zeros.
    pub(super) fn fragments(&mut self, count: u64) -> Content {
        let mut writer = self.area.file(count * 2 * 4096, u64::MAX).unwrap();
        for index in 0..count {
            writer.write(&[index as u8 | 1; 4096]).unwrap();
            writer.skip(4096).unwrap();
        }
        writer.finish().unwrap()
    }

    pub(super) fn finish(self, free_bytes: u64) -> Result<Image, Error> {
        let path = self.dir.path().join("image");
        let made = finish(self.area, &self.tree, &Options { free_bytes })?;
        Ok(Image {
            file: File::open(&path).unwrap(),
            path,
            made,
            _dir: self.dir,
        })
    }

    /// Writes the image and checks it with `e2fsck`.
    pub(super) fn clean(self, free_bytes: u64) -> Image {
        let image = self.finish(free_bytes).unwrap();
        image.assert_clean();
        image
    }
}

pub(super) struct Image {
    pub path: PathBuf,
    pub made: Made,
    file: File,
    _dir: tempfile::TempDir,
}

impl Blocks for Image {
    fn bytes(&self) -> u64 {
        self.file.metadata().unwrap().len()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset)
    }
}

impl Image {
    pub(super) fn assert_clean(&self) {
        assert_clean(&self.path);
        assert_eq!(self.bytes(), self.made.bytes);
    }

    pub(super) fn debugfs(&self, request: &str) -> String {
        run("debugfs", &["-R", request, self.path.to_str().unwrap()])
    }

    pub(super) fn with_fs<T>(&self, then: impl FnOnce(&FileSystem<'_>) -> T) -> T {
        then(&FileSystem::open(self).unwrap())
    }

    pub(super) fn read(&self, path: &[u8]) -> Vec<u8> {
        self.with_fs(|fs| {
            let mut bytes = Vec::new();
            fs.read_file(&path.into())
                .unwrap()
                .read_to_end(&mut bytes)
                .unwrap();
            bytes
        })
    }
}

/// Asserts that `e2fsck` finds nothing, not even a possible optimization.
pub(super) fn assert_clean(image: &Path) {
    let said = run("e2fsck", &["-fn", image.to_str().unwrap()]);
    let is_fine = |line: &str| {
        line.is_empty() || line.starts_with("Pass ") || line.starts_with("sandtree-root: ")
    };
    assert!(said.lines().all(is_fine), "{said}");
}

/// Runs a program, which must succeed. Returns its output.
pub(super) fn run(program: &str, arguments: &[&str]) -> String {
    // starts: the program of run(…) in crates/disk/src/ext4
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    said
}
