//! Decides by its header whether a qcow2 image is accepted: without features that this program does
//! not read, and complete in one file unless the caller knows what lies below it.

use sandtree_disk::qcow2::{
    HEADER_BYTES, Header, HeaderError, Layout, MAX_L1_BYTES, Version, incompatible,
};

use super::unpack::Compression;
use crate::disk_image::error::{DiskError, Qcow2Damage, Qcow2Refused};
use crate::disk_image::source::Raw;

/// QEMU's limit for the name of a backing file.
const MAX_NAME_BYTES: u32 = 1023;

/// What lies below an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::disk_image) enum Below {
    /// The image must be complete.
    Nothing,
    /// The caller has the layer below, so the image may name one. The name is ignored.
    Given,
}

/// The facts of an accepted header that reading needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Accepted {
    pub layout: Layout,
    pub version: Version,
    pub compression: Compression,
}

pub(super) fn accept(file: &Raw, below: Below) -> Result<Accepted, DiskError> {
    let len = file.bytes().min(HEADER_BYTES as u64) as usize;
    let mut start = vec![0; len];
    file.read(0, &mut start)?;
    let header = Header::parse(&start).map_err(not_a_header)?;
    check_features(header.features.incompatible)?;
    let compression = compression(&header)?;
    if header.encryption != 0 {
        return Err(Qcow2Refused::Encryption.into());
    }
    if below == Below::Nothing {
        check_alone(&header, file)?;
    }
    Ok(Accepted {
        layout: header.layout,
        version: header.version,
        compression,
    })
}

fn not_a_header(error: HeaderError) -> DiskError {
    match error {
        HeaderError::Version(version) => Qcow2Refused::Version(version).into(),
        error => Qcow2Damage::Header(error).into(),
    }
}

fn check_features(incompatible: u64) -> Result<(), Qcow2Refused> {
    let refused = [
        (incompatible::CORRUPT, Qcow2Refused::Corrupt),
        (incompatible::DIRTY, Qcow2Refused::Dirty),
        (incompatible::EXTERNAL_DATA, Qcow2Refused::ExternalData),
        (incompatible::EXTENDED_L2, Qcow2Refused::ExtendedL2),
        (
            !incompatible::COMPRESSION_TYPE,
            Qcow2Refused::Features(incompatible),
        ),
    ];
    let found = refused
        .into_iter()
        .find(|(bits, _)| incompatible & bits != 0);
    match found {
        Some((_, why)) => Err(why),
        None => Ok(()),
    }
}

fn compression(header: &Header) -> Result<Compression, Qcow2Refused> {
    match header.compression_type() {
        0 => Ok(Compression::Deflate),
        1 => Ok(Compression::Zstd),
        other => Err(Qcow2Refused::Compression(other)),
    }
}

/// The whole disk must be in this file.
fn check_alone(header: &Header, file: &Raw) -> Result<(), DiskError> {
    if header.backing_offset != 0 {
        return Err(Qcow2Refused::BackingFile(backing_name(header, file)?).into());
    }
    Ok(())
}

/// The name of the backing file, as far as it is in the file.
fn backing_name(header: &Header, file: &Raw) -> Result<String, DiskError> {
    let start = header.backing_offset.min(file.bytes());
    let len = u64::from(header.backing_bytes.min(MAX_NAME_BYTES));
    let mut name = vec![0; len.min(file.bytes() - start) as usize];
    file.read(start, &mut name)?;
    Ok(String::from_utf8_lossy(&name).into_owned())
}

/// The L1 table must cover the disk, and be small enough for memory.
pub(super) fn check_l1(layout: &Layout) -> Result<(), Qcow2Damage> {
    let needed = layout.l1_entries_needed();
    if needed <= layout.l1_entries.into() && needed <= MAX_L1_BYTES / 8 {
        return Ok(());
    }
    Err(Qcow2Damage::L1Entries {
        entries: layout.l1_entries,
        bytes: layout.size,
    })
}
