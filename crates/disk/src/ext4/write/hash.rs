//! The hash of names: the kernel's shortened MD4 with a seed, over names as signed characters.

use super::identity::HASH_SEED;

/// The hash by which an index orders names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Hash {
    /// The lowest bit is always clear.
    pub major: u32,
    minor: u32,
}

const CHUNK_BYTES: usize = 32;
/// The kernel uses the highest hash as the end mark when it lists a directory.
const END: u32 = 0xffff_fffe;

pub(super) fn of(name: &[u8]) -> Hash {
    let mut state = seed();
    let mut rest = name;
    while !rest.is_empty() {
        transform(&mut state, &words(rest));
        rest = &rest[rest.len().min(CHUNK_BYTES)..];
    }
    let major = state[1] & !1;
    Hash {
        major: if major == END { END - 2 } else { major },
        minor: state[2],
    }
}

fn seed() -> [u32; 4] {
    let (words, _) = HASH_SEED.as_chunks::<4>();
    [0, 1, 2, 3].map(|index| u32::from_le_bytes(words[index]))
}

/// The next bytes as words. Unused words are filled with the number of remaining bytes.
fn words(rest: &[u8]) -> [u32; 8] {
    let length = rest.len() as u32;
    let pad = (length | length << 8) | (length | length << 8) << 16;
    let mut words = [pad; 8];
    let chunk = &rest[..rest.len().min(CHUNK_BYTES)];
    for (word, bytes) in words.iter_mut().zip(chunk.chunks(4)) {
        *word = bytes.iter().fold(pad, |value, byte| {
            (value << 8).wrapping_add(*byte as i8 as u32)
        });
    }
    words
}

type Mix = fn(u32, u32, u32) -> u32;

/// Each round has its own order of words and its own rotation counts.
const ROUNDS: [(Mix, u32, [usize; 8], [u32; 4]); 3] = [
    (
        |x, y, z| z ^ (x & (y ^ z)),
        0,
        [0, 1, 2, 3, 4, 5, 6, 7],
        [3, 7, 11, 19],
    ),
    (
        |x, y, z| (x & y).wrapping_add((x ^ y) & z),
        0x5a82_7999,
        [1, 3, 5, 7, 0, 2, 4, 6],
        [3, 5, 9, 13],
    ),
    (
        |x, y, z| x ^ y ^ z,
        0x6ed9_eba1,
        [3, 7, 2, 6, 1, 5, 0, 4],
        [3, 9, 11, 15],
    ),
];

fn transform(state: &mut [u32; 4], words: &[u32; 8]) {
    let [mut a, mut b, mut c, mut d] = *state;
    for (mix, constant, order, turns) in ROUNDS {
        for (step, word) in order.into_iter().enumerate() {
            let sum = a
                .wrapping_add(mix(b, c, d))
                .wrapping_add(words[word])
                .wrapping_add(constant);
            [a, b, c, d] = [d, sum.rotate_left(turns[step % 4]), b, c];
        }
    }
    for (value, added) in state.iter_mut().zip([a, b, c, d]) {
        *value = value.wrapping_add(added);
    }
}
