//! A program for the guests of these tests, which the tests build with `rustc` alone. It uses
//! memory and disk in known ways.
//!
//! ```text
//!   worker churn SEED               writes, frees, remaps and discards memory, and files on disk and in memory, for ever
//!   worker count MEMORY DISK TORN   writes a number to memory, then to disk, then the next, for ever; and if the disk
//!                                   does not hold the last one, says so in TORN
//!   worker freeze                   stops the first process, for ever: nothing in the guest is answered any more
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
    }

    pub const READ_WRITE: i32 = 3;
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

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["churn", seed] => churn(seed.parse().expect("a number")),
        ["count", memory, disk, torn] => count(memory, disk, torn),
        ["freeze"] => freeze(),
        _ => panic!("it is not known how to {args:?}"),
    }
}
