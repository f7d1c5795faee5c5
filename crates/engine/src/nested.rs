//! Recognises, in the saved devices of a machine, a processor that executes a guest of its guest.
//!
//! ```text
//!   04 section:32 03 "cpu" instance:32 version:32 | 16 registers:64 rip:64 rflags:64 hflags:32 ...
//! ```
//!
//! QEMU saves such a processor under every accelerator. It loads one only with the nested state
//! that KVM gives it: without, as under TCG, the load fails.
//!
//! Always: a section that is not of an x86 processor, or is cut off, is skipped.

/// How the sections of processors begin, without the section's number before.
const SECTION: &[u8] = b"\x03cpu";
const FULL_SECTION: u8 = 4;
const SECTION_NUMBER_BYTES: usize = 4;
/// Of the processor's section on x86, in all versions that we support. Others have others.
const VERSION: [u8; 4] = 12_u32.to_be_bytes();
const INSTANCE_BYTES: usize = 4;
/// What comes before the hidden flags: 16 registers, `rip` and `rflags`.
const BEFORE_FLAGS_BYTES: usize = 18 * 8;
/// In the hidden flags: intercepts of the hypervisor are active.
const IN_GUEST: u32 = 1 << 21;
/// The part of a processor's section in which KVM's nested state is.
const KVM_STATE: &[u8] = b"cpu/kvm_nested_state";

/// Whether QEMU refuses to load these devices because a processor executes a nested guest.
pub(crate) fn is_refused(devices: &[u8]) -> bool {
    let mut starts = (0..devices.len()).filter(|&at| devices[at..].starts_with(SECTION));
    let executes = |at| hidden_flags(devices, at).is_some_and(|flags| flags & IN_GUEST != 0);
    let has_kvm_state = || {
        devices
            .windows(KVM_STATE.len())
            .any(|part| part == KVM_STATE)
    };
    starts.any(executes) && !has_kvm_state()
}

/// The hidden flags of the processor whose section has its name here.
fn hidden_flags(devices: &[u8], at: usize) -> Option<u32> {
    let kind = at.checked_sub(SECTION_NUMBER_BYTES + 1)?;
    let rest = devices.get(at + SECTION.len() + INSTANCE_BYTES..)?;
    let (version, fields) = rest.split_first_chunk()?;
    let (flags, _) = fields.get(BEFORE_FLAGS_BYTES..)?.split_first_chunk()?;
    let is_processor = devices[kind] == FULL_SECTION && *version == VERSION;
    is_processor.then(|| u32::from_be_bytes(*flags))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(version: u32, flags: u32, rest: &[u8]) -> Vec<u8> {
        let mut bytes = vec![FULL_SECTION, 0, 0, 0, 7];
        bytes.extend(SECTION);
        bytes.extend([0; INSTANCE_BYTES]);
        bytes.extend(version.to_be_bytes());
        bytes.extend([0xff; BEFORE_FLAGS_BYTES]);
        bytes.extend(flags.to_be_bytes());
        bytes.extend(rest);
        bytes
    }

    #[test]
    fn one_processor_in_a_nested_guest_is_enough() {
        let outside = section(12, !IN_GUEST, b"");
        let inside = section(12, IN_GUEST, b"");
        assert!(!is_refused(&outside));
        assert!(!is_refused(&[outside.clone(), outside.clone()].concat()));
        assert!(is_refused(&inside));
        assert!(is_refused(&[outside, inside].concat()));
    }

    #[test]
    fn nested_state_of_kvm_can_be_loaded() {
        assert!(!is_refused(&section(12, IN_GUEST, KVM_STATE)));
    }

    #[test]
    fn what_is_no_whole_section_of_an_x86_processor_is_skipped() {
        assert!(!is_refused(&section(22, IN_GUEST, b"")));
        let inside = section(12, IN_GUEST, b"");
        let mut other = inside.clone();
        other[0] = 1;
        assert!(!is_refused(&other));
        for length in 0..inside.len() {
            assert!(!is_refused(&inside[..length]), "{length} bytes");
        }
        assert!(!is_refused(SECTION));
    }
}
