//! QEMU's argument vector, a pure function of the machine's shape.
//!
//! Always: no path, port or name of the host is in it. Files and sockets arrive as descriptors at
//! the fixed numbers of [`fd`], so equal shapes have equal arguments. PCI addresses are explicit:
//! leaving out one device moves no other. Nothing is taken from QEMU's defaults that a newer
//! version could change.

use std::ffi::OsString;
use std::os::fd::RawFd;

use crate::accel::Accel;
use crate::arch::Arch;
use crate::block::{self, Aio, Flushes, Opening};
use crate::network::{Announce, NetworkMode};

/// The name of the guest's port, by which the agent finds it.
pub const LINK_PORT: &str = "dev.sandtree.agent";
/// The name of the port on which the guest uses directories of the host.
pub const MOUNTS_PORT: &str = "dev.sandtree.mounts";

/// Descriptor numbers in the QEMU process.
pub(crate) mod fd {
    use std::os::fd::RawFd;

    use crate::preload::format;

    pub const QMP: RawFd = 3;
    pub const LINK: RawFd = 4;
    pub const CONSOLE: RawFd = 5;
    pub const KERNEL: RawFd = 6;
    pub const INITRAMFS: RawFd = 7;
    pub const PLAN: RawFd = format::PLAN_FD;
    pub const RAM: RawFd = format::RAM_FD;
    pub const REPORT: RawFd = format::REPORT_FD;
    /// The library that is loaded into QEMU.
    pub const LIBRARY: RawFd = 11;
    pub const MOUNTS: RawFd = 12;
    /// The base; overlays follow.
    pub const DISK: RawFd = 16;
    /// Memory layers follow the disks.
    pub const LAYER: RawFd = format::LAYER_FDS.start;
}

/// Cache of translated code, in MiB. QEMU's own choice is a GiB; a kernel and a busy user space fit
/// into this.
const TRANSLATED_CODE_MIB: u32 = 256;

/// What the frame buffers of a guest may take. They are a part of the state of its devices, so a
/// guest that allocates many must not make that too large to keep.
const FRAME_BYTES_MAX: u32 = 48 << 20;

/// The devices of a screen: picture, keyboard, pointer.
pub(crate) const SCREEN_DEVICES: [&str; 3] =
    ["virtio-gpu-pci", "virtio-keyboard-pci", "virtio-tablet-pci"];

/// Everything that follows `-sandbox`: after this QEMU cannot start programs or gain anything.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// What the arguments depend on.
#[derive(Clone, Debug)]
pub struct Shape {
    pub arch: Arch,
    pub accel: Accel,
    pub machine_type: String,
    /// A model with its options.
    pub cpu: String,
    pub name: String,
    pub memory_mib: u64,
    pub cpus: u32,
    pub cmdline: String,
    pub drive: Drive,
    pub aio: Aio,
    pub flushes: Flushes,
    pub network: NetworkMode,
    pub announce: Announce,
    pub ports: Ports,
    pub display: Option<Screen>,
    pub start: Start,
    pub extra_args: Vec<String>,
}

/// The guest's ports to the host. A state loads only into a machine with the same ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ports {
    /// The agent's.
    Link,
    /// The agent's, and the one of mounts.
    #[default]
    LinkAndMounts,
}

/// The size in pixels that the guest's screen prefers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Screen {
    pub width: u16,
    pub height: u16,
}

/// What the guest's disk is at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drive {
    /// The base, and that many overlays.
    Overlays(usize),
    /// A node without data. Another one takes its place before the guest runs.
    Later { bytes: u64 },
}

/// What the guest does at the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    #[default]
    Run,
    /// Waits for a state to be loaded.
    Incoming,
}

