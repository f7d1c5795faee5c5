//! What the codec promises: round trips, the real tar, and a corpus of archives that want something
//! else.

use std::io::{Read, Write};
use std::process::Command;

use super::frame::Output;
use super::header::{Header, Kind, SECTOR};
use super::record::ArtifactRecord;
use super::{BLOCK, Damage, Input, Member, Reader, SparseMap, Writer};
use crate::fs::ReadAt;
use crate::{Digest, Error};

/// Blocks of zeros, of one byte, and a short end.
fn sparse_content() -> Vec<u8> {
    let block = |byte| vec![byte; BLOCK as usize];
    [
        block(0),
        block(7),
        block(0),
        block(0),
        block(9),
        vec![3; 700],
    ]
    .concat()
}

fn ends_with_hole() -> Vec<u8> {
    [vec![1; BLOCK as usize], vec![0; 3 * BLOCK as usize]].concat()
}

fn put(writer: &mut Writer<impl Write>, content: &[u8]) {
    let file: &dyn ReadAt = &content.to_vec();
    let map = SparseMap::of_file(file).unwrap();
    writer.begin(&blob(content), &map).unwrap();
    for piece in map.pieces() {
        writer
            .data(&content[piece.offset as usize..piece.end() as usize])
            .unwrap();
    }
}

fn blob(content: &[u8]) -> Member {
    Member::Blob(Digest::of(content))
}

/// An archive with members of every shape.
fn archive() -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    writer.whole(&Member::Artifact, b"{}").unwrap();
    writer
        .whole(&Member::Manifest, &[b'm'; 2 * SECTOR])
        .unwrap();
    for content in contents() {
        put(&mut writer, &content);
    }
    writer.finish().unwrap()
}

fn contents() -> [Vec<u8>; 5] {
    [
        vec![],
        b"small".to_vec(),
        sparse_content(),
        ends_with_hole(),
        vec![0; BLOCK as usize],
    ]
}

fn compressed(archive: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut output = Output::compressed(&mut out).unwrap();
    output.write_all(archive).unwrap();
    output.finish().unwrap();
    out
}

/// Every member with its content, holes filled.
fn read_all(input: impl Read) -> Result<Vec<(Member, Vec<u8>)>, Error> {
    let mut reader = Reader::new(Input::new(input)?);
    let mut members = Vec::new();
    while let Some(found) = reader.next_member()? {
        let mut content = vec![0; found.map.bytes() as usize];
        for piece in found.map.pieces() {
            let into = &mut content[piece.offset as usize..piece.end() as usize];
            assert_eq!(reader.read(into)?, into.len());
        }
        members.push((found.member, content));
    }
    Ok(members)
}

fn refusal(archive: &[u8]) -> Damage {
    match read_all(archive) {
        Err(Error::Artifact(damage)) => damage,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_written_is_read_compressed_or_not() {
    let plain = read_all(&archive()[..]).unwrap();
    assert_eq!(plain[0], (Member::Artifact, b"{}".to_vec()));
    assert_eq!(plain.len(), 7);
    for ((member, found), content) in plain[2..].iter().zip(contents()) {
        assert_eq!((member, found), (&blob(&content), &content));
    }
    assert_eq!(read_all(&compressed(&archive())[..]).unwrap(), plain);
}

#[test]
fn holes_take_no_room() {
    let sparse = ends_with_hole();
    let mut writer = Writer::new(Vec::new());
    put(&mut writer, &sparse);
    let len = writer.finish().unwrap().len();
    assert_eq!(len, BLOCK as usize + 4 * SECTOR + 2 * SECTOR);
}

/// The vector of docs/format.md, byte for byte.
#[test]
fn an_archive_has_the_bytes_that_the_format_says() {
    let manifest = include_bytes!("../../../../docs/vectors/snapshot-manifest.json");
    let mut writer = Writer::new(Vec::new());
    let record = ArtifactRecord::new(&Digest::of(manifest), None, true).to_bytes();
    writer.whole(&Member::Artifact, &record).unwrap();
    writer.whole(&Member::Manifest, manifest).unwrap();
    put(&mut writer, &[&[0; BLOCK as usize][..], b"end"].concat());
    let archive = writer.finish().unwrap();
    assert_eq!(archive.len(), 7168);
    assert_eq!(
        Digest::of(&archive).as_str(),
        "65729dbad39dbd50028b557165d26119a49ff9b190e6f20120f33d946ff9b9a8"
    );
}

#[test]
fn gnu_tar_unpacks_an_archive_to_equal_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.tar");
    std::fs::write(&path, archive()).unwrap();
    let unpack = Command::new("tar")
        .arg("xSf")
        .arg(&path)
        .current_dir(dir.path())
        .output();
    let Ok(unpacked) = unpack else {
        eprintln!("SKIPPED: tar is not installed, so no archive was shown to it");
        return;
    };
    assert!(
        unpacked.status.success() && unpacked.stderr.is_empty(),
        "{unpacked:?}"
    );
    for (member, content) in read_all(&archive()[..]).unwrap() {
        let found = std::fs::read(dir.path().join(member.to_string())).unwrap();
        assert!(found == content, "{member} differs");
    }
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        4,
        "nothing but the members is there"
    );
}

