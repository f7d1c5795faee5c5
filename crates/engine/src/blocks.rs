//! Memory of a machine that is not its main RAM: firmware, tables, and what further devices bring
//! along.
//!
//! ```text
//!   ram0                       captured as layers
//!   pc.bios                    read-only; a machine that waits for a state does not load it, so it is written here
//!   pc.rom, /rom@...           read-only; made by QEMU at each start, from the same arguments
//!   anything else              belongs to no layer: only QEMU's own stream holds it
//! ```
//!
//! Always: what a guest can see is captured, or is known not to be.

use std::path::PathBuf;

use crate::arch::Arch;
use crate::error::Error;
use crate::qmp::{HumanMonitorCommand, Qmp};
use crate::ram::GuestMemory;

const RAM: &str = "ram0";
const FIRMWARE: &str = "pc.bios";
/// The firmware ends where four gigabytes do.
const FIRMWARE_END: u64 = 1 << 32;
const FIRMWARE_BYTES_MAX: u64 = 16 << 20;

/// The names of the blocks that no layer holds.
pub(crate) async fn uncaptured(qmp: &Qmp, arch: Arch) -> Result<Vec<String>, Error> {
    let listed = qmp
        .run(HumanMonitorCommand {
            command_line: "info ramblock",
        })
        .await?;
    let blocks = parse(&listed);
    if !blocks.iter().any(|name| name == RAM) {
        return Err(Error::Protocol {
            detail: "QEMU does not list the guest's RAM".into(),
        });
    }
    Ok(blocks
        .into_iter()
        .filter(|name| !is_covered(name, arch))
        .collect())
}

/// Each line of a block has its name, the size of its pages with a unit, and numbers.
fn parse(listed: &str) -> Vec<String> {
    let lines = listed
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let blocks = lines.filter(|words| words.get(3).is_some_and(|word| word.starts_with("0x")));
    blocks.map(|words| words[0].to_owned()).collect()
}

fn is_covered(name: &str, arch: Arch) -> bool {
    let of_machine: &[&str] = match arch {
        Arch::X86_64 => &[RAM, FIRMWARE, "pc.rom"],
        // Flash that nothing is plugged into.
        Arch::Aarch64 => &[RAM, "virt.flash0", "virt.flash1"],
    };
    of_machine.contains(&name) || name.starts_with("/rom@")
}

/// The firmware of a machine that was started to wait for a state, and where QEMU has it.
#[derive(Debug)]
pub(crate) struct Firmware {
    file: PathBuf,
    bytes: u64,
    /// Where it lies, in QEMU's words.
    shown: String,
}

impl Firmware {
    /// Asks where the firmware lies. It stays there as long as the machine exists. What is wrong
    /// with the file is an error of [`Firmware::restore`].
    pub(crate) async fn find(qmp: &Qmp, file: PathBuf) -> Result<Self, Error> {
        let bytes = file.metadata().map_or(0, |status| status.len());
        let asked = format!("gpa2hva {:#x}", FIRMWARE_END.saturating_sub(bytes));
        let shown = qmp.run(HumanMonitorCommand {
            command_line: &asked,
        });
        Ok(Self {
            shown: shown.await?,
            file,
            bytes,
        })
    }

    /// Writes the firmware into the machine, which is stopped.
    pub(crate) fn restore(&self, memory: &GuestMemory) -> Result<(), Error> {
        let bytes = std::fs::read(&self.file).map_err(Error::io("read", &self.file))?;
        let length = bytes.len() as u64;
        if length == 0 || length > FIRMWARE_BYTES_MAX || length != self.bytes {
            return Err(Error::Spec {
                detail: format!(
                    "{} has {length} bytes, which no firmware has",
                    self.file.display()
                ),
            });
        }
        let address = address(&self.shown).ok_or_else(|| Error::Protocol {
            detail: format!("QEMU does not show its firmware: {}", self.shown.trim()),
        })?;
        memory.write_beside(address, &bytes)
    }
}

/// From `Host virtual address for 0xfffc0000 (pc.bios) is 0x7f9b30600000`.
fn address(answer: &str) -> Option<u64> {
    let (what, address) = answer.trim().rsplit_once(" is 0x")?;
    what.ends_with(&format!("({FIRMWARE})"))
        .then(|| u64::from_str_radix(address, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = "              Block Name    PSize              Offset               Used              Total\r
                    ram0    4 KiB  0x0000000000000000 0x0000000008000000 0x0000000008000000\r
    /rom@etc/acpi/tables    4 KiB  0x0000000008080000 0x0000000000020000 0x0000000000200000\r
                 pc.bios    4 KiB  0x0000000008000000 0x0000000000040000 0x0000000000040000\r
   0000:00:08.0/vga.vram    4 KiB  0x0000000008100000 0x0000000001000000 0x0000000001000000\r\n";

    #[test]
    fn memory_that_no_layer_holds_is_named() {
        let outside: Vec<_> = parse(LISTED)
            .into_iter()
            .filter(|name| !is_covered(name, Arch::X86_64))
            .collect();
        assert_eq!(outside, ["0000:00:08.0/vga.vram"]);
        assert_eq!(parse(LISTED).len(), 4);
    }

    #[test]
    fn only_the_firmware_is_written_to() {
        assert_eq!(
            address("Host virtual address for 0xfffc0000 (pc.bios) is 0x7f9b30600000\r\n"),
            Some(0x7f9b_3060_0000)
        );
        assert_eq!(
            address("Host virtual address for 0xfffc0000 (ram0) is 0x7f9b30600000"),
            None
        );
        assert_eq!(address("No memory is mapped at address 0xfffc0000"), None);
    }
}
