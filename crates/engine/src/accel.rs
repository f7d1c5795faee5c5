//! Accelerators, and the probe that tells whether KVM can run a guest here.
//!
//! `/dev/kvm` may exist, open and even create a machine on hosts where no normal kernel runs. So the probe is a real
//! round trip: a guest of two hundred bytes goes through the processor modes a kernel goes through and reports.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::str::FromStr;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use crate::arch::Arch;
use crate::argv::probe_argv;
use crate::error::Error;
use crate::probe::{Probe, Verdict, describe};
use crate::process::{Exit, Process};

/// A guest that works reports within a tenth of a second; a wrong "no" would slow a busy host down until it reboots.
const PROBE_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    Kvm,
    Tcg,
    Hvf,
    Whpx,
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
            Accel::Hvf => "hvf",
            Accel::Whpx => "whpx",
        })
    }
}

/// What a caller asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccelChoice {
    /// KVM where it works, else the emulator.
    #[default]
    Auto,
    Only(Accel),
}

impl FromStr for AccelChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => Ok(AccelChoice::Auto),
            "kvm" => Ok(AccelChoice::Only(Accel::Kvm)),
            "tcg" => Ok(AccelChoice::Only(Accel::Tcg)),
            "hvf" => Ok(AccelChoice::Only(Accel::Hvf)),
            "whpx" => Ok(AccelChoice::Only(Accel::Whpx)),
            other => Err(Error::Spec { detail: format!("accelerator {other:?} is not one of auto, kvm, tcg") }),
        }
    }
}

pub type KvmVerdict = Verdict;

/// Probes KVM. An engine failure other than a verdict is a reason, too: the emulator works all the same.
pub(crate) async fn probe_kvm(probe: &Probe<'_>) -> KvmVerdict {
    let found = match openable(probe) {
        Err(reason) => Err(reason),
        Ok(()) => round_trip(probe, Accel::Kvm).await,
    };
    found.into()
}

fn openable(probe: &Probe<'_>) -> Result<(), String> {
    if probe.arch != Arch::HOST {
        return Err(format!("it runs {} guests only on this host", Arch::HOST));
    }
    let device = File::options().read(true).write(true).open("/dev/kvm");
    let device = device.map_err(|error| format!("/dev/kvm cannot be opened: {error}"))?;
    let status = device.metadata().map_err(|error| format!("/dev/kvm cannot be looked at: {error}"))?;
    match probe.jail.uid {
        Some(uid) if !reachable(status.mode()) => Err(format!(
            "/dev/kvm (mode {:04o}) can be opened neither by its group nor by all, and machines run as user {uid}",
            status.mode() & 0o7777
        )),
        _ => Ok(()),
    }
}

/// Whether a user other than the owner can open the device; the jail lends the group.
fn reachable(mode: u32) -> bool {
    mode & 0o060 == 0o060 || mode & 0o006 == 0o006
}

/// Runs the guest; the error is the reason why it did not report.
pub(crate) async fn round_trip(probe: &Probe<'_>, accel: Accel) -> Result<(), String> {
    let process = start(probe, accel).await.map_err(|error| describe(&error))?;
    match tokio::time::timeout(PROBE_DEADLINE, process.exit().wait()).await {
        Ok(exit) => judge(probe.arch, &exit),
        Err(_) => Err(format!("a test guest did not run: no sign of life within {} s", PROBE_DEADLINE.as_secs())),
    }
}

async fn start(probe: &Probe<'_>, accel: Accel) -> Result<Process, Error> {
    const ROM_FD: i32 = 3;
    let rom = rom_file(probe.arch).map_err(Error::io("create", "the test guest in memory"))?;
    let rom_path = format!("/proc/self/fd/{ROM_FD}");
    let accel_name = accel.to_string();
    let cpu = if accel == Accel::Tcg { "max" } else { "host" };
    let mut args = vec!["-machine", probe.arch.machine_type(), "-accel", &accel_name, "-cpu", cpu];
    args.extend(["-m", "16M", "-no-reboot", "-bios", &rom_path]);
    if probe.arch == Arch::X86_64 {
        args.extend(["-device", "isa-debug-exit,iobase=0xf4,iosize=1"]);
    }
    probe.launch("probe-kvm", accel, probe_argv(&args), vec![(ROM_FD, rom.into())]).await
}

fn judge(arch: Arch, exit: &Exit) -> Result<(), String> {
    let expected = match arch {
        // isa-debug-exit ends QEMU with twice the value written, plus one.
        Arch::X86_64 => i32::from(REPORT) * 2 + 1,
        Arch::Aarch64 => 0,
    };
    if exit.status.code() == Some(expected) { Ok(()) } else { Err(format!("a test guest did not run: {exit}")) }
}

