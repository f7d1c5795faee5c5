//! Random overlays on a root file system, compared with their definitions.

use std::fs;
use std::path::PathBuf;

use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest};
use proptest::sample::Index;
use tempfile::TempDir;

use super::super::check::Damage;
use super::super::samples::{Cluster, DATA, L2, Overlay, overlay, overlays, put_u64};
use super::*;
use crate::Silent;

/// The root file system of the tests ends inside a cluster.
const BASE_BYTES: u64 = 2 * CLUSTER + 1000;
const BASE: u8 = 0xbb;

struct Files {
    dir: TempDir,
    count: usize,
}

impl Files {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("base"), vec![BASE; BASE_BYTES as usize]).unwrap();
        Self { dir, count: 0 }
    }

    fn base(&self) -> PathBuf {
        self.dir.path().join("base")
    }

    fn add(&mut self, bytes: &[u8]) -> PathBuf {
        self.count += 1;
        let path = self.dir.path().join(self.count.to_string());
        fs::write(&path, bytes).unwrap();
        path
    }

    fn add_all(&mut self, layers: &[Overlay]) -> Vec<PathBuf> {
        layers
            .iter()
            .map(|layer| self.add(&layer.bytes()))
            .collect()
    }

    fn written_to(&self, chain: &Chain) -> File {
        let path = self.dir.path().join("to");
        let mut out = crate::fs::Files::new(Arc::new(crate::fs::Disk))
            .output(&path)
            .unwrap();
        chain.write_to(&mut out, &Silent).unwrap();
        out.finish().unwrap();
        File::open(&path).unwrap()
    }

    fn written_over(&self, chain: &Chain) -> File {
        let path = self.dir.path().join("over");
        fs::copy(self.base(), &path).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        chain.write_over(&file, &Silent).unwrap();
        file
    }

    fn chain(&self, layers: &[PathBuf]) -> Result<Chain, Error> {
        Chain::open(&self.base(), layers)
    }
}

fn data(size: u64, clusters: &[(u64, u8)]) -> Overlay {
    overlay(
        size,
        clusters
            .iter()
            .map(|(cluster, byte)| (*cluster, Cluster::Data(*byte))),
    )
}

fn clusters(range: Range<u64>) -> Vec<Range<u64>> {
    std::iter::once(range.start * CLUSTER..range.end * CLUSTER).collect()
}

fn read(chain: &Chain, offset: u64, bytes: u64) -> Vec<u8> {
    let mut into = vec![0xee; bytes as usize];
    chain.read_at(offset, &mut into).unwrap();
    into
}

/// The expected content of one cluster, by the definition of a chain.
fn expected(layers: &[Overlay], cluster: u64, size: u64) -> Vec<u8> {
    let start = cluster * CLUSTER;
    let visible = BASE_BYTES.min(layers.first().map_or(BASE_BYTES, |lowest| lowest.size));
    let mut content = layers
        .iter()
        .rev()
        .find_map(|layer| layer.content(cluster))
        .unwrap_or_else(|| {
            let stored = visible.saturating_sub(start).min(CLUSTER);
            vec![BASE; stored as usize]
        });
    content.resize(CLUSTER as usize, 0);
    content.truncate((size - start).min(CLUSTER) as usize);
    content
}

#[test]
fn a_root_file_system_without_overlays_is_a_disk() {
    let files = Files::new();
    let chain = files.chain(&[]).unwrap();
    assert_eq!(chain.bytes(), BASE_BYTES);
    assert_eq!(read(&chain, CLUSTER - 1, 3), [BASE; 3]);
    let beyond = chain.read_at(BASE_BYTES - 1, &mut [0; 2]).unwrap_err();
    assert_eq!(beyond.io_kind(), Some(io::ErrorKind::UnexpectedEof));
    assert!(chain.read_at(u64::MAX, &mut [0; 2]).is_err());
}

