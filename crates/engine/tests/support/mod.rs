//! A guest small enough to be written by hand, and machines around it.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use sandtree_engine::{
    Accel, Announce, Arch, DiskChain, Engine, EngineConfig, Flushes, Jail, Limits, MachineSpec,
    Memory, NetworkMode, Ports, Preload, Start,
};

pub fn config() -> EngineConfig {
    let search = vec!["/usr/local/bin".into(), "/usr/bin".into()];
    EngineConfig {
        binary: None,
        search,
        arch: Arch::X86_64,
        jail: jail(),
    }
}

pub async fn engine() -> Engine {
    Engine::open(&config(), None)
        .await
        .expect("QEMU is installed")
}

pub fn jail() -> Jail {
    Jail {
        uid: rustix::process::geteuid().is_root().then_some(64_322),
    }
}

/// A machine of two disk layers whose guest prints its command line and then does what that begins
/// with: `off`, `reset`, `panic`, `busy` to count in the byte at [`COUNTER`] for ever, or anything
/// else to stay.
pub fn spec(dir: &Path, cmdline: &str) -> MachineSpec {
    MachineSpec {
        name: "toy".into(),
        memory_bytes: 64 << 20,
        cpus: 1,
        accel: Accel::Tcg,
        machine_type: Arch::X86_64.machine_type().into(),
        cpu: "max,la57=off".into(),
        kernel: file(&dir.join("kernel"), &kernel()),
        initramfs: file(&dir.join("initramfs"), b"nothing"),
        cmdline: cmdline.into(),
        disk: disk(dir),
        network: NetworkMode::Isolated,
        announce: Announce::NotAsked,
        ports: Ports::LinkAndMounts,
        display: None,
        memory: Memory::Empty,
        start: Start::Run,
        preload: Preload::Use,
        extra_args: Vec::new(),
        jail: jail(),
        limits: Limits::default(),
    }
}

pub fn file(path: &Path, content: &[u8]) -> File {
    File::create(path).unwrap().write_all(content).unwrap();
    File::open(path).unwrap()
}

fn disk(dir: &Path) -> DiskChain {
    let base = file(&dir.join("base"), &[0; 1 << 20]);
    let frozen = file(&dir.join("frozen"), &overlay(1 << 20));
    drop(file(&dir.join("active"), &overlay(1 << 20)));
    let active = File::options()
        .read(true)
        .write(true)
        .open(dir.join("active"))
        .unwrap();
    DiskChain {
        base,
        overlays: vec![frozen, active],
        flushes: Flushes::Ignored,
    }
}

/// An empty qcow2 overlay of that size in clusters of 64 KiB: header, table of reference counts,
/// reference counts of four clusters, table.
pub fn overlay(bytes: u32) -> Vec<u8> {
    let words: [u32; 26] = [
        0x5146_49fb,
        3,
        0,
        0,
        0,
        16,
        0,
        bytes,
        0,
        1,
        0,
        3 << 16,
        0,
        1 << 16,
        1,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        4,
        104,
    ];
    let image = tempfile::tempfile().unwrap();
    image.set_len(4 << 16).unwrap();
    image
        .write_all_at(&words.map(u32::to_be_bytes).concat(), 0)
        .unwrap();
    image
        .write_all_at(&(2_u64 << 16).to_be_bytes(), 1 << 16)
        .unwrap();
    image
        .write_all_at(&[0, 1, 0, 1, 0, 1, 0, 1], 2 << 16)
        .unwrap();
    let mut bytes = vec![0; 4 << 16];
    image.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Where the busy guest counts.
#[allow(dead_code, reason = "the example runs another guest")]
pub const COUNTER: u64 = 0x80_0000;

const LOAD_ADDRESS: u64 = 0x10_0000;

/// An ELF file with one segment of code, and the note that makes QEMU enter it in 32-bit mode
/// (PVH).
fn kernel() -> Vec<u8> {
    const HEADERS: u64 = 64 + 2 * 56;
    let note = note();
    let code_at = HEADERS + note.len() as u64;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    elf.extend([2_u16, 62].map(u16::to_le_bytes).concat()); // executable, x86-64
    elf.extend(1_u32.to_le_bytes());
    elf.extend([LOAD_ADDRESS, 64, 0].map(u64::to_le_bytes).concat());
    elf.extend(0_u32.to_le_bytes());
    elf.extend([64_u16, 56, 2, 0, 0, 0].map(u16::to_le_bytes).concat());
    elf.extend(segment(1, 7, code_at, CODE.len() as u64));
    elf.extend(segment(4, 4, HEADERS, note.len() as u64));
    elf.extend(note);
    elf.extend(CODE);
    elf
}

fn segment(kind: u32, flags: u32, offset: u64, size: u64) -> Vec<u8> {
    let mut header = [kind, flags].map(u32::to_le_bytes).concat();
    header.extend(
        [offset, LOAD_ADDRESS, LOAD_ADDRESS, size, size, 4]
            .map(u64::to_le_bytes)
            .concat(),
    );
    header
}

fn note() -> Vec<u8> {
    let mut note = [4_u32, 8, 18].map(u32::to_le_bytes).concat();
    note.extend(b"Xen\0");
    note.extend(LOAD_ADDRESS.to_le_bytes());
    note
}

#[rustfmt::skip]
const CODE: &[u8] = &[
    0x8b, 0x73, 0x18,             //       mov 24(%ebx), %esi    the command line
    0x89, 0xf7,                   //       mov %esi, %edi
    0xba, 0xf8, 0x03, 0, 0,       //       mov $0x3f8, %edx      the serial port
    0xac,                         // next: lodsb
    0x84, 0xc0,                   //       test %al, %al
    0x74, 0x03,                   //       je act
    0xee,                         //       out %al, %dx
    0xeb, 0xf8,                   //       jmp next
    0x8a, 0x07,                   // act:  mov (%edi), %al
    0x3c, b'o', 0x74, 0x0f,       //       cmp $'o', %al; je off
    0x3c, b'r', 0x74, 0x17,       //       cmp $'r', %al; je reset
    0x3c, b'p', 0x74, 0x1c,       //       cmp $'p', %al; je panic
    0x3c, b'b', 0x74, 0x2f,       //       cmp $'b', %al; je busy
    0xf4,                         // halt: hlt
    0xeb, 0xfd,                   //       jmp halt
    0x66, 0xba, 0x04, 0x06,       // off:  mov $0x604, %dx       power management of q35
    0x66, 0xb8, 0x00, 0x20,       //       mov $0x2000, %ax
    0x66, 0xef,                   //       out %ax, %dx
    0xeb, 0xf1,                   //       jmp halt
    0x66, 0xba, 0xf9, 0x0c,       // reset: mov $0xcf9, %dx
    0xb0, 0x06,                   //       mov $6, %al
    0xee,                         //       out %al, %dx
    0xeb, 0xe8,                   //       jmp halt
    0xb8, 0x10, 0x30, 0x00, 0x80, // panic: mov $0x80003010, %eax  first region of PCI slot 6
    0x66, 0xba, 0xf8, 0x0c,       //       mov $0xcf8, %dx
    0xef,                         //       out %eax, %dx
    0x66, 0xba, 0xfc, 0x0c,       //       mov $0xcfc, %dx
    0xed,                         //       in %dx, %eax
    0x83, 0xe0, 0xf0,             //       and $~15, %eax
    0xc6, 0x00, 0x01,             //       movb $1, (%eax)
    0xeb, 0xd1,                   //       jmp halt
    0xfe, 0x05, 0, 0, 0x80, 0,    // busy: incb 0x800000
    0xeb, 0xf8,                   //       jmp busy
];
