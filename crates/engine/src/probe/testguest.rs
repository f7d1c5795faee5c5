//! Test guests: a ROM of a few hundred bytes that goes through the processor modes a kernel goes
//! through, and reports.
//!
//! ```text
//!   F000:0000 real mode -> protected mode -> long mode with paging -> body -> report by a port, which ends QEMU
//! ```
//!
//! Always: they run under the same jail and filter as machines, without a disk, a network or a
//! control connection.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};

use super::Probe;
use crate::accel::Accel;
use crate::arch::Arch;
use crate::argv::probe_argv;
use crate::error::Error;
use crate::exit::Exit;
use crate::process::Process;

/// What a test guest does once it is in long mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// Writes memory and reads it back, and finds whether instructions are executed or interpreted.
    Modes,
    /// Executes instructions that emulators are known to get wrong. On x86-64 alone.
    Instructions,
}

/// What a test guest reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Report {
    /// It ran.
    Modes,
    /// It ran, hundreds of times too slowly.
    Interpreted,
    /// It ran, and this is what it found.
    Instructions(Wrong),
}

/// Which groups of instructions compute wrong results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub adx: bool,
    pub bmi1: bool,
}

/// A running test guest. Dropped, it is killed.
#[derive(Debug)]
pub(crate) struct TestGuest {
    process: Process,
    arch: Arch,
}

impl TestGuest {
    pub(crate) async fn start(
        probe: &Probe<'_>,
        accel: Accel,
        body: Body,
    ) -> Result<TestGuest, Error> {
        const ROM_FD: i32 = 3;
        let rom =
            rom_file(probe.arch, body).map_err(Error::io("create", "the test guest in memory"))?;
        let rom_path = format!("/proc/self/fd/{ROM_FD}");
        let accel_name = accel.to_string();
        let cpu = if accel == Accel::Tcg { "max" } else { "host" };
        let mut args = vec![
            "-machine",
            probe.arch.machine_type(),
            "-accel",
            &accel_name,
            "-cpu",
            cpu,
        ];
        args.extend(["-m", "16M", "-no-reboot", "-bios", &rom_path]);
        if probe.arch == Arch::X86_64 {
            args.extend(["-device", "isa-debug-exit,iobase=0xf4,iosize=1"]);
        }
        let process = probe
            .launch(
                "probe-guest",
                accel,
                probe_argv(&args),
                vec![(ROM_FD, rom.into())],
            )
            .await?;
        Ok(TestGuest {
            process,
            arch: probe.arch,
        })
    }

    /// Waits for the report. `None`: there was none in time. The inner error is how QEMU ended
    /// instead.
    pub(crate) async fn report(self, deadline: Duration) -> Option<Result<Report, Exit>> {
        let exit = tokio::time::timeout(deadline, self.process.exit().wait())
            .await
            .ok()?;
        Some(read_report(self.arch, &exit).ok_or(exit))
    }
}

fn read_report(arch: Arch, exit: &Exit) -> Option<Report> {
    let code = exit.status.code()?;
    if arch == Arch::Aarch64 {
        return (code == 0).then_some(Report::Modes);
    }
    // isa-debug-exit ends QEMU with twice the value written, plus one.
    let value = u8::try_from(code >> 1).ok().filter(|_| code & 1 == 1)?;
    match value {
        RAN => Some(Report::Modes),
        INTERPRETED => Some(Report::Interpreted),
        value if value & !(ADX | BMI1) == TRIED => Some(Report::Instructions(Wrong {
            adx: value & ADX != 0,
            bmi1: value & BMI1 != 0,
        })),
        _ => None,
    }
}

fn rom_file(arch: Arch, body: Body) -> io::Result<File> {
    let rom = match (arch, body) {
        (Arch::X86_64, Body::Modes) => rom_x86_64(MODES),
        (Arch::X86_64, Body::Instructions) => rom_x86_64(INSTRUCTIONS),
        (Arch::Aarch64, _) => ROM_AARCH64.to_vec(),
    };
    let file = File::from(memfd_create("probe", MemfdFlags::CLOEXEC)?);
    file.write_all_at(&rom, 0)?;
    Ok(file)
}

/// The value the first body reports.
const RAN: u8 = 0x2a;
/// The value it reports if every instruction took hundreds of cycles.
const INTERPRETED: u8 = 0x2b;
/// The value the second body reports, with a bit for each group of instructions that is wrong.
const TRIED: u8 = 0x30;
const ADX: u8 = 1;
const BMI1: u8 = 2;

/// Where the segment descriptors are; the prelude knows.
const DESCRIPTORS_AT: usize = 0x200;

/// 64 KiB that end at the reset vector, from which a far jump leads to the code at F000:0000.
fn rom_x86_64(body: &[u8]) -> Vec<u8> {
    let mut rom = vec![0; 64 << 10];
    let mut put = |at: usize, bytes: &[u8]| rom[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, PRELUDE);
    put(PRELUDE.len(), body);
    put(DESCRIPTORS_AT, DESCRIPTORS);
    put(0xfff0, &[0xea, 0x00, 0x00, 0x00, 0xf0]); // ljmp $0xf000, $0
    rom
}