#[test]
fn a_read_may_cross_clusters_and_tables() {
    let mut files = Files::new();
    let layers = files.add_all(&[data(2 * L2_SPAN, &[(0, 1), (8191, 2), (8192, 3)])]);
    let chain = files.chain(&layers).unwrap();
    assert_eq!(read(&chain, CLUSTER - 1, 2), [1, BASE]);
    assert_eq!(read(&chain, BASE_BYTES - 1, 2), [BASE, 0]);
    assert_eq!(read(&chain, L2_SPAN - 1, 2), [2, 3]);
}

#[test]
fn the_origin_of_a_cluster_is_reported() {
    let mut files = Files::new();
    let layers = files.add_all(&[
        data(L2_SPAN, &[(1, 1), (5, 1)]),
        overlay(L2_SPAN, [(1, Cluster::Data(2)), (5, Cluster::Zero)]),
    ]);
    let chain = files.chain(&layers).unwrap();
    let origins = [0, 1, 4, 5].map(|cluster| chain.origin_of(cluster).unwrap());
    assert_eq!(
        origins,
        [
            Where::Base,
            Where::Layer {
                layer: 1,
                offset: DATA
            },
            Where::Zero,
            Where::Zero
        ]
    );
}

#[test]
fn invalid_chains_are_refused() {
    let mut files = Files::new();
    let shrunk = files.add_all(&[data(2 * CLUSTER, &[]), data(CLUSTER, &[])]);
    assert!(matches!(files.chain(&shrunk), Err(Error::DiskChain { .. })));
    let mut damaged = data(L2_SPAN, &[(0, 1), (1, 2)]).bytes();
    put_u64(&mut damaged, L2 + 8, DATA);
    let layers = [files.add(&data(CLUSTER, &[]).bytes()), files.add(&damaged)];
    let damage = files.chain(&layers).unwrap_err();
    assert!(
        matches!(
            damage,
            Error::DiskLayer {
                layer: 1,
                damage: Damage::Shared { offset: DATA }
            }
        ),
        "{damage}"
    );
}

#[test]
fn only_clusters_from_different_layers_can_differ() {
    let mut files = Files::new();
    let layers = files.add_all(&[
        data(L2_SPAN, &[(0, 1), (1, 1)]),
        data(L2_SPAN, &[(1, 2), (2, 2)]),
        data(L2_SPAN + CLUSTER, &[(9, 3)]),
    ]);
    let [first, second, third] = [1, 2, 3].map(|n| files.chain(&layers[..n]).unwrap());
    assert_eq!(changed(&first, &first).unwrap(), []);
    assert_eq!(changed(&first, &second).unwrap(), clusters(1..3));
    let larger = [
        CLUSTER..3 * CLUSTER,
        9 * CLUSTER..10 * CLUSTER,
        L2_SPAN..L2_SPAN + CLUSTER,
    ];
    assert_eq!(changed(&third, &first).unwrap(), larger);
}

#[test]
fn copies_are_equal_if_the_caller_says_so() {
    let mut files = Files::new();
    let layer = data(L2_SPAN, &[(3, 1)]);
    let [one, other] = [0, 1].map(|_| files.add_all(std::slice::from_ref(&layer)));
    let open = |layers: &[PathBuf]| files.chain(layers).unwrap();
    assert_eq!(changed(&open(&one), &open(&other)).unwrap(), clusters(3..4));
    let named =
        |layers: &[PathBuf], layer: &str| open(layers).with_identities("base", &[layer.to_owned()]);
    assert_eq!(changed(&named(&one, "x"), &named(&other, "x")).unwrap(), []);
    assert_eq!(
        changed(&named(&one, "x"), &named(&other, "y")).unwrap(),
        clusters(3..4)
    );
}

