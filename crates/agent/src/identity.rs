//! The guest's identity: names, clock, randomness, network, and a root file system as large as its
//! disk.
//!
//! Always: applying the same identity again changes nothing.
//! When it fails: the steps before the failing one stay done.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::time::{ClockId, Timespec};
use sandtree_proto::{Boot, Failure, Identity, Rebirth};

use crate::failure::{OrFailure, refusal};
use crate::names::Names;
use crate::role::Role;
use crate::{network, sys};

const EXT4_MAGIC: i64 = 0xEF53;
const SECTOR: u64 = 512;
/// The offset of ext4's superblock; the count of blocks is in it.
const SUPERBLOCK: u64 = 1024;
const BLOCKS_COUNT: u64 = 4;

/// How long an enlarged disk may take to show its new size, which virtio reports asynchronously.
const DISK_GROWS_WITHIN: Duration = Duration::from_secs(10);

/// What a guest needs at hand to take an identity. After a restore an emulated processor translates
/// all code anew, so every system call saved there makes the guest ready earlier.
#[derive(Debug)]
pub struct Means {
    names: Names,
    random: OnceLock<File>,
}

impl Means {
    pub fn new(role: Role) -> Self {
        Self {
            names: Names::new(role),
            random: OnceLock::new(),
        }
    }

    /// Becomes `identity`, after a boot.
    pub fn assume(&self, identity: &Identity) -> Result<(), Failure> {
        self.names.move_into_memory();
        self.renew(identity)?;
        network::configure(identity.network)?;
        grow_root(0)
    }

    /// Becomes one of its own, after a restore. Memory holds everything but the time, randomness
    /// and, in a new sandbox, names.
    pub fn assume_again(&self, rebirth: &Rebirth) -> Result<(), Failure> {
        self.renew(&rebirth.identity)?;
        rebirth.disk_bytes.map_or(Ok(()), grow_root)
    }

    /// Whether that needs no disk, and so never waits.
    pub fn is_at_hand(&self, rebirth: &Rebirth) -> bool {
        let keeps_its_names = rebirth.identity.hostname.is_empty();
        rebirth.disk_bytes.is_none() && (keeps_its_names || self.names.are_in_memory())
    }

    /// An empty name stands for the present one.
    fn renew(&self, identity: &Identity) -> Result<(), Failure> {
        set_clock(identity.unix_time_ns)?;
        self.add_entropy(&identity.entropy)?;
        if identity.hostname.is_empty() {
            return Ok(());
        }
        self.names.assume(&identity.hostname, &identity.machine_id)
    }

    fn add_entropy(&self, bytes: &[u8]) -> Result<(), Failure> {
        let message = || "cannot add entropy".into();
        let random = match self.random.get() {
            Some(random) => random,
            None => {
                let opened = File::options().write(true).open("/dev/random");
                let opened = opened.or_failure(message)?;
                self.random.get_or_init(|| opened)
            }
        };
        sys::add_entropy(random, bytes).or_failure(message)
    }
}

/// Makes a guest that waited without a root one of its own, before anything else runs in it.
pub fn renew(boot: &Boot) -> Result<(), Failure> {
    let message = || "cannot add entropy".into();
    let random = File::options().write(true).open("/dev/random");
    sys::add_entropy(random.or_failure(message)?, &boot.entropy).or_failure(message)?;
    set_clock(boot.unix_time_ns)
}

fn set_clock(unix_time_ns: u64) -> Result<(), Failure> {
    let tv_sec = (unix_time_ns / 1_000_000_000) as i64;
    let tv_nsec = (unix_time_ns % 1_000_000_000) as i64;
    rustix::time::clock_settime(ClockId::Realtime, Timespec { tv_sec, tv_nsec })
        .or_failure(|| "cannot set the clock".into())
}

