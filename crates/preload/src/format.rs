//! The messages between the engine and the library. `engine` compiles this same
//! file, so the two sides cannot differ.
//!
//! ```text
//!   PLAN_FD           a file with the plan, or a socket on which one message brings the plan and the layers
//!   plan    magic 8 | version 4 | base 4 | ram bytes 8 | entries 8 | entry...
//!   entry   guest offset 8 | bytes 8 | file offset 8 | descriptor 4 | 0 4
//!   report  magic 8 | address 8 | bytes 8 | regions 8 | mapping: step 4, errno 4 | tracking: step 4, errno 4
//! ```
//!
//! Always: numbers are in the byte order of the host, both sides being on it. Nothing here panics
//! on any input.

/// Descriptors in the QEMU process.
pub const PLAN_FD: i32 = 8;
/// The file that QEMU takes its RAM from. It marks the mapping, or is the memory itself.
pub const RAM_FD: i32 = 9;
pub const REPORT_FD: i32 = 10;
pub const LAYERS_MAX: usize = 64;
/// Memory layers, closed once they are mapped.
pub const LAYER_FDS: core::ops::Range<i32> = 64..64 + LAYERS_MAX as i32;

pub const PAGE_BYTES: u64 = 4096;

const PLAN_MAGIC: u64 = u64::from_be_bytes(*b"sandplan");
const REPORT_MAGIC: u64 = u64::from_be_bytes(*b"sandrept");
const VERSION: u32 = 1;

/// What lies below the entries of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// Anonymous memory in place of the file.
    Zeros,
    /// The file itself, as QEMU asks for it.
    File,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub base: Base,
    pub ram_bytes: u64,
    pub entries: u64,
}

impl Plan {
    pub const BYTES: usize = 32;

    #[allow(dead_code, reason = "the engine's side")]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let base = match self.base {
            Base::Zeros => 0,
            Base::File => 1,
        };
        words([
            PLAN_MAGIC,
            pair(VERSION, base),
            self.ram_bytes,
            self.entries,
        ])
    }

    #[allow(dead_code, reason = "the library's side")]
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let [magic, version_base, ram_bytes, entries] = numbers(bytes);
        let base = match unpair(version_base) {
            (VERSION, 0) => Base::Zeros,
            (VERSION, 1) => Base::File,
            _ => return None,
        };
        (magic == PLAN_MAGIC).then_some(Self {
            base,
            ram_bytes,
            entries,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub guest_offset: u64,
    pub bytes: u64,
    pub file_offset: u64,
    pub descriptor: u32,
}

impl Entry {
    pub const BYTES: usize = 32;

    #[allow(dead_code, reason = "the engine's side")]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        words([
            self.guest_offset,
            self.bytes,
            self.file_offset,
            pair(self.descriptor, 0),
        ])
    }

    #[allow(dead_code, reason = "the library's side")]
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let [guest_offset, bytes, file_offset, descriptor] = numbers(bytes);
        Self {
            guest_offset,
            bytes,
            file_offset,
            descriptor: unpair(descriptor).0,
        }
    }

    /// Whether it lies inside RAM of that size, in whole pages, and comes from a layer.
    #[allow(dead_code, reason = "the library's side")]
    pub fn fits(&self, ram_bytes: u64) -> bool {
        let aligned = [self.guest_offset, self.bytes, self.file_offset]
            .iter()
            .all(|n| n.is_multiple_of(PAGE_BYTES));
        let inside = self
            .guest_offset
            .checked_add(self.bytes)
            .is_some_and(|end| end <= ram_bytes);
        let from_layer = i32::try_from(self.descriptor).is_ok_and(|fd| LAYER_FDS.contains(&fd));
        aligned && inside && from_layer && self.bytes > 0 && self.file_offset <= i64::MAX as u64
    }
}

/// What the library does, as named when it fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Step {
    ReadPlan = 1,
    MapBase,
    CheckEntry,
    MapEntry,
    HugePages,
    Open,
    Negotiate,
    Register,
    Wait,
}

impl Step {
    const ALL: [Step; 9] = [
        Step::ReadPlan,
        Step::MapBase,
        Step::CheckEntry,
        Step::MapEntry,
        Step::HugePages,
        Step::Open,
        Step::Negotiate,
        Step::Register,
        Step::Wait,
    ];
}

/// A step that failed, with its error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    pub step: Step,
    pub errno: i32,
}

impl Failure {
    fn encode(outcome: Result<(), Failure>) -> u64 {
        match outcome {
            Ok(()) => 0,
            Err(Failure { step, errno }) => pair(step as u32, errno.cast_unsigned()),
        }
    }

    /// None when no step has that number.
    fn decode(number: u64) -> Option<Result<(), Failure>> {
        match unpair(number) {
            (0, _) => Some(Ok(())),
            (code, errno) => {
                let step = Step::ALL.into_iter().find(|step| *step as u32 == code)?;
                Some(Err(Failure {
                    step,
                    errno: errno.cast_signed(),
                }))
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    pub address: u64,
    pub bytes: u64,
    /// Entries mapped; the next one is the one that failed.
    pub regions: u64,
    pub mapping: Result<(), Failure>,
    pub tracking: Result<(), Failure>,
}

impl Report {
    pub const BYTES: usize = 48;

    #[allow(dead_code, reason = "the library's side")]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let outcomes = [
            Failure::encode(self.mapping),
            Failure::encode(self.tracking),
        ];
        words([
            REPORT_MAGIC,
            self.address,
            self.bytes,
            self.regions,
            outcomes[0],
            outcomes[1],
        ])
    }

    #[allow(dead_code, reason = "the engine's side")]
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let [magic, address, bytes, regions, mapping, tracking] = numbers(bytes);
        let mapping = Failure::decode(mapping)?;
        let tracking = Failure::decode(tracking)?;
        (magic == REPORT_MAGIC).then_some(Self {
            address,
            bytes,
            regions,
            mapping,
            tracking,
        })
    }
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn unpair(number: u64) -> (u32, u32) {
    (number as u32, (number >> 32) as u32)
}

fn words<const WORDS: usize, const BYTES: usize>(numbers: [u64; WORDS]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (to, number) in bytes.chunks_exact_mut(8).zip(numbers) {
        to.copy_from_slice(&number.to_ne_bytes());
    }
    bytes
}

fn numbers<const WORDS: usize, const BYTES: usize>(bytes: &[u8; BYTES]) -> [u64; WORDS] {
    let mut numbers = [0; WORDS];
    for (to, from) in numbers.iter_mut().zip(bytes.as_chunks().0) {
        *to = u64::from_ne_bytes(*from);
    }
    numbers
}
