//! Finding the root file system on a disk.

use super::super::samples::{TYPE_LINUX, TYPE_ROOT, boot, magic, root, with_gpt, with_mbr};
use super::{import, message, padded};

fn assert_takes(image: &[u8], partition: u32) {
    let (imported, bytes) = import(image).unwrap();
    assert_eq!(imported.partition, Some(partition));
    assert!(bytes == padded(root()));
}

#[test]
fn the_partition_with_an_operating_system_is_chosen() {
    assert_takes(&with_mbr(&[(0x83, &root())]), 1);
    assert_takes(
        &with_mbr(&[
            (0x83, &boot()),
            (0x82, &magic(4086, b"SWAPSPACE2")),
            (0x83, &root()),
        ]),
        3,
    );
    assert_takes(&with_mbr(&[(0x05, &root()), (0x83, &root())]), 2);
    for sector in [512, 4096] {
        assert_takes(
            &with_gpt(sector, &[(TYPE_LINUX, &boot()), (TYPE_LINUX, &root())]),
            2,
        );
        assert_takes(
            &with_gpt(
                sector,
                &[(TYPE_LINUX, &magic(82, b"FAT32   ")), (TYPE_ROOT, &root())],
            ),
            2,
        );
    }
}

#[test]
fn of_two_systems_the_one_with_the_root_type_is_chosen() {
    assert_takes(
        &with_gpt(512, &[(TYPE_LINUX, &root()), (TYPE_ROOT, &root())]),
        2,
    );
    assert_takes(
        &with_gpt(512, &[(TYPE_LINUX, &root()), (TYPE_ROOT, &boot())]),
        1,
    );
}

#[test]
fn of_two_equally_good_partitions_none_is_chosen() {
    let both = "several partitions could be the root file system: \
                partition 1 has ext4 (1573888 bytes), partition 3 has ext4 (1573888 bytes)";
    assert_eq!(
        message(&with_mbr(&[
            (0x83, &root()),
            (0x83, &boot()),
            (0x83, &root())
        ])),
        both
    );
    assert_eq!(
        message(&with_gpt(
            512,
            &[
                (TYPE_ROOT, &root()),
                (TYPE_LINUX, &boot()),
                (TYPE_ROOT, &root())
            ]
        )),
        both
    );
}

#[test]
fn a_damaged_gpt_is_read_from_its_second_copy() {
    let good = with_gpt(512, &[(TYPE_LINUX, &boot()), (TYPE_ROOT, &root())]);
    let damaged = |places: &[usize]| {
        let mut image = good.clone();
        places.iter().for_each(|at| image[*at] ^= 1);
        image
    };
    let header = 512 + 72;
    let entries = 1024 + 128 + 32;
    let second = good.len() - 512 + 72;
    for places in [
        &[header][..],
        &[entries],
        &[512],
        &[second],
        &[510, entries],
    ] {
        assert_takes(&damaged(places), 2);
    }
    let expected = "both copies of the disk's GPT are damaged: in the first, its entries have a wrong checksum; \
                    in the second, its header has a wrong checksum";
    assert_eq!(message(&damaged(&[entries, second])), expected);
}

#[test]
fn other_file_systems_are_named() {
    let others: [(usize, &[u8], &str); 8] = [
        (0, b"XFSB", "xfs"),
        (65600, b"_BHRfS_M", "btrfs"),
        (32769, b"CD001", "iso9660"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (536, b"LVM2 001", "LVM"),
        (82, b"FAT32   ", "vfat"),
        (4086, b"SWAPSPACE2", "swap"),
        (0, b"hsqs", "squashfs"),
    ];
    for (at, bytes, name) in others {
        let expected = format!("the root file system is {name}; only ext4 is supported");
        assert_eq!(message(&magic(at, bytes)), expected);
    }
    let btrfs = magic(65600, b"_BHRfS_M");
    let expected = "the root file system is btrfs; only ext4 is supported";
    assert_eq!(
        message(&with_gpt(
            512,
            &[(TYPE_LINUX, &boot()), (TYPE_LINUX, &btrfs)]
        )),
        expected,
        "/boot is not a root"
    );
}

#[test]
fn the_partitions_of_a_disk_without_a_root_are_listed() {
    let vfat = magic(54, b"FAT16   ");
    let expected = "no partition has a root file system: partition 1 has vfat (131072 bytes), \
                    partition 2 has an ext4 without an operating system (1048576 bytes), \
                    partition 3 has logical partitions, which are not supported (1573888 bytes), \
                    partition 4 has only zeros (4096 bytes)";
    let parts: [(u8, &[u8]); 4] = [
        (0x0c, &vfat),
        (0x83, &boot()),
        (0x0f, &root()),
        (0x83, &[0; 4096]),
    ];
    assert_eq!(message(&with_mbr(&parts)), expected);
    assert_eq!(
        message(&with_gpt(512, &[])),
        "no partition has a root file system: the disk has no partitions"
    );
    let nothing = "the disk has neither a file system nor a partition table";
    assert_eq!(message(&vec![0; 1 << 20]), nothing);
    assert_eq!(message(b""), nothing);
    assert_eq!(message(&[7; 5000]), nothing);
}

#[test]
fn a_truncated_file_system_is_refused() {
    let cut = |image: Vec<u8>, by: usize| message(&image[..image.len() - by]);
    let expected = "the file system has 1573888 bytes, but its place on the disk has only 1572864";
    assert_eq!(cut(root(), 1024), expected);
    assert_eq!(cut(with_mbr(&[(0x83, &root())]), 4096), expected);
    let mut image = root();
    image[1024 + 24] = 7;
    assert_eq!(
        message(&image),
        "the file system is damaged: its block size is invalid"
    );
    let mut image = root();
    image[1024 + 4..1024 + 8].fill(0);
    assert_eq!(
        message(&image),
        "the file system is damaged: its number of blocks is invalid"
    );
}
