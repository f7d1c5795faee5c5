use super::*;

fn run(page: u64, pages: u64) -> ByteRun {
    ByteRun {
        offset: page * PAGE_BYTES,
        bytes: pages * PAGE_BYTES,
    }
}

/// Bits of a pagemap entry with what they make of a page.
#[test]
fn a_written_page_is_there_and_of_no_file() {
    const PFN_AND_SWAP: u64 = (1 << 55) - 1;
    const UFFD_WP: u64 = 1 << 57;
    for (entry, written, soft_dirty) in [
        (0, false, false),
        (PRESENT, true, false),
        (PRESENT | PFN_AND_SWAP | UFFD_WP, true, false),
        (SWAPPED, true, false),
        (PRESENT | FILE_OR_SHARED, false, false),
        (SWAPPED | FILE_OR_SHARED, false, false),
        (SOFT_DIRTY, false, false),
        (PRESENT | SOFT_DIRTY, true, true),
        (SWAPPED | SOFT_DIRTY, true, true),
        (PRESENT | FILE_OR_SHARED | SOFT_DIRTY, false, false),
    ] {
        assert_eq!(
            (is_written(entry), is_soft_dirty(entry)),
            (written, soft_dirty),
            "{entry:#x}"
        );
    }
    assert_eq!(
        [SOFT_DIRTY, FILE_OR_SHARED, SWAPPED, PRESENT].map(u64::trailing_zeros),
        [55, 61, 62, 63]
    );
}

#[test]
fn neighbours_become_one_run_across_pieces() {
    let entries = |pages: &[u64]| {
        pages
            .iter()
            .flat_map(|entry| entry.to_ne_bytes())
            .collect::<Vec<_>>()
    };
    let mut runs = Vec::new();
    collect(&entries(&[PRESENT, 0, SWAPPED]), 10, is_written, &mut runs);
    collect(
        &entries(&[PRESENT, PRESENT | FILE_OR_SHARED, PRESENT]),
        13,
        is_written,
        &mut runs,
    );
    assert_eq!(runs, [run(10, 1), run(12, 2), run(15, 1)]);
}

#[test]
fn what_a_failed_scan_left_is_joined_with_the_next() {
    let found = vec![run(5, 2), run(9, 1), run(1, 1), run(5, 1), run(7, 1)];
    assert_eq!(joined(found), [run(1, 1), run(5, 3), run(9, 1)]);
}

#[test]
fn batches_keep_order_and_limits() {
    assert!(batches(&[]).is_empty());
    assert!(batches(&[run(3, 0)]).is_empty());
    let many: Vec<_> = (0..2500).map(|page| run(2 * page, 1)).collect();
    let split = batches(&many);
    assert_eq!(
        split.iter().map(Vec::len).collect::<Vec<_>>(),
        [1024, 1024, 452]
    );
    assert_eq!(split.concat(), many);

    let gib = (1 << 30) / PAGE_BYTES;
    let split = batches(&[run(0, gib - 1), run(gib, 2 * gib)]);
    let bytes = |batch: &Vec<ByteRun>| batch.iter().map(|run| run.bytes).sum::<u64>();
    assert_eq!(
        split.iter().map(bytes).collect::<Vec<_>>(),
        [1 << 30, 1 << 30, (1 << 30) - PAGE_BYTES]
    );
    assert_eq!(split[0], [run(0, gib - 1), run(gib, 1)]);
}

/// This very process, which can always look at itself.
fn own(bytes: &[u8]) -> GuestMemory {
    let pidfd = rustix::process::pidfd_open(
        rustix::process::getpid(),
        rustix::process::PidfdFlags::empty(),
    )
    .unwrap();
    let place = Place {
        address: bytes.as_ptr() as u64,
        bytes: bytes.len() as u64,
    };
    let mapped = Mapped::File {
        reason: "a test".into(),
    };
    let tracking = Err(Untracked::NoLibrary {
        reason: "a test".into(),
    });
    GuestMemory::new(std::process::id(), Arc::new(pidfd), place, mapped, tracking)
}

#[test]
fn runs_are_read_in_order_behind_existing_content() {
    let bytes: Vec<u8> = (0..8 * PAGE_BYTES)
        .map(|at| (at / PAGE_BYTES) as u8)
        .collect();
    let mut into = vec![0xff];
    own(&bytes)
        .read(&[run(6, 2), run(1, 1)], &mut into)
        .unwrap();
    let mut expected = vec![0xff];
    for page in [6, 7, 1] {
        expected.extend([page; PAGE_BYTES as usize]);
    }
    assert!(into == expected);
}

#[test]
fn what_is_not_memory_of_the_guest_is_not_read() {
    let bytes = vec![1; 2 * PAGE_BYTES as usize];
    let mut into = Vec::new();
    for outside in [
        run(1, 2),
        run(2, 1),
        ByteRun {
            offset: u64::MAX,
            bytes: 2,
        },
    ] {
        assert!(matches!(
            own(&bytes).read(&[outside], &mut into),
            Err(Error::Spec { .. })
        ));
    }
    let mut beyond = own(&bytes);
    // Nothing is mapped in the first page of a process.
    beyond.place = Place {
        address: 0,
        bytes: 2 * PAGE_BYTES,
    };
    let error = beyond.read(&[run(0, 1)], &mut into).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Io {
                op: "read the memory of",
                ..
            }
        ),
        "{error}"
    );
    assert!(into.is_empty());
}

#[test]
fn only_what_is_near_to_written_pages_is_protected_again() {
    let mib = |number: u64| number << 20;
    let ranges = vec![
        0..4096,
        8192..12288,
        mib(3)..mib(4),
        mib(5)..mib(6),
        mib(100)..mib(100) + 4096,
    ];
    assert_eq!(
        near(ranges),
        [0..12288, mib(3)..mib(6), mib(100)..mib(100) + 4096]
    );
    // Reported twice, and out of order.
    assert_eq!(
        near(vec![mib(8)..mib(9), 0..mib(2), mib(1)..mib(2), 4096..8192]),
        [0..mib(2), mib(8)..mib(9)]
    );
    assert_eq!(near(Vec::new()), Vec::<std::ops::Range<u64>>::new());
}
