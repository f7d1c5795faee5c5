//! The outer guest: an emulated machine with KVM inside. Each test starts from its snapshot.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::direct;
use super::keyed::{self, QEMU};
use crate::support::lab::{WORKER, worker};
use crate::support::{Answer, NOT_IN_TIME, World, finish_within, program, text};

/// The version of the recipe; a change of the recipe increments it.
const RECIPE: &str = "2";
/// The name of the snapshot, and of the sandbox that starts from it.
const OUTER: &str = "outer";
/// Emulated, also on a host with KVM, so that the processor is the same everywhere. One processor:
/// with two, inner guests of two processors crash now and then (docs/under-the-hood/kvm.md).
const SHAPE: [&str; 10] = [
    "--accel",
    "tcg",
    "--memory",
    "3G",
    "--cpus",
    "1",
    "--disk",
    "4G",
    "--network",
    "none",
];
/// Everything in the outer guest is emulated, and a command has many steps.
const DEADLINE: Duration = Duration::from_secs(600);
/// A check takes about a minute.
const CHECK_DEADLINE: Duration = Duration::from_secs(300);
/// What a kernel reports when one of its processors has executed no task for long.
const STUCK: &str = "soft lockup";

/// Firmware and accelerators that QEMU loads from its directories.
const BESIDE_QEMU: [&str; 6] = [
    "/usr/share/seabios/bios-256k.bin",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
    "/usr/share/qemu/pvh.bin",
    "/usr/lib/x86_64-linux-gnu/qemu/accel-tcg-x86_64.so",
    "/usr/lib/x86_64-linux-gnu/qemu/accel-tcg-i386.so",
];
/// The modules of KVM on AMD, in the order of their dependencies.
const MODULES: [&str; 3] = [
    "virt/lib/irqbypass",
    "arch/x86/kvm/kvm",
    "arch/x86/kvm/kvm-amd",
];

/// Paths in the outer guest.
pub const STORE: &str = "/srv/store";
const MODULES_DIR: &str = "/lib/kvm";
const WORKER_FILE: &str = "/srv/worker";

/// `/dev/kvm` as in distributions: for root and a group. `member` is in the group, `other` is not.
const DEVICE: &str = "chgrp kvm /dev/kvm && chmod 0660 /dev/kvm";
const USERS: &str = "echo kvm:x:104:member >> /etc/group; for user in member:2001 other:2002; do \
    name=${user%:*}; id=${user#*:}; echo $name:x:$id:$id::/home/$name:/bin/sh >> /etc/passwd; \
    echo $name:x:$id: >> /etc/group; mkdir -p /home/$name; chown $id:$id /home/$name; done";

/// A running outer guest.
pub struct Outer {
    pub world: World,
    started: Instant,
}

impl Outer {
    /// Starts the outer guest: KVM is loaded, and the store has the warm states of
    /// `direct::SHAPES`.
    pub fn start() -> Self {
        let outer = Outer {
            world: World::like(base()),
            started: Instant::now(),
        };
        outer.world.json(["run", "-d", "--name", OUTER, OUTER]);
        outer
    }

    /// Runs a shell line in the guest, as root.
    pub fn sh(&self, line: &str) -> Answer {
        self.exec(&["sh", "-c", line])
    }

    /// Runs a shell line that must succeed, and returns its output.
    #[track_caller]
    pub fn say(&self, line: &str) -> String {
        let answer = self.sh(line);
        assert_eq!(answer.code, 0, "{line}: {answer:#?}");
        answer.out().trim_end().to_owned()
    }

    /// Runs `sandtree` in the guest, with this store.
    pub fn sandtree(&self, store: &str, args: &[&str]) -> Answer {
        let home = format!("SANDTREE_HOME={store}");
        self.exec(&[&["env", &home, "sandtree"], args].concat())
    }

    /// Runs it and asserts that it succeeds.
    #[track_caller]
    pub fn ok(&self, store: &str, args: &[&str]) {
        let answer = self.sandtree(store, args);
        assert_eq!(answer.code, 0, "{args:?}: {answer:#?}");
    }

