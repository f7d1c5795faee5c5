//! Makes the specification that QEMU is started with for a sandbox.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::MemfdFlags;
use sandtree_engine::{
    self as engine, Accel, Announce, CpuChoice, DiskChain, Engine, Flushes, Limits, MachineSpec,
    Memory, Nesting, NetworkMode, Ports, Preload, Screen, Start,
};
use sandtree_store::{
    AccelChoice, DisplaySize, Init, LayerId, MachineRecord, Network, SandboxDir, SandboxRecord,
};

use crate::error::{Error, Result, engine_error, store_error};
use crate::files::open;
use crate::inner::Inner;

/// The program in the guest; it is built together with this crate.
pub(crate) static AGENT: &[u8] = include_bytes!(env!("SANDTREE_AGENT"));

/// The kernel writes warnings and worse to the console, ends the machine at once when it panics,
/// and skips checks that only real hardware or a distrusted compiler needs.
const KERNEL_OPTIONS: &str = "console=ttyS0 loglevel=4 panic=-1 random.trust_cpu=on no_timer_check \
    tsc=reliable i8042.noaux i8042.nokbd cryptomgr.notests";

/// An emulated processor does not speculate on the guest's behalf: what a kernel does against
/// speculation protects nothing there, and costs emulated code at every indirect call.
const EMULATED_OPTIONS: &str = " mitigations=off";

/// What distinguishes one start of a sandbox's machine from another.
pub(crate) struct Shape<'a> {
    pub kernel: Kernel,
    pub memory: Memory,
    pub preload: Preload,
    pub start: Start,
    pub disk: &'a [LayerId],
    pub machine: &'a MachineRecord,
}

/// How far a kernel boots by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// To the end: its agent mounts the disk.
    Boots,
    /// Until its agent waits for a root. Its own disk is empty, because another will replace it.
    Waits,
}

pub(crate) fn machine_spec(
    host: &Inner,
    dir: &SandboxDir,
    accel: Accel,
    shape: Shape<'_>,
) -> Result<MachineSpec> {
    let record = dir.record();
    let image = host
        .store
        .image_by_digest(&record.image_digest)
        .map_err(store_error("read an image"))?;
    let kernel = host
        .store
        .kernel(&record.kernel_digest)
        .map_err(store_error("read a kernel"))?;
    let initramfs = sandtree_images::initramfs(&host.store, AGENT, &kernel)
        .map_err(|error| error.making(&record.image))?;
    let (active, frozen) = shape.disk.split_last().expect("a sandbox has a disk");
    let active = dir.disk_layer(active);
    let active = File::options()
        .read(true)
        .write(true)
        .open(&active)
        .map_err(|e| Error::io("open", &active, e))?;
    let mut overlays = frozen
        .iter()
        .map(|id| open(&dir.disk_layer(id)))
        .collect::<Result<Vec<_>>>()?;
    overlays.push(active);
    let base = match shape.kernel {
        Kernel::Boots => open(&image.rootfs())?,
        Kernel::Waits => blank(record.disk_bytes)?,
    };
    let cmdline = match shape.kernel {
        Kernel::Boots => cmdline(image.record.init, accel),
        Kernel::Waits => waiting_cmdline(accel),
    };
    Ok(MachineSpec {
        name: record.name.to_string(),
        memory_bytes: record.memory_bytes,
        cpus: record.cpus,
        accel,
        machine_type: shape.machine.machine_type.clone(),
        cpu: shape.machine.cpu.clone(),
        kernel: open(&kernel.kernel())?,
        initramfs: open(&initramfs)?,
        cmdline,
        disk: DiskChain {
            base,
            overlays,
            flushes: flushes(record),
        },
        network: network(shape.machine.network, record.network),
        announce: announce(shape.machine),
        ports: ports(shape.machine),
        display: shape.machine.display.map(screen),
        extra_args: record.qemu_args.clone(),
        jail: host.jail(Some(&record.id)),
        limits: limits(record),
        memory: shape.memory,
        start: shape.start,
        preload: shape.preload,
    })
}

fn flushes(record: &SandboxRecord) -> Flushes {
    if record.durable {
        Flushes::PassedOn
    } else {
        Flushes::Ignored
    }
}

