//! The disk in an image: its bytes, and its ranges without data.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use sandtree_disk::{Blocks, qcow2};

use super::error::DiskError;
use super::overlay::Overlay;
use super::qcow2::{Below, Qcow2};
use super::{DiskFormat, DiskLimits};

/// A range that either must be read, or is all zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub end: u64,
    pub is_data: bool,
}

#[derive(Debug)]
pub(super) enum Source {
    Raw(Raw),
    Qcow2(Qcow2),
    Overlay(Box<Overlay>),
}

/// A file whose bytes are those of the disk.
#[derive(Debug)]
pub(super) struct Raw {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl Source {
    pub(super) fn open(path: &Path, limits: DiskLimits) -> Result<Self, DiskError> {
        let raw = Raw::open(path)?;
        let disk = if raw.starts_with(&qcow2::MAGIC)? {
            Self::Qcow2(Qcow2::open(raw, limits, Below::Nothing)?)
        } else {
            Self::Raw(raw)
        };
        check_size(disk.bytes(), limits)?;
        Ok(disk)
    }

    pub(super) fn format(&self) -> DiskFormat {
        match self {
            Self::Raw(_) => DiskFormat::Raw,
            Self::Qcow2(_) | Self::Overlay(_) => DiskFormat::Qcow2,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.bytes,
            Self::Qcow2(qcow2) => qcow2.bytes(),
            Self::Overlay(overlay) => overlay.bytes(),
        }
    }

    /// Fills `into` from `offset` on. The caller reads only bytes of the disk.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DiskError> {
        match self {
            Self::Raw(raw) => raw.read(offset, into),
            Self::Qcow2(qcow2) => qcow2.read(offset, into),
            Self::Overlay(overlay) => overlay.read(offset, into),
        }
    }

    /// The range that starts at a place on the disk.
    pub(super) fn run(&self, at: u64) -> Result<Run, DiskError> {
        match self {
            Self::Raw(raw) => raw.run(at),
            Self::Qcow2(qcow2) => qcow2.run(at),
            Self::Overlay(overlay) => overlay.run(at),
        }
    }
}

pub(super) fn check_size(bytes: u64, limits: DiskLimits) -> Result<(), DiskError> {
    if bytes <= limits.bytes {
        return Ok(());
    }
    Err(DiskError::TooLarge {
        bytes,
        limit_bytes: limits.bytes,
    })
}

impl Raw {
    pub(super) fn open(path: &Path) -> Result<Self, DiskError> {
        // This check comes before the open, which would wait for a writer if the file is a pipe.
        let metadata = fs::metadata(path).map_err(DiskError::io("read", path))?;
        if !metadata.is_file() {
            return Err(DiskError::NotAFile(path.to_owned()));
        }
        let file = File::open(path).map_err(DiskError::io("open", path))?;
        Ok(Self {
            bytes: metadata.len(),
            path: path.to_owned(),
            file,
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DiskError> {
        self.file
            .read_exact_at(into, offset)
            .map_err(DiskError::io("read", &self.path))
    }

    fn starts_with(&self, magic: &[u8; 4]) -> Result<bool, DiskError> {
        let mut start = [0; 4];
        if self.bytes < start.len() as u64 {
            return Ok(false);
        }
        self.read(0, &mut start)?;
        Ok(start == *magic)
    }

    fn run(&self, at: u64) -> Result<Run, DiskError> {
        let data = match seek(&self.file, SeekFrom::Data(at)) {
            Ok(data) => data.min(self.bytes),
            Err(Errno::NXIO) => self.still_all()?,
            // A file system without support for holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                return Ok(Run {
                    end: self.bytes,
                    is_data: true,
                });
            }
            Err(errno) => return Err(self.failed(errno)),
        };
        if data > at {
            return Ok(Run {
                end: data,
                is_data: false,
            });
        }
        let hole = seek(&self.file, SeekFrom::Hole(at)).map_err(|errno| self.failed(errno))?;
        // Bytes that are appended meanwhile are not part of the disk. A run has at least one byte.
        Ok(Run {
            end: hole.min(self.bytes).max(at + 1),
            is_data: true,
        })
    }

    /// The end of the file, unless the file became shorter meanwhile: then it has no data there,
    /// too.
    fn still_all(&self) -> Result<u64, DiskError> {
        let len = self
            .file
            .metadata()
            .map_err(DiskError::io("read", &self.path))?
            .len();
        if len >= self.bytes {
            return Ok(self.bytes);
        }
        let source = io::ErrorKind::UnexpectedEof.into();
        Err(DiskError::io("read", &self.path)(source))
    }

    fn failed(&self, errno: Errno) -> DiskError {
        DiskError::io("read", &self.path)(errno.into())
    }
}

/// A part of a disk, from which a file system or a partition table is read.
#[derive(Debug)]
pub(super) struct Part<'a> {
    pub disk: &'a Source,
    pub start: u64,
    pub bytes: u64,
}

impl Blocks for Part<'_> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let inside = offset
            .checked_add(into.len() as u64)
            .is_some_and(|end| end <= self.bytes);
        if !inside {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.disk
            .read(self.start + offset, into)
            .map_err(io::Error::other)
    }
}