    /// Puts the sandboxes of a store of this host into the store in it, which has the same images.
    pub fn carry_in(&self, world: &World) {
        let mut tar = Command::new("tar");
        tar.args(["--create", "-C"]).arg(world.home());
        tar.args(["sandboxes", "names/sandboxes"]);
        self.send(tar, STORE);
    }

    fn exec(&self, command: &[&str]) -> Answer {
        self.exec_within(DEADLINE, command)
    }

    fn exec_within(&self, deadline: Duration, command: &[&str]) -> Answer {
        let mut run = self.world.command();
        run.args(["exec", OUTER, "--"])
            .args(command)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        finish_within(run.spawn().unwrap(), deadline)
    }

    /// Begins a command that starts the machine of a sandbox of 128 MiB, gives the accelerator that
    /// the machine is started with, breaks the command off and removes the sandbox. A guest that is
    /// emulated inside an emulated one may need minutes to answer, and its emulation is not
    /// reliable: it is not waited for.
    #[track_caller]
    pub fn accelerator_of(&self, command: &str, sandbox: &str) -> String {
        // Probes start QEMU, too, with less memory. A shell's job in the background ignores SIGINT.
        let line = format!(
            "export SANDTREE_HOME={STORE}; sandtree {command} > /tmp/said 2>&1 & run=$!; \
             look() {{ for id in $(pidof qemu-system-x86_64); do tr '\\0' '\\n' < /proc/$id/cmdline > /tmp/line; \
             ! grep -qx 128M /tmp/line || sed -n '/^-accel$/{{n;p;}}' /tmp/line; done 2> /dev/null; }}; \
             until found=$(look) && [ -n \"$found\" ]; do \
             kill -0 $run || {{ cat /tmp/said >&2; exit 1; }}; usleep 50000; done; \
             kill $run; wait $run; until ! pidof qemu-system-x86_64 > /dev/null; do \
             sandtree rm -f {sandbox} > /dev/null 2>&1; usleep 50000; done; echo $found"
        );
        // The properties of the accelerator follow a comma.
        self.say(&line)
            .split(',')
            .next()
            .unwrap_or_default()
            .to_owned()
    }

    /// Runs a check of `direct` in an outer guest. The emulated virtualisation stops an outer
    /// processor now and then (docs/under-the-hood/kvm.md): a check that does not end because of
    /// that is run once more.
    pub fn check(name: &str) {
        let outer = Outer::start();
        let answer = outer.run_check(name);
        if answer.code != NOT_IN_TIME || outer.complaints(STUCK).is_empty() {
            outer.judge(name, &answer);
            return outer.end();
        }
        eprintln!("{name}: a processor of the outer guest was stuck; a second run follows");
        outer.remove();
        let outer = Outer::start();
        let answer = outer.run_check(name);
        outer.judge(name, &answer);
        outer.end();
    }

    fn run_check(&self, name: &str) -> Answer {
        let tests = self.send_tests();
        let check = format!("kvm::direct::{name}");
        let settings = settings();
        let mut command = vec!["env"];
        command.extend(settings.iter().map(String::as_str));
        command.extend([&tests, "--ignored", "--exact", "--test-threads=1", &check]);
        self.exec_within(CHECK_DEADLINE, &command)
    }

    /// Asserts that a check has run and passed.
    fn judge(&self, name: &str, answer: &Answer) {
        let out = String::from_utf8_lossy(&answer.stdout);
        let err = answer.err();
        let is_whole = out.contains("1 passed; 0 failed") && !err.contains(direct::SKIPPED);
        assert!(
            answer.code == 0 && is_whole,
            "{name}: {}\n{out}\n{err}\n{}",
            answer.code,
            self.say("dmesg | tail -n 30")
        );
    }

    /// Copies this test program into the guest, to the same path, and returns the path.
    pub fn send_tests(&self) -> String {
        let tests = std::env::current_exe().unwrap();
        self.send_program(&tests);
        tests.to_str().unwrap().to_owned()
    }

