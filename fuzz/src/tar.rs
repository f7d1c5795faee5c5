//! Archives for a root file system, mutated. Checksums of headers are corrected, because otherwise
//! the reader would refuse nearly every input at once.

use sandtree_disk::ext4::read::FileSystem;
use sandtree_rootfs::{Builder, Limits, Options, TarRules};

const BLOCK: usize = 512;
const LIMITS: Limits = Limits {
    nodes: 64,
    bytes: 1 << 20,
    names_bytes: 64 << 10,
    written_bytes: 4 << 20,
};

/// Any archive is accepted or refused, and an accepted one makes a file system.
pub fn check(input: &[u8]) {
    let dir = tempfile::tempdir().expect("a directory can be made");
    let image = dir.path().join("image");
    let mut builder = Builder::create(&image, LIMITS).expect("an image can be made");
    let mut archive = input.to_vec();
    archive
        .chunks_exact_mut(BLOCK)
        .filter(|block| &block[257..262] == b"ustar")
        .for_each(seal);
    let mut bytes = 0;
    let mut watch = |so_far| {
        bytes = so_far;
        Ok(())
    };
    let is_taken = [TarRules::Plain, TarRules::Layer].iter().all(|rules| {
        builder
            .add_tar(&mut &archive[..], *rules, &mut watch)
            .is_ok()
    });
    assert!(bytes <= LIMITS.bytes);
    // Extended attributes may be too large for an inode.
    if is_taken && builder.finish(&Options::default()).is_ok() {
        let image = std::fs::read(&image).expect("the image can be read");
        FileSystem::open(&image).expect("it is a file system");
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let pax = b"30 mtime=1700000000.123456789\n25 SCHILY.xattr.user.a=b\n";
    let sparse =
        b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n31 GNU.sparse.realsize=1048576\n21 GNU.sparse.name=s\n";
    let old_map = b"27 GNU.sparse.size=1048576\n29 GNU.sparse.map=0,5,4096,5\n";
    let mut map = b"1\n8192\n512\n".to_vec();
    map.resize(2 * BLOCK, 7);
    vec![
        [
            member("a/", b'5', "", b""),
            member("a/b", b'0', "", b"bytes"),
            member("c", b'1', "a/b", b""),
        ]
        .concat(),
        [
            member("l", b'2', "a/../a", b""),
            member("l/x", b'0', "", b"x"),
            member("n", b'3', "", b""),
        ]
        .concat(),
        [
            member("x", b'x', "", pax),
            member("f", b'0', "", &[1; 700]),
            member("a/.wh.f", b'0', "", b""),
        ]
        .concat(),
        [member("x", b'x', "", sparse), member("f", b'0', "", &map)].concat(),
        [
            member("x", b'x', "", old_map),
            member("f", b'0', "", b"1234567890"),
        ]
        .concat(),
        [
            member("L", b'L', "", &[b'n'; 200]),
            member("K", b'K', "", &[b't'; 200]),
            member("s", b'2', "", b""),
        ]
        .concat(),
        [
            member("g", b'g', "", pax),
            member("p", b'6', "", b""),
            member(".wh..wh..opq", b'0', "", b""),
        ]
        .concat(),
        [member("s", b'S', "", b""), vec![0; 2 * BLOCK]].concat(),
    ]
}

fn member(name: &str, kind: u8, link: &str, bytes: &[u8]) -> Vec<u8> {
    let mut member = vec![0; BLOCK];
    let size = format!("{:011o}", bytes.len());
    let fields: [(usize, &[u8]); 5] = [
        (0, name.as_bytes()),
        (100, b"0000755"),
        (124, size.as_bytes()),
        (157, link.as_bytes()),
        (257, b"ustar\x0000"),
    ];
    for (at, bytes) in fields {
        member[at..at + bytes.len()].copy_from_slice(bytes);
    }
    member[156] = kind;
    seal(&mut member);
    member.extend_from_slice(bytes);
    member.resize(member.len().next_multiple_of(BLOCK), 0);
    member
}

fn seal(block: &mut [u8]) {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
}
