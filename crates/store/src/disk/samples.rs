//! Overlays for tests, described cluster by cluster.

use std::collections::BTreeMap;

use proptest::collection::{btree_map, vec};
use proptest::prelude::{Just, Strategy, prop_oneof};
use proptest::sample::select;

use sandtree_disk::qcow2::{COPIED, READS_AS_ZERO};

use super::overlay::{self, CLUSTER, L2_SPAN};

pub(super) const L1: u64 = 3 * CLUSTER;
/// The offsets of the first L2 table and of the first data cluster.
pub(super) const L2: u64 = 4 * CLUSTER;
pub(super) const DATA: u64 = 5 * CLUSTER;
/// From one cluster to several L2 tables; some end inside a cluster.
const SIZES: [u64; 5] = [
    CLUSTER,
    3 * CLUSTER + 512,
    L2_SPAN,
    L2_SPAN + 5 * CLUSTER - 512,
    3 * L2_SPAN,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cluster {
    Zero,
    /// Zero, with a place allocated for it.
    PlacedZero,
    Data(u8),
}

#[derive(Debug, Clone)]
pub(super) struct Overlay {
    pub(super) size: u64,
    clusters: BTreeMap<u64, Cluster>,
}

pub(super) fn overlays() -> impl Strategy<Value = Vec<Overlay>> {
    let place = select(vec![
        0, 1, 2, 3, 4, 8190, 8191, 8192, 8193, 8196, 8197, 16384, 16385, 24575,
    ]);
    let cluster = prop_oneof![
        Just(Cluster::Zero),
        Just(Cluster::PlacedZero),
        (1u8..).prop_map(Cluster::Data),
        (1u8..).prop_map(Cluster::Data)
    ];
    let clusters = btree_map(place, cluster, 0..10);
    vec((0..SIZES.len(), clusters), 1..5).prop_map(|mut layers| {
        layers.sort_by_key(|(size, _)| *size);
        layers
            .into_iter()
            .map(|(size, clusters)| overlay(SIZES[size], clusters))
            .collect()
    })
}

pub(super) fn overlay(size: u64, clusters: impl IntoIterator<Item = (u64, Cluster)>) -> Overlay {
    let on_disk = clusters
        .into_iter()
        .filter(|(cluster, _)| cluster * CLUSTER < size)
        .collect();
    Overlay {
        size,
        clusters: on_disk,
    }
}

impl Overlay {
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut file = overlay::empty(self.size).unwrap();
        file.resize(L2 as usize, 0);
        for (index, cluster) in &self.clusters {
            let l1_entry = L1 + index / 8192 * 8;
            if u64_at(&file, l1_entry) == 0 {
                let table = add_cluster(&mut file, 0);
                put_u64(&mut file, l1_entry, table | COPIED);
            }
            let entry = match cluster {
                Cluster::Zero => READS_AS_ZERO,
                Cluster::PlacedZero => add_cluster(&mut file, 0xdd) | READS_AS_ZERO | COPIED,
                Cluster::Data(byte) => add_cluster(&mut file, *byte) | COPIED,
            };
            let l2 = u64_at(&file, l1_entry) & !COPIED;
            put_u64(&mut file, l2 + index % 8192 * 8, entry);
        }
        file
    }

    /// The content of one cluster in this layer, if the layer has it.
    pub(super) fn content(&self, cluster: u64) -> Option<Vec<u8>> {
        let mut content = match self.clusters.get(&cluster)? {
            Cluster::Data(byte) => vec![*byte; CLUSTER as usize],
            Cluster::Zero | Cluster::PlacedZero => return Some(Vec::new()),
        };
        let kept = (self.size - cluster * CLUSTER).min(CLUSTER);
        content[kept as usize..].fill(0);
        Some(content)
    }
}

fn add_cluster(file: &mut Vec<u8>, byte: u8) -> u64 {
    let offset = file.len() as u64;
    file.resize((offset + CLUSTER) as usize, byte);
    let count = (2 * CLUSTER + offset / CLUSTER * 2) as usize;
    file[count..count + 2].copy_from_slice(&1u16.to_be_bytes());
    offset
}

pub(super) fn u64_at(file: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(file[at as usize..][..8].try_into().unwrap())
}

pub(super) fn put_u64(file: &mut [u8], at: u64, value: u64) {
    file[at as usize..][..8].copy_from_slice(&value.to_be_bytes());
}