    /// Copies a program into the guest, to the same path, without its debug information.
    pub fn send_program(&self, path: &Path) {
        let dir = tempfile::tempdir().unwrap();
        let name = path.file_name().unwrap();
        let status = Command::new("strip")
            .arg("-o")
            .arg(dir.path().join(name))
            .arg(path)
            .status();
        assert!(
            status.expect("strip runs").success(),
            "{} cannot be stripped",
            path.display()
        );
        let below = path.parent().unwrap().to_str().unwrap();
        self.say(&format!("mkdir -p {below}"));
        let mut tar = Command::new("tar");
        tar.args(["--create", "-C"]).arg(dir.path()).arg(name);
        self.send(tar, below);
    }

    /// Unpacks the output of `tar` below a directory of the guest.
    pub fn send(&self, mut tar: Command, below: &str) {
        let mut packing = tar
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let packed = packing.stdout.take().unwrap();
        let mut unpacking = self.world.command();
        unpacking
            .args(["exec", "-i", OUTER, "--", "tar", "x", "-C", below])
            .stdin(packed);
        let answer = finish_within(
            unpacking
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
            DEADLINE,
        );
        assert_eq!(answer.code, 0, "{answer:#?}");
        assert!(packing.wait().unwrap().success());
    }

    /// Asserts that the guest's kernel has no complaints, and removes the guest.
    pub fn end(self) {
        let complaints = self.complaints("BUG|WARNING|Oops|Call Trace");
        assert_eq!(complaints, "", "the outer guest's kernel complains");
        self.print_cost();
        self.remove();
    }

    /// The lines of the kernel's log that match.
    fn complaints(&self, pattern: &str) -> String {
        self.say(&format!("dmesg | grep -E '{pattern}' || true"))
    }

    fn remove(self) {
        self.world.ok(["rm", "-f", OUTER]);
        self.world.assert_empty();
    }
}

impl Outer {
    /// Prints the guest's running time, and its machine's processor time, which depends less on the
    /// load of the host.
    fn print_cost(&self) {
        let machine = &self.world.inspect(OUTER)["qemu_pid"];
        let stat = fs::read_to_string(format!("/proc/{machine}/stat")).expect("it runs");
        // After the name, which may contain spaces: the 12th and 13th field, in hundredths of a
        // second.
        let fields: Vec<&str> = stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .collect();
        let ticks: u64 = [11, 12]
            .iter()
            .map(|field| fields[*field].parse::<u64>().expect("a number"))
            .sum();
        let thread = std::thread::current();
        let name = thread.name().unwrap_or_default();
        let ran = self.started.elapsed().as_secs_f32();
        // `println` prints nothing in a test that passes.
        writeln!(
            std::io::stderr(),
            "{name}: {ran:.0} s, {} s of processor time",
            ticks / 100
        )
        .expect("it is open");
    }
}

/// The environment of the test program in the guest.
pub fn settings() -> [String; 3] {
    let place = env!("CARGO_TARGET_TMPDIR");
    [
        format!("TMPDIR={place}"),
        format!("{}={STORE}", direct::BASE),
        format!("{WORKER}={WORKER_FILE}"),
    ]
}

/// A store with the snapshot of the outer guest, made once for each build.
fn base() -> &'static Path {
    static BASE: OnceLock<PathBuf> = OnceLock::new();
    BASE.get_or_init(|| {
        let world = World::new();
        let release = kernel_release(world.home());
        keyed::made_once("kvm-outer", &keyed::key(&[RECIPE, &release]), |path| {
            prepare(path, &release)
        })
    })
}