/// The arguments after the program's name.
pub fn argv(shape: &Shape) -> Vec<OsString> {
    let mut args = Args::default();
    machine(&mut args, shape);
    control(&mut args, shape);
    kernel(&mut args, shape);
    disk(&mut args, shape);
    network(&mut args, shape);
    ports(&mut args, shape.ports);
    devices(&mut args);
    display(&mut args, shape.display);
    confine(&mut args, shape.accel);
    args.0.extend(shape.extra_args.iter().map(OsString::from));
    args.0
}

#[derive(Default)]
struct Args(Vec<OsString>);

impl Args {
    fn flag(&mut self, flag: &str) {
        self.0.push(flag.into());
    }

    fn option(&mut self, option: &str, value: impl Into<String>) {
        self.flag(option);
        self.0.push(value.into().into());
    }
}

fn machine(args: &mut Args, shape: &Shape) {
    args.flag("-nodefaults");
    args.flag("-no-user-config");
    args.option("-name", format!("guest={}", escape(&shape.name)));
    args.option("-machine", machine_type(shape));
    args.option("-accel", accelerator(shape.accel));
    args.option("-cpu", shape.cpu.clone());
    args.option("-smp", format!("cpus={0},maxcpus={0}", shape.cpus));
    args.option("-m", format!("{}M", shape.memory_mib));
    // Merging equal pages would tell one guest what another holds.
    let size = format!("{}M", shape.memory_mib);
    let path = descriptor(shape.accel, fd::RAM);
    args.option(
        "-object",
        format!("memory-backend-file,id=ram0,size={size},mem-path={path},share=off,merge=off"),
    );
    args.option("-display", "none");
}

/// Devices that no guest uses are off: less to attack, and 0.4 s less firmware and probing under
/// TCG.
fn machine_type(shape: &Shape) -> String {
    let common = format!(
        "{},memory-backend=ram0,suppress-vmdesc=on,usb=off",
        shape.machine_type
    );
    match shape.arch {
        Arch::X86_64 => format!("{common},smm=off,vmport=off,sata=off,smbus=off"),
        Arch::Aarch64 => format!("{common},gic-version=max"),
    }
}

fn accelerator(accel: Accel) -> String {
    match accel {
        Accel::Tcg => format!("tcg,tb-size={TRANSLATED_CODE_MIB}"),
        Accel::Whpx => "whpx,kernel-irqchip=off".into(),
        Accel::Kvm | Accel::Hvf => accel.to_string(),
    }
}

fn control(args: &mut Args, shape: &Shape) {
    args.option("-chardev", socket("qmp", fd::QMP));
    args.option("-mon", "chardev=qmp,mode=control");
    args.option("-chardev", socket("console", fd::CONSOLE));
    args.option("-serial", "chardev:console");
    // A guest that reboots or panics ends its machine; a panic is reported before.
    args.flag("-no-reboot");
    args.option("-action", "panic=shutdown");
    args.option("-device", format!("pvpanic-pci,id=pvpanic,{}", slot(6)));
    args.option("-global", "migration.send-configuration=off");
    if shape.start == Start::Incoming {
        args.flag("-S");
        args.option("-incoming", "defer");
    }
    if shape.arch == Arch::X86_64 {
        args.option("-device", "vmgenid,id=vmgenid,guid=auto");
    }
}

fn kernel(args: &mut Args, shape: &Shape) {
    args.option("-kernel", descriptor(shape.accel, fd::KERNEL));
    args.option("-initrd", descriptor(shape.accel, fd::INITRAMFS));
    args.option("-append", shape.cmdline.clone());
}

/// A descriptor as a path that QEMU opens.
fn descriptor(accel: Accel, fd: RawFd) -> String {
    let prefix = if accel == Accel::Hvf {
        "/dev/fd"
    } else {
        "/proc/self/fd"
    };
    format!("{prefix}/{fd}")
}