fn rom_file(arch: Arch) -> std::io::Result<File> {
    let rom = match arch {
        Arch::X86_64 => rom_x86_64(),
        Arch::Aarch64 => ROM_AARCH64.to_vec(),
    };
    let file = File::from(memfd_create("probe", MemfdFlags::CLOEXEC)?);
    file.write_all_at(&rom, 0)?;
    Ok(file)
}

/// The value the guest reports with.
const REPORT: u8 = 0x2a;

/// 64 KiB that end at the reset vector, from which a far jump leads to the code at F000:0000.
fn rom_x86_64() -> Vec<u8> {
    let mut rom = vec![0; 64 << 10];
    rom[..CODE_X86_64.len()].copy_from_slice(CODE_X86_64);
    rom[0xfff0..0xfff5].copy_from_slice(&[0xea, 0x00, 0x00, 0x00, 0xf0]); // ljmp $0xf000, $0
    rom
}

/// From real mode through protected mode into long mode with paging, one write and read of memory, the report.
#[rustfmt::skip]
const CODE_X86_64: &[u8] = &[
    // 0x00, 16 bit
    0xfa,                                                       // cli
    0x2e, 0x66, 0x0f, 0x01, 0x16, 0xd8, 0x00,                   // lgdtl %cs:0xd8
    0x0f, 0x20, 0xc0,                                           // mov %cr0, %eax
    0x0c, 0x01,                                                 // or $1, %al            protected mode
    0x0f, 0x22, 0xc0,                                           // mov %eax, %cr0
    0x66, 0xea, 0x18, 0x00, 0x0f, 0x00, 0x08, 0x00,             // ljmpl $0x08, $0xf0018
    // 0x18, 32 bit
    0x66, 0xb8, 0x10, 0x00,                                     // mov $0x10, %ax
    0x8e, 0xd8,                                                 // mov %ax, %ds
    0xc7, 0x05, 0x00, 0x10, 0, 0, 0x03, 0x20, 0, 0,             // movl $0x2003, 0x1000  level 4 -> 0x2000
    0xc7, 0x05, 0x04, 0x10, 0, 0, 0, 0, 0, 0,                   // movl $0, 0x1004
    0xc7, 0x05, 0x00, 0x20, 0, 0, 0x03, 0x30, 0, 0,             // movl $0x3003, 0x2000  level 3 -> 0x3000
    0xc7, 0x05, 0x04, 0x20, 0, 0, 0, 0, 0, 0,                   // movl $0, 0x2004
    0xc7, 0x05, 0x00, 0x30, 0, 0, 0x83, 0, 0, 0,                // movl $0x83, 0x3000    one page of 2 MiB at 0
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
    // 0x8b, 64 bit
    0x48, 0xb8, 0xf0, 0xde, 0xbc, 0x9a, 0x78, 0x56, 0x34, 0x12, // movabs $0x123456789abcdef0, %rax
    0x48, 0x89, 0x04, 0x25, 0x00, 0x40, 0, 0,                   // mov %rax, 0x4000
    0x48, 0x8b, 0x1c, 0x25, 0x00, 0x40, 0, 0,                   // mov 0x4000, %rbx
    0x48, 0x39, 0xd8,                                           // cmp %rbx, %rax
    0x75, 0x04,                                                 // jne 0xae
    0xb0, REPORT,                                               // mov $REPORT, %al
    0xe6, 0xf4,                                                 // out %al, $0xf4
    0xf4,                                                       // 0xae: hlt
    0xeb, 0xfd,                                                 // jmp 0xae
    0, 0, 0, 0, 0, 0, 0,
    // 0xb8, segment descriptors: none, 32-bit code, data, 64-bit code. Their accessed bits are set: a processor sets a
    // clear one when it loads the descriptor, and under KVM that write to ROM never completes.
    0, 0, 0, 0, 0, 0, 0, 0,
    0xff, 0xff, 0, 0, 0, 0x9b, 0xcf, 0,
    0xff, 0xff, 0, 0, 0, 0x93, 0xcf, 0,
    0xff, 0xff, 0, 0, 0, 0x9b, 0xaf, 0,
    // 0xd8, their limit and address
    0x1f, 0x00, 0xb8, 0x00, 0x0f, 0x00,
];

/// Asks the firmware interface to power off, which ends QEMU with status 0.
#[rustfmt::skip]
const ROM_AARCH64: &[u8] = &[
    0x00, 0x01, 0x80, 0x52, // mov w0, #8
    0x00, 0x80, 0xb0, 0x72, // movk w0, #0x8400, lsl #16    PSCI SYSTEM_OFF
    0x02, 0x00, 0x00, 0xd4, // hvc #0
    0x00, 0x00, 0x00, 0x14, // b .
];
