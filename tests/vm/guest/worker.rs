//! A program for the guests of these tests, which the tests build with `rustc` alone. It uses
//! memory and disk in known ways.
//!
//! ```text
//!   worker churn SEED               writes, frees, remaps and discards memory, and files on disk and in memory, for ever
//!   worker count MEMORY DISK TORN   writes a number to memory, then to disk, then the next, for ever; and if the disk
//!                                   does not hold the last one, says so in TORN
//!   worker freeze                   stops the first process, for ever: nothing in the guest is answered any more
//!   worker inner END MARK           runs a guest of its own by KVM, which exits 1000 times; then END: `halt` makes the file
//!                                   MARK and keeps the halted guest, `spin` makes MARK and lets the guest spin, for ever
//! ```

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

const PAGE: usize = 4096;
/// Regions of memory, each with at most this many pages.
const REGIONS: usize = 48;
const REGION_PAGES: u64 = 96;
const O_DSYNC: i32 = 0o10000;
const O_DIRECT: i32 = if cfg!(target_arch = "aarch64") {
    0o200000
} else {
    0o40000
};

mod sys {
    use std::ffi::c_void;

    unsafe extern "C" {
        pub fn mmap(
            at: *mut c_void,
            len: usize,
            prot: i32,
            flags: i32,
            fd: i32,
            offset: i64,
        ) -> *mut c_void;
        pub fn munmap(at: *mut c_void, len: usize) -> i32;
        pub fn mremap(at: *mut c_void, old: usize, new: usize, flags: i32, ...) -> *mut c_void;
        pub fn madvise(at: *mut c_void, len: usize, advice: i32) -> i32;
        pub fn ptrace(request: i32, pid: i32, at: usize, data: usize) -> i64;
        pub fn ioctl(fd: i32, request: u64, ...) -> i32;
    }

    pub const READ_WRITE: i32 = 3;
    pub const SHARED: i32 = 1;
    pub const PRIVATE_ANONYMOUS: i32 = 0x22;
    pub const MAY_MOVE: i32 = 1;
    pub const DONT_NEED: i32 = 4;
    pub const SEIZE: i32 = 0x4206;
    pub const INTERRUPT: i32 = 0x4207;
}

/// xorshift: the same numbers for the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

struct Region {
    at: *mut u8,
    pages: usize,
}

impl Region {
    fn new(pages: usize) -> Region {
        // SAFETY: a fresh mapping touches nothing that exists.
        let at = unsafe {
            sys::mmap(
                std::ptr::null_mut(),
                pages * PAGE,
                sys::READ_WRITE,
                sys::PRIVATE_ANONYMOUS,
                -1,
                0,
            )
        };
        assert!(at as isize != -1, "no memory");
        Region {
            at: at.cast(),
            pages,
        }
    }

    fn write(&mut self, page: usize, random: &mut Random) {
        for word in 0..1 + random.below(PAGE as u64 / 8) as usize {
            // SAFETY: the address is within the region, which has no other owner.
            unsafe {
                self.at
                    .add(page * PAGE + word * 8)
                    .cast::<u64>()
                    .write_volatile(random.next())
            }
        }
    }

    fn resize(&mut self, pages: usize) {
        // SAFETY: the region is ours, and its old address is not used again.
        let at = unsafe {
            sys::mremap(
                self.at.cast(),
                self.pages * PAGE,
                pages * PAGE,
                sys::MAY_MOVE,
            )
        };
        assert!(at as isize != -1, "no memory");
        (self.at, self.pages) = (at.cast(), pages);
    }

    fn discard(&mut self) {
        // SAFETY: the region is ours; it reads as zeros afterwards.
        assert!(unsafe { sys::madvise(self.at.cast(), self.pages * PAGE, sys::DONT_NEED) } == 0);
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region is ours, and its owner is being dropped.
        assert!(unsafe { sys::munmap(self.at.cast(), self.pages * PAGE) } == 0);
    }
}

