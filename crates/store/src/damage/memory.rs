//! Why a file is not a memory layer.

use std::fmt;

use thiserror::Error as ThisError;

/// Why a file is no memory layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
pub enum Damage {
    #[error("it is shorter than a header")]
    Short,
    #[error("it is not a memory layer")]
    NotALayer,
    #[error("its version is {0}; this program knows version 1")]
    Version(u32),
    #[error("its pages have {0} bytes")]
    PageSize(u32),
    #[error("guest memory of {0} bytes")]
    RamBytes(u64),
    #[error("it claims {data} data and {zero} zero runs")]
    Runs { data: u64, zero: u64 },
    #[error("it claims {0} bytes of data, more than guest memory has")]
    TooMuchData(u64),
    #[error("it has {found} bytes where its header makes {expected}")]
    Length { expected: u64, found: u64 },
    #[error("byte {at} of the header must be zero")]
    Padding { at: usize },
    #[error("{kind} run {index} is empty")]
    EmptyRun { kind: RunKind, index: u64 },
    #[error("{kind} run {index} begins at page {first}, before the end of the one before it")]
    Order {
        kind: RunKind,
        index: u64,
        first: u64,
    },
    #[error("{kind} run {index} ends beyond guest memory")]
    Outside { kind: RunKind, index: u64 },
    #[error("page {page} is in a data run and in a zero run")]
    DataAndZero { page: u64 },
    #[error("its data runs have {runs} bytes, its header says {header}")]
    DataBytes { runs: u64, header: u64 },
    #[error("header and run table do not have the checksum in the header")]
    Checksum,
}

/// Which part of the run table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunKind {
    Data,
    Zero,
}

impl fmt::Display for RunKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Data => "data",
            Self::Zero => "zero",
        })
    }
}
