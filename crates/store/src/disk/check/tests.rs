//! A small overlay with data, and every kind of damage to it.

use proptest::collection::vec;
use proptest::prelude::{any, proptest};

use sandtree_disk::qcow2::{COMPRESSED, COPIED, READS_AS_ZERO};

use super::*;
use crate::disk::overlay;

const CLUSTER: u64 = 0x1_0000;
const REFCOUNTS: u64 = 2 * CLUSTER;
const L1: u64 = 3 * CLUSTER;
const L2: u64 = 4 * CLUSTER;
const DATA: u64 = 5 * CLUSTER;
const FREE: u64 = 8 * CLUSTER;

/// One L2 table, three data clusters, and one cluster at the end that is neither used nor counted.
fn overlay() -> Vec<u8> {
    let mut file = overlay::empty(1 << 30).unwrap();
    file.resize((FREE + CLUSTER) as usize, 0);
    put_u64(&mut file, L1, L2 | COPIED);
    for index in 0..3 {
        put_u64(&mut file, L2 + index * 8, (DATA + index * CLUSTER) | COPIED);
    }
    (4..8).for_each(|cluster| put_count(&mut file, cluster, 1));
    file
}

fn put_u64(file: &mut [u8], at: u64, value: u64) {
    file[at as usize..][..8].copy_from_slice(&value.to_be_bytes());
}

fn put_u32(file: &mut [u8], at: u64, value: u32) {
    file[at as usize..][..4].copy_from_slice(&value.to_be_bytes());
}

fn put_count(file: &mut [u8], cluster: u64, count: u16) {
    file[(REFCOUNTS + cluster * 2) as usize..][..2].copy_from_slice(&count.to_be_bytes());
}

fn after(damage: impl FnOnce(&mut Vec<u8>)) -> Verdict {
    let mut file = overlay();
    damage(&mut file);
    bytes(&file).unwrap()
}

fn corrupt(damage: impl FnOnce(&mut Vec<u8>)) -> Damage {
    match after(damage) {
        Verdict::Corrupt(damage) => damage,
        clean => panic!("not found: {clean:?}"),
    }
}

#[test]
fn a_whole_overlay_is_clean() {
    assert_eq!(after(|_| {}), Verdict::Clean { leaked_clusters: 0 });
}

#[test]
fn leaked_clusters_are_not_damage() {
    assert_eq!(
        after(|file| put_count(file, 8, 1)),
        Verdict::Clean { leaked_clusters: 1 }
    );
    assert_eq!(
        after(|file| put_count(file, 5, 2)),
        Verdict::Clean { leaked_clusters: 1 }
    );
    assert_eq!(
        after(|file| put_u64(file, L2, 0)),
        Verdict::Clean { leaked_clusters: 1 }
    );
    assert_eq!(
        after(|file| put_u64(file, L1, 0)),
        Verdict::Clean { leaked_clusters: 4 }
    );
}

#[test]
fn zero_clusters_are_allowed_with_and_without_a_place() {
    assert_eq!(
        after(|file| put_u64(file, L2 + 24, READS_AS_ZERO)),
        Verdict::Clean { leaked_clusters: 0 }
    );
    let placed = (FREE + 9 * CLUSTER) | READS_AS_ZERO;
    assert_eq!(
        after(|file| put_u64(file, L2 + 24, placed)),
        Verdict::Clean { leaked_clusters: 0 }
    );
}

#[test]
fn a_cluster_in_use_must_be_counted() {
    for (cluster, offset) in (0..8).map(|cluster| (cluster, cluster * CLUSTER)) {
        assert_eq!(
            corrupt(|file| put_count(file, cluster, 0)),
            Damage::Uncounted { offset }
        );
    }
    assert_eq!(
        corrupt(|file| put_u64(file, CLUSTER, 0)),
        Damage::Uncounted { offset: 0 }
    );
}

#[test]
fn a_cluster_used_twice_is_damage() {
    for offset in [0, CLUSTER, REFCOUNTS, L1, L2, DATA].into_iter().skip(1) {
        assert_eq!(
            corrupt(|file| put_u64(file, L2 + 24, offset)),
            Damage::Shared { offset }
        );
    }
    assert_eq!(
        corrupt(|file| put_u64(file, L1 + 8, L2)),
        Damage::Shared { offset: L2 }
    );
    assert_eq!(
        corrupt(|file| put_u64(file, CLUSTER + 8, REFCOUNTS)),
        Damage::Shared { offset: REFCOUNTS }
    );
}

