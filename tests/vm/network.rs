//! What a guest can reach, and how ports of the host lead into it.

use crate::support::shared;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Stdio};

use serde_json::Value;

use crate::support::shared::{A, Shared};
use crate::support::{DEADLINE, World, is_alive, kill, until, wait};

const PAGE: &str =
    "mkdir -p /tmp/www; echo carried > /tmp/www/page; httpd -p 127.0.0.1:80 -h /tmp/www";

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Asks the guest's web server for the page.
fn page(port: u16) -> String {
    let mut stream = connect(port);
    stream.write_all(b"GET /page HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// `sandtree forward` until it is dropped.
struct Forwarding {
    child: Child,
    port: u16,
}

impl Forwarding {
    fn start(world: &World, sandbox: &str, ports: &str) -> Forwarding {
        let mut command = world.command();
        command
            .args(["--json", "forward", sandbox, ports])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        let started: Value = serde_json::from_str(&line).unwrap();
        Forwarding {
            child,
            port: started["host"].as_u64().unwrap().try_into().unwrap(),
        }
    }
}

impl Drop for Forwarding {
    fn drop(&mut self) {
        kill(self.child.id(), "KILL");
        self.child.wait().unwrap();
    }
}

/// The host's port in the answer of `run -d`.
fn published(started: &Value) -> u16 {
    started["ports"][0]["host"]
        .as_u64()
        .unwrap()
        .try_into()
        .unwrap()
}

#[test]
fn isolated_has_an_address_and_reaches_nothing() {
    let a = Shared::sandbox();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    assert!(
        a.said("ip -4 -o addr show dev eth0")
            .contains("10.0.2.15/24")
    );
    assert_eq!(a.said("ip route | grep default | wc -l"), "0\n");
    assert!(
        !a.holds(&format!("nc -w 3 10.0.2.2 {port} < /dev/null")),
        "the host's loopback was reached"
    );
    assert!(!a.holds("ping -c 1 -W 2 1.1.1.1"), "the world answered");
    assert!(!a.holds("ping -c 1 -W 2 10.0.2.2"), "a gateway answered");
    assert!(
        !a.holds("nslookup -timeout=2 example.com 10.0.2.3"),
        "a name server answered"
    );
    assert!(
        !a.holds("nc -w 3 10.0.2.3 53 < /dev/null"),
        "a name server was reached"
    );
    assert_eq!(
        listener.accept().unwrap_err().kind(),
        std::io::ErrorKind::WouldBlock
    );
    // Packets are sent and then dropped: with a queue that is stuck, the kernel would complain
    // every five seconds.
    let statistics =
        "cd /sys/class/net/eth0/statistics; echo $(($(cat tx_packets) > 1)) $(cat tx_dropped)";
    assert_eq!(a.said(statistics), "1 0\n");
}

#[test]
fn none_has_only_loopback_and_published_ports() {
    let world = World::new();
    let started = world.start(A, &["--network", "none", "--publish", "0:80"]);
    assert_eq!(
        world
            .sh(
                A,
                "ls /sys/class/net; ping -c 1 -W 2 127.0.0.1 > /dev/null && echo up"
            )
            .out(),
        "lo\nup\n"
    );
    assert_eq!(world.sh(A, PAGE).code, 0);
    assert!(page(published(&started)).ends_with("carried\n"));
    let forwarding = Forwarding::start(&world, A, "0:80");
    assert!(page(forwarding.port).ends_with("carried\n"));
    drop(forwarding);
    shared::remove(&world);
}

#[test]
fn full_reaches_the_host_and_has_published_ports() {
    let world = World::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let started = world.start(A, &["--network", "full", "--publish", "0:80"]);
    let serving = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"from the host\n").unwrap();
    });
    assert_eq!(
        world
            .sh(A, &format!("nc -w 20 10.0.2.2 {port} < /dev/null"))
            .out(),
        "from the host\n"
    );
    serving.join().unwrap();
    assert_eq!(world.sh(A, PAGE).code, 0);
    assert!(page(published(&started)).ends_with("carried\n"));
    shared::remove(&world);
}