#[test]
fn too_many_ranges_are_joined() {
    let mut ranges = Vec::new();
    (0..MAX_RANGES as u64 + 10).for_each(|index| add(&mut ranges, index * 2..index * 2 + 1));
    assert_eq!(ranges.len(), MAX_RANGES);
    assert_eq!(ranges.last().unwrap().end, (MAX_RANGES as u64 + 9) * 2 + 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_cluster_is_read_from_its_newest_layer(layers in overlays()) {
        let mut files = Files::new();
        let paths = files.add_all(&layers);
        let chain = files.chain(&paths).unwrap();
        let size = layers.last().unwrap().size;
        prop_assert_eq!(chain.bytes(), size);
        for cluster in (0..size.div_ceil(CLUSTER)).filter(|n| *n < 12 || n % 8192 > 8180 || n % 8192 < 12) {
            let expected = expected(&layers, cluster, size);
            prop_assert!(read(&chain, cluster * CLUSTER, expected.len() as u64) == expected, "cluster {}", cluster);
        }
    }

    /// A new raw file equals one that is written over a copy of the root file system. Both have
    /// holes.
    #[test]
    fn a_raw_file_is_what_the_chain_reads(layers in overlays(), more in 0u64..3) {
        let mut files = Files::new();
        let paths = files.add_all(&layers);
        let chain = files.chain(&paths).unwrap().extended_to(layers.last().unwrap().size + more * CLUSTER).unwrap();
        for raw in [files.written_to(&chain), files.written_over(&chain)] {
            let found = raw.metadata().unwrap();
            prop_assert_eq!(found.len(), chain.bytes());
            prop_assert!(found.blocks() * 512 <= 64 * CLUSTER, "{} bytes on disk", found.blocks() * 512);
            let clusters = 0..chain.bytes().div_ceil(CLUSTER);
            for start in clusters.filter(|n| *n < 12 || n % 8192 > 8180 || n % 8192 < 12).map(|n| n * CLUSTER) {
                let mut piece = vec![0xee; CLUSTER.min(chain.bytes() - start) as usize];
                raw.read_exact_at(&mut piece, start).unwrap();
                prop_assert!(piece == read(&chain, start, piece.len() as u64), "at {}", start);
            }
        }
    }

    /// Two disks that share some layers are equal outside the reported ranges.
    #[test]
    fn nothing_differs_outside_the_ranges(layers in overlays(), other in overlays(), shared in 0usize..5) {
        let mut files = Files::new();
        let paths = files.add_all(&layers);
        let mut branch = paths[..shared.min(paths.len())].to_vec();
        let least = branch.len().checked_sub(1).map_or(0, |last| layers[last].size);
        let fitting: Vec<_> = other.into_iter().filter(|layer| layer.size >= least).collect();
        branch.extend(files.add_all(&fitting));
        let a = files.chain(&paths).unwrap();
        let b = files.chain(&branch).unwrap();
        let ranges = changed(&a, &b).unwrap();
        prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
        let both = a.bytes().min(b.bytes());
        for start in (0..both).step_by(CLUSTER as usize).filter(|at| at % L2_SPAN < 12 * CLUSTER) {
            let bytes = CLUSTER.min(both - start);
            let can_differ = ranges.iter().any(|range| range.start < start + bytes && start < range.end);
            prop_assert!(can_differ || read(&a, start, bytes) == read(&b, start, bytes), "at {}", start);
        }
    }

    /// For any content of the tables, a layer is refused or the whole disk can be read.
    #[test]
    fn any_damage_is_refused_or_can_be_read(
        layers in overlays(),
        which in any::<Index>(),
        bends in vec((0usize..6, 0usize..128, any::<u8>()), 1..4),
    ) {
        let mut files = Files::new();
        let mut layers: Vec<_> = layers.iter().map(Overlay::bytes).collect();
        let which = which.index(layers.len());
        for (cluster, at, byte) in bends {
            if let Some(place) = layers[which].get_mut(cluster * CLUSTER as usize + at) {
                *place = byte;
            }
        }
        let paths: Vec<_> = layers.iter().map(|layer| files.add(layer)).collect();
        if let Ok(chain) = files.chain(&paths) {
            let bytes = chain.bytes().min(16 * CLUSTER);
            read(&chain, 0, bytes);
            read(&chain, chain.bytes() - bytes, bytes);
            prop_assert_eq!(changed(&chain, &chain).unwrap(), []);
        }
    }
}