fn disk(args: &mut Args, shape: &Shape) {
    let drive = match shape.drive {
        Drive::Overlays(overlays) => {
            chain(args, shape, overlays);
            block::node(overlays as u64)
        }
        Drive::Later { bytes } => {
            args.option("-blockdev", block::placeholder(bytes));
            block::PLACEHOLDER.to_owned()
        }
    };
    args.option("-object", "iothread,id=io0");
    args.option(
        "-device",
        format!(
            "virtio-blk-pci,id={},drive={drive},iothread=io0,{}",
            block::DEVICE,
            slot(3)
        ),
    );
}

fn chain(args: &mut Args, shape: &Shape, overlays: usize) {
    for level in 0..=overlays {
        args.option("-add-fd", format!("fd={},set={level}", disk_fd(level)));
    }
    let opening = Opening {
        aio: shape.aio,
        flushes: shape.flushes,
    };
    for node in block::nodes(overlays as u64, opening) {
        args.option("-blockdev", node.json());
    }
}

fn disk_fd(level: usize) -> RawFd {
    fd::DISK + level as RawFd
}

/// An isolated interface is on a hub with nothing else on it. User-mode networking with `restrict`
/// would do nearly the same, but still answers pings as its gateway.
fn network(args: &mut Args, shape: &Shape) {
    match shape.network {
        NetworkMode::None => return args.option("-nic", "none"),
        NetworkMode::Isolated => {
            args.option("-netdev", "hubport,id=net0,hubid=0");
            // Takes what is sent, and drops it. Without a reader the guest's queue fills,
            // and its kernel complains.
            args.option("-netdev", "hubport,id=nowhere,hubid=0");
        }
        NetworkMode::Full => args.option("-netdev", "user,id=net0"),
        // A state of user-mode networking loads into nothing else.
        NetworkMode::Restricted => args.option("-netdev", "user,id=net0,restrict=on"),
    }
    let announce = match shape.announce {
        Announce::Asked => "",
        Announce::NotAsked => "guest_announce=off,",
    };
    // Without an option ROM the firmware does not wait for a network boot.
    args.option(
        "-device",
        format!(
            "virtio-net-pci,id=net,netdev=net0,romfile=,{announce}{}",
            slot(4)
        ),
    );
}

/// Port 0 is for a console, which the machine does not have.
fn ports(args: &mut Args, ports: Ports) {
    let most = match ports {
        Ports::Link => 2,
        Ports::LinkAndMounts => 3,
    };
    args.option(
        "-device",
        format!("virtio-serial-pci,id=serial,max_ports={most},{}", slot(2)),
    );
    port(args, 1, "link", (fd::LINK, LINK_PORT));
    if ports == Ports::LinkAndMounts {
        port(args, 2, "mounts", (fd::MOUNTS, MOUNTS_PORT));
    }
}

fn port(args: &mut Args, number: u8, id: &str, (end, name): (RawFd, &str)) {
    args.option("-chardev", socket(id, end));
    args.option(
        "-device",
        format!("virtserialport,id={id},bus=serial.0,nr={number},chardev={id},name={name}"),
    );
}

fn devices(args: &mut Args) {
    args.option("-object", "rng-builtin,id=rng0");
    args.option(
        "-device",
        format!("virtio-rng-pci,id=rng,rng=rng0,{}", slot(5)),
    );
}

/// A screen with keyboard and pointer. Their whole state is that of the devices: none of them has
/// memory of its own. `-vnc none` listens nowhere; clients come as descriptors.
fn display(args: &mut Args, display: Option<Screen>) {
    let Some(Screen { width, height }) = display else {
        return;
    };
    let [gpu, keyboard, tablet] = SCREEN_DEVICES;
    args.option(
        "-device",
        format!(
            "{gpu},id=gpu,max_outputs=1,max_hostmem={FRAME_BYTES_MAX},xres={width},\
             yres={height},{}",
            slot(7)
        ),
    );
    args.option("-device", format!("{keyboard},id=keyboard,{}", slot(8)));
    args.option("-device", format!("{tablet},id=tablet,{}", slot(9)));
    args.option("-vnc", "none");
}