#[test]
fn references_are_aligned_and_inside_the_file() {
    let beyond = FREE + CLUSTER;
    assert_eq!(
        corrupt(|file| put_u64(file, L2, DATA + 512)),
        Damage::Unaligned {
            at: L2,
            offset: DATA + 512
        }
    );
    assert_eq!(
        corrupt(|file| put_u64(file, L2, beyond)),
        Damage::Beyond {
            at: L2,
            offset: beyond
        }
    );
    assert_eq!(
        corrupt(|file| put_u64(file, L1, beyond)),
        Damage::Beyond {
            at: L1,
            offset: beyond
        }
    );
    assert_eq!(
        corrupt(|file| put_u64(file, CLUSTER + 8, beyond)),
        Damage::Beyond {
            at: CLUSTER + 8,
            offset: beyond
        }
    );
    assert_eq!(
        corrupt(|file| put_u64(file, 40, u64::MAX - 7)),
        Damage::Beyond {
            at: 40,
            offset: u64::MAX - 7
        }
    );
    assert_eq!(
        corrupt(|file| put_u64(file, 48, beyond)),
        Damage::Beyond {
            at: 48,
            offset: beyond
        }
    );
}

#[test]
fn a_truncated_file_is_damaged() {
    for len in [
        0,
        103,
        104,
        CLUSTER,
        2 * CLUSTER,
        L1,
        L2,
        L2 + 8,
        DATA,
        DATA + 2 * CLUSTER,
    ] {
        corrupt(|file| file.truncate(len as usize));
    }
}

#[test]
fn an_unexpected_header_is_refused() {
    assert_eq!(corrupt(|file| file[0] = 0), Damage::NotQcow2);
    assert_eq!(corrupt(|file| put_u32(file, 4, 2)), Damage::Version(2));
    assert_eq!(corrupt(|file| put_u32(file, 20, 8)), Damage::ClusterBits(8));
    assert_eq!(
        corrupt(|file| put_u32(file, 20, 63)),
        Damage::ClusterBits(63)
    );
    assert_eq!(corrupt(|file| put_u64(file, 72, 1)), Damage::MarkedDirty);
    assert_eq!(corrupt(|file| put_u64(file, 72, 2)), Damage::MarkedCorrupt);
    assert_eq!(
        corrupt(|file| put_u64(file, 72, 1 << 40)),
        Damage::Feature(1 << 40)
    );
    assert_eq!(corrupt(|file| put_u32(file, 36, 1)), Damage::L1Size);
    assert_eq!(corrupt(|file| put_u32(file, 36, u32::MAX)), Damage::L1Size);
    assert_eq!(corrupt(|file| put_u64(file, 24, u64::MAX)), Damage::L1Size);
    assert_eq!(
        corrupt(|file| put_u32(file, 56, 0)),
        Damage::RefcountTableSize
    );
    assert_eq!(
        corrupt(|file| put_u32(file, 56, u32::MAX)),
        Damage::RefcountTableSize
    );
    // Compatible features, the length of the header, an extension.
    for at in [8, 32, 60, 80, 84, 88, 92, 96, 100, 104, 108] {
        assert!(
            matches!(corrupt(|file| put_u32(file, at, 9)), Damage::Unexpected(_)),
            "{at}"
        );
    }
}

#[test]
fn unexpected_entries_are_refused() {
    assert!(matches!(
        corrupt(|file| put_u64(file, L2, DATA | COMPRESSED)),
        Damage::Unexpected(_)
    ));
    assert_eq!(
        corrupt(|file| put_u64(file, L2, DATA | 2)),
        Damage::Reserved { at: L2 }
    );
    assert_eq!(
        corrupt(|file| put_u64(file, L1, L2 | 1)),
        Damage::Reserved { at: L1 }
    );
}

proptest! {
    /// The check ends with a verdict for any content of the tables.
    #[test]
    fn any_damage_gets_a_verdict(damage in vec((0u64..5, 0usize..256, any::<u8>()), 1..8)) {
        let mut file = overlay();
        for (cluster, at, byte) in damage {
            file[cluster as usize * CLUSTER as usize + at] = byte;
        }
        bytes(&file).unwrap();
    }
}