/// The release of the kernel of the image that the outer guest is made from.
pub fn kernel_release(home: &Path) -> String {
    let bundles = fs::read_dir(home.join("kernels"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let bundles: Vec<PathBuf> = bundles.collect();
    let [bundle] = &bundles[..] else {
        panic!("one kernel is expected: {bundles:?}")
    };
    let bundle: Value =
        serde_json::from_slice(&fs::read(bundle.join("bundle.json")).unwrap()).unwrap();
    text(&bundle["release"]).to_owned()
}

fn prepare(path: &Path, release: &str) {
    let outer = Outer {
        world: World::at(path.to_owned()),
        started: Instant::now(),
    };
    outer
        .world
        .json([&["run", "-d", "--name", OUTER], &SHAPE[..], &["tiny"]].concat());
    move_in(&outer, release);
    outer.say(USERS);
    outer.say(&format!("cd {MODULES_DIR}; for module in irqbypass kvm kvm-amd; do insmod $module.ko; done; {DEVICE}"));
    for shape in direct::SHAPES {
        outer.ok(STORE, &direct::run_once(shape));
    }
    outer.say("sync");
    outer.print_cost();
    outer.world.ok(["save", OUTER, OUTER, "--memory"]);
    outer.world.ok(["rm", "-f", OUTER]);
    outer.world.assert_empty();
}

/// Copies KVM's modules, QEMU, this program and a store with the image into the outer guest.
fn move_in(outer: &Outer, release: &str) {
    let mut files: Vec<String> = BESIDE_QEMU.iter().map(|path| (*path).to_owned()).collect();
    files.extend(libraries(Path::new(QEMU)));
    files.extend(libraries(program()));
    files.extend(libraries(&std::env::current_exe().unwrap()));
    files.push(QEMU.to_owned());
    files.retain(|path| Path::new(path).exists());
    files.sort();
    files.dedup();
    let mut programs = Command::new("tar");
    programs
        .args(["--create", "--dereference", "--absolute-names"])
        .args(&files);
    outer.send(programs, "/");

    outer.send_program(program());
    outer.say(&format!(
        // Not a symbolic link: the program may be below /root, where other users see nothing.
        "ln {} /usr/bin/sandtree; mkdir -p {MODULES_DIR} {}",
        program().display(),
        env!("CARGO_TARGET_TMPDIR")
    ));
    let mut own = Command::new("tar");
    own.args([
        "--create",
        "--absolute-names",
        "--transform",
        "s,.*,worker,",
    ])
    .arg(worker());
    outer.send(own, "/srv");
    let mut modules = Command::new("tar");
    modules
        .args(["--create", "-C"])
        .arg(modules_of(release))
        .arg(".");
    outer.send(modules, MODULES_DIR);
    // The program makes the store's directories; only the content is copied.
    outer.ok(STORE, &["ps"]);
    let mut store = Command::new("tar");
    store.args(["--create", "-C"]).arg(outer.world.home());
    store.args([
        "format",
        "images",
        "initramfs",
        "kernels",
        "names/images",
        "cache/tiny-recipe",
    ]);
    outer.send(store, STORE);
}

fn libraries(of: &Path) -> Vec<String> {
    let answer = Command::new("ldd").arg(of).output().unwrap();
    assert!(answer.status.success(), "{answer:?}");
    let text = String::from_utf8(answer.stdout).unwrap();
    text.split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(str::to_owned)
        .collect()
}

/// A directory with KVM's modules for this kernel, from the kernel's package, downloaded once.
pub fn modules_of(release: &str) -> PathBuf {
    keyed::made_once("kvm-modules", release, |path| {
        let work = tempfile::tempdir().unwrap();
        let package = format!("linux-image-{release}");
        let script = format!(
            "cd '{0}' && apt-get -q -o APT::Sandbox::User=root download '{package}' > /dev/null && \
             dpkg-deb -x ./*.deb . && mkdir '{1}' && modules=$(echo {0}/lib/modules/* {0}/usr/lib/modules/*) && \
             for file in {2}; do for dir in $modules; do packed=$dir/kernel/$file.ko.xz; \
             [ ! -e $packed ] || xz -dc $packed > '{1}'/${{file##*/}}.ko || exit; done; done",
            work.path().display(),
            path.display(),
            MODULES.join(" ")
        );
        // starts: apt-get, dpkg-deb, mkdir, xz
        let done = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let is_whole = fs::read_dir(path).is_ok_and(|files| files.count() == MODULES.len());
        assert!(
            done.status.success() && is_whole,
            "the KVM modules of {package} cannot be had: if apt has only a newer kernel, remove target/tmp/base-home-*, \
             so that the image is made with that one: {}",
            String::from_utf8_lossy(&done.stderr)
        );
    })
}
