//! Random overlays on top of each other, compared with a map of their clusters.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, any, prop_assert_eq, proptest};
use proptest::sample::Index;
use sandtree_disk::qcow2::{COMPRESSED, COPIED, READS_AS_ZERO};

use super::super::check::{Damage, Verdict, bytes as check};
use super::super::overlay::{self, CLUSTER};
use super::super::samples::{Cluster, DATA, L1, L2, Overlay, overlay, overlays, put_u64, u64_at};
use super::*;

fn with(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

fn folded(layers: &[Vec<u8>]) -> Result<Vec<u8>, Error> {
    let layers: Vec<_> = layers.iter().map(|bytes| with(bytes)).collect();
    let out = with(&[]);
    let folded = fold(&layers, &out)?;
    let mut bytes = vec![0; out.metadata().unwrap().len() as usize];
    out.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(folded.bytes, bytes.len() as u64);
    assert_eq!(
        check(&bytes).unwrap(),
        Verdict::Clean { leaked_clusters: 0 }
    );
    Ok(bytes)
}

/// The clusters of an overlay, read through its tables. Zero clusters are empty.
fn clusters(file: &[u8]) -> BTreeMap<u64, Vec<u8>> {
    let l1 = u64_at(file, 40);
    let size = u64_at(file, 24);
    let mut found = BTreeMap::new();
    for index in 0..size.div_ceil(CLUSTER) {
        let l2 = u64_at(file, l1 + index / 8192 * 8) & !COPIED;
        match if l2 == 0 {
            0
        } else {
            u64_at(file, l2 + index % 8192 * 8)
        } {
            0 => None,
            READS_AS_ZERO => found.insert(index, Vec::new()),
            entry => found.insert(
                index,
                file[(entry & !COPIED) as usize..][..CLUSTER as usize].to_vec(),
            ),
        };
    }
    found
}

fn damage(edit: impl FnOnce(&mut Vec<u8>)) -> Damage {
    let sound = overlay(CLUSTER, []).bytes();
    let mut damaged = overlay(L2_SPAN, [(0, Cluster::Data(1)), (1, Cluster::Data(2))]).bytes();
    edit(&mut damaged);
    match folded(&[sound, damaged]) {
        Err(Error::DiskLayer { layer: 1, damage }) => damage,
        other => panic!("not found: {:?}", other.map(|bytes| bytes.len())),
    }
}

#[test]
fn one_layer_folds_to_itself() {
    let one = overlay(L2_SPAN, [(7, Cluster::Data(1)), (8, Cluster::Zero)]).bytes();
    assert!(clusters(&folded(std::slice::from_ref(&one)).unwrap()) == clusters(&one));
}

#[test]
fn empty_layers_fold_to_an_empty_overlay() {
    let empty = overlay::empty(5 << 40).unwrap();
    let bytes = folded(&[empty.clone(), empty]).unwrap();
    assert_eq!(u64_at(&bytes, 24), 5 << 40);
    let l1 = u64_at(&bytes, 40);
    assert!((0..(5 << 40) / L2_SPAN).all(|table| u64_at(&bytes, l1 + table * 8) == 0));
}

#[test]
fn a_file_that_ends_inside_its_last_cluster_is_padded_with_zeros() {
    let mut bytes = overlay(L2_SPAN, [(0, Cluster::Data(1)), (1, Cluster::Data(2))]).bytes();
    bytes.truncate((DATA + CLUSTER + 100) as usize);
    let found = clusters(&folded(&[bytes]).unwrap());
    assert!(found[&0].iter().all(|byte| *byte == 1));
    assert!(found[&1][..100].iter().all(|byte| *byte == 2));
    assert!(found[&1][100..].iter().all(|byte| *byte == 0));
}

#[test]
fn many_clusters_are_all_counted() {
    let newest = overlay(
        3 * L2_SPAN,
        (0..300).map(|cluster| (cluster * 82, Cluster::Data(cluster as u8))),
    );
    let found = clusters(&folded(&[overlay(CLUSTER, []).bytes(), newest.bytes()]).unwrap());
    assert_eq!(found.len(), 300);
}

#[test]
fn shrinking_disks_and_nonempty_outputs_are_refused() {
    let [small, large] = [CLUSTER, 2 * CLUSTER].map(|size| overlay(size, []).bytes());
    assert!(matches!(
        folded(&[large, small.clone()]),
        Err(Error::DiskFold { .. })
    ));
    assert!(matches!(folded(&[]), Err(Error::DiskFold { .. })));
    assert!(matches!(
        fold(&[with(&small)], &with(&[0])),
        Err(Error::NotEmpty)
    ));
}

#[test]
fn a_layer_that_is_damaged_is_named() {
    let beyond = DATA + 2 * CLUSTER;
    assert_eq!(damage(|file| file.truncate(50)), Damage::Short);
    assert_eq!(damage(|file| file[0] = 0), Damage::NotQcow2);
    assert_eq!(damage(|file| file[23] = 17), Damage::ClusterBits(17));
    assert_eq!(damage(|file| file[39] = 0), Damage::L1Size);
    assert_eq!(
        damage(|file| put_u64(file, 40, u64::MAX - 7)),
        Damage::Unaligned {
            at: 40,
            offset: u64::MAX - 7
        }
    );
    assert_eq!(
        damage(|file| put_u64(file, 40, beyond)),
        Damage::Beyond {
            at: 40,
            offset: beyond
        }
    );
    assert_eq!(
        damage(|file| put_u64(file, L1, beyond)),
        Damage::Beyond {
            at: L1,
            offset: beyond
        }
    );
    assert_eq!(
        damage(|file| put_u64(file, L1, L2 | 1)),
        Damage::Reserved { at: L1 }
    );
    assert_eq!(
        damage(|file| put_u64(file, L2, beyond)),
        Damage::Beyond {
            at: L2,
            offset: beyond
        }
    );
    assert_eq!(
        damage(|file| put_u64(file, L2, DATA + 512)),
        Damage::Unaligned {
            at: L2,
            offset: DATA + 512
        }
    );
    assert!(matches!(
        damage(|file| put_u64(file, L2, DATA | COMPRESSED)),
        Damage::Unexpected(_)
    ));
}

/// A small file must not fill the disk by repeating one cluster everywhere.
#[test]
fn a_layer_that_repeats_a_cluster_is_refused() {
    let everywhere = |file: &mut Vec<u8>| {
        (0..8192).for_each(|index| put_u64(file, L2 + index * 8, DATA | COPIED))
    };
    assert_eq!(damage(everywhere), Damage::Shared { offset: DATA });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_newest_layer_that_has_a_cluster_wins(layers in overlays()) {
        let result = folded(&layers.iter().map(Overlay::bytes).collect::<Vec<_>>()).unwrap();
        let size = layers.last().unwrap().size;
        prop_assert_eq!(u64_at(&result, 24), size);
        let newest = |cluster| layers.iter().rev().find_map(|layer| layer.content(cluster));
        let expected = (0..size.div_ceil(CLUSTER)).filter_map(|cluster| Some((cluster, newest(cluster)?)));
        assert!(clusters(&result) == expected.collect::<BTreeMap<_, _>>());
    }

    /// For any content of the tables, the fold ends with a clean overlay or with an error.
    #[test]
    fn any_damage_ends_the_fold_or_changes_nothing_else(
        layers in overlays(),
        which in any::<Index>(),
        bends in vec((0usize..5, 0usize..128, any::<u8>()), 1..6),
    ) {
        let mut layers: Vec<_> = layers.iter().map(Overlay::bytes).collect();
        let which = which.index(layers.len());
        let file = &mut layers[which];
        for (cluster, at, byte) in bends {
            let at = cluster * CLUSTER as usize + at;
            if let Some(place) = file.get_mut(at) {
                *place = byte;
            }
        }
        drop(folded(&layers));
    }
}
