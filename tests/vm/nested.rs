//! The soft-dirty mode for real: in a guest of our own, whose kernel has it where the host's may not.
//!
//! ```text
//!   this host --> outer (a sandbox, Debian's kernel) --> inner (a sandbox of the outer one's `sandtree`)
//! ```
//!
//! The inner one begins from a warm state that is made here and moved in: an emulated guest of an emulated guest takes
//! minutes to boot.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{Answer, World, finish, program};

const QEMU: &str = "/usr/bin/qemu-system-x86_64";
/// Firmware and accelerators that QEMU looks for beside itself.
const BESIDE_QEMU: [&str; 6] = [
    "/usr/share/seabios/bios-256k.bin",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
    "/usr/share/qemu/pvh.bin",
    "/usr/lib/x86_64-linux-gnu/qemu/accel-tcg-x86_64.so",
    "/usr/lib/x86_64-linux-gnu/qemu/accel-tcg-i386.so",
];
/// Of everything the work has left, in memory and on disk.
const SUMS: &str = "md5sum /dev/shm/* /root/new*";
const SHAPE: [&str; 2] = ["--memory", "128M"];

#[test]
fn soft_dirty_states_are_exact_in_a_kernel_that_has_it() {
    // It is packed, and must not change meanwhile.
    let world = World::copied();
    world.ok([&["run"][..], &SHAPE, &["tiny", "--", "true"]].concat());
    world.start("outer", &["--memory", "1G", "--cpus", "2", "--disk", "1G"]);
    move_in(&world);

    inner(&world, &[&["run", "-d", "--name", "inner", "--memory-mode", "soft-dirty"][..], &SHAPE, &["tiny"]].concat());
    let sums: Vec<String> = (1..=2).map(|number| work_and_checkpoint(&world, number)).collect();
    assert_ne!(sums[0], sums[1]);
    for number in [1, 2] {
        inner(&world, &["revert", "inner", &format!("c{number}")]);
        assert_eq!(contents(&world), sums[number - 1], "state c{number}");
    }
    world.ok(["rm", "-f", "outer"]);
    world.assert_empty();
}

/// Writes, overwrites and frees memory, and takes a state of it.
fn work_and_checkpoint(world: &World, number: usize) -> String {
    let work = format!(
        "cd /dev/shm; dd if=/dev/urandom of=new{number} bs=64k count=20 2>/dev/null; \
         dd if=/dev/urandom of=same bs=64k count=8 conv=notrunc 2>/dev/null; rm -f new$(({number} - 1)); \
         cp new{number} /root/; {SUMS}"
    );
    let sums = inner(world, &["exec", "inner", "--", "sh", "-c", &work]).out().to_owned();
    let taken = inner(world, &["--json", "checkpoint", "inner"]);
    let taken: Value = serde_json::from_slice(&taken.stdout).unwrap();
    assert_eq!((&taken["mode"], &taken["degraded"]), (&"soft-dirty".into(), &Value::Array(Vec::new())), "{taken}");
    // Only the first may be all that was ever written.
    assert!(number == 1 || taken["memory_bytes"].as_u64().unwrap() < 16 << 20, "{taken}");
    sums
}

fn contents(world: &World) -> String {
    inner(world, &["exec", "inner", "--", "sh", "-c", SUMS]).out().to_owned()
}

/// Runs `sandtree` in the outer guest.
fn inner(world: &World, args: &[&str]) -> Answer {
    world.ok([&["exec", "outer", "--", "env", "SANDTREE_HOME=/srv/home", "sandtree"], args].concat())
}

/// Puts QEMU, this program and the store with its image and warm states into the outer guest.
fn move_in(world: &World) {
    let mut files: Vec<String> = BESIDE_QEMU.iter().map(|path| (*path).to_owned()).collect();
    files.extend(libraries(Path::new(QEMU)));
    files.extend(libraries(program()));
    files.push(QEMU.to_owned());
    files.retain(|path| Path::new(path).exists());
    files.sort();
    files.dedup();
    let mut programs = Command::new("tar");
    programs.args(["--create", "--dereference", "--absolute-names"]).args(&files);
    send(world, programs, "/");

    let own = format!("s,.*,usr/bin/{},", program().file_name().unwrap().to_str().unwrap());
    let mut ourselves = Command::new("tar");
    ourselves.args(["--create", "--absolute-names", "--transform", &own]).arg(program());
    send(world, ourselves, "/");

    let mut store = Command::new("tar");
    store.args(["--create", "-C"]).arg(world.home());
    store.args(["format", "images", "initramfs", "kernels", "names/images", "cache/tiny-recipe", "warm"]);
    world.ok([
        "exec",
        "outer",
        "--",
        "sh",
        "-c",
        "cd /srv; mkdir -p home/names/sandboxes home/sandboxes home/staging home/cache",
    ]);
    send(world, store, "/srv/home");
}

fn libraries(of: &Path) -> Vec<String> {
    let answer = Command::new("ldd").arg(of).output().unwrap();
    assert!(answer.status.success(), "{answer:?}");
    let text = String::from_utf8(answer.stdout).unwrap();
    text.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned).collect()
}

/// Unpacks what `tar` packs below a directory of the outer guest.
fn send(world: &World, mut tar: Command, below: &str) {
    let mut packing = tar.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let packed = packing.stdout.take().unwrap();
    let mut unpacking = world.command();
    unpacking.args(["exec", "-i", "outer", "--", "tar", "x", "-C", below]).stdin(packed);
    let answer = finish(unpacking.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    assert_eq!(answer.code, 0, "{answer:#?}");
    assert!(packing.wait().unwrap().success());
}
