use super::*;
use crate::preload::format::Step;

fn layer(bytes: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    file
}

fn entry(guest_offset: u64, bytes: u64, layer: usize, file_offset: u64) -> MapEntry {
    MapEntry {
        guest_offset,
        bytes,
        layer,
        file_offset,
    }
}

#[test]
fn a_plan_reads_as_it_was_written() {
    let entries = [entry(4096, 8192, 0, 0), entry(1 << 33, 4096, 1, 4096)];
    let plan = plan(Base::Zeros, 1 << 34, &entries, &[layer(8192), layer(8192)]).unwrap();
    assert_eq!(plan.len(), Plan::BYTES + 2 * Entry::BYTES);
    let (header, rest) = plan.split_first_chunk().unwrap();
    assert_eq!(
        Plan::decode(header),
        Some(Plan {
            base: Base::Zeros,
            ram_bytes: 1 << 34,
            entries: 2
        })
    );
    let read: Vec<_> = rest.as_chunks().0.iter().map(Entry::decode).collect();
    let expected = [(4096, 8192, 0, 64), (1 << 33, 4096, 4096, 65)];
    assert_eq!(
        read,
        expected.map(|(guest_offset, bytes, file_offset, descriptor)| Entry {
            guest_offset,
            bytes,
            file_offset,
            descriptor
        })
    );
    assert!(read.iter().all(|entry| entry.fits(1 << 34)));
}

#[test]
fn a_plan_that_is_none_is_not_read() {
    let good = Plan {
        base: Base::File,
        ram_bytes: 4096,
        entries: 0,
    }
    .encode();
    assert!(Plan::decode(&good).is_some());
    for byte in 0..16 {
        let mut bad = good;
        bad[byte] ^= 0x40;
        assert_eq!(Plan::decode(&bad), None, "byte {byte}");
    }
}

#[test]
fn what_does_not_lie_inside_does_not_fit() {
    let good = Entry {
        guest_offset: 4096,
        bytes: 4096,
        file_offset: 0,
        descriptor: 127,
    };
    assert!(good.fits(8192));
    for bad in [
        Entry {
            guest_offset: 8192,
            ..good
        },
        Entry {
            guest_offset: 1,
            ..good
        },
        Entry {
            guest_offset: 0_u64.wrapping_sub(4096),
            ..good
        },
        Entry { bytes: 0, ..good },
        Entry {
            bytes: 4097,
            ..good
        },
        Entry {
            file_offset: 512,
            ..good
        },
        Entry {
            file_offset: 1 << 63,
            ..good
        },
        Entry {
            descriptor: 63,
            ..good
        },
        Entry {
            descriptor: 128,
            ..good
        },
        Entry {
            descriptor: u32::MAX,
            ..good
        },
    ] {
        assert!(!bad.fits(8192), "{bad:?}");
    }
}

#[test]
fn layers_that_are_missing_short_or_too_many_are_refused() {
    let refused =
        |entries: &[MapEntry], layers: &[File]| match plan(Base::Zeros, 1 << 20, entries, layers) {
            Err(Error::NotMapped { reason }) => reason,
            other => panic!("{other:?}"),
        };
    assert_eq!(
        refused(&[entry(0, 4096, 1, 0)], &[layer(4096)]),
        "region 0 is of layer 1, which is not there"
    );
    let short = [entry(0, 4096, 0, 0), entry(0, 4096, 0, 4096)];
    assert_eq!(
        refused(&short, &[layer(8191)]),
        "region 1 ends behind the 8191 bytes of layer 0"
    );
    assert!(
        refused(&[entry(0, 4096, 0, u64::MAX - 4095)], &[layer(4096)])
            .starts_with("region 0 ends behind")
    );
    let many: Vec<_> = (0..65).map(|_| layer(0)).collect();
    assert_eq!(refused(&[], &many), "65 layers are more than 64");
}

