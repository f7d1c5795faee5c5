//! What a guest, a machine and a foreign snapshot can reach, and what a state holds in addition to
//! main memory.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::support::{Answer, World, finish, program, until};

/// A server on the host's loopback that greets every client. It is a separate process, because
/// other tests count the listening ports of theirs.
struct Greeter {
    process: Child,
    port: u16,
}

impl Greeter {
    fn start() -> Self {
        // starts: our own program
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--ignored",
            "--exact",
            "--nocapture",
            "confined::greets_until_its_input_ends",
        ]);
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let port = lines
            .map_while(Result::ok)
            .find_map(|line| line.split_once("port ")?.1.parse().ok());
        Self {
            process,
            port: port.expect("it says its port"),
        }
    }
}

impl Drop for Greeter {
    fn drop(&mut self) {
        // It may have ended by itself.
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

#[test]
#[ignore = "a server, which another test starts"]
fn greets_until_its_input_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("port {}", listener.local_addr().unwrap().port());
    std::thread::spawn(move || listener.incoming().flatten().for_each(greet));
    drop(std::io::stdin().read_to_end(&mut Vec::new()));
}

/// A client that leaves early is no failure.
fn greet(mut stream: std::net::TcpStream) {
    drop(stream.write_all(b"hello from the host\n"));
    drop(stream.shutdown(std::net::Shutdown::Write));
    drop(stream.read(&mut [0; 16]));
}

/// What a guest receives from a server on the host's loopback.
fn heard(world: &World, sandbox: &str, port: u16) -> String {
    world
        .sh(
            sandbox,
            &format!("nc -w 5 10.0.2.2 {port} < /dev/null 2> /dev/null"),
        )
        .out()
        .trim()
        .to_owned()
}

/// Network and ports reach beyond the guest, so a snapshot of unknown origin does not decide about
/// them.
#[test]
fn a_snapshot_of_another_store_gets_neither_the_network_nor_ports_of_the_host() {
    let there = World::new();
    let here = World::new();
    let greeter = Greeter::start();
    let port = greeter.port;
    there.start("n", &["--network", "full", "--publish", "0:80"]);
    assert_eq!(heard(&there, "n", port), "hello from the host");
    there.ok(["save", "--memory", "n", "theirs"]);
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("theirs.tar.zst");
    there.ok(["snapshot", "export", "theirs", "-o", file.to_str().unwrap()]);
    there.ok(["rm", "-f", "n"]);
    here.ok(["snapshot", "import", file.to_str().unwrap()]);

    let answer = here.ok(["run", "-d", "--name", "e", "theirs"]);
    assert!(
        answer.err().contains("--network full grants it"),
        "{answer:?}"
    );
    assert!(
        answer.err().contains("are not published") && answer.err().contains("hint: --publish "),
        "{answer:?}"
    );
    let cut_off = |world: &World, name: &str| {
        let info = world.inspect(name);
        assert_eq!(
            (&info["network"], &info["ports"]),
            (&"isolated".into(), &Value::Array(Vec::new())),
            "{info}"
        );
        assert_eq!(heard(world, name, port), "");
    };
    cut_off(&here, "e");
    // It stays isolated in every state.
    here.ok(["checkpoint", "e", "c"]);
    here.ok(["revert", "e", "c"]);
    cut_off(&here, "e");
    here.ok(["fork", "e", "-n", "1", "--name", "f"]);
    cut_off(&here, "f-1");
    here.ok(["rm", "-f", "e", "f-1"]);

    here.ok([
        "run",
        "-d",
        "--name",
        "i",
        "--network",
        "isolated",
        "theirs",
    ]);
    cut_off(&here, "i");
    here.run(["run", "--network", "none", "theirs", "--", "true"])
        .failed_with(&["network", "--network isolated"]);
    here.ok(["run", "-d", "--name", "g", "--network", "full", "theirs"]);
    assert_eq!(heard(&here, "g", port), "hello from the host");
    here.ok(["rm", "-f", "i", "g"]);

    // A snapshot that this store saved itself keeps its settings.
    there.ok(["run", "-d", "--name", "own", "theirs"]);
    assert_eq!(there.inspect("own")["network"], "full");
    assert_eq!(heard(&there, "own", port), "hello from the host");
    there.ok(["rm", "-f", "own"]);
}

/// A framebuffer is guest memory outside of main memory.
#[test]
fn memory_outside_main_memory_is_part_of_a_state() {
    let world = World::new();
    world.start(
        "v",
        &[
            "--cold",
            "--qemu-arg=-device",
            "--qemu-arg=VGA,bus=pcie.0,addr=0x8",
        ],
    );
    let pixel = |value: &str| {
        world
            .sh("v", &format!("devmem 0xfd000000 32 {value}"))
            .out()
            .trim()
            .to_owned()
    };
    pixel("0xdeadbeef");
    assert_eq!(pixel(""), "0xDEADBEEF");
    let taken = world.json(["checkpoint", "v", "c"]);
    assert_eq!(taken["mode"], "full", "{taken}");
    assert!(
        taken["degraded"][0]["message"]
            .as_str()
            .unwrap()
            .contains("vga.vram"),
        "{taken}"
    );
    assert_eq!(taken["degraded"][0]["code"], "device_memory", "{taken}");
    assert_eq!(
        taken["degraded"][0]["arguments"]["devices"][0], "0000:00:08.0/vga.vram",
        "{taken}"
    );
    pixel("0x1");
    world.ok(["revert", "v", "c"]);
    assert_eq!(pixel(""), "0xDEADBEEF");
    world.ok(["rm", "-f", "v"]);
}

/// A machine that waits for a state does not load its firmware itself.
#[test]
fn a_restored_guest_sees_the_firmware_that_a_booted_one_sees() {
    let world = World::new();
    // The reset vector, and the last paragraph before it.
    let line = ["sh", "-c", "devmem 0xfffffff0 64; devmem 0xffffffe0 64"];
    let booted = world.ok([&["run", "--cold", "tiny", "--"][..], &line].concat());
    let restored = world.ok([&["run", "tiny", "--"][..], &line].concat());
    assert!(
        booted.out().starts_with("0x") && !booted.out().starts_with("0x0000000000000000"),
        "{booted:?}"
    );
    assert_eq!(
        (restored.out(), restored.err().as_str()),
        (booted.out(), "")
    );
}

#[test]
fn emulated_guests_are_not_offered_instructions_that_the_emulator_gets_wrong() {
    let world = World::new();
    let wrong = world.json(["doctor"])["qemu"]["found"]["miscomputed"].clone();
    let flags = world.ok([
        "run",
        "tiny",
        "--",
        "grep",
        "-m1",
        "^flags",
        "/proc/cpuinfo",
    ]);
    let offered: Vec<&str> = flags.out().split_whitespace().collect();
    assert!(offered.contains(&"sse2"), "{offered:?}");
    for feature in wrong.as_array().unwrap() {
        assert!(
            !offered.contains(&feature.as_str().unwrap()),
            "{feature} is offered, and computed wrongly"
        );
    }
}

/// An emulated guest reads the host's counter. On a host with another counter rate, its clock would
/// run at a wrong speed.
#[test]
fn a_guest_whose_counter_runs_at_another_rate_gets_another_clock() {
    const CLOCK: &str = "cat /sys/devices/system/clocksource/clocksource0/current_clocksource";
    let world = World::new();
    let id = world.start("a", &["--accel", "tcg"])["id"]
        .as_str()
        .unwrap()
        .to_owned();
    // The kernel has another name for it until it has measured the rate, for a second after a boot.
    until("the guest uses its counter", || {
        world.sh("a", CLOCK).out() == "tsc\n"
    });
    let state = world.json(["checkpoint", "a", "c"])["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let path = world
        .home()
        .join("sandboxes")
        .join(id)
        .join("states")
        .join(state)
        .join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let rate = manifest["machine"]["tsc_khz"]
        .as_u64()
        .expect("a state says the rate");
    manifest["machine"]["tsc_khz"] = (rate / 2).into();
    fs::remove_file(&path).unwrap();
    fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();

    let reverted = world.json(["revert", "a", "c"]);
    let told = reverted["degraded"].to_string();
    assert!(
        told.contains("slower clock") && told.contains("MHz"),
        "{reverted}"
    );
    let clock = world.sh("a", CLOCK);
    assert!(["hpet\n", "acpi_pm\n"].contains(&clock.out()), "{clock:?}");
    world.ok(["rm", "-f", "a"]);
}

/// Runs the program behind `wrapper`, which changes its user or its privileges.
fn wrapped(world: &World, wrapper: &[&str], args: &[&str]) -> Answer {
    // starts: setpriv, unshare
    let mut command = Command::new(wrapper[0]);
    command
        .args(&wrapper[1..])
        .arg(program())
        .args(args)
        .env("SANDTREE_HOME", world.home())
        .stdin(Stdio::null());
    finish(
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    )
}

fn wrapped_json(world: &World, wrapper: &[&str], args: &[&str]) -> Value {
    let answer = wrapped(world, wrapper, &[&["--json"], args].concat());
    assert_eq!(answer.code, 0, "{args:?}: {answer:#?}");
    serde_json::from_slice(&answer.stdout).unwrap_or_else(|e| panic!("{e}: {answer:#?}"))
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Writes, takes a checkpoint, writes again and reverts; then forks and pauses.
fn states_work(world: &World, wrapper: &[&str]) -> Value {
    let ok = |args: &[&str]| {
        let answer = wrapped(world, wrapper, args);
        assert_eq!(answer.code, 0, "{args:?}: {answer:#?}");
        answer
    };
    ok(&["run", "-d", "--name", "a", "--memory", "128M", "tiny"]);
    ok(&["exec", "a", "--", "sh", "-c", "echo one > /dev/shm/x"]);
    let taken = wrapped_json(world, wrapper, &["checkpoint", "a", "c"]);
    ok(&["exec", "a", "--", "sh", "-c", "echo two > /dev/shm/x"]);
    ok(&["revert", "a", "c"]);
    assert_eq!(ok(&["exec", "a", "--", "cat", "/dev/shm/x"]).out(), "one\n");
    ok(&["fork", "a", "-n", "1", "--name", "f"]);
    assert_eq!(
        ok(&["exec", "f-1", "--", "cat", "/dev/shm/x"]).out(),
        "one\n"
    );
    ok(&["pause", "a"]);
    ok(&["resume", "a"]);
    assert_eq!(ok(&["exec", "a", "--", "cat", "/dev/shm/x"]).out(), "one\n");
    ok(&["rm", "-f", "a", "f-1"]);
    taken
}

/// As in a container, whose root lacks this capability.
#[test]
fn without_the_ptrace_capability_qemu_captures_states_itself() {
    if !is_root() {
        eprintln!("not checked: only root has capabilities to give up");
        return;
    }
    const WITHOUT: [&str; 3] = [
        "setpriv",
        "--bounding-set=-sys_ptrace",
        "--inh-caps=-sys_ptrace",
    ];
    let world = World::copied();
    let doctor = wrapped(&world, &WITHOUT, &["doctor"]);
    assert!(doctor.out().contains("CAP_SYS_PTRACE"), "{doctor:?}");
    assert!(doctor.err().contains("--machine-user caller"), "{doctor:?}");
    let taken = states_work(&world, &WITHOUT);
    assert_eq!(taken["mode"], "full", "{taken}");
    assert!(
        taken["degraded"][0]["message"]
            .as_str()
            .unwrap()
            .contains("CAP_SYS_PTRACE"),
        "{taken}"
    );

    // Machines that run as the caller need no capability.
    let as_caller = [&WITHOUT[..], &["env", "SANDTREE_MACHINE_USER=caller"]].concat();
    let taken = states_work(&world, &as_caller);
    assert_eq!(taken["mode"], "write-protect", "{taken}");
    world.assert_empty();
}

/// As in a rootless container: its root is one ordinary user, and there are no other user ids.
#[test]
fn in_a_user_namespace_of_one_user_machines_run_as_their_caller() {
    const INSIDE: [&str; 2] = ["unshare", "--map-root-user"];
    // starts: unshare
    let probe = Command::new(INSIDE[0])
        .args(&INSIDE[1..])
        .arg("true")
        .stderr(Stdio::null())
        .status()
        .unwrap();
    if !probe.success() {
        eprintln!("not checked: this kernel gives no user namespaces to this user");
        return;
    }
    let world = World::copied();
    let doctor = wrapped_json(&world, &INSIDE, &["doctor"]);
    assert_eq!(doctor["qemu"]["found"]["own_uid"], false, "{doctor}");
    let taken = states_work(&world, &INSIDE);
    assert_eq!(taken["mode"], "write-protect", "{taken}");
    world.assert_empty();
}
