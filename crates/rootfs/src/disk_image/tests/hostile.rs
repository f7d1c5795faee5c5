//! Damaged and hostile images.

use std::sync::OnceLock;

use proptest::collection::vec;
use proptest::prelude::{ProptestConfig, any};
use proptest::{prop_assert, proptest};

use super::super::DiskLimits;
use super::super::samples::{
    self, How, Qcow2, TYPE_ROOT, deflate, packed_entry, put_u32, put_u64, root, with_gpt, with_mbr,
};
use super::{LIMITS, import, import_within, message};

const CLUSTER: usize = 4096;
const L1: usize = CLUSTER;
const L2: usize = 2 * CLUSTER;

fn sample() -> Vec<u8> {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    let packed = |index: usize, _: &[u8]| {
        if index.is_multiple_of(3) {
            How::Packed
        } else {
            How::Data
        }
    };
    BYTES
        .get_or_init(|| {
            Qcow2 {
                version: 3,
                cluster_bits: 12,
                is_zstd: false,
            }
            .file(&root(), packed)
        })
        .clone()
}

/// The sample with an eight-byte number at a place.
fn with_u64(at: usize, value: u64) -> Vec<u8> {
    let mut image = sample();
    put_u64(&mut image, at, value);
    image
}

fn with_u32(at: usize, value: u32) -> Vec<u8> {
    let mut image = sample();
    put_u32(&mut image, at, value);
    image
}

