//! Commands, terminals and connections while their sandbox is checkpointed, paused, reverted and
//! forked.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

use crate::support::pty::Window;
use crate::support::{self, Answer, DEADLINE, World, finish, until, wait};

/// Counts on both streams until the file `enough` exists.
const COUNT: &str = "i=0; until [ -e /run/enough ]; do i=$((i+1)); echo $i; echo e$i >&2; usleep 2000; done; echo end; exit 7";

/// The output of a command, as it arrives.
struct Watched {
    child: Child,
    out: Arc<Mutex<Vec<u8>>>,
    err: Arc<Mutex<Vec<u8>>>,
    stdin: Option<ChildStdin>,
    readers: Vec<std::thread::JoinHandle<()>>,
}

impl Watched {
    fn start(world: &World, args: &[&str]) -> Watched {
        let mut command = world.command();
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let out = Arc::<Mutex<Vec<u8>>>::default();
        let err = Arc::<Mutex<Vec<u8>>>::default();
        let stdin = child.stdin.take();
        let readers = vec![
            gather(Box::new(child.stdout.take().unwrap()), out.clone()),
            gather(Box::new(child.stderr.take().unwrap()), err.clone()),
        ];
        Watched {
            child,
            out,
            err,
            stdin,
            readers,
        }
    }

    fn bytes(&self) -> usize {
        self.out.lock().unwrap().len()
    }

    /// Waits until more output arrives.
    fn continues(&self) {
        let before = self.bytes();
        until("more output comes", || self.bytes() > before + 100);
    }

    fn end(mut self) -> Answer {
        drop(self.stdin.take());
        let code = wait(&mut self.child, DEADLINE).expect("the command ends");
        self.readers
            .into_iter()
            .for_each(|reader| reader.join().unwrap());
        let take = |bytes: &Mutex<Vec<u8>>| std::mem::take(&mut *bytes.lock().unwrap());
        Answer {
            code,
            stdout: take(&self.out),
            stderr: take(&self.err),
        }
    }
}

fn gather(
    mut from: Box<dyn Read + Send>,
    into: Arc<Mutex<Vec<u8>>>,
) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            into.lock().unwrap().extend_from_slice(&buffer[..count]);
        }
    })
}

fn enough(world: &World, sandbox: &str) {
    assert_eq!(world.sh(sandbox, "touch /run/enough").code, 0);
}

/// Asserts that the output has every number once, on both streams, and its end. Returns the last
/// number.
#[track_caller]
fn assert_counted(answer: &Answer) -> usize {
    assert_eq!(answer.code, 7, "{answer:?}");
    let lines: Vec<&str> = answer.out().lines().collect();
    let (end, numbers) = lines.split_last().unwrap();
    assert_eq!(*end, "end");
    assert_each_once(numbers, "");
    let errors = answer.err();
    let errors: Vec<&str> = errors.lines().collect();
    assert_eq!(errors.len(), numbers.len());
    assert_each_once(&errors, "e");
    numbers.len()
}

fn assert_each_once(lines: &[&str], before: &str) {
    for (index, line) in lines.iter().enumerate() {
        assert_eq!(
            *line,
            format!("{before}{}", index + 1),
            "line {index} of {}",
            lines.len()
        );
    }
}

fn detach(world: &World, sandbox: &str, line: &str) -> String {
    world
        .ok(["exec", "-d", sandbox, "--", "sh", "-c", line])
        .out()
        .trim()
        .to_owned()
}

fn listed(world: &World, sandbox: &str) -> Vec<Value> {
    world.json(["attach", sandbox]).as_array().unwrap().clone()
}