/// Switches to a clock that the machine emulates: slower to read than the time-stamp counter, but
/// independent of it.
pub fn leave_tsc() -> Result<(), Failure> {
    const CURRENT: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let switched = ["hpet", "acpi_pm"].iter().any(|clock| {
        // A kernel without that clock keeps the current one.
        let written = fs::write(CURRENT, clock);
        written.is_ok() && fs::read_to_string(CURRENT).is_ok_and(|current| current.trim() == *clock)
    });
    if switched {
        Ok(())
    } else {
        Err(refusal(
            Errno::NODEV,
            "the guest has neither an HPET nor an ACPI timer",
        ))
    }
}

/// Moves the clock by a difference, which, unlike an absolute time, stays right during its
/// transfer.
pub fn step_clock(by_ns: i64) -> Result<(), Failure> {
    set_clock(unix_time_ns().saturating_add_signed(by_ns))
}

pub fn unix_time_ns() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::Realtime);
    // A clock before 1970 counts as zero.
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + now.tv_nsec as u64
}

/// Enlarges an ext4 root to its device, as soon as the device has `disk_bytes`. Other file systems
/// keep their size.
fn grow_root(disk_bytes: u64) -> Result<(), Failure> {
    let message = || "cannot grow the root file system".into();
    let root = File::open("/").or_failure(message)?;
    let system = rustix::fs::fstatfs(&root).or_failure(message)?;
    let read_only = rustix::fs::fstatvfs(&root)
        .or_failure(message)?
        .f_flag
        .contains(rustix::fs::StatVfsMountFlags::RDONLY);
    if system.f_type != EXT4_MAGIC || read_only {
        return Ok(());
    }
    let device = Device::of(&root)?;
    device.await_size(disk_bytes)?;
    let blocks = device.bytes()? / system.f_bsize as u64;
    // The kernel would also find that nothing is to be done, but more slowly.
    if device.ext4_blocks()? == blocks {
        return Ok(());
    }
    sys::resize_ext4(&root, blocks).or_failure(message)
}

/// The block device of a file system, as the kernel shows it.
struct Device {
    dir: PathBuf,
}

impl Device {
    fn of(root: &File) -> Result<Self, Failure> {
        let number = root
            .metadata()
            .or_failure(|| "cannot find the root's device".into())?
            .dev();
        let major = rustix::fs::major(number);
        let minor = rustix::fs::minor(number);
        Ok(Self {
            dir: PathBuf::from(format!("/sys/dev/block/{major}:{minor}")),
        })
    }

    fn await_size(&self, wanted: u64) -> Result<(), Failure> {
        let deadline = Instant::now() + DISK_GROWS_WITHIN;
        loop {
            let bytes = self.bytes()?;
            if bytes >= wanted {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let message =
                    format!("the root's disk has {bytes} bytes, and {wanted} were announced");
                return Err(refusal(Errno::TIMEDOUT, message));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn bytes(&self) -> Result<u64, Failure> {
        let path = self.dir.join("size");
        let message = || format!("cannot read {}", path.display());
        let sectors = fs::read_to_string(&path).or_failure(message)?;
        let sectors: u64 = sectors
            .trim()
            .parse()
            .map_err(io::Error::other)
            .or_failure(message)?;
        Ok(sectors * SECTOR)
    }

    /// The number of blocks in the superblock; its upper half is unused below 16 TiB.
    fn ext4_blocks(&self) -> Result<u64, Failure> {
        let message = || "cannot read the root's superblock".into();
        let uevent = fs::read_to_string(self.dir.join("uevent")).or_failure(message)?;
        let name = uevent
            .lines()
            .find_map(|line| line.strip_prefix("DEVNAME="));
        let name = name
            .ok_or(io::Error::from(io::ErrorKind::NotFound))
            .or_failure(message)?;
        let mut blocks = [0; 4];
        let device = File::open(Path::new("/dev").join(name)).or_failure(message)?;
        device
            .read_exact_at(&mut blocks, SUPERBLOCK + BLOCKS_COUNT)
            .or_failure(message)?;
        Ok(u32::from_le_bytes(blocks).into())
    }
}