/// A size that needs an extended header, as GNU tar reads it. Only the headers are there.
#[test]
fn gnu_tar_reads_the_size_of_a_large_member() {
    let bytes = 9 << 30;
    let dir = tempfile::tempdir().unwrap();
    let mut headers = Vec::new();
    Writer::new(&mut headers)
        .begin(&Member::Manifest, &SparseMap::dense(bytes))
        .unwrap();
    let path = dir.path().join("a.tar");
    std::fs::write(&path, headers).unwrap();
    let Ok(listed) = Command::new("tar").arg("tvf").arg(&path).output() else {
        eprintln!("SKIPPED: tar is not installed, so no archive was shown to it");
        return;
    };
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(
        listed.contains(&bytes.to_string()) && listed.contains("manifest.json"),
        "{listed}"
    );
}

#[test]
fn an_archive_cut_anywhere_is_refused() {
    let whole = archive();
    let compressed = compressed(&archive());
    let cuts = (0..whole.len()).filter(|at| at % SECTOR < 2 || at % SECTOR == SECTOR - 1);
    for at in cuts {
        let damage = refusal(&whole[..at]);
        assert!(
            matches!(damage, Damage::Truncated(_) | Damage::NotAnArtifact),
            "{at}: {damage}"
        );
    }
    for at in 0..compressed.len() {
        let damage = refusal(&compressed[..at]);
        assert!(
            matches!(damage, Damage::Truncated(_) | Damage::NotAnArtifact),
            "{at}: {damage}"
        );
    }
}

/// Whether a byte is in a sector that holds something else than one byte over and over, as content
/// here does.
fn is_in_header(archive: &[u8], at: usize) -> bool {
    let sector = &archive[at / SECTOR * SECTOR..][..SECTOR];
    sector.iter().any(|byte| *byte != sector[0])
}

#[test]
fn a_flipped_bit_is_refused_or_changes_content_alone() {
    let whole = archive();
    let members = read_all(&whole[..]).unwrap();
    for at in (0..whole.len()).filter(|at| at % 997 == 0 || is_in_header(&whole, *at)) {
        let mut bent = whole.clone();
        bent[at] ^= 1 << (at % 8);
        if let Ok(found) = read_all(&bent[..]) {
            let names = |members: &[(Member, Vec<u8>)]| {
                members
                    .iter()
                    .map(|(name, _)| name.clone())
                    .collect::<Vec<_>>()
            };
            assert_eq!(names(&found), names(&members), "{at}");
            assert_ne!(found, members, "{at}: a bit that the reader ignores");
        }
    }
    let compressed = compressed(&whole);
    for at in 0..compressed.len() {
        let mut bent = compressed.clone();
        bent[at] ^= 1 << (at % 8);
        // A frame has a few bits that mean nothing.
        assert!(
            read_all(&bent[..]).map_or(true, |found| found == members),
            "{at}"
        );
    }
}

