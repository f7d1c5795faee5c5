//! Layers against a plain array of pages, and every kind of damage to a layer's file.

use std::fs::File;
use std::os::unix::fs::FileExt;

use proptest::collection::vec;
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::sample::Index;

use super::*;
use crate::Error;

const PAGES: u64 = 96;
const RAM: u64 = PAGES * PAGE;

/// What a page is in a layer: not there, all zero, or filled with a byte. `Some(0)` is a zero page.
type Pages = Vec<Option<u8>>;

fn pages() -> impl Strategy<Value = Pages> {
    let run = (
        prop_oneof![Just(None), Just(Some(0)), any::<u8>().prop_map(Some)],
        1usize..9,
    );
    vec(run, 0..40).prop_map(|runs| {
        let mut pages: Pages = runs
            .into_iter()
            .flat_map(|(page, count)| vec![page; count])
            .collect();
        pages.resize(PAGES as usize, None);
        pages
    })
}

fn page(byte: u8) -> Vec<u8> {
    vec![byte; PAGE as usize]
}

fn file() -> File {
    tempfile::tempfile().unwrap()
}

fn writer(file: &File) -> MemoryWriter<&File> {
    MemoryWriter::new(file, RAM).unwrap()
}

/// Writes the pages run by run, in the way a capture does.
fn write(pages: &Pages) -> (Layer, File) {
    let file = file();
    let mut writer = writer(&file);
    let mut first = 0;
    for run in pages.chunk_by(|a, b| a.is_some() == b.is_some()) {
        let bytes: Vec<u8> = run.iter().flatten().flat_map(|byte| page(*byte)).collect();
        if !bytes.is_empty() {
            writer.append(first, &bytes).unwrap();
        }
        first += run.len() as u64;
    }
    (writer.finish().unwrap(), file)
}

/// What the guest sees with these layers, bottom first, over zeros.
fn model(layers: &[Pages]) -> Vec<u8> {
    let newest = |index: usize| {
        layers
            .iter()
            .rev()
            .find_map(|layer| layer[index])
            .unwrap_or(0)
    };
    (0..PAGES as usize)
        .flat_map(|index| page(newest(index)))
        .collect()
}

/// What the guest sees when the plan is mapped.
fn mapped(layers: &[(Layer, File)]) -> Vec<u8> {
    let mut ram = vec![0; RAM as usize];
    for Mapping {
        first_page,
        pages,
        layer,
        file_offset,
    } in plan(layers.iter().map(|(layer, _)| layer))
    {
        let into = &mut ram[(first_page * PAGE) as usize..][..(pages * PAGE) as usize];
        layers[layer].1.read_exact_at(into, file_offset).unwrap();
    }
    ram
}

fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn with(bytes: &[u8]) -> File {
    let file = file();
    file.write_all_at(bytes, 0).unwrap();
    file
}

fn damage(bytes: &[u8]) -> Damage {
    match Layer::read(&with(bytes)) {
        Err(Error::MemoryLayer(damage)) => damage,
        other => panic!("not found: {other:?}"),
    }
}

/// Recomputes the checksum, so that the rules behind it are reached.
fn resealed(mut bytes: Vec<u8>) -> Vec<u8> {
    use sha2::{Digest as _, Sha256};
    let data_bytes = u64::from_le_bytes(bytes[24..32].try_into().unwrap()) as usize;
    let table = PAGE as usize + data_bytes;
    let checksum = Sha256::new_with_prefix(&bytes[..48])
        .chain_update(&bytes[table..])
        .finalize();
    bytes[48..80].copy_from_slice(&checksum);
    bytes
}

/// Two data pages at 3, a zero page at 5, a data page at 8: the example of docs/format.md.
fn example() -> (Layer, Vec<u8>) {
    let file = file();
    let mut writer = MemoryWriter::new(&file, 16 * PAGE).unwrap();
    writer
        .append(3, &[page(0xaa), page(0xbb), page(0)].concat())
        .unwrap();
    writer.append(8, &page(0xcc)).unwrap();
    (writer.finish().unwrap(), content(&file))
}

fn bent(at: usize, value: &[u8]) -> Vec<u8> {
    let mut bytes = example().1;
    bytes[at..at + value.len()].copy_from_slice(value);
    resealed(bytes)
}

