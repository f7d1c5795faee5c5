//! A program for the guests of these tests, which the tests build with `rustc` alone. It uses
//! memory and disk in known ways.
//!
//! ```text
//!   worker churn SEED               writes, frees, remaps and discards memory, and files on disk and in memory, for ever
//!   worker count MEMORY DISK TORN   writes a number to memory, then to disk, then the next, for ever; and if the disk
//!                                   does not hold the last one, says so in TORN
//!   worker files DIR SEED COUNT     does COUNT random operations on files below DIR, and prints the result of each
//!   worker hold DIR                 holds files of DIR open, mapped and locked, and works with them, for ever; prints what
//!                                   each gives when that changes
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
            call(
                vm.as_raw_fd(),
                SET_USER_MEMORY_REGION,
                &raw const region as usize,
            );
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
        let at = unsafe { sys::mmap(std::ptr::null_mut(), bytes, sys::READ_WRITE, flags, fd, 0) };
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

/// Random operations on files. The same seed does the same anywhere, so two file systems can be
/// compared by what is printed.
mod files {
    use std::fs::{self, File, OpenOptions, Permissions};
    use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
    use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
    use std::path::{Path, PathBuf};

    use super::Random;

    /// Few names, so that operations meet.
    const NAMES: [&str; 6] = ["a", "b", "c", "ä ü", "-x", "long-long-long-long-name"];
    const DIRECTORIES: [&str; 4] = ["", "d", "e", "d/f"];
    /// Files that stay open over several operations.
    const OPEN: usize = 4;

    struct Work {
        root: PathBuf,
        random: Random,
        open: Vec<Option<File>>,
    }

    pub fn run(dir: &str, seed: u64, count: u64) {
        let mut work = Work {
            root: dir.into(),
            random: Random(seed.max(1)),
            open: (0..OPEN).map(|_| None).collect(),
        };
        for number in 0..count {
            let (what, result) = work.step();
            let result = result.unwrap_or_else(|error| format!("error {}", errno(&error)));
            println!("{number} {what}: {result}");
        }
        println!(
            "{}",
            work.tree(Path::new("")).expect("the directory can be read")
        );
    }

    /// A number of the kernel, or that of Rust's own refusals.
    fn errno(error: &io::Error) -> String {
        match error.raw_os_error() {
            Some(number) => number.to_string(),
            None => format!("{:?}", error.kind()),
        }
    }

    impl Work {
        fn path(&mut self) -> PathBuf {
            let directory = DIRECTORIES[self.random.below(DIRECTORIES.len() as u64) as usize];
            let name = NAMES[self.random.below(NAMES.len() as u64) as usize];
            Path::new(directory).join(name)
        }

        fn at(&self, path: &Path) -> PathBuf {
            self.root.join(path)
        }

        fn bytes(&mut self) -> Vec<u8> {
            let length = [0, 1, 100, 5000, 70_000][self.random.below(5) as usize];
            let first = self.random.next() as u8;
            (0..length)
                .map(|i| first.wrapping_add((i / 7) as u8))
                .collect()
        }

