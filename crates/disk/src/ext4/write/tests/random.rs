//! Images of random trees are valid and contain their files.

use proptest::prelude::*;

use super::image::{Image, Maker};
use crate::ext4::write::{Device, Kind, NodeId, Tree};

#[derive(Debug, Clone)]
enum What {
    Dir,
    /// Pieces: their lengths, and whether they are zeros.
    File(Vec<(usize, bool)>),
    Symlink(usize),
    Device(u32, u32),
    Hard(usize),
    /// A file that is removed again.
    Removed(usize),
}

#[derive(Debug, Clone)]
struct Step {
    parent: usize,
    name: Vec<u8>,
    what: What,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

fn what() -> impl Strategy<Value = What> {
    let piece = (1..20_000usize, any::<bool>());
    prop_oneof![
        3 => Just(What::Dir),
        4 => prop::collection::vec(piece, 0..12).prop_map(What::File),
        1 => (1..4096usize).prop_map(What::Symlink),
        1 => (0..4096u32, 0..1u32 << 20).prop_map(|(major, minor)| What::Device(major, minor)),
        1 => any::<usize>().prop_map(What::Hard),
        1 => (0..100_000usize).prop_map(What::Removed),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let byte =
        any::<u8>().prop_filter("no part of a name", |byte| !matches!(byte, 0 | b'/' | b'.'));
    let name = prop::collection::vec(byte, 1..256);
    let xattr = (
        "user\\.[a-z]{1,30}",
        prop::collection::vec(any::<u8>(), 0..200),
    );
    let xattr = xattr.prop_map(|(name, value)| (name.into_bytes(), value));
    let xattrs = prop::collection::vec(xattr, 0..6);
    (any::<usize>(), name, what(), xattrs).prop_map(|(parent, name, what, xattrs)| Step {
        parent,
        name,
        what,
        xattrs,
    })
}

/// Files with their paths and bytes.
type Files = Vec<(Vec<u8>, Vec<u8>)>;

struct Generator {
    maker: Maker,
    dirs: Vec<(NodeId, Vec<u8>)>,
    files: Vec<NodeId>,
    expected: Files,
}

impl Generator {
    fn take(&mut self, step: Step) {
        let (parent, parent_path) = self.dirs[step.parent % self.dirs.len()].clone();
        let Kind::Dir(names) = &self.maker.node(parent).kind else {
            unreachable!()
        };
        if names.contains_key(&step.name) {
            return;
        }
        let path = [&parent_path[..], b"/", &step.name].concat();
        let id = match step.what {
            What::Dir => {
                let id = self.maker.dir(parent, &step.name);
                self.dirs.push((id, path));
                id
            }
            What::File(pieces) => {
                let bytes: Vec<_> = pieces
                    .iter()
                    .flat_map(|(bytes, zeros)| vec![u8::from(!zeros); *bytes])
                    .collect();
                let id = self.maker.file(parent, &step.name, &bytes);
                self.files.push(id);
                self.expected.push((path, bytes));
                id
            }
            What::Symlink(bytes) => {
                self.maker
                    .add(parent, &step.name, Kind::Symlink(vec![b't'; bytes]))
            }
            What::Device(major, minor) => self.maker.add(
                parent,
                &step.name,
                Kind::BlockDevice(Device { major, minor }),
            ),
            What::Hard(index) if !self.files.is_empty() => {
                return self
                    .maker
                    .link(parent, &step.name, self.files[index % self.files.len()]);
            }
            What::Hard(_) => return,
            What::Removed(bytes) => {
                let content = self.maker.content(&vec![3; bytes]);
                return self.maker.area.free(&content);
            }
        };
        self.maker.node(id).attributes.xattrs.extend(step.xattrs);
    }
}

fn build(steps: Vec<Step>, free_bytes: u64) -> (Image, Files) {
    let mut generator = Generator {
        maker: Maker::new(),
        dirs: vec![(Tree::ROOT, Vec::new())],
        files: Vec::new(),
        expected: Vec::new(),
    };
    steps.into_iter().for_each(|step| generator.take(step));
    (generator.maker.clean(free_bytes), generator.expected)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn random_trees_are_stored(steps in prop::collection::vec(step(), 0..120), free_bytes in 0..1u64 << 30) {
        let (image, expected) = build(steps, free_bytes);
        for (path, bytes) in expected {
            prop_assert!(image.read(&path) == bytes, "{}", path.escape_ascii());
        }
    }
}