#[test]
fn the_example_of_the_format_document() {
    let (layer, bytes) = example();
    let hex = |range: std::ops::Range<usize>| {
        bytes[range]
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect::<String>()
    };
    assert_eq!(hex(0..16), "53616e64744d656d0100000000100000");
    assert_eq!(
        hex(16..48),
        "0000010000000000003000000000000002000000000000000100000000000000"
    );
    assert_eq!(
        hex(48..80),
        "80598254f992a6616faf8a3d7280b383a5d4d4fcfeadaa69bde7f6a885d8d72b"
    );
    assert!(bytes[80..4096].iter().all(|byte| *byte == 0));
    assert_eq!([bytes[4096], bytes[8192], bytes[12288]], [0xaa, 0xbb, 0xcc]);
    assert_eq!(hex(16384..16400), "03000000000000000200000000000000");
    assert_eq!(hex(16400..16416), "08000000000000000100000000000000");
    assert_eq!(hex(16416..16432), "05000000000000000100000000000000");
    assert_eq!(layer.len_bytes(), bytes.len() as u64);
    assert_eq!(Layer::read(&with(&bytes)).unwrap(), layer);
}

#[test]
fn an_empty_layer_is_one() {
    let (layer, file) = write(&vec![None; PAGES as usize]);
    assert_eq!(layer.len_bytes(), PAGE);
    assert_eq!(Layer::read(&file).unwrap(), layer);
    assert_eq!(plan([&layer]), []);
}

#[test]
fn every_rule_of_the_format_is_held() {
    use RunKind::{Data, Zero};
    let number = |number: u64| number.to_le_bytes();
    assert_eq!(damage(&example().1[..4095]), Damage::Short);
    assert_eq!(damage(&bent(0, b"s")), Damage::NotALayer);
    assert_eq!(damage(&bent(8, &[2])), Damage::Version(2));
    assert_eq!(
        damage(&bent(12, &16384u32.to_le_bytes())),
        Damage::PageSize(16384)
    );
    for ram in [0, 4095, MAX_RAM_BYTES + PAGE, u64::MAX] {
        assert_eq!(damage(&bent(16, &number(ram))), Damage::RamBytes(ram));
    }
    for zero in [MAX_RUNS - 1, u64::MAX - 1, u64::MAX] {
        assert_eq!(
            damage(&bent(40, &number(zero))),
            Damage::Runs { data: 2, zero }
        );
    }
    let mut greedy = example().1;
    greedy[24..32].copy_from_slice(&number(u64::MAX));
    assert_eq!(damage(&greedy), Damage::TooMuchData(u64::MAX));
    let longer = resealed([example().1, vec![0]].concat());
    assert_eq!(
        damage(&longer),
        Damage::Length {
            expected: 16432,
            found: 16433
        }
    );
    assert_eq!(damage(&bent(4095, &[1])), Damage::Padding { at: 4095 });
    assert_eq!(
        damage(&bent(16392, &number(0))),
        Damage::EmptyRun {
            kind: Data,
            index: 0
        }
    );
    assert_eq!(
        damage(&bent(16400, &number(4))),
        Damage::Order {
            kind: Data,
            index: 1,
            first: 4
        }
    );
    assert_eq!(
        damage(&bent(16408, &number(9))),
        Damage::Outside {
            kind: Data,
            index: 1
        }
    );
    assert_eq!(
        damage(&bent(16424, &number(u64::MAX))),
        Damage::Outside {
            kind: Zero,
            index: 0
        }
    );
    assert_eq!(
        damage(&bent(16416, &number(4))),
        Damage::DataAndZero { page: 4 }
    );
    assert_eq!(
        damage(&bent(16416, &number(8))),
        Damage::DataAndZero { page: 8 }
    );
    assert_eq!(
        damage(&bent(16408, &number(2))),
        Damage::DataBytes {
            runs: 4 * PAGE,
            header: 3 * PAGE
        }
    );
    let mut bytes = example().1;
    bytes[48] ^= 1;
    assert_eq!(damage(&bytes), Damage::Checksum);
}

#[test]
fn a_file_that_was_not_finished_is_no_layer() {
    let file = file();
    let mut writer = writer(&file);
    writer
        .append(0, &vec![1; 2 * PIECE.min(RAM as usize / 2)])
        .unwrap();
    drop(writer);
    assert!(matches!(Layer::read(&file), Err(Error::MemoryLayer(_))));
}