/// From real mode through protected mode into long mode with paging.
#[rustfmt::skip]
const PRELUDE: &[u8] = &[
    // 0x00, 16 bit
    0xfa,                                                       // cli
    0x2e, 0x66, 0x0f, 0x01, 0x16, 0x20, 0x02,                   // lgdtl %cs:0x220
    0x0f, 0x20, 0xc0,                                           // mov %cr0, %eax
    0x0c, 0x01,                                                 // or $1, %al: protected mode
    0x0f, 0x22, 0xc0,                                           // mov %eax, %cr0
    0x66, 0xea, 0x18, 0x00, 0x0f, 0x00, 0x08, 0x00,             // ljmpl $0x08, $0xf0018
    // 0x18, 32 bit: the page tables: level 4 -> 0x2000, level 3 -> 0x3000, one page of 2 MiB at 0
    0x66, 0xb8, 0x10, 0x00,                                     // mov $0x10, %ax
    0x8e, 0xd8,                                                 // mov %ax, %ds
    0xc7, 0x05, 0x00, 0x10, 0, 0, 0x03, 0x20, 0, 0,             // movl $0x2003, 0x1000
    0xc7, 0x05, 0x04, 0x10, 0, 0, 0, 0, 0, 0,                   // movl $0, 0x1004
    0xc7, 0x05, 0x00, 0x20, 0, 0, 0x03, 0x30, 0, 0,             // movl $0x3003, 0x2000
    0xc7, 0x05, 0x04, 0x20, 0, 0, 0, 0, 0, 0,                   // movl $0, 0x2004
    0xc7, 0x05, 0x00, 0x30, 0, 0, 0x83, 0, 0, 0,                // movl $0x83, 0x3000
    0xc7, 0x05, 0x04, 0x30, 0, 0, 0, 0, 0, 0,                   // movl $0, 0x3004
    0x0f, 0x20, 0xe0,                                           // mov %cr4, %eax
    0x83, 0xc8, 0x20,                                           // or $0x20, %eax        PAE
    0x0f, 0x22, 0xe0,                                           // mov %eax, %cr4
    0xb8, 0x00, 0x10, 0, 0,                                     // mov $0x1000, %eax
    0x0f, 0x22, 0xd8,                                           // mov %eax, %cr3
    0xb9, 0x80, 0x00, 0x00, 0xc0,                               // mov $0xc0000080, %ecx
    0x0f, 0x32,                                                 // rdmsr
    0x0d, 0x00, 0x01, 0, 0,                                     // or $0x100, %eax       long mode
    0x0f, 0x30,                                                 // wrmsr
    0x0f, 0x20, 0xc0,                                           // mov %cr0, %eax
    0x0d, 0x00, 0x00, 0x00, 0x80,                               // or $0x80000000, %eax  paging
    0x0f, 0x22, 0xc0,                                           // mov %eax, %cr0
    0xea, 0x8b, 0x00, 0x0f, 0x00, 0x18, 0x00,                   // ljmpl $0x18, $0xf008b
    // 0x8b, 64 bit: the body
];

/// One write and read of memory. Then 16 times a loop of 20,000 turns: if the fastest took more
/// than 200 cycles a turn, the host interprets instructions instead of executing them. A processor
/// takes 1 or 2, an emulator that translates takes 10 to 50, and one that interprets takes
/// thousands. An interrupted loop takes longer, so the fastest decides.
#[rustfmt::skip]
const MODES: &[u8] = &[
    0x48, 0xb8, 0xf0, 0xde, 0xbc, 0x9a, 0x78, 0x56, 0x34, 0x12, // movabs $0x123456789abcdef0, %rax
    0x48, 0x89, 0x04, 0x25, 0x00, 0x40, 0, 0,                   // mov %rax, 0x4000
    0x48, 0x8b, 0x1c, 0x25, 0x00, 0x40, 0, 0,                   // mov 0x4000, %rbx
    0x48, 0x39, 0xd8,                                           // cmp %rbx, %rax
    0x75, 0x46,                                                 // jne 4f
    0x41, 0xb8, 16, 0, 0, 0,                                    // mov $16, %r8d
    0x49, 0x83, 0xc9, 0xff,                                     // or $-1, %r9: the fastest so far
    0x0f, 0x31,                                                 // 1: rdtsc
    0x48, 0xc1, 0xe2, 0x20,                                     // shl $32, %rdx
    0x48, 0x09, 0xd0,                                           // or %rdx, %rax
    0x49, 0x89, 0xc2,                                           // mov %rax, %r10
    0xb9, 0x20, 0x4e, 0, 0,                                     // mov $20000, %ecx
    0xff, 0xc9,                                                 // 2: dec %ecx
    0x75, 0xfc,                                                 // jnz 2b
    0x0f, 0x31,                                                 // rdtsc
    0x48, 0xc1, 0xe2, 0x20,                                     // shl $32, %rdx
    0x48, 0x09, 0xd0,                                           // or %rdx, %rax
    0x4c, 0x29, 0xd0,                                           // sub %r10, %rax
    0x4c, 0x39, 0xc8,                                           // cmp %r9, %rax
    0x4c, 0x0f, 0x42, 0xc8,                                     // cmovb %rax, %r9
    0x41, 0xff, 0xc8,                                           // dec %r8d
    0x75, 0xd3,                                                 // jnz 1b
    0xb0, RAN,                                                  // mov $RAN, %al
    0x49, 0x81, 0xf9, 0x00, 0x09, 0x3d, 0x00,                   // cmp $4000000, %r9
    0x76, 0x02,                                                 // jbe 3f
    0xb0, INTERPRETED,                                          // mov $INTERPRETED, %al
    0xe6, 0xf4,                                                 // 3: out %al, $0xf4
    0xf4,                                                       // 4: hlt
    0xeb, 0xfd,                                                 // jmp 4b
];