        fn step(&mut self) -> (String, io::Result<String>) {
            let path = self.path();
            let at = self.at(&path);
            let shown = path.display();
            let done = |result: io::Result<()>| result.map(|()| "done".to_owned());
            match self.random.below(22) {
                0..=2 => {
                    let bytes = self.bytes();
                    (format!("write {shown}"), done(fs::write(at, bytes)))
                }
                3 => {
                    let bytes = self.bytes();
                    let appended = OpenOptions::new().append(true).open(at);
                    let appended = appended.and_then(|mut file| file.write_all(&bytes));
                    (format!("append {shown}"), done(appended))
                }
                4 | 5 => (
                    format!("read {shown}"),
                    fs::read(at).map(|bytes| sum(&bytes)),
                ),
                6 => {
                    let new = OpenOptions::new()
                        .write(true)
                        .create_new(true)
                        .mode(0o640)
                        .open(at);
                    (format!("create {shown}"), done(new.map(drop)))
                }
                7 => (format!("unlink {shown}"), done(fs::remove_file(at))),
                8 => (format!("mkdir {shown}"), done(fs::create_dir(at))),
                9 => {
                    let directory = DIRECTORIES[1 + self.random.below(3) as usize];
                    let made = fs::create_dir(self.at(Path::new(directory)));
                    (format!("mkdir {directory}"), done(made))
                }
                10 => (format!("rmdir {shown}"), done(fs::remove_dir(at))),
                11 | 12 => {
                    let to = self.path();
                    let renamed = fs::rename(at, self.at(&to));
                    (format!("rename {shown} {}", to.display()), done(renamed))
                }
                13 => {
                    let to = self.path();
                    let linked = fs::hard_link(at, self.at(&to));
                    (format!("link {shown} {}", to.display()), done(linked))
                }
                14 => {
                    let to = self.path();
                    let linked = symlink(&to, at);
                    (format!("symlink {shown} {}", to.display()), done(linked))
                }
                15 => {
                    let mode = [0o644, 0o600, 0o755, 0o444][self.random.below(4) as usize];
                    let set = fs::set_permissions(at, Permissions::from_mode(mode));
                    (format!("chmod {shown}"), done(set))
                }
                16 => {
                    let size = [0, 10, 4096, 100_000][self.random.below(4) as usize];
                    let cut = OpenOptions::new().write(true).open(at);
                    let cut = cut.and_then(|file| file.set_len(size));
                    (format!("truncate {shown} {size}"), done(cut))
                }
                17 => (
                    format!("stat {shown}"),
                    fs::symlink_metadata(at).map(|found| stat(&found)),
                ),
                _ => self.open_files(&path),
            }
        }

        /// Operations on files that stay open, also after they are removed or renamed.
        fn open_files(&mut self, path: &Path) -> (String, io::Result<String>) {
            let slot = self.random.below(OPEN as u64) as usize;
            let what = self.random.below(5);
            let bytes = self.bytes();
            let Some(file) = &mut self.open[slot] else {
                let opened = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .open(self.root.join(path));
                let shown = opened.as_ref().map(|_| "done".to_owned());
                let shown = shown.map_err(|e| {
                    e.raw_os_error()
                        .map_or(ErrorKind::Other.into(), io::Error::from_raw_os_error)
                });
                self.open[slot] = opened.ok();
                return (format!("open {slot} {}", path.display()), shown);
            };
            match what {
                0 => (
                    format!("pwrite {slot}"),
                    file.write_all_at(&bytes, 3000).map(|()| "done".into()),
                ),
                1 => {
                    let mut all = Vec::new();
                    let read = file
                        .seek(SeekFrom::Start(0))
                        .and_then(|_| file.read_to_end(&mut all));
                    (format!("read {slot}"), read.map(|_| sum(&all)))
                }
                2 => (
                    format!("fstat {slot}"),
                    file.metadata().map(|found| stat(&found)),
                ),
                3 => (
                    format!("fsync {slot}"),
                    file.sync_all().map(|()| "done".into()),
                ),
                _ => {
                    self.open[slot] = None;
                    (format!("close {slot}"), Ok("done".into()))
                }
            }
        }

        /// Everything below a directory, sorted.
        fn tree(&self, path: &Path) -> io::Result<String> {
            let mut names = Vec::new();
            for entry in fs::read_dir(self.at(path))? {
                names.push(entry?.file_name());
            }
            names.sort();
            let mut text = String::new();
            for name in names {
                let path = path.join(name);
                let found = fs::symlink_metadata(self.at(&path))?;
                text.push_str(&format!("{} {}", path.display(), stat(&found)));
                if found.is_dir() {
                    text.push('\n');
                    text.push_str(&self.tree(&path)?);
                } else if found.is_file() {
                    text.push_str(&format!(" {}\n", sum(&fs::read(self.at(&path))?)));
                } else {
                    text.push_str(&format!(" {:?}\n", fs::read_link(self.at(&path))?));
                }
            }
            Ok(text)
        }
    }