/// QEMU writes a disk, or all of memory in one stream; either file is a little larger than its
/// data.
fn limits(record: &SandboxRecord) -> Limits {
    let largest = record.disk_bytes.max(record.memory_bytes);
    let file_bytes = largest
        .saturating_add(largest / 64)
        .saturating_add(256 << 20);
    Limits {
        file_bytes: Some(file_bytes),
        ..Limits::default()
    }
}

/// The network of a machine in a sandbox that may use `allowed`.
fn network(machine: Network, allowed: Network) -> NetworkMode {
    match (machine, allowed) {
        (Network::None, _) => NetworkMode::None,
        (Network::Isolated, _) => NetworkMode::Isolated,
        (Network::Full, Network::Full) => NetworkMode::Full,
        (Network::Full, Network::Isolated | Network::None) => NetworkMode::Restricted,
    }
}

fn announce(machine: &MachineRecord) -> Announce {
    if machine.silent_network {
        Announce::NotAsked
    } else {
        Announce::Asked
    }
}

fn ports(machine: &MachineRecord) -> Ports {
    if machine.mounts_port {
        Ports::LinkAndMounts
    } else {
        Ports::Link
    }
}

fn screen(size: DisplaySize) -> Screen {
    Screen {
        width: size.width(),
        height: size.height(),
    }
}

/// The machine a sandbox gets here when it boots.
pub(crate) async fn machine_record(
    host: &Inner,
    record: &SandboxRecord,
    accel: Accel,
) -> Result<MachineRecord> {
    let engine = host.engine().await?;
    if record.display.is_some() {
        let checked = engine.check_screens();
        checked.map_err(engine_error("give the sandbox a screen"))?;
    }
    let nesting = if record.nested {
        Nesting::On
    } else {
        Nesting::Off
    };
    let choice = CpuChoice {
        model: record.cpu.as_deref(),
        nesting,
    };
    let cpu = engine
        .cpu(accel, choice)
        .await
        .map_err(engine_error("resolve a processor model"))?;
    host.keep_news(engine);
    Ok(MachineRecord {
        arch: record.arch,
        machine_type: engine.arch().machine_type().to_owned(),
        cpu: cpu.argument,
        accelerator: accel.to_string(),
        qemu_version: engine.version().to_string(),
        cpus: record.cpus,
        network: record.network,
        qemu_args: record.qemu_args.clone(),
        cpu_features: cpu.features,
        tsc_khz: engine.verdicts().tsc_khz.filter(|_| accel == Accel::Tcg),
        silent_network: true,
        mounts_port: true,
        display: record.display,
    })
}

pub(crate) fn chosen_accel(engine: &Engine, record: &SandboxRecord) -> Result<Accel> {
    let choice = match record.accel {
        AccelChoice::Auto => engine::AccelChoice::Auto,
        AccelChoice::Kvm => engine::AccelChoice::Only(Accel::Kvm),
        AccelChoice::Tcg => engine::AccelChoice::Only(Accel::Tcg),
    };
    engine.accel(choice).map_err(engine_error("be used"))
}

pub(crate) fn cmdline(init: Init, accel: Accel) -> String {
    format!("{} {}", kernel_options(accel), boot_options(init))
}

/// The command line of a kernel whose agent waits for a root.
pub(crate) fn waiting_cmdline(accel: Accel) -> String {
    format!("{} sandtree.wait", kernel_options(accel))
}

/// The agent's options for an image. They are on the kernel's command line, or in the message to an
/// agent that waits.
pub(crate) fn boot_options(init: Init) -> String {
    let init = match init {
        Init::Agent => "agent",
        Init::Image => "image",
    };
    format!("sandtree.init={init}")
}

fn kernel_options(accel: Accel) -> String {
    let mitigations = if accel == Accel::Tcg {
        EMULATED_OPTIONS
    } else {
        ""
    };
    format!("{KERNEL_OPTIONS}{mitigations}")
}

/// A disk that reads as zeros and takes no space.
fn blank(bytes: u64) -> Result<File> {
    let failed = |source| Error::io("make", "an empty disk", source);
    let blank = rustix::fs::memfd_create("blank", MemfdFlags::CLOEXEC)
        .and_then(|blank| rustix::fs::ftruncate(&blank, bytes).map(|()| blank))
        .map_err(|errno| failed(errno.into()))?;
    // QEMU asks for a descriptor that cannot write.
    open(Path::new(&format!("/proc/self/fd/{}", blank.as_raw_fd())))
}