#[test]
fn nothing_may_follow_the_end() {
    let whole = archive();
    let compressed = compressed(&archive());
    assert_eq!(refusal(&[&whole[..], &[0]].concat()), Damage::Trailing);
    assert_eq!(refusal(&[&whole[..], &whole].concat()), Damage::Trailing);
    assert_eq!(refusal(&[&compressed[..], &[0]].concat()), Damage::Trailing);
    assert_eq!(
        refusal(&[&compressed[..], &compressed].concat()),
        Damage::Trailing,
        "a second frame"
    );
    let skippable = [0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0];
    assert_eq!(
        refusal(&[&compressed[..], &skippable].concat()),
        Damage::Trailing
    );
    assert_eq!(
        refusal(&[&skippable, &compressed[..]].concat()),
        Damage::NotAnArtifact
    );
    let mut one_end = whole.clone();
    one_end[whole.len() - 1] = 1;
    assert_eq!(refusal(&one_end), Damage::End);
    assert_eq!(
        refusal(&self::compressed(&[&whole[..], &[0]].concat())),
        Damage::Trailing
    );
}

#[test]
fn other_files_are_refused_at_once() {
    for other in [&b""[..], b"PK\x03\x04", b"\x1f\x8b\x08\x00", &[0; 4096]] {
        assert_eq!(refusal(other), Damage::NotAnArtifact);
    }
}

#[test]
fn a_frame_that_asks_for_a_large_window_is_refused() {
    // Magic, a descriptor without a content size, a window of 2^28 bytes, and the beginning of a
    // block.
    let frame = [
        0x28,
        0xb5,
        0x2f,
        0xfd,
        0x00,
        (28 - 10) << 3,
        0x01,
        0x00,
        0x00,
    ];
    assert!(matches!(refusal(&frame), Damage::Compression(_)));
}

/// One entry of any kind, as another archiver or an attacker would write it.
fn entry(name: &str, kind: u8, content: &[u8]) -> Vec<u8> {
    let mut block = Header {
        name: name.to_owned(),
        kind: Kind::File,
        bytes: content.len() as u64,
    }
    .to_block();
    block[156] = kind;
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut entry = [&block[..], content].concat();
    entry.resize(entry.len().next_multiple_of(SECTOR), 0);
    entry
}

/// An archive whose second member is `entry`.
fn with(entry: &[u8]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    writer.whole(&Member::Artifact, b"{}").unwrap();
    let archive = writer.finish().unwrap();
    let (start, end) = archive.split_at(archive.len() - 2 * SECTOR);
    [start, entry, end].concat()
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    for name in [
        "/etc/passwd",
        "../x",
        "blobs/../../x",
        "blobs/",
        "./manifest.json",
        "names/images/x",
        "manifest.json/",
    ] {
        assert!(
            matches!(
                refusal(&with(&entry(name, b'0', b"x"))),
                Damage::Name { .. }
            ),
            "{name}"
        );
    }
}

#[test]
fn everything_but_plain_files_is_refused() {
    for kind in *b"1234567gLKSDMVA\0" {
        let damage = refusal(&with(&entry("manifest.json", kind, b"")));
        assert!(matches!(damage, Damage::Kind { .. }), "{damage}");
    }
}