    /// What does not depend on the file system. A directory's size and links do.
    fn stat(found: &fs::Metadata) -> String {
        let size = if found.is_dir() { 0 } else { found.len() };
        let links = if found.is_dir() { 0 } else { found.nlink() };
        format!("{:o} {size} {links} {}", found.mode(), found.uid())
    }

    fn sum(bytes: &[u8]) -> String {
        let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |sum, byte| {
            (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        format!("{} bytes {sum:x}", bytes.len())
    }
}

/// Files that stay open, mapped and locked while the machine goes from state to state.
mod hold {
    use std::collections::BTreeMap;
    use std::fs::{self, File, OpenOptions};
    use std::io::{self, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::time::Duration;

    use super::{PAGE, sys};

    pub fn run(dir: &str) -> ! {
        let at = |name: &str| Path::new(dir).join(name);
        let mut append = OpenOptions::new()
            .append(true)
            .create(true)
            .open(at("log"))
            .expect("log");
        let kept = File::open(at("kept")).expect("kept");
        let lock = File::create(at("lock")).expect("lock");
        lock.lock().expect("it is locked");
        let mapped = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(at("mapped"))
            .expect("mapped");
        mapped.set_len(PAGE as u64).expect("it grows");
        // SAFETY: a fresh mapping of a file of this size.
        let map = unsafe {
            sys::mmap(
                std::ptr::null_mut(),
                PAGE,
                sys::READ_WRITE,
                sys::SHARED,
                mapped.as_raw_fd(),
                0,
            )
        };
        std::env::set_current_dir(dir).expect("it is a directory");
        let mut last = BTreeMap::new();
        for round in 0u64.. {
            let mut buffer = [0; 16];
            let read = kept.read_at(&mut buffer, 0);
            let read =
                read.map(|count| String::from_utf8_lossy(&buffer[..count]).trim().to_owned());
            tell(&mut last, "kept", read);
            tell(
                &mut last,
                "append",
                writeln!(append, "{round}").map(|()| "done".into()),
            );
            tell(&mut last, "move", directories(dir).map(|()| "done".into()));
            tell(
                &mut last,
                "here",
                fs::metadata("kept").map(|_| "done".into()),
            );
            let other =
                File::open(at("lock")).and_then(|file| file.try_lock().map_err(io::Error::from));
            tell(
                &mut last,
                "lock",
                Ok(if other.is_ok() { "lost" } else { "held" }.into()),
            );
            // SAFETY: the mapping is a page.
            unsafe { map.cast::<u64>().write_volatile(round) };
            std::thread::sleep(Duration::from_millis(10));
        }
        unreachable!("numbers do not end")
    }

    fn directories(dir: &str) -> io::Result<()> {
        let at = |name: &str| Path::new(dir).join(name);
        fs::create_dir(at("one"))?;
        fs::rename(at("one"), at("two"))?;
        fs::remove_dir(at("two"))
    }

    fn tell(
        last: &mut BTreeMap<&'static str, String>,
        what: &'static str,
        result: io::Result<String>,
    ) {
        let result = result.unwrap_or_else(|error| format!("error {error}"));
        if last.get(what) != Some(&result) {
            println!("{what}: {result}");
            last.insert(what, result);
        }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["churn", seed] => churn(seed.parse().expect("a number")),
        ["count", memory, disk, torn] => count(memory, disk, torn),
        ["files", dir, seed, count] => {
            let number = |text: &str| text.parse().expect("a number");
            files::run(dir, number(seed), number(count));
        }
        ["hold", dir] => hold::run(dir),
        ["freeze"] => freeze(),
        ["inner", end, mark] => inner(end, mark),
        _ => panic!("it is not known how to {args:?}"),
    }
}