#[test]
fn unsupported_features_are_named() {
    let mut backed = with_u64(8, 512);
    put_u32(&mut backed, 16, 9);
    backed[512..521].copy_from_slice(b"/etc/\x1b[1m");
    let mut zstd = with_u64(72, 8);
    zstd[104] = 2;
    let refused = [
        (with_u32(4, 1), "version 1"),
        (with_u32(4, 4), "version 4"),
        (backed, r#"a backing file, "/etc/\u{1b}[1m""#),
        (with_u64(8, u64::MAX), r#"a backing file, """#),
        (with_u32(32, 1), "encryption"),
        (with_u64(72, 1), "a mark that it was not closed"),
        (with_u64(72, 2), "a mark that it is corrupt"),
        (with_u64(72, 4), "an external data file"),
        (with_u64(72, 16), "extended L2 entries"),
        (
            with_u64(72, 1 << 40),
            "features with the bits 0x10000000000",
        ),
        (zstd, "compression of type 2"),
    ];
    for (image, what) in refused {
        assert_eq!(
            message(&image),
            format!("the qcow2 image has {what}, which is not supported")
        );
    }
    assert!(
        import(&with_u32(60, 7)).is_ok(),
        "internal snapshots are ignored"
    );
}

#[test]
fn wrong_numbers_are_refused() {
    let end = sample().len() as u64;
    let beyond = end.next_multiple_of(CLUSTER as u64);
    let damaged = [
        (
            with_u32(20, 8),
            "its clusters have an invalid size of 2^8 bytes".to_owned(),
        ),
        (
            with_u32(20, 22),
            "its clusters have an invalid size of 2^22 bytes".into(),
        ),
        (
            with_u32(20, u32::MAX),
            "its clusters have an invalid size of 2^4294967295 bytes".into(),
        ),
        (
            with_u32(100, 96),
            "its header has an invalid length of 96 bytes".into(),
        ),
        (
            with_u32(36, 0),
            "its L1 table has 0 entries for 1573888 bytes".into(),
        ),
        (
            with_u64(40, 4097),
            "the offset 4097 at 40 is not a multiple of the cluster size".into(),
        ),
        (
            with_u64(40, beyond),
            format!("the offset {beyond} at 40 is outside the file"),
        ),
        (
            with_u64(40, u64::MAX << 12),
            format!("the offset {} at 40 is outside the file", u64::MAX << 12),
        ),
        (
            with_u64(L1, beyond),
            format!("the offset {beyond} at 4096 is outside the file"),
        ),
        (
            with_u64(L1, 512),
            "the offset 512 at 4096 is not a multiple of the cluster size".into(),
        ),
        (
            with_u64(L1, 1),
            "the entry at 4096 has reserved bits set".into(),
        ),
        (
            with_u64(L2, beyond),
            format!("the offset {beyond} at 8192 is outside the file"),
        ),
        (
            with_u64(L2, 512),
            "the offset 512 at 8192 is not a multiple of the cluster size".into(),
        ),
        (
            with_u64(L2, 2),
            "the entry at 8192 has reserved bits set".into(),
        ),
        (
            with_u64(L2, 1 << 62 | beyond),
            format!("the offset {beyond} at 8192 is outside the file"),
        ),
        (
            sample()[..71].to_vec(),
            "it is shorter than its header".into(),
        ),
        (
            sample()[..100].to_vec(),
            "it is shorter than its header".into(),
        ),
    ];
    for (image, what) in damaged {
        assert_eq!(
            message(&image),
            format!("the qcow2 image is damaged: {what}")
        );
    }
    let mut old = sample();
    put_u32(&mut old, 4, 2);
    put_u64(&mut old, L2, 1);
    assert_eq!(
        message(&old),
        "the qcow2 image is damaged: the entry at 8192 has reserved bits set"
    );
}

#[test]
fn a_disk_above_the_size_limit_is_refused() {
    let too_large =
        |bytes: u64| format!("the disk has {bytes} bytes; the limit is {}", LIMITS.bytes);
    for bytes in [LIMITS.bytes + 1, 1 << 40, u64::MAX] {
        assert_eq!(message(&with_u64(24, bytes)), too_large(bytes));
    }
    let no_limit = import_within(
        &with_u64(24, u64::MAX),
        DiskLimits {
            bytes: u64::MAX,
            written_bytes: u64::MAX,
        },
    )
    .unwrap_err();
    assert!(
        no_limit.to_string().contains("its L1 table has 1 entries"),
        "{no_limit}"
    );
    let raw = import_within(
        &root(),
        DiskLimits {
            bytes: 1 << 20,
            written_bytes: u64::MAX,
        },
    )
    .unwrap_err();
    assert_eq!(
        raw.to_string(),
        "the disk has 1573888 bytes; the limit is 1048576"
    );
}

#[test]
fn a_compressed_cluster_must_have_the_size_of_one_cluster() {
    let zstd = Qcow2 {
        version: 3,
        cluster_bits: 12,
        is_zstd: true,
    }
    .file(&root(), |_, _| How::Packed);
    let huge = vec![0x55; 64 << 20];
    let packed = [
        (sample(), deflate(&[1; CLUSTER - 1])),
        (sample(), vec![0xff; 100]),
        (sample(), Vec::from([0])),
        (zstd.clone(), zstd::bulk::compress(&huge, 1).unwrap()),
        (
            zstd.clone(),
            zstd::bulk::compress(&[1; CLUSTER - 1], 1).unwrap(),
        ),
        (
            zstd.clone(),
            zstd::bulk::compress(&[1; CLUSTER + 1], 1).unwrap(),
        ),
        // A frame with a window of two gigabytes.
        (zstd, vec![0x28, 0xb5, 0x2f, 0xfd, 0, 0xa8, 1, 0, 0]),
    ];
    for (mut image, packed) in packed {
        let offset = image.len();
        put_u64(
            &mut image,
            L2,
            packed_entry(offset, packed.len().min(8000), 12),
        );
        image.extend(&packed);
        assert_eq!(
            message(&image),
            format!(
                "the qcow2 image is damaged: the compressed cluster at {offset} cannot be decompressed"
            )
        );
    }
    // Data after the first cluster is ignored, as by QEMU.
    let mut image = sample();
    let packed = deflate(&[&root()[..CLUSTER], &huge].concat());
    let offset = image.len();
    put_u64(
        &mut image,
        L2,
        packed_entry(offset, packed.len().min(8000), 12),
    );
    image.extend(&packed);
    assert!(import(&image).is_ok_and(|(_, bytes)| bytes[..root().len()] == root()));
}

#[test]
fn a_truncated_image_is_refused() {
    for image in [sample(), with_mbr(&[(0x83, &root())])] {
        for len in (0..image.len() - CLUSTER).step_by(30_011) {
            assert!(import(&image[..len]).is_err(), "with {len} bytes");
        }
    }
}

/// Flips bits, more often in tables and headers than in contents.
fn flip(image: &mut [u8], flips: &[(u16, bool, u8)]) {
    for (place, far, bit) in flips {
        let range = if *far { image.len() } else { 3 * CLUSTER };
        let at = usize::from(*place) * range / (1 << 16);
        image[at] ^= 1 << (bit % 8);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_damaged_image_is_imported_within_the_limit_or_refused(
        which in 0usize..3,
        flips in vec((any::<u16>(), any::<bool>(), any::<u8>()), 1..12),
    ) {
        let mut image = match which {
            0 => sample(),
            1 => Qcow2 { version: 3, cluster_bits: 9, is_zstd: true }.file(&samples::boot(), |_, _| How::Packed),
            _ => with_gpt(512, &[(TYPE_ROOT, &root())]),
        };
        flip(&mut image, &flips);
        if let Ok((imported, bytes)) = import(&image) {
            prop_assert!(imported.bytes <= LIMITS.bytes && bytes.len() as u64 == imported.bytes);
        }
    }
}
