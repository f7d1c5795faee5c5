//! A hundred thousand small files are added quickly.

use std::fs;
use std::time::{Duration, Instant};

use super::Bench;
use super::archive::{raw_header, seal};

const FILES: usize = 100_000;

fn name(at: usize) -> String {
    format!("d{}/e{}/file-{at}", at % 100, at / 100 % 50)
}

/// Far more than needed, even on a busy machine.
fn assert_quick(start: Instant) {
    assert!(
        start.elapsed() < Duration::from_secs(30),
        "it took {:?}",
        start.elapsed()
    );
}

#[test]
fn many_files_are_added_from_an_archive() {
    let mut archive = Vec::with_capacity(FILES * 1536);
    for at in 0..FILES {
        let text = format!("this is file {at}\n").repeat(1 + at % 30);
        archive.extend(seal(raw_header(&name(at), b'0', text.len() as u64)));
        archive.extend_from_slice(text.as_bytes());
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    let start = Instant::now();
    let mut bench = Bench::new();
    bench.plain(&archive).expect("it is taken");
    assert_quick(start);
    for at in [0, 1, 77_777, FILES - 1] {
        assert_eq!(
            bench.text(&name(at)),
            Some(format!("this is file {at}\n").repeat(1 + at % 30))
        );
    }
    let (_dir, _, made) = bench.finish();
    assert_eq!(made.nodes as usize, FILES + 100 + 100 * 50 + 1);
}

#[test]
fn many_files_are_added_from_a_directory() {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory can be made");
    for at in 0..FILES {
        let path = dir.path().join(name(at));
        if at < 10_000 {
            fs::create_dir_all(path.parent().expect("it has one"))
                .expect("a directory can be made");
        }
        fs::write(path, at.to_string()).expect("a file can be written");
    }
    let start = Instant::now();
    let mut bench = Bench::new();
    bench
        .builder
        .add_dir(dir.path(), &mut |_| Ok(()))
        .expect("it is taken");
    assert_quick(start);
    for at in [0, 1, 77_777, FILES - 1] {
        assert_eq!(bench.text(&name(at)), Some(at.to_string()));
    }
    bench.finish();
}