#[test]
fn pages_come_whole_in_order_and_inside_memory() {
    let file = file();
    let mut writer = writer(&file);
    writer.append(4, &page(1)).unwrap();
    for (first, bytes) in [
        (4, page(1)),
        (0, page(1)),
        (5, vec![1; 100]),
        (PAGES, page(1)),
        (u64::MAX, page(0)),
    ] {
        let refused = writer.append(first, &bytes);
        assert!(
            matches!(refused, Err(Error::MemoryPages { first_page, .. }) if first_page == first),
            "{first}"
        );
        assert!(writer.append_stored(first, &bytes).is_err(), "{first}");
    }
    writer.append(PAGES - 1, &page(0)).unwrap();
    let layer = writer.finish().unwrap();
    assert_eq!(
        layer.zero,
        [PageRun {
            first: PAGES - 1,
            count: 1
        }]
    );
    assert!(matches!(
        MemoryWriter::new(&file, RAM),
        Err(Error::NotEmpty)
    ));
    for bytes in [0, 1, MAX_RAM_BYTES + PAGE] {
        assert!(
            matches!(
                MemoryWriter::new(self::file(), bytes),
                Err(Error::MemorySize { .. })
            ),
            "{bytes}"
        );
    }
}

#[test]
fn scattered_zero_pages_do_not_make_countless_runs() {
    let pages = 1u64 << 14;
    let file = file();
    let mut writer = MemoryWriter::new(&file, pages * PAGE).unwrap();
    let piece: Vec<u8> = (0..64).flat_map(|index| page(index % 2)).collect();
    (0..pages)
        .step_by(64)
        .for_each(|first| writer.append(first, &piece).unwrap());
    let layer = writer.finish().unwrap();
    assert!(
        layer.data.len() + layer.zero.len() <= 4097,
        "{} data, {} zero",
        layer.data.len(),
        layer.zero.len()
    );
    assert_eq!(Layer::read(&file).unwrap(), layer);
}

#[test]
fn a_folded_layer_has_few_runs_and_the_same_content() {
    let runs = MAX_FOLDED_RUNS as u64 + 1000;
    let ram = runs * 4 * PAGE;
    let bottom = file();
    let mut writer = MemoryWriter::new(&bottom, ram).unwrap();
    // Gaps of one to three pages, so that the smallest are the ones to be filled.
    (0..runs).for_each(|run| {
        writer
            .append(run * 4, &page(1).repeat(1 + (run % 3) as usize))
            .unwrap()
    });
    let layers = [(writer.finish().unwrap(), bottom)];
    let folded = file();
    let flat = file();
    let flat_folded = file();
    let layer = fold(
        &layers,
        Gaps::Zero,
        MemoryWriter::new(&folded, ram).unwrap(),
    )
    .unwrap();
    assert_eq!((layer.data.len(), layer.zero.len()), (MAX_FOLDED_RUNS, 0));
    assert_eq!(layer.data_bytes, layers[0].0.data_bytes + 1000 * PAGE);
    flatten(&layers, &flat).unwrap();
    flatten(&[(layer, folded)], &flat_folded).unwrap();
    assert!(content(&flat) == content(&flat_folded));
}

#[test]
fn layers_of_another_guest_are_refused() {
    let small = write(&vec![None; PAGES as usize]);
    let large = file();
    let other = MemoryWriter::new(&large, 2 * RAM)
        .unwrap()
        .finish()
        .unwrap();
    let layers = [small, (other, large)];
    let out = file();
    assert!(matches!(
        fold(&layers, Gaps::Zero, writer(&out)),
        Err(Error::MemorySize { .. })
    ));
    assert!(matches!(
        flatten(&layers, &out),
        Err(Error::MemorySize { .. })
    ));
    assert!(matches!(flatten(&[], &out), Err(Error::MemorySize { .. })));
}