/// 32-bit `adcx` and `adox` with something in the upper half of their operand: flags must be as
/// before. `blsi`: the carry shows whether its operand was zero.
#[rustfmt::skip]
const INSTRUCTIONS: &[u8] = &[
    0xbc, 0x00, 0x80, 0, 0,                                     // mov $0x8000, %esp
    0x31, 0xdb,                                                 // xor %ebx, %ebx
    0x48, 0xb8, 0, 0, 0, 0, 0, 0x30, 0, 0,                      // movabs $0x300000000000, %rax
    0x31, 0xc9,                                                 // xor %ecx, %ecx
    0x9c, 0x5e,                                                 // pushfq; pop %rsi
    0x66, 0x0f, 0x38, 0xf6, 0xc1,                               // adcx %ecx, %eax
    0x9c, 0x5f,                                                 // pushfq; pop %rdi
    0x48, 0xb8, 0, 0, 0, 0, 0, 0x30, 0, 0,                      // movabs $0x300000000000, %rax
    0x31, 0xc9,                                                 // xor %ecx, %ecx
    0xf3, 0x0f, 0x38, 0xf6, 0xc1,                               // adox %ecx, %eax
    0x9c, 0x5a,                                                 // pushfq; pop %rdx
    0x48, 0x39, 0xf7,                                           // cmp %rsi, %rdi
    0x75, 0x05,                                                 // jne 1f
    0x48, 0x39, 0xf2,                                           // cmp %rsi, %rdx
    0x74, 0x03,                                                 // je 2f
    0x80, 0xcb, ADX,                                            // 1: or $ADX, %bl
    0xb8, 6, 0, 0, 0,                                           // 2: mov $6, %eax
    0xc4, 0xe2, 0x68, 0xf3, 0xd8,                               // blsi %eax, %edx
    0x73, 0x09,                                                 // jnc 3f
    0x31, 0xc0,                                                 // xor %eax, %eax
    0xc4, 0xe2, 0x68, 0xf3, 0xd8,                               // blsi %eax, %edx
    0x73, 0x03,                                                 // jnc 4f
    0x80, 0xcb, BMI1,                                           // 3: or $BMI1, %bl
    0xb0, TRIED,                                                // 4: mov $TRIED, %al
    0x08, 0xd8,                                                 // or %bl, %al
    0xe6, 0xf4,                                                 // out %al, $0xf4
    0xf4,                                                       // 5: hlt
    0xeb, 0xfd,                                                 // jmp 5b
];

/// None, 32-bit code, data, 64-bit code; then their limit and address, at 0x220. Their accessed
/// bits are set: a processor sets a clear one when it loads the descriptor, and under KVM that
/// write to ROM never completes.
#[rustfmt::skip]
const DESCRIPTORS: &[u8] = &[
    0, 0, 0, 0, 0, 0, 0, 0,
    0xff, 0xff, 0, 0, 0, 0x9b, 0xcf, 0,
    0xff, 0xff, 0, 0, 0, 0x93, 0xcf, 0,
    0xff, 0xff, 0, 0, 0, 0x9b, 0xaf, 0,
    0x1f, 0x00, 0x00, 0x02, 0x0f, 0x00,
];

/// Asks the firmware interface to power off, which ends QEMU with status 0.
#[rustfmt::skip]
const ROM_AARCH64: &[u8] = &[
    0x00, 0x01, 0x80, 0x52, // mov w0, #8
    0x00, 0x80, 0xb0, 0x72, // movk w0, #0x8400, lsl #16    PSCI SYSTEM_OFF
    0x02, 0x00, 0x00, 0xd4, // hvc #0
    0x00, 0x00, 0x00, 0x14, // b .
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A processor sets the accessed bit of a descriptor that it loads, and a ROM cannot take that.
    #[test]
    fn no_descriptor_has_to_be_written_when_it_is_loaded() {
        let access_bytes = DESCRIPTORS[8..32].chunks(8).map(|descriptor| descriptor[5]);
        assert!(
            access_bytes.clone().all(|access| access & 1 == 1),
            "{:x?}",
            access_bytes.collect::<Vec<_>>()
        );
    }

    #[test]
    fn the_prelude_ends_where_it_jumps_to() {
        assert_eq!(PRELUDE.len(), 0x8b);
        assert!(PRELUDE.len() + MODES.len().max(INSTRUCTIONS.len()) <= DESCRIPTORS_AT);
    }
}
