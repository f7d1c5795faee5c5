//! Kernels, in the form that boots fastest.
//!
//! A distribution's bzImage unpacks itself in the guest, which takes a quarter of the boot under
//! emulation. We unpack it once, here: the payload is an ELF file that QEMU starts directly through
//! its PVH entry. A kernel that is packed in another way, or has no PVH entry, stays a bzImage.

use std::io::Read;

use sandtree_store::KernelFormat;

use crate::elf::{self, Elf};

/// Far above any kernel, and far below the host's memory.
const MAX_KERNEL_BYTES: u64 = 256 << 20;
const XEN_ELFNOTE_PHYS32_ENTRY: u32 = 18;

/// Offsets in the bzImage's setup header.
const SETUP_SECTORS: usize = 0x1f1;
const SETUP_MAGIC: usize = 0x202;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;

/// The kernel to boot, and its form.
pub(crate) fn prepare(kernel: Vec<u8>) -> (KernelFormat, Vec<u8>) {
    if has_pvh_entry(&kernel) {
        return (KernelFormat::Vmlinux, kernel);
    }
    match payload(&kernel)
        .and_then(unpack)
        .filter(|vmlinux| has_pvh_entry(vmlinux))
    {
        Some(vmlinux) => (KernelFormat::Vmlinux, vmlinux),
        None => (KernelFormat::BzImage, kernel),
    }
}

/// Whether the bytes are in one of the two forms that boot here.
pub(crate) fn is_kernel(bytes: &[u8]) -> bool {
    has_pvh_entry(bytes) || bytes.get(SETUP_MAGIC..SETUP_MAGIC + 4) == Some(b"HdrS")
}

fn payload(bzimage: &[u8]) -> Option<&[u8]> {
    if bzimage.get(SETUP_MAGIC..SETUP_MAGIC + 4)? != b"HdrS" {
        return None;
    }
    let code = (usize::from(*bzimage.get(SETUP_SECTORS)?) + 1) * 512;
    let start = code + elf::u32_at(bzimage, PAYLOAD_OFFSET)? as usize;
    bzimage
        .get(start..)?
        .get(..elf::u32_at(bzimage, PAYLOAD_LENGTH)? as usize)
}

fn unpack(payload: &[u8]) -> Option<Vec<u8>> {
    let mut vmlinux = Vec::new();
    // One frame only: the kernel's build appends four bytes of length.
    let decoder = zstd::stream::read::Decoder::with_buffer(payload)
        .ok()?
        .single_frame();
    decoder
        .take(MAX_KERNEL_BYTES + 1)
        .read_to_end(&mut vmlinux)
        .ok()?;
    (vmlinux.len() as u64 <= MAX_KERNEL_BYTES).then_some(vmlinux)
}

fn has_pvh_entry(vmlinux: &[u8]) -> bool {
    let notes = Elf::parse(vmlinux).map(Elf::notes).unwrap_or_default();
    notes
        .iter()
        .any(|note| note.name == b"Xen\0" && note.kind == XEN_ELFNOTE_PHYS32_ENTRY)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A bzImage with one setup sector, directly followed by `payload`.
    fn bzimage(payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 1024];
        bytes[SETUP_SECTORS] = 1;
        bytes[SETUP_MAGIC..SETUP_MAGIC + 4].copy_from_slice(b"HdrS");
        bytes[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4]
            .copy_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(payload);
        bytes
    }

    /// An ELF file with one note and nothing else.
    fn elf_with_note(kind: u32) -> Vec<u8> {
        let mut bytes = vec![0; 64 + 56];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[32] = 64;
        bytes[56] = 1;
        bytes[64] = 4;
        bytes[64 + 8] = 120;
        bytes[64 + 32] = 20;
        for word in [4, 4, kind] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(b"Xen\0\0\0\0\0");
        bytes[64 + 32] = 20;
        bytes
    }

    #[test]
    fn a_packed_kernel_with_a_pvh_entry_is_unpacked() {
        let vmlinux = elf_with_note(XEN_ELFNOTE_PHYS32_ENTRY);
        let mut packed = zstd::encode_all(&vmlinux[..], 1).unwrap();
        packed.extend_from_slice(&(vmlinux.len() as u32).to_le_bytes());
        assert_eq!(prepare(bzimage(&packed)), (KernelFormat::Vmlinux, vmlinux));
    }

    #[test]
    fn any_other_kernel_stays_unchanged() {
        let no_entry = zstd::encode_all(&elf_with_note(1)[..], 1).unwrap();
        for image in [
            bzimage(&no_entry),
            bzimage(b"\x1f\x8bgzip"),
            b"short".to_vec(),
            vec![0; 4096],
        ] {
            assert_eq!(prepare(image.clone()), (KernelFormat::BzImage, image));
        }
    }
}