#[test]
fn extended_headers_that_say_something_else_are_refused() {
    let manifest = entry("manifest.json", b'0', b"");
    let sparse_name = "GNUSparseFile.0/manifest.json";
    let extended = |records: &[u8], name| {
        [
            entry("PaxHeaders/manifest.json", b'x', records),
            entry(name, b'0', b""),
        ]
        .concat()
    };
    let path = refusal(&with(&extended(
        b"24 path=../../etc/passwd\n",
        "manifest.json",
    )));
    assert!(
        matches!(path, Damage::Pax { .. } | Damage::PaxKey { .. }),
        "{path}"
    );
    let path = refusal(&with(&extended(b"11 path=/x\n", "manifest.json")));
    assert!(
        matches!(path, Damage::PaxKey { ref key, .. } if key == "path"),
        "{path}"
    );
    let twice = [
        entry("PaxHeaders/manifest.json", b'x', b"9 size=1\n"),
        extended(b"9 size=1\n", "manifest.json"),
    ];
    assert!(matches!(
        refusal(&with(&twice.concat())),
        Damage::Pax {
            rule: "there is another one behind it",
            ..
        }
    ));
    let long = [
        entry("PaxHeaders/manifest.json", b'x', &[b'1'; 2048]),
        manifest,
    ]
    .concat();
    assert!(matches!(
        refusal(&with(&long)),
        Damage::Pax {
            rule: "it is too long",
            ..
        }
    ));
    assert!(matches!(
        refusal(&with(&entry(sparse_name, b'0', b""))),
        Damage::Name { .. }
    ));
}

/// A sparse member with this size, this map and this much behind it.
fn sparse_entry(bytes: u64, map: &str, data: &[u8]) -> Vec<u8> {
    let records = [
        "GNU.sparse.major=1",
        "GNU.sparse.minor=0",
        "GNU.sparse.name=manifest.json",
    ]
    .map(str::to_owned);
    let record = |text: &String| format!("{} {text}\n", text.len() + 4);
    let records = records
        .into_iter()
        .chain([format!("GNU.sparse.realsize={bytes}")])
        .map(|text| record(&text));
    let mut content = map.as_bytes().to_vec();
    content.resize(content.len().next_multiple_of(SECTOR), 0);
    content.extend(data);
    let records: String = records.collect();
    [
        entry("PaxHeaders/manifest.json", b'x', records.as_bytes()),
        entry("GNUSparseFile.0/manifest.json", b'0', &content),
    ]
    .concat()
}

#[test]
fn sparse_members_that_lie_are_refused() {
    let block = vec![1; BLOCK as usize];
    assert!(
        read_all(&with(&sparse_entry(2 * BLOCK, "2\n0\n65536\n131072\n0\n", &block))[..]).is_ok()
    );
    assert!(matches!(
        refusal(&with(&sparse_entry(
            1 << 60,
            "1\n1152921504606846976\n0\n",
            b""
        ))),
        Damage::TooLarge { .. }
    ));
    let short = sparse_entry(2 * BLOCK, "2\n0\n65536\n131072\n0\n", &block[..100]);
    assert!(matches!(refusal(&with(&short)), Damage::StoredBytes { .. }));
    let long = sparse_entry(
        2 * BLOCK,
        "2\n0\n65536\n131072\n0\n",
        &[&block[..], b"more"].concat(),
    );
    assert!(matches!(refusal(&with(&long)), Damage::StoredBytes { .. }));
    let behind = sparse_entry(2 * BLOCK, "1\n131072\n0\n7\n", b"");
    assert!(matches!(
        refusal(&with(&behind)),
        Damage::Map {
            rule: "there is something behind it",
            ..
        }
    ));
    let many = sparse_entry(2 * BLOCK, "1048577\n", b"");
    assert!(matches!(
        refusal(&with(&many)),
        Damage::TooManyPieces { .. }
    ));
}

/// Its map claims what follows it, and the memory for it stays bounded.
#[test]
fn a_map_without_an_end_is_refused() {
    let endless = [
        with(&sparse_entry(1 << 40, "1000000\n", b"")),
        vec![b'1'; 1 << 20],
    ]
    .concat();
    assert!(matches!(refusal(&endless), Damage::Map { .. }));
}

#[test]
fn the_number_of_workers_does_not_show() {
    let content: Vec<u8> = (0..40u32 << 18)
        .flat_map(|n| (n / 3).wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    let compress = |workers, step: usize| {
        let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
        encoder.include_checksum(true).unwrap();
        encoder.multithread(workers).unwrap();
        content
            .chunks(step)
            .for_each(|chunk| encoder.write_all(chunk).unwrap());
        encoder.finish().unwrap()
    };
    let ours = compressed(&content);
    assert!(compress(1, 1 << 20) == ours && compress(3, 77_777) == ours);
}