#[test]
fn output_continues_across_checkpoint_and_pause_without_a_lost_or_repeated_byte() {
    let world = World::new();
    world.start("a", &[]);
    let pattern =
        "dd if=/dev/urandom of=/run/pattern bs=1k count=300 2>/dev/null; base64 /run/pattern";
    assert_eq!(world.sh("a", pattern).code, 0);
    let mut expected = Vec::new();
    world
        .command()
        .args(["cp", "a:/run/pattern", "-"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
        .stdout
        .unwrap()
        .read_to_end(&mut expected)
        .unwrap();
    let counting = Watched::start(&world, &["exec", "a", "--", "sh", "-c", COUNT]);
    let line = "until [ -e /run/enough ]; do cat /run/pattern; usleep 50000; done";
    let streaming = Watched::start(&world, &["exec", "a", "--", "sh", "-c", line]);
    let detached = detach(&world, "a", COUNT);
    let attached = Watched::start(&world, &["attach", "a", &detached]);
    let all_go_on = || {
        [&counting, &streaming, &attached]
            .into_iter()
            .for_each(Watched::continues)
    };
    all_go_on();
    for _ in 0..3 {
        world.ok(["checkpoint", "a"]);
        all_go_on();
    }
    for _ in 0..2 {
        world.ok(["pause", "a"]);
        let stands = (counting.bytes(), streaming.bytes(), attached.bytes());
        assert_eq!(world.inspect("a")["state"], "paused");
        world.ok(["resume", "a"]);
        assert!(
            counting.bytes() >= stands.0
                && streaming.bytes() >= stands.1
                && attached.bytes() >= stands.2
        );
        all_go_on();
    }
    enough(&world, "a");
    let counted = assert_counted(&counting.end());
    assert!(counted > 100, "only {counted} lines");
    assert_counted(&attached.end());
    let streamed = streaming.end();
    assert_eq!(streamed.code, 0, "{streamed:?}");
    assert!(
        !streamed.stdout.is_empty() && streamed.stdout.len().is_multiple_of(expected.len()),
        "a part is missing"
    );
    assert!(
        streamed
            .stdout
            .chunks(expected.len())
            .all(|chunk| chunk == expected),
        "the bytes differ"
    );
    // A client that attaches late gets everything, too.
    assert_counted(&world.run(["attach", "a", &detached]));
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

#[test]
fn a_detached_command_continues_without_clients_and_in_every_fork() {
    let world = World::new();
    world.start("a", &[]);
    let id = detach(&world, "a", COUNT);
    until("it counts", || {
        listed(&world, "a")[0]["stdout_bytes"].as_u64().unwrap() > 200
    });
    world.ok(["checkpoint", "a", "base"]);
    world.ok(["pause", "a"]);
    until("its keeper has gone", || {
        support::processes_of(world.home()).is_empty()
    });
    world.ok(["resume", "a"]);
    assert_eq!(
        (listed(&world, "a").len(), &listed(&world, "a")[0]["id"]),
        (1, &id.as_str().into())
    );
    world.ok(["fork", "a", "--name", "b", "-n", "2"]);
    for fork in ["b-1", "b-2"] {
        assert_eq!(
            listed(&world, fork)[0]["id"],
            id.as_str(),
            "the same command in {fork}"
        );
        assert!(listed(&world, fork)[0]["ended"].is_null());
    }
    let watching = Watched::start(&world, &["attach", "b-1", &id]);
    watching.continues();
    enough(&world, "b-1");
    let in_fork = assert_counted(&watching.end());
    assert!(
        listed(&world, "a")[0]["ended"].is_null(),
        "the source's was ended by the fork's end"
    );
    assert!(
        listed(&world, "b-2")[0]["ended"].is_null(),
        "the other fork's was ended"
    );
    let watching = Watched::start(&world, &["attach", "a", &id]);
    until("the source's goes its own way", || {
        let seen = watching.out.lock().unwrap();
        String::from_utf8_lossy(&seen).lines().count() > in_fork + 10
    });
    enough(&world, "a");
    assert_counted(&watching.end());
    enough(&world, "b-2");
    assert_counted(&world.run(["attach", "b-2", &id]));
    world.ok(["rm", "-f", "a", "b-1", "b-2"]);
    world.assert_empty();
}

#[test]
fn after_a_revert_earlier_commands_can_be_attached_and_later_ones_end() {
    let world = World::new();
    world.start("a", &[]);
    let early = detach(&world, "a", COUNT);
    let ended = detach(&world, "a", "echo over; exit 3");
    let mine = Watched::start(&world, &["exec", "a", "--", "sh", "-c", COUNT]);
    mine.continues();
    until("both have begun", || {
        listed(&world, "a")
            .iter()
            .all(|exec| exec["stdout_bytes"].as_u64().unwrap() > 4)
    });
    world.ok(["checkpoint", "a", "base"]);
    let late = detach(&world, "a", COUNT);
    let waiting = Watched::start(&world, &["exec", "a", "--", "sh", "-c", COUNT]);
    let watching_early = Watched::start(&world, &["attach", "a", &early]);
    let watching_late = Watched::start(&world, &["attach", "a", &late]);
    [&waiting, &watching_early, &watching_late]
        .into_iter()
        .for_each(Watched::continues);
    world.ok(["revert", "a", "base"]);
    // All of them waited for a machine that is gone.
    for watched in [mine, waiting, watching_early, watching_late] {
        let answer = watched.end();
        assert_eq!(answer.code, 125, "{answer:?}");
        assert!(
            answer.err().contains("the sandbox was reverted to base"),
            "{}",
            tail(&answer.err())
        );
    }
    world.run(["attach", "a", &late]).failed_with(&[
        "there is no detached command",
        &late,
        "sandtree attach",
    ]);
    let known = listed(&world, "a");
    let ids: Vec<&str> = known
        .iter()
        .map(|exec| exec["id"].as_str().unwrap())
        .collect();
    assert!(
        ids.contains(&early.as_str())
            && ids.contains(&ended.as_str())
            && !ids.contains(&late.as_str()),
        "{ids:?}"
    );
    assert_eq!(
        ids.len(),
        3,
        "the one that a client waited for is among them: {known:?}"
    );
    let answer = world.run(["attach", "a", &ended]);
    assert_eq!((answer.code, answer.out()), (3, "over\n"), "{answer:?}");
    let watching = Watched::start(&world, &["attach", "a", &early]);
    watching.continues();
    enough(&world, "a");
    assert_counted(&watching.end());
    let orphan = ids
        .iter()
        .find(|id| **id != early && **id != ended)
        .unwrap();
    let answer = world.run(["attach", "a", orphan]);
    assert!(
        answer.code == 7 && answer.out().ends_with("end\n"),
        "{answer:?}"
    );
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

fn tail(text: &str) -> &str {
    &text[text.len().saturating_sub(400)..]
}

#[test]
fn a_terminal_continues_across_checkpoint_and_pause() {
    let world = World::new();
    world.start("a", &[]);
    let line = "stty -echo; n=0; while read word; do n=$((n+1)); echo \"<$n $word $(stty size)>\"; done; echo over";
    let mut command = world.command();
    command.args([
        "exec",
        "-t",
        "a",
        "--",
        "sh",
        "-c",
        &format!("echo ready; {line}"),
    ]);
    let mut window = Window::open(&command, (24, 80));
    window.expect("ready");
    window.type_in("one\n");
    window.expect("<1 one 24 80>");
    world.ok(["checkpoint", "a"]);
    window.type_in("two\n");
    window.expect("<2 two 24 80>");
    world.ok(["pause", "a"]);
    // Typed while the sandbox is paused; it arrives after the resume.
    window.type_in("three\n");
    world.ok(["resume", "a"]);
    window.expect("<3 three 24 80>");
    window.resize(30, 100);
    until("the new size has come", || {
        window.type_in("again\n");
        window.expect("again ");
        window.expect(">");
        world.sh("a", "stty -F /dev/pts/0 size").out() == "30 100\n"
    });
    window.type_in("\u{4}");
    window.expect("over");
    assert_eq!(window.close(DEADLINE), Some(0));
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

/// Input that a client sent before a pause, during it, and after it.
#[test]
fn input_continues_across_checkpoint_and_pause() {
    let world = World::new();
    world.start("a", &[]);
    let mut summing = Watched::start(&world, &["exec", "-i", "a", "--", "sha256sum"]);
    until("it reads", || world.sh("a", "pidof sha256sum").code == 0);
    let sent: Vec<u8> = (0..1u32 << 19)
        .flat_map(|number| number.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    let mut stdin = summing.stdin.take().unwrap();
    let writing = std::thread::spawn({
        let sent = sent.clone();
        move || {
            sent.chunks(8 << 10)
                .for_each(|chunk| stdin.write_all(chunk).unwrap())
        }
    });
    world.ok(["checkpoint", "a"]);
    world.ok(["pause", "a"]);
    world.ok(["resume", "a"]);
    world.ok(["checkpoint", "a"]);
    writing.join().unwrap();
    let answer = summing.end();
    assert_eq!(answer.code, 0, "{answer:?}");
    let here = std::process::Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let mut here = here.unwrap();
    here.stdin.take().unwrap().write_all(&sent).unwrap();
    assert_eq!(
        answer.out(),
        finish(here).out(),
        "the bytes that came are not those that were sent"
    );
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

/// A connection through a published port, with an echo server at its other end.
struct Echo {
    stream: BufReader<TcpStream>,
}

impl Echo {
    fn connect(port: u16) -> Echo {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let mut echo = Echo {
            stream: BufReader::new(stream),
        };
        echo.says("hello");
        echo
    }

    fn says(&mut self, word: &str) {
        writeln!(self.stream.get_mut(), "{word}").unwrap();
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        assert_eq!(line, format!("{word}\n"));
    }

    /// Asserts that the connection is reset, neither closed in order nor silent.
    fn is_reset(&mut self) {
        let error = self
            .stream
            .read(&mut [0])
            .expect_err("an orderly end would be a lie");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
}

/// The connections to the echo server that the guest lists.
fn connections(world: &World, sandbox: &str) -> String {
    world
        .sh(
            sandbox,
            "netstat -tn | grep ':7000 .*ESTABLISHED'; pidof cat",
        )
        .out()
        .to_owned()
}

fn published(started: &Value) -> u16 {
    started["ports"][0]["host"]
        .as_u64()
        .unwrap()
        .try_into()
        .unwrap()
}

/// A forward of a user ends with the machine that it leads to.
#[test]
fn a_forward_survives_a_checkpoint_and_ends_with_a_revert() {
    let world = World::new();
    world.start("a", &[]);
    assert_eq!(
        world
            .sh("a", "nc -ll -p 7000 -e cat > /dev/null 2>&1 &")
            .code,
        0
    );
    until("it listens", || {
        world.sh("a", "netstat -ltn | grep -q :7000").code == 0
    });
    let forwarding = Watched::start(&world, &["--json", "forward", "a", "0:7000"]);
    until("the port is printed", || forwarding.bytes() > 0);
    let started: Value = serde_json::from_slice(&forwarding.out.lock().unwrap()).unwrap();
    let port = u16::try_from(started["host"].as_u64().unwrap()).unwrap();
    let mut echo = Echo::connect(port);
    world.ok(["checkpoint", "a", "base"]);
    echo.says("still");
    world.ok(["revert", "a", "base"]);
    echo.is_reset();
    let answer = forwarding.end();
    assert_eq!(answer.code, 125, "{answer:?}");
    until("the guest's end is reset", || {
        connections(&world, "a").is_empty()
    });
    world.ok(["rm", "-f", "a"]);
    world.assert_empty();
}

#[test]
fn connections_survive_a_checkpoint_and_are_reset_otherwise() {
    let world = World::new();
    let port = published(&world.start("a", &["--publish", "0:7000"]));
    assert_eq!(
        world
            .sh("a", "nc -ll -p 7000 -e cat > /dev/null 2>&1 &")
            .code,
        0
    );
    until("it listens", || {
        world.sh("a", "netstat -ltn | grep -q :7000").code == 0
    });
    let mut first = Echo::connect(port);
    for tag in ["one", "two"] {
        world.ok(["checkpoint", "a", tag]);
        first.says(tag);
    }

    // In a fork the guest's end is reset; that of the source continues.
    let forked = world.json(["fork", "a", "--name", "b"]);
    until("the fork's end is reset", || {
        connections(&world, "b-1").is_empty()
    });
    first.says("still here");
    Echo::connect(published(&forked["forks"][0])).says("in the fork");
    first.says("and still");

    world.ok(["revert", "a", "two"]);
    first.is_reset();
    until("the guest's end is reset", || {
        connections(&world, "a").is_empty()
    });
    let mut second = Echo::connect(port);

    world.ok(["pause", "a"]);
    second.is_reset();
    world.ok(["resume", "a"]);
    until("the guest's end is reset", || {
        connections(&world, "a").is_empty()
    });
    Echo::connect(port).says("after all");
    world.ok(["rm", "-f", "a", "b-1"]);
    world.assert_empty();
}