/// QEMU's own system call filter exists on Linux alone.
fn confine(args: &mut Args, accel: Accel) {
    if matches!(accel, Accel::Kvm | Accel::Tcg) {
        args.option("-sandbox", SANDBOX);
    }
}

/// The arguments every probe shares with a machine: no defaults, no display, the same filter.
pub(crate) fn probe_argv(args: &[&str]) -> Vec<OsString> {
    let common = [
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-sandbox",
        SANDBOX,
    ];
    common.iter().chain(args).map(OsString::from).collect()
}

fn socket(id: &str, fd: RawFd) -> String {
    format!("socket,id={id},fd={fd}")
}

fn slot(number: u8) -> String {
    format!("bus=pcie.0,addr={number:#x}")
}

/// A comma inside a value is written twice.
fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(arch: Arch, accel: Accel) -> Shape {
        Shape {
            arch,
            accel,
            machine_type: arch.machine_type().into(),
            cpu: "max,la57=off".into(),
            name: "a".into(),
            memory_mib: 512,
            cpus: 2,
            cmdline: "console=ttyS0 panic=-1".into(),
            drive: Drive::Overlays(2),
            aio: Aio::Threads,
            flushes: Flushes::Ignored,
            network: NetworkMode::Isolated,
            announce: Announce::NotAsked,
            ports: Ports::LinkAndMounts,
            display: None,
            start: Start::Run,
            extra_args: Vec::new(),
        }
    }

    /// One option with its value per line.
    fn text(shape: &Shape) -> String {
        let mut text = String::new();
        for arg in argv(shape) {
            let arg = arg.into_string().unwrap();
            let separator = if arg.starts_with('-') { "\n" } else { " " };
            text.push_str(separator);
            text.push_str(&arg);
        }
        text.trim_start().to_owned() + "\n"
    }

    #[track_caller]
    fn check(shape: &Shape, golden: &str, name: &str) {
        let path = format!("{}/tests/golden/{name}", env!("CARGO_MANIFEST_DIR"));
        assert!(
            text(shape) == golden,
            "differs from {path}; it is now:\n{}",
            text(shape)
        );
    }

    macro_rules! golden {
        ($($test:ident: $shape:expr => $file:literal;)*) => {$(
            #[test]
            fn $test() {
                check(&$shape, include_str!(concat!("../tests/golden/", $file)), $file);
            }
        )*};
    }

    /// Of the overlay that is written, and of nothing else.
    #[test]
    fn flushes_are_passed_on_where_that_is_asked_for() {
        let ignored = shape(Arch::X86_64, Accel::Tcg);
        let passed_on = Shape {
            flushes: Flushes::PassedOn,
            ..ignored.clone()
        };
        let differ = |ours: &str, theirs: &str| {
            ours.lines()
                .zip(theirs.lines())
                .filter(|(a, b)| a != b)
                .count()
        };
        let ignored = text(&ignored);
        let passed_on = text(&passed_on);
        assert_eq!(
            (
                differ(&ignored, &passed_on),
                passed_on.matches(r#""no-flush":false"#).count()
            ),
            (2, 2)
        );
        let active = passed_on
            .lines()
            .filter(|line| line.contains("no-flush\":false"));
        assert!(
            active
                .clone()
                .all(|line| line.contains("disk2") && line.contains(r#""read-only":false"#))
        );
        assert!(!ignored.contains(r#""no-flush":false"#));
    }

    golden! {
        tcg_x86_64: shape(Arch::X86_64, Accel::Tcg) => "tcg-x86_64.txt";
        kvm_x86_64: Shape { aio: Aio::IoUring, network: NetworkMode::Full, drive: Drive::Overlays(1), ..shape(Arch::X86_64, Accel::Kvm) } => "kvm-x86_64.txt";
        hvf_x86_64: Shape { network: NetworkMode::None, ..shape(Arch::X86_64, Accel::Hvf) } => "hvf-x86_64.txt";
        whpx_x86_64: shape(Arch::X86_64, Accel::Whpx) => "whpx-x86_64.txt";
        tcg_aarch64: shape(Arch::Aarch64, Accel::Tcg) => "tcg-aarch64.txt";
        kvm_aarch64: shape(Arch::Aarch64, Accel::Kvm) => "kvm-aarch64.txt";
        hvf_aarch64: shape(Arch::Aarch64, Accel::Hvf) => "hvf-aarch64.txt";
    }

    #[test]
    fn a_machine_that_waits_for_a_state_differs_in_that_alone() {
        let running = shape(Arch::X86_64, Accel::Tcg);
        let waiting = text(&Shape {
            start: Start::Incoming,
            ..running.clone()
        });
        assert_eq!(waiting.replace("-S\n-incoming defer\n", ""), text(&running));
        assert_ne!(waiting, text(&running));
    }

    #[test]
    fn a_machine_that_gets_its_disk_later_differs_in_the_nodes_alone() {
        let now = shape(Arch::X86_64, Accel::Tcg);
        let later = Shape {
            drive: Drive::Later { bytes: 1 << 30 },
            ..now.clone()
        };
        let without_nodes = |shape: &Shape| {
            let text = text(shape);
            let lines = text
                .lines()
                .filter(|line| !line.starts_with("-add-fd") && !line.starts_with("-blockdev"));
            lines.collect::<Vec<_>>().join("\n")
        };
        assert_eq!(
            without_nodes(&later).replace("drive=nothing", "drive=disk2"),
            without_nodes(&now)
        );
        let node = r#"-blockdev {"driver":"null-co","node-name":"nothing","#;
        assert!(text(&later).contains(node), "{}", text(&later));
        assert!(text(&later).contains(r#""size":1073741824"#));
    }

    /// So a state with a screen finds every other device where it was.
    #[test]
    fn a_screen_adds_devices_and_moves_none() {
        let without = shape(Arch::X86_64, Accel::Tcg);
        let with = text(&Shape {
            display: Some(Screen {
                width: 1024,
                height: 768,
            }),
            ..without.clone()
        });
        let added = "-device virtio-gpu-pci,id=gpu,max_outputs=1,max_hostmem=50331648,xres=1024,\
                     yres=768,bus=pcie.0,addr=0x7\n\
                     -device virtio-keyboard-pci,id=keyboard,bus=pcie.0,addr=0x8\n\
                     -device virtio-tablet-pci,id=tablet,bus=pcie.0,addr=0x9\n\
                     -vnc none\n";
        assert_eq!(with.replace(added, ""), text(&without));
        assert_ne!(with, text(&without));
    }

    #[test]
    fn a_guest_that_expects_to_be_asked_gets_the_device_that_asks() {
        let silent = shape(Arch::X86_64, Accel::Tcg);
        let asking = Shape {
            announce: Announce::Asked,
            ..silent.clone()
        };
        assert_eq!(
            text(&silent).replace("guest_announce=off,", ""),
            text(&asking)
        );
        assert_ne!(text(&silent), text(&asking));
    }

    #[test]
    fn a_restricted_network_differs_from_a_full_one_in_that_alone() {
        let full = Shape {
            network: NetworkMode::Full,
            ..shape(Arch::X86_64, Accel::Tcg)
        };
        let restricted = text(&Shape {
            network: NetworkMode::Restricted,
            ..full.clone()
        });
        assert_eq!(restricted.replace(",restrict=on", ""), text(&full));
        assert_ne!(restricted, text(&full));
    }

    #[test]
    fn what_a_caller_adds_comes_last_and_commas_do_not_split_names() {
        let extra_args = vec!["-device".into(), "x".into()];
        let shape = Shape {
            name: "a,b".into(),
            extra_args,
            ..shape(Arch::X86_64, Accel::Tcg)
        };
        assert!(text(&shape).contains("-name guest=a,,b\n"));
        assert!(text(&shape).ends_with("-device x\n"));
    }
}