#[test]
fn adjacent_pages_of_one_file_are_one_mapping() {
    let (bottom, _) = write(&vec![Some(1); PAGES as usize]);
    let mut hole = vec![None; PAGES as usize];
    hole[10] = Some(2);
    let (top, _) = write(&hole);
    let planned: Vec<_> = plan([&bottom, &top])
        .into_iter()
        .map(|m| (m.first_page, m.pages, m.layer))
        .collect();
    assert_eq!(planned, [(0, 10, 0), (10, 1, 1), (11, PAGES - 11, 0)]);
    assert_eq!(plan([&bottom, &bottom]).len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn layers_behave_like_an_array_of_pages(pages in vec(pages(), 1..6)) {
        let layers: Vec<_> = pages.iter().map(write).collect();
        let expected = model(&pages);
        for (layer, file) in &layers {
            prop_assert_eq!(&Layer::read(file).unwrap(), layer);
            prop_assert_eq!(file.metadata().unwrap().len(), layer.len_bytes());
        }
        prop_assert!(mapped(&layers) == expected);
        let folded = file();
        let flat = file();
        let one = fold(&layers, Gaps::Zero, writer(&folded)).unwrap();
        prop_assert_eq!(&Layer::read(&folded).unwrap(), &one);
        prop_assert!(mapped(&[(one, folded)]) == expected);
        flatten(&layers, &flat).unwrap();
        prop_assert!(content(&flat) == expected);
    }

    /// Pages that no layer of a stack has are not touched by the layers above them, either.
    #[test]
    fn a_stack_may_be_folded_from_the_bottom_to_anywhere(
        pages in vec(pages(), 2..6),
        cut in any::<Index>(),
    ) {
        let mut layers: Vec<_> = pages.iter().map(write).collect();
        let above = layers.split_off(1 + cut.index(layers.len() - 1));
        let folded = file();
        let one = fold(&layers, Gaps::Zero, writer(&folded)).unwrap();
        let stack: Vec<_> = std::iter::once((one, folded)).chain(above).collect();
        prop_assert!(mapped(&stack) == model(&pages));
    }

    /// The layers below show through the gaps, and not through zero pages.
    #[test]
    fn a_stack_may_be_folded_from_anywhere_to_the_top(
        pages in vec(pages(), 2..6),
        cut in any::<Index>(),
    ) {
        let mut stack: Vec<_> = pages.iter().map(write).collect();
        let above = stack.split_off(1 + cut.index(stack.len() - 1));
        let folded = file();
        let one = fold(&above, Gaps::Below, writer(&folded)).unwrap();
        stack.push((one, folded));
        prop_assert!(mapped(&stack) == model(&pages));
    }

    #[test]
    fn coalesced_runs_cover_the_same_and_the_least_more(
        gaps in vec((0u64..9, 1u64..9), 0..30),
        max_runs in 0usize..12,
    ) {
        let mut end = 0;
        let runs: Vec<_> = gaps.iter().map(|(gap, count)| {
            let run = PageRun { first: end + gap, count: *count };
            end = run.end();
            run
        }).collect();
        let joined = coalesce(runs.clone(), max_runs);
        prop_assert!(joined.len() <= max_runs.max(1));
        prop_assert!(joined.windows(2).all(|pair| pair[0].end() < pair[1].first));
        let is_in = |run: &PageRun, j: &PageRun| j.first <= run.first && run.end() <= j.end();
        prop_assert!(runs.iter().all(|run| joined.iter().any(|j| is_in(run, j))));
        let pages = |runs: &[PageRun]| runs.iter().map(|run| run.count).sum::<u64>();
        let mut inner: Vec<u64> = gaps.iter().skip(1).map(|(gap, _)| *gap).collect();
        inner.sort_unstable();
        let least: u64 = inner.iter().take(runs.len().saturating_sub(max_runs.max(1))).sum();
        prop_assert_eq!(pages(&joined), pages(&runs) + least);
    }

    /// One byte of header or table, or the length: nothing of it can change without being seen.
    #[test]
    fn any_change_to_header_or_table_is_refused(
        pages in pages(),
        at in any::<Index>(),
        flip in 1u8..,
    ) {
        let (layer, file) = write(&pages);
        let mut bytes = content(&file);
        let table = (PAGE + layer.data_bytes) as usize;
        let at = at.index(PAGE as usize + bytes.len() - table);
        bytes[if at < PAGE as usize { at } else { at - PAGE as usize + table }] ^= flip;
        damage(&bytes);
    }

    #[test]
    fn any_other_length_is_refused(pages in pages(), cut in any::<Index>(), more in 1usize..9000) {
        let mut bytes = content(&write(&pages).1);
        damage(&bytes[..cut.index(bytes.len())]);
        bytes.resize(bytes.len() + more, 0);
        damage(&bytes);
    }

    /// Also with a checksum that is right, whatever is read obeys the rules.
    #[test]
    fn any_table_is_refused_or_sound(bends in vec((0usize..48, any::<u8>()), 1..4)) {
        let mut bytes = example().1;
        bends.iter().for_each(|(at, byte)| bytes[16384 + at] = *byte % 17);
        let Ok(layer) = Layer::read(&with(&resealed(bytes))) else { return Ok(()) };
        let mut owners = [0; 16];
        let runs = layer.data.iter().map(|run| &run.pages).chain(&layer.zero);
        runs.for_each(|run| (run.first..run.end()).for_each(|page| owners[page as usize] += 1));
        prop_assert!(owners.iter().all(|owners| *owners < 2));
        prop_assert_eq!(layer.len_bytes(), 16432);
    }
}