fn churn(seed: u64) {
    let mut random = Random(seed | 1);
    let mut regions: Vec<Region> = Vec::new();
    for turn in 0u64.. {
        let index = random.below(REGIONS as u64) as usize;
        let pages = 1 + random.below(REGION_PAGES) as usize;
        match (random.below(10), regions.get_mut(index)) {
            (0, Some(_)) => drop(regions.swap_remove(index)),
            (1, Some(region)) => region.resize(pages),
            (2, Some(region)) => region.discard(),
            (3, _) => write_file("/dev/shm", &mut random),
            (4, _) => write_file("/churn", &mut random),
            (_, Some(region)) => {
                for _ in 0..8 {
                    let page = random.below(region.pages as u64) as usize;
                    region.write(page, &mut random);
                }
            }
            (_, None) => regions.push(Region::new(pages)),
        }
        if turn % 16 == 0 {
            std::fs::write("/dev/shm/turn", format!("{turn}")).expect("memory takes a file");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// Creates, overwrites, truncates or removes one of a few files.
fn write_file(dir: &str, random: &mut Random) {
    let path = format!("{dir}/{}", random.below(12));
    match random.below(4) {
        0 => drop(std::fs::remove_file(path)),
        1 => drop(
            OpenOptions::new()
                .write(true)
                .open(path)
                .map(|file| file.set_len(random.below(64 << 10))),
        ),
        _ => {
            let bytes: Vec<u8> = (0..1 + random.below(8 << 10))
                .flat_map(|_| random.next().to_le_bytes())
                .collect();
            let mut file = File::create(path).expect("the file can be made");
            file.write_all(&bytes).expect("there is room");
            if random.below(2) == 0 {
                file.sync_all().expect("it can be synced");
            }
        }
    }
}

/// A page for direct I/O, which bypasses all caches.
#[repr(C, align(4096))]
struct Block([u8; PAGE]);

impl Block {
    fn of(number: u64) -> Block {
        let mut block = Block([0; PAGE]);
        block.0[..8].copy_from_slice(&number.to_le_bytes());
        block
    }

    fn number(&self) -> u64 {
        u64::from_le_bytes(self.0[..8].try_into().expect("eight bytes"))
    }
}

fn count(memory: &str, disk: &str, torn: &str) {
    std::fs::write(disk, [0; PAGE]).expect("the disk takes a file");
    let disk = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(O_DIRECT | O_DSYNC)
        .open(disk)
        .expect("it opens");
    let memory = File::create(memory).expect("memory takes a file");
    let mut found = Block::of(0);
    for number in 1u64.. {
        memory
            .write_all_at(format!("{number:>20}\n").as_bytes(), 0)
            .expect("memory takes it");
        disk.read_exact_at(&mut found.0, 0)
            .expect("the disk is read");
        if found.number() != number - 1 {
            let text = format!(
                "the disk says {} where memory says {}\n",
                found.number(),
                number - 1
            );
            return std::fs::write(torn, text).expect("memory takes a file");
        }
        disk.write_all_at(&Block::of(number).0, 0)
            .expect("the disk takes it");
    }
}

/// The first process ignores signals that would stop it, so a debugger stops it.
fn freeze() {
    for thread in std::fs::read_dir("/proc/1/task")
        .expect("it has threads")
        .flatten()
    {
        let id: i32 = thread
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
            .expect("a number");
        for request in [sys::SEIZE, sys::INTERRUPT] {
            // SAFETY: no memory of ours is read or written.
            assert!(
                unsafe { sys::ptrace(request, id, 0, 0) } == 0,
                "thread {id} cannot be stopped"
            );
        }
    }
    loop {
        std::thread::park();
    }
}

/// The smallest guest that KVM runs: some instructions of 16 bits in one page of memory.
mod kvm {
    use std::fs::{File, OpenOptions};
    use std::os::fd::{AsRawFd, FromRawFd, RawFd};

    use super::{PAGE, sys};

    const CREATE_VM: u64 = 0xae01;
    const GET_VCPU_MMAP_SIZE: u64 = 0xae04;
    const CREATE_VCPU: u64 = 0xae41;
    const SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
    const RUN: u64 = 0xae80;
    const SET_REGS: u64 = 0x4090_ae82;
    const GET_SREGS: u64 = 0x8138_ae83;
    const SET_SREGS: u64 = 0x4138_ae84;

    /// In `struct kvm_run`.
    const EXIT_REASON_AT: usize = 8;
    pub const EXIT_IO: u32 = 2;
    pub const EXIT_HLT: u32 = 5;

    /// Where the code is, in the guest's memory.
    const CODE_AT: u64 = 0x1000;

    /// A guest of one processor. Its memory stays mapped until the program ends.
    pub struct Guest {
        _vm: File,
        processor: File,
        run: *const u8,
    }

    #[repr(C)]
    struct Region {
        slot: u32,
        flags: u32,
        guest_at: u64,
        bytes: u64,
        at: u64,
    }

    impl Guest {
        pub fn with(code: &[u8]) -> Self {
            let kvm = OpenOptions::new()
                .read(true)
                .write(true)
                .open("/dev/kvm")
                .expect("KVM is loaded");
            let vm = owned(call(kvm.as_raw_fd(), CREATE_VM, 0));
            let region = Region {
                slot: 0,
                flags: 0,
                guest_at: CODE_AT,
                bytes: PAGE as u64,
                at: page_of(code) as u64,
            };
            call(vm.as_raw_fd(), SET_USER_MEMORY_REGION, &raw const region as usize);
            let processor = owned(call(vm.as_raw_fd(), CREATE_VCPU, 0));
            set_registers(processor.as_raw_fd());
            let bytes = call(kvm.as_raw_fd(), GET_VCPU_MMAP_SIZE, 0) as usize;
            let run = map(bytes, sys::SHARED, processor.as_raw_fd());
            Guest {
                _vm: vm,
                processor,
                run,
            }
        }

        /// Runs the guest until its next exit, and returns the reason.
        pub fn run(&self) -> u32 {
            call(self.processor.as_raw_fd(), RUN, 0);
            // SAFETY: KVM has written the reason to the mapping, which is longer than that.
            unsafe { self.run.add(EXIT_REASON_AT).cast::<u32>().read_volatile() }
        }
    }

    fn page_of(code: &[u8]) -> *mut u8 {
        let page = map(PAGE, sys::PRIVATE_ANONYMOUS, -1);
        // SAFETY: the page was just mapped, and the code is shorter than it.
        unsafe { page.copy_from_nonoverlapping(code.as_ptr(), code.len().min(PAGE)) };
        page
    }

    /// Begins at the code, in a segment that begins at 0.
    fn set_registers(processor: RawFd) {
        let mut special = [0u8; 312];
        call(processor, GET_SREGS, special.as_mut_ptr() as usize);
        // The code segment is first: its base, its limit, its selector.
        special[..8].fill(0);
        special[12..14].fill(0);
        call(processor, SET_SREGS, special.as_ptr() as usize);
        let mut registers = [0u64; 18];
        registers[16] = CODE_AT;
        // A flag that is always set.
        registers[17] = 2;
        call(processor, SET_REGS, registers.as_ptr() as usize);
    }

    fn map(bytes: usize, flags: i32, fd: RawFd) -> *mut u8 {
        // SAFETY: a new mapping replaces no other one.
        let at = unsafe {
            sys::mmap(std::ptr::null_mut(), bytes, sys::READ_WRITE, flags, fd, 0)
        };
        assert!(at as isize != -1, "{}", std::io::Error::last_os_error());
        at.cast()
    }

    fn call(fd: RawFd, request: u64, argument: usize) -> i32 {
        // SAFETY: the argument is 0, or the address of what the request takes.
        let result = unsafe { sys::ioctl(fd, request, argument) };
        assert!(
            result >= 0,
            "{request:#x}: {}",
            std::io::Error::last_os_error()
        );
        result
    }

    fn owned(fd: i32) -> File {
        // SAFETY: KVM has just made the descriptor, and nothing else has it.
        unsafe { File::from_raw_fd(fd) }
    }
}

/// Runs a guest that exits 1000 times by writing to a port.
fn inner(end: &str, mark: &str) {
    const EXITS: u16 = 1000;
    let [low, high] = EXITS.to_le_bytes();
    // mov $EXITS, %cx; again: out %al, $0x10; loop again
    let mut code = vec![0xb9, low, high, 0xe6, 0x10, 0xe2, 0xfc];
    match end {
        "halt" => code.push(0xf4),
        "spin" => code.extend([0xeb, 0xfe]),
        _ => panic!("a guest cannot end by {end:?}"),
    }
    let guest = kvm::Guest::with(&code);
    for _ in 0..EXITS {
        assert_eq!(guest.run(), kvm::EXIT_IO);
    }
    if end == "spin" {
        File::create(mark).expect("the mark is made");
    }
    assert_eq!(guest.run(), kvm::EXIT_HLT);
    File::create(mark).expect("the mark is made");
    loop {
        std::thread::park();
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["churn", seed] => churn(seed.parse().expect("a number")),
        ["count", memory, disk, torn] => count(memory, disk, torn),
        ["freeze"] => freeze(),
        ["inner", end, mark] => inner(end, mark),
        _ => panic!("it is not known how to {args:?}"),
    }
}
