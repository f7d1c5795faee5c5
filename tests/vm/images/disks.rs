//! Foreign disks boot: a bare file system, one in a partition, one in a qcow2 file.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use super::{busybox, end, files, host, image, say};
use crate::support::World;

const SECTOR: u64 = 512;
const ROOT_START: u64 = 2048 * SECTOR;
/// The partition type of a Linux root file system for x86-64, in the order of the disk's bytes.
const ROOT_TYPE: [u8; 16] = [
    0xe3, 0xbc, 0x68, 0x4f, 0xcd, 0xe8, 0xb1, 0x4d, 0x96, 0xe7, 0xfb, 0xca, 0xf9, 0x84, 0xb7, 0x09,
];

/// A file system of 64 MiB with busybox and its init in it.
fn bare(world: &World, dir: &Path) -> std::path::PathBuf {
    let root = dir.join("root");
    let disk = dir.join("bare.raw");
    busybox(world, &root);
    fs::write(root.join("etc/word"), "of the disk").unwrap();
    host(
        "mke2fs",
        [
            "-q",
            "-t",
            "ext4",
            "-d",
            root.to_str().unwrap(),
            disk.to_str().unwrap(),
            "64M",
        ],
    );
    disk
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| {
        if crc & 1 == 1 {
            crc >> 1 ^ 0xedb8_8320
        } else {
            crc >> 1
        }
    };
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc))
    })
}

/// The same file system behind a partition table. The test writes the table itself, because not
/// every host has a program for it.
fn partitioned(bare: &Path, disk: &Path) {
    let content = fs::read(bare).unwrap();
    let sectors = (ROOT_START + content.len() as u64) / SECTOR + 34;
    let mut entries = vec![0; 128 * 128];
    entries[..16].copy_from_slice(&ROOT_TYPE);
    entries[16..32].copy_from_slice(&[7; 16]);
    entries[32..40].copy_from_slice(&(ROOT_START / SECTOR).to_le_bytes());
    entries[40..48].copy_from_slice(&(sectors - 35).to_le_bytes());
    let mut header = vec![0; 92];
    header[..16].copy_from_slice(b"EFI PART\0\0\x01\0\x5c\0\0\0");
    for (at, value) in [
        (24, 1),
        (32, sectors - 1),
        (40, 34),
        (48, sectors - 34),
        (72, 2),
    ] {
        header[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    header[80..84].copy_from_slice(&128u32.to_le_bytes());
    header[84..88].copy_from_slice(&128u32.to_le_bytes());
    header[88..92].copy_from_slice(&crc32(&entries).to_le_bytes());
    let sum = crc32(&header);
    header[16..20].copy_from_slice(&sum.to_le_bytes());
    // One partition over everything, for programs that do not know the table that follows.
    let mut protective = vec![0; 512];
    protective[450] = 0xee;
    protective[454..458].copy_from_slice(&1u32.to_le_bytes());
    protective[458..462].copy_from_slice(&u32::MAX.to_le_bytes());
    protective[510..].copy_from_slice(&[0x55, 0xaa]);
    let file = File::create(disk).unwrap();
    file.set_len(sectors * SECTOR).unwrap();
    for (at, bytes) in [
        (0, &protective),
        (SECTOR, &header),
        (2 * SECTOR, &entries),
        (ROOT_START, &content),
    ] {
        file.write_all_at(bytes, at).unwrap();
    }
}

/// QEMU's program for disks without a machine.
struct Daemon {
    orders: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Daemon {
    fn order(&mut self, order: &str, arguments: Value) {
        writeln!(
            self.orders,
            "{}",
            json!({ "execute": order, "arguments": arguments })
        )
        .unwrap();
        let answer = self.until(|line| line.get("return").is_some() || line.get("error").is_some());
        assert!(answer.get("return").is_some(), "{order}: {answer}");
    }

    fn until(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "it ended");
            let line: Value = serde_json::from_str(&line).unwrap();
            if wanted(&line) {
                return line;
            }
        }
    }

    fn concluded(&mut self) {
        self.until(|line| {
            line["event"] == "JOB_STATUS_CHANGE" && line["data"]["status"] == "concluded"
        });
    }
}

/// The same disk in QEMU's own format, written by QEMU.
fn qcow2(raw: &Path, disk: &Path) {
    File::create(disk).unwrap();
    let file = |name: &str, path: &Path| {
        format!("driver=file,node-name={name},filename={}", path.display())
    };
    let mut command = Command::new("qemu-storage-daemon");
    command.args([
        "--blockdev",
        &file("to", disk),
        "--blockdev",
        &file("raw", raw),
    ]);
    command.args([
        "--chardev",
        "stdio,id=c",
        "--monitor",
        "chardev=c,mode=control",
    ]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut daemon = Daemon {
        orders: child.stdin.take().unwrap(),
        output: BufReader::new(child.stdout.take().unwrap()),
    };
    let bytes = fs::metadata(raw).unwrap().len();
    daemon.order("qmp_capabilities", json!({}));
    let options = json!({ "driver": "qcow2", "file": "to", "size": bytes });
    daemon.order(
        "blockdev-create",
        json!({ "job-id": "make", "options": options }),
    );
    daemon.concluded();
    daemon.order("job-dismiss", json!({ "id": "make" }));
    daemon.order(
        "blockdev-add",
        json!({ "driver": "qcow2", "node-name": "disk", "file": "to" }),
    );
    let copy = json!({ "job-id": "copy", "device": "raw", "target": "disk", "sync": "full", "auto-dismiss": false });
    daemon.order("blockdev-backup", copy);
    daemon.concluded();
    daemon.order("quit", json!({}));
    assert!(child.wait().unwrap().success());
}

#[test]
fn disks_boot_by_their_own_init() {
    let world = World::new();
    let dir = files();
    let bare = bare(&world, dir.path());
    let gpt = dir.path().join("gpt.img");
    let packed = dir.path().join("packed.qcow2");
    partitioned(&bare, &gpt);
    qcow2(&gpt, &packed);
    world.ok(["image", "import", bare.to_str().unwrap()]);
    world.ok(["image", "import", gpt.to_str().unwrap()]);
    // The same file system gives the same image in every packing.
    let made = world.json(["image", "import", packed.to_str().unwrap()]);
    assert_eq!(
        (&made["names"], &made["init"]),
        (&json!(["bare", "gpt", "packed"]), &json!("image"))
    );
    world.ok(["run", "--cold", "-d", "--name", "a", "gpt"]);
    assert_eq!(
        say(&world, "a", "cat /proc/1/comm /etc/word"),
        "init\nof the disk"
    );
    let mib: u64 = say(&world, "a", "df -m / | awk 'END { print $2 }'")
        .parse()
        .unwrap();
    assert!(mib > 4000, "the file system grew to its disk: {mib} MiB");
    world.ok(["stop", "a"]);
    world.ok(["start", "a"]);
    assert_eq!(say(&world, "a", "cat /etc/word"), "of the disk");
    world.ok(["rm", "-f", "a"]);
    // The same with the agent as init, and with a smaller disk.
    world.ok([
        "image",
        "import",
        "--init",
        "agent",
        "--disk",
        "128M",
        "--name",
        "agent",
        bare.to_str().unwrap(),
    ]);
    assert_eq!(
        world.ok(["run", "agent", "--", "cat", "/etc/word"]).out(),
        "of the disk"
    );
    assert_eq!(image(&world, "agent")["disk_bytes"], 128 << 20);
    end(&world, &["tiny"]);
}