#[test]
fn a_report_reads_as_it_was_written() {
    let failed = |step, errno| Err(Failure { step, errno });
    for (mapping, tracking) in [
        (Ok(()), Ok(())),
        (Ok(()), failed(Step::Negotiate, libc::EINVAL)),
        (
            failed(Step::MapEntry, libc::ENOMEM),
            failed(Step::Register, -1),
        ),
    ] {
        let report = Report {
            address: 0x7f00_0000_0000,
            bytes: 1 << 29,
            regions: 726,
            mapping,
            tracking,
        };
        assert_eq!(Report::decode(&report.encode()), Some(report));
    }
}

#[test]
fn a_report_that_is_none_is_not_read() {
    let good = Report {
        address: 0,
        bytes: 0,
        regions: 0,
        mapping: Ok(()),
        tracking: Ok(()),
    }
    .encode();
    for (byte, value) in [(0, 0), (7, 0), (32, 99), (40, 200), (43, 1)] {
        let mut bad = good;
        bad[byte] = value;
        assert_eq!(Report::decode(&bad), None, "byte {byte}");
    }
}

/// What QEMU gets when nothing is laid, or the error that the caller gets.
#[test]
fn without_the_library_there_is_only_the_file() {
    let jail = Jail::default();
    let (handed, mut expected) = prepare(Memory::Empty, Preload::Skip, 1 << 20, jail).unwrap();
    assert_eq!(
        handed
            .descriptors
            .iter()
            .map(|(target, _)| *target)
            .collect::<Vec<_>>(),
        [9]
    );
    assert!(handed.environment.is_empty());
    assert_eq!(
        expected.take_report(),
        Err("the library was not asked for".into())
    );
    let mapped = Memory::Mapped {
        entries: Vec::new(),
        layers: vec![layer(4096)],
    };
    assert!(matches!(
        prepare(mapped, Preload::Skip, 1 << 20, jail),
        Err(Error::Spec { .. })
    ));
    let short = Memory::Flat { file: layer(4096) };
    assert!(matches!(
        prepare(short, Preload::Skip, 1 << 20, jail),
        Err(Error::Spec { .. })
    ));
}

#[test]
fn a_library_that_says_nothing_is_missing() {
    let (handed, mut expected) =
        prepare(Memory::Empty, Preload::Use, 1 << 20, Jail::default()).unwrap();
    assert_eq!(
        handed
            .descriptors
            .iter()
            .map(|(target, _)| *target)
            .collect::<Vec<_>>(),
        [9, 8, 10, 11]
    );
    assert_eq!(
        expected.take_report(),
        Err("QEMU did not load the library".into())
    );
}

#[test]
fn mappings_are_found_in_the_kernels_list() {
    let line = "7f8a40000000-7f8a60000000 rw-p 00000000 00:01 1087      /memfd:guest-ram (deleted)";
    assert_eq!(
        parse_mapping(line),
        Some((0x7f8a_4000_0000, 0x7f8a_6000_0000, 1087))
    );
    assert_eq!(
        parse_mapping("7ffe0000-7ffe1000 rw-p 00000000 00:00 0"),
        Some((0x7ffe_0000, 0x7ffe_1000, 0))
    );
    assert_eq!(parse_mapping("nonsense"), None);
    let file = tempfile::tempfile().unwrap();
    let missing = find_mapping(std::process::id(), file.metadata().unwrap().ino(), 4096);
    assert!(matches!(missing, Err(Error::NotMapped { .. })));
}

/// Code that can panic would bring the function that aborts, and a standard library much more.
#[test]
fn the_library_cannot_panic_and_is_small() {
    assert!(!LIBRARY.windows(7).any(|name| name == b"\0abort\0"));
    assert!(LIBRARY.windows(8).any(|name| name == b"\0mmap64\0"));
    assert!(LIBRARY.len() < 32 << 10, "{} bytes", LIBRARY.len());
}
