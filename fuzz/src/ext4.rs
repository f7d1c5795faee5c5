//! A guest's file system with damage. An image is too large for an input, so an input describes the
//! damage: records of eight bytes, with a place among the used bytes and a value.

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use sandtree_diff::{Options, diff};

const RECORD: usize = 8;
const CLUSTER: usize = 64 << 10;
/// The features of images' root file systems, and inline content.
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,\
                        large_file,huge_file,dir_nlink,extra_isize,metadata_csum,inline_data";

struct Sample {
    bytes: Vec<u8>,
    /// The places of used bytes.
    used: Vec<usize>,
}

/// One record each, spread over the image.
pub fn seeds() -> Vec<Vec<u8>> {
    let count = sample().used.len() as u32;
    (0..512)
        .map(|seed: u32| {
            [
                (count / 512 * seed).to_le_bytes(),
                seed.wrapping_mul(0x9e37_79b9).to_le_bytes(),
            ]
            .concat()
        })
        .collect()
}

/// A comparison ends for any disk, and skipping blocks that cannot differ does not change its
/// result.
pub fn check(input: &[u8]) {
    let sample = sample();
    let mut bytes = sample.bytes.clone();
    let changed: Vec<_> = input
        .chunks_exact(RECORD)
        .map(|record| damage(&mut bytes, &sample.used, record))
        .collect();
    let all = diff(&sample.bytes, &bytes, None, Options::default());
    let some = diff(&sample.bytes, &bytes, Some(&changed), Options::default());
    if let (Ok(all), Ok(some)) = (all, some) {
        assert_eq!(all, some);
    }
}

/// Writes a value. Returns the clusters that can differ now.
fn damage(bytes: &mut [u8], used: &[usize], record: &[u8]) -> Range<u64> {
    let (place, value) = record.split_at(4);
    let place = place
        .iter()
        .rev()
        .fold(0, |number, byte| number << 8 | usize::from(*byte));
    let at = used[place % used.len()];
    let end = bytes.len().min(at + 1 + usize::from(value[0] % 4));
    bytes[at..end].copy_from_slice(&value[..end - at]);
    (at / CLUSTER * CLUSTER) as u64..end.next_multiple_of(CLUSTER) as u64
}

fn sample() -> &'static Sample {
    static SAMPLE: OnceLock<Sample> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory can be made");
        let bytes = make(dir.path());
        let is_used = |(at, byte): &(usize, &u8)| **byte != 0 || at % 1024 < 64;
        let used = bytes
            .iter()
            .enumerate()
            .filter(is_used)
            .map(|(at, _)| at)
            .collect();
        Sample { bytes, used }
    })
}

/// Four mebibytes with nodes of every kind, and two transactions in the journal.
fn make(dir: &Path) -> Vec<u8> {
    let tree = dir.join("tree");
    let image = dir.join("image");
    fs::create_dir_all(tree.join("dir/deeper")).expect("a directory can be made");
    for (name, bytes) in [
        ("dir/file", 3000),
        ("dir/deeper/inline", 100),
        ("large", 200_000),
    ] {
        fs::write(tree.join(name), vec![7; bytes]).expect("a file can be written");
    }
    let mke2fs = tool("mke2fs")
        .args(["-q", "-F", "-b", "1024", "-I", "256", "-O", FEATURES, "-d"])
        .args([&tree, &image])
        .arg("4M")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    assert!(
        mke2fs.is_ok_and(|status| status.success()),
        "mke2fs works; it is in e2fsprogs"
    );
    let block = tree.join("dir/file");
    let commands = format!(
        "symlink link target\nea_set dir/file user.name value\njo -c\njw -b 900 {}\njw -r 900\njc\n",
        block.display()
    );
    debugfs(&image, &commands);
    fs::read(&image).expect("the image can be read")
}

fn debugfs(image: &Path, commands: &str) {
    let mut debugfs = tool("debugfs");
    let child = debugfs
        .args(["-w", "-f", "-"])
        .arg(image)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut child = child.expect("debugfs is installed; it is in e2fsprogs");
    let mut stdin = child.stdin.take().expect("it has an input");
    stdin
        .write_all(commands.as_bytes())
        .expect("it reads its commands");
    drop(stdin);
    assert!(
        child.wait().is_ok_and(|status| status.success()),
        "debugfs works"
    );
}

fn tool(name: &str) -> Command {
    // starts: the program of tool(…)
    let mut command = Command::new(name);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}
