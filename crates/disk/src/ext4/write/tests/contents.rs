//! Bytes of files.

use super::image::Maker;
use super::{MIB, pattern};
use crate::ext4::write::{Content, Error, Extent, Kind, Tree};

#[test]
fn files_of_many_sizes_are_stored() {
    let mut maker = Maker::new();
    let sizes = [0, 1, 4095, 4096, 4097, 70_001, 3 << 20, (8 << 20) + 5];
    let contents: Vec<_> = sizes
        .into_iter()
        .map(|size| pattern(size as u64, size))
        .collect();
    for content in &contents {
        maker.file(Tree::ROOT, content.len().to_string(), content);
    }
    let image = maker.clean(MIB);
    for content in &contents {
        assert!(
            image.read(format!("/{}", content.len()).as_bytes()) == *content,
            "{} bytes",
            content.len()
        );
    }
    let dumped = image.path.with_extension("dumped");
    image.debugfs(&format!("dump /70001 {}", dumped.display()));
    assert!(std::fs::read(dumped).unwrap() == contents[5]);
}

#[test]
fn a_file_written_in_pieces_equals_one_written_at_once() {
    let mut bytes = pattern(1, 50_000);
    bytes[5000..30_000].fill(0);
    let mut maker = Maker::new();
    let whole = maker.content(&bytes);
    for piece in [1, 7, 4095, 4096, 4097, 9000] {
        let mut writer = maker.area.file(50_000, u64::MAX).unwrap();
        for chunk in bytes.chunks(piece) {
            if chunk.iter().all(|byte| *byte == 0) {
                writer.skip(chunk.len() as u64).unwrap();
            } else {
                writer.write(chunk).unwrap();
            }
        }
        let content = writer.finish().unwrap();
        let shape = |content: &Content| {
            content
                .extents
                .iter()
                .map(|it| (it.logical, it.blocks))
                .collect::<Vec<_>>()
        };
        assert_eq!(shape(&content), shape(&whole), "pieces of {piece}");
        assert!(
            maker.area.read(&content, u64::MAX).unwrap() == bytes,
            "pieces of {piece}"
        );
    }
}

#[test]
fn written_bytes_can_be_read_at_once() {
    let mut maker = Maker::new();
    let bytes = pattern(9, 5 << 20);
    let content = maker.content(&bytes);
    let small = maker.content(b"small");
    assert!(maker.area.read(&content, u64::MAX).unwrap() == bytes);
    assert_eq!(maker.area.read(&content, 5000).unwrap(), bytes[..5000]);
    assert_eq!(maker.area.read(&small, 3).unwrap(), b"sma");
}

#[test]
fn extents_are_stored_in_the_inode_and_in_trees() {
    let mut maker = Maker::new();
    for count in [1, 4, 5, 340, 341, 1360, 1361, 3000] {
        let content = maker.fragments(count);
        assert_eq!(content.extents.len() as u64, count);
        maker.add(Tree::ROOT, count.to_string(), Kind::File(content));
    }
    let image = maker.clean(MIB);
    for count in [1, 4, 5, 340, 341, 1360, 1361, 3000u64] {
        let bytes = image.read(format!("/{count}").as_bytes());
        assert_eq!(bytes.len() as u64, count * 8192);
        let is_right = |(index, block): (usize, &[u8])| {
            let expected = if index % 2 == 0 {
                (index / 2) as u8 | 1
            } else {
                0
            };
            block.iter().all(|byte| *byte == expected)
        };
        assert!(
            bytes.chunks(4096).enumerate().all(is_right),
            "{count} extents"
        );
    }
    assert!(image.debugfs("extents /3000").contains("\n 2/ 2 "));
}

#[test]
fn a_file_of_1_tib_with_one_block_is_stored() {
    let mut maker = Maker::new();
    let mut writer = maker.area.file(1 << 40, u64::MAX).unwrap();
    writer.skip((1 << 40) - 4096).unwrap();
    writer.write(&[7; 4096]).unwrap();
    let content = writer.finish().unwrap();
    assert_eq!(content.extents.len(), 1);
    maker.add(Tree::ROOT, "huge", Kind::File(content));
    let empty = maker.area.file(16 << 40, u64::MAX).map(drop).unwrap_err();
    assert!(matches!(empty, Error::TooLarge { what: "a file", .. }));
    let image = maker.clean(MIB);
    let stat = image.debugfs("stat /huge");
    assert!(
        stat.contains("Size: 1099511627776") && stat.contains("Blockcount: 8\n"),
        "{stat}"
    );
}

#[test]
fn more_bytes_than_announced_are_refused() {
    let mut maker = Maker::new();
    let mut writer = maker.area.file(5, u64::MAX).unwrap();
    writer.write(b"1234").unwrap();
    let refused = writer.write(b"56").unwrap_err();
    assert!(matches!(
        refused,
        Error::LongerThanAnnounced { announced_bytes: 5 }
    ));
    assert!(writer.skip(2).is_err());
    let content = writer.finish().unwrap();
    assert_eq!(maker.area.read(&content, 10).unwrap(), b"1234\0");
}

#[test]
fn freed_and_abandoned_files_become_free_blocks_and_holes() {
    let mut maker = Maker::new();
    maker.file(Tree::ROOT, "before", &pattern(1, 10_000));
    let gone = maker.content(&pattern(2, 5 << 20));
    maker.file(Tree::ROOT, "between", &pattern(3, 10_000));
    let mut given_up = maker.area.file(1 << 20, u64::MAX).unwrap();
    given_up.write(&pattern(4, 500_000)).unwrap();
    drop(given_up);
    maker.file(Tree::ROOT, "after", &pattern(5, 10_000));
    maker.area.free(&gone);
    let image = maker.clean(0);
    let Extent {
        physical, blocks, ..
    } = gone.extents[0];
    assert!(
        image
            .debugfs(&format!("testb {physical} {blocks}"))
            .lines()
            .all(|line| line.contains("not in use"))
    );
    let bytes = std::fs::read(&image.path).unwrap();
    assert!(
        bytes[physical as usize * 4096..][..blocks as usize * 4096]
            .iter()
            .all(|byte| *byte == 0)
    );
    assert!(
        image.read(b"/between") == pattern(3, 10_000)
            && image.read(b"/after") == pattern(5, 10_000)
    );
}

/// Data in the first five groups, around backups in three of them.
#[test]
fn data_is_written_around_backups() {
    let mut maker = Maker::new();
    let block_of = |index: u64| [(index % 251) as u8 + 1; 65536];
    let mut writer = maker.area.file(600 << 20, u64::MAX).unwrap();
    (0..9600).for_each(|index| writer.write(&block_of(index)).unwrap());
    let content = writer.finish().unwrap();
    let starts: Vec<_> = content
        .extents
        .iter()
        .map(|extent| extent.physical)
        .collect();
    assert!(
        starts.contains(&(32768 + 129)) && starts.contains(&(3 * 32768 + 129)),
        "{starts:?}"
    );
    maker.add(Tree::ROOT, "large", Kind::File(content));
    let image = maker.clean(MIB);
    let bytes = image.read(b"/large");
    assert!(
        bytes
            .chunks(65536)
            .zip(0..)
            .all(|(chunk, index)| chunk == block_of(index))
    );
    // dumpe2fs accepts each backup.
    for group in [1, 3] {
        let superblock = (group * 32768).to_string();
        super::run(
            "dumpe2fs",
            &[
                "-h",
                "-o",
                &format!("superblock={superblock}"),
                image.path.to_str().unwrap(),
            ],
        );
    }
}