#[test]
fn a_forward_ends_with_its_sandbox_and_reports_it() {
    let world = World::new();
    let started = world.start(A, &["--publish", "0:80"]);
    let mut forwarding = Forwarding::start(&world, A, "0:80");
    assert_eq!(world.sh(A, PAGE).code, 0);
    assert!(
        page(published(&started)).ends_with("carried\n"),
        "published while isolated"
    );
    assert!(
        page(forwarding.port).ends_with("carried\n"),
        "forwarded while isolated"
    );
    assert_eq!(
        world.inspect(A)["ports"],
        started["ports"],
        "the chosen port is shown"
    );
    shared::remove(&world);
    assert_eq!(wait(&mut forwarding.child, DEADLINE), Some(125));
    let mut said = String::new();
    forwarding
        .child
        .stderr
        .as_mut()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert!(said.contains("forward"), "{said}");
    assert!(
        TcpStream::connect(("127.0.0.1", published(&started))).is_err(),
        "a port outlives its sandbox"
    );
}

#[test]
fn a_port_that_is_taken_is_refused_and_nothing_is_left() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let world = World::new();
    let pair = format!("{port}:80");
    world
        .run(["run", "-d", "--publish", &pair, "tiny"])
        .failed_with(&["listen", &port]);
    world.assert_empty();
    world
        .run(["run", "--publish", &pair, "tiny", "--", "true"])
        .failed_with(&["listen", &port]);
    world.assert_empty();
    let a = Shared::sandbox();
    a.run(["forward", A, &pair]).failed_with(&["listen", &port]);
}

#[test]
fn a_forward_carries_every_byte_both_ways() {
    let a = Shared::sandbox();
    a.said("nc -l -p 7000 -e cat > /dev/null 2>&1 &");
    a.until_holds("netstat -ltn | grep -q :7000");
    let forwarding = Forwarding::start(&a, A, "0:7000");
    let sent: Vec<u8> = (0..6u32 << 18)
        .flat_map(|number| number.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    let mut stream = connect(forwarding.port);
    let mut writer = stream.try_clone().unwrap();
    let writing = std::thread::spawn({
        let sent = sent.clone();
        move || writer.write_all(&sent).unwrap()
    });
    let mut echoed = vec![0; sent.len()];
    stream.read_exact(&mut echoed).unwrap();
    writing.join().unwrap();
    assert!(echoed == sent, "the bytes differ");
}

#[test]
fn a_half_closed_connection_still_answers() {
    let a = Shared::sandbox();
    // The digest is known only after everything was read.
    a.said("nc -l -p 7001 -e sha256sum > /dev/null 2>&1 &");
    a.until_holds("netstat -ltn | grep -q :7001");
    let forwarding = Forwarding::start(&a, A, "0:7001");
    let mut stream = connect(forwarding.port);
    stream.write_all(b"abc").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(
        answer.starts_with("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        "{answer}"
    );
}

#[test]
fn a_refused_connection_is_reset_and_the_forward_continues() {
    let a = Shared::sandbox();
    let mut forwarding = Forwarding::start(&a, A, "0:7002");
    for _ in 0..2 {
        let error = connect(forwarding.port).read(&mut [0]).unwrap_err();
        assert_eq!(
            error.kind(),
            std::io::ErrorKind::ConnectionReset,
            "no server listens in the guest"
        );
    }
    assert!(
        forwarding.child.try_wait().unwrap().is_none(),
        "the forward ended with a refused connection"
    );
    a.said("(echo late | nc -l -p 7002) > /dev/null 2>&1 &");
    a.until_holds("netstat -ltn | grep -q :7002");
    let mut answer = String::new();
    connect(forwarding.port)
        .read_to_string(&mut answer)
        .unwrap();
    assert_eq!(answer, "late\n");
}

#[test]
fn a_connection_whose_guest_dies_is_reset() {
    let world = World::new();
    let started = world.start(A, &["--publish", "0:7003"]);
    assert_eq!(
        world
            .sh(A, "(sleep 1000 | nc -l -p 7003) > /dev/null 2>&1 &")
            .code,
        0
    );
    until("it listens", || {
        world.sh(A, "netstat -ltn | grep -q :7003").code == 0
    });
    let mut publishing = connect(published(&started));
    publishing.write_all(b"x").unwrap();
    until("it is connected", || {
        world.sh(A, "netstat -tn | grep -q :7003.*ESTABLISHED").code == 0
    });
    let machine = world.inspect(A)["qemu_pid"].as_u64().unwrap() as u32;
    kill(machine, "KILL");
    until("the machine is gone", || !is_alive(machine));
    let error = publishing
        .read(&mut [0])
        .expect_err("an orderly end would be a lie");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    shared::remove(&world);
}
