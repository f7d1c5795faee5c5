//! Mutations of well-formed inputs.

/// A small random generator: the same numbers for the same seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// One of the seeds, with a few mutations.
    pub fn mutated(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut input = seeds[self.below(seeds.len())].clone();
        for _ in 0..self.below(6) {
            self.mutate(&mut input, seeds);
        }
        input
    }

    fn mutate(&mut self, input: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        let at = self.below(input.len());
        match self.below(8) {
            0 => input.insert(at, self.next() as u8),
            1 if !input.is_empty() => {
                input.remove(at);
            }
            2 if !input.is_empty() => input[at] ^= 1 << self.below(8),
            3 if !input.is_empty() => input[at] = [0, 1, 0x7f, 0x80, 0xff][self.below(5)],
            4 => input.truncate(at),
            5 => self.overwrite(input, at),
            6 => {
                let other = &seeds[self.below(seeds.len())];
                let from = self.below(other.len());
                input.splice(at..at, other[from..].iter().copied());
            }
            _ => input.extend_from_within(at..),
        }
        input.truncate(1 << 18);
    }

    /// Overwrites two, four or eight bytes with a number that is often a limit.
    fn overwrite(&mut self, input: &mut [u8], at: usize) {
        let value = [
            0,
            1,
            0xffff,
            0x1_0000,
            0x1_0001,
            u64::from(u32::MAX),
            u64::MAX / 2,
            u64::MAX,
        ][self.below(8)];
        let bytes = value.to_le_bytes();
        let width = [2, 4, 8][self.below(3)].min(input.len() - at.min(input.len()));
        input[at..at + width].copy_from_slice(&bytes[..width]);
    }
}
