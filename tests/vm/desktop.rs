//! Sandboxes with a screen: the image `desktop`, with a real Xfce.
//!
//! The image is made once for all builds, and its warm state once for each build. Most tests begin
//! from a snapshot with a terminal open, in which `cat` writes what is typed to a file.

mod console;
mod held;
mod view;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

use crate::kvm::keyed;
use crate::moves;
use crate::support::lab::spares_of;
use crate::support::{Answer, World, eventually, finish, made_once, program, say, text, until};

/// One processor, so that a busy program takes it from everything else.
const SHAPE: [&str; 4] = ["--cpus", "1", "--memory", "1G"];
const TYPED: &str = "/tmp/typed";
/// A program on a desktop under emulation may take this long to appear.
const PATIENCE: Duration = Duration::from_secs(300);
/// The version of the snapshot; a change of its making increments it.
const RECIPE: &str = "2";

/// A store with the desktop and its warm state.
fn base() -> &'static Path {
    static BASE: OnceLock<PathBuf> = OnceLock::new();
    BASE.get_or_init(|| {
        let run = [&["run"][..], &SHAPE, &["desktop", "--", "true"]].concat();
        made_once("base-desktop-1", &run, &[])
    })
}

/// The same with the snapshot `typing`.
fn typing() -> World {
    static TYPING: OnceLock<PathBuf> = OnceLock::new();
    let store = TYPING.get_or_init(|| {
        let base = base();
        keyed::made_once("desktop-typing", &keyed::key(&[RECIPE]), |path| {
            let world = World::like_at(base, path.to_owned());
            start(&world, "t");
            open_terminal(&world, "t");
            world.ok(["save", "t", "typing", "--memory"]);
            world.ok(["rm", "-f", "t"]);
            world.assert_empty();
        })
    });
    World::like(store)
}

fn start(world: &World, name: &str) {
    let run = [&["run", "-d", "--name", name][..], &SHAPE, &["desktop"]].concat();
    world.ok(run);
}

/// Stops the panel, whose clock changes the picture each minute.
fn stop_clock(world: &World, name: &str) {
    say(world, name, "sudo -n pkill -STOP -f 'xfce4[-/]panel'");
}

/// A sandbox with a terminal that writes to [`TYPED`].
fn start_typing(world: &World, name: &str) {
    world.ok(["run", "-d", "--name", name, "typing"]);
}

fn open_terminal(world: &World, name: &str) {
    let line = format!("stty -ixon; exec cat > {TYPED}");
    let command = ["xfce4-terminal", "--maximize", "-x", "sh", "-c", &line];
    let exec = [&["exec", "-d", name, "--"][..], &command].concat();
    world.ok(exec);
    let opened = eventually(PATIENCE, || {
        (world.sh(name, &format!("test -e {TYPED}")).code == 0).then_some(())
    });
    assert!(opened.is_some(), "the terminal does not start");
    // Its window appears a little later than its shell.
    await_still(world, name);
    // The first character of a program takes long: it loads its input method.
    world.ok(["mouse", name, "click", "400", "400"]);
    type_line(world, name, "ready");
    await_typed(world, name, "ready\n");
    // So that every test begins with an empty file.
    say(world, name, &format!("truncate -s 0 {TYPED}"));
    stop_clock(world, name);
    world.ok(["screenshot", name, "--wait-still", "1s", "-o", "/dev/null"]);
}

/// Waits until the screen has shown the same for two seconds.
#[track_caller]
fn await_still(world: &World, name: &str) {
    let still = ["screenshot", name, "--wait-still", "2s", "--timeout", "2m"];
    world.ok([&still[..], &["-o", "/dev/null"]].concat());
}

/// Keeps a picture: `docs/figures/desktop.png` is one of these.
fn keep_figure(world: &World, name: &str) {
    await_still(world, name);
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    fs::write(dir.join("desktop.png"), picture(world, name)).unwrap();
}

#[track_caller]
fn type_line(world: &World, name: &str, text: &str) {
    world.ok(["type", name, text]);
    world.ok(["key", name, "enter"]);
}

fn typed(world: &World, name: &str) -> String {
    // The offset of `cat` is not that of the emptied file, which begins with a hole.
    say(world, name, &format!("tr -d '\\000' < {TYPED}; echo ."))
        .strip_suffix('.')
        .expect("it ends with it")
        .to_owned()
}

#[track_caller]
fn await_typed(world: &World, name: &str, wanted: &str) {
    let mut last = String::new();
    let found = eventually(PATIENCE, || {
        last = typed(world, name);
        (last == wanted).then_some(())
    });
    assert!(found.is_some(), "typed {wanted:?}, and arrived {last:?}");
}

/// A screenshot's file.
#[track_caller]
fn picture(world: &World, name: &str) -> Vec<u8> {
    world.ok(["screenshot", name, "-o", "-"]).stdout
}

/// Width, height and pixels of a PNG file.
fn decoded(png: &[u8]) -> (u32, u32, Vec<u8>) {
    let mut reader = png::Decoder::new(std::io::Cursor::new(png))
        .read_info()
        .expect("it is a PNG file");
    let mut pixels = vec![0; reader.output_buffer_size().expect("it has a size")];
    let frame = reader.next_frame(&mut pixels).expect("it is whole");
    (frame.width, frame.height, pixels)
}

fn end(world: &World, names: &[&str]) {
    world.ok([&["rm", "-f"][..], names].concat());
    world.assert_empty();
}

fn begin(world: &World, args: &[&str]) -> Child {
    let mut command = world.command();
    command.args(args);
    let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    piped.spawn().expect("it starts")
}

#[track_caller]
fn refused(world: &World, args: &[&str], code: &str) -> Answer {
    let answer = world.run([&["--json"][..], args].concat());
    assert_ne!(answer.code, 0, "{args:?}");
    let said: Value = serde_json::from_str(answer.err().trim()).unwrap_or_default();
    assert_eq!(said["error"]["code"], code, "{args:?}: {answer:#?}");
    answer
}

#[test]
fn the_first_picture_of_a_warm_desktop_is_a_desktop() {
    let world = World::like(base());
    start(&world, "d");
    let (width, height, pixels) = decoded(&picture(&world, "d"));
    assert_eq!((width, height), (1280, 800));
    let colours: BTreeSet<&[u8]> = pixels.chunks_exact(3).collect();
    assert!(colours.len() > 100, "{} colours", colours.len());
    // The panel is a band at an edge that differs from the background below it.
    let line = |y: usize| &pixels[y * 1280 * 3..(y + 1) * 1280 * 3];
    assert!((0..20).any(|y| line(y) != line(60)), "there is no panel");

    let file = world.home().join("shot.png");
    let shot = world.json(["screenshot", "d", "-o", file.to_str().unwrap()]);
    assert_eq!(
        (&shot["width"], &shot["height"]),
        (&1280.into(), &800.into())
    );
    assert_eq!(shot["ready"], true);
    assert_eq!(decoded(&fs::read(&file).unwrap()).0, 1280);
    fs::remove_file(file).unwrap();
    let display = world.json(["display", "d"]);
    assert_eq!(display["ready"], true);
    assert_eq!(world.inspect("d")["display"], "1280x800");
    end(&world, &["d"]);
}

#[test]
fn the_picture_of_a_revert_is_that_of_its_checkpoint() {
    let world = World::like(base());
    start(&world, "d");
    stop_clock(&world, "d");
    world.ok(["mouse", "d", "move", "300", "300"]);
    let still = ["screenshot", "d", "--wait-still", "1s", "-o", "-"];
    let before = world.ok(still).stdout;
    world.ok(["checkpoint", "d", "before"]);
    world.ok(["mouse", "d", "move", "700", "500"]);
    let after = eventually(PATIENCE, || {
        Some(picture(&world, "d")).filter(|picture| *picture != before)
    });
    assert!(after.is_some(), "the pointer is not in the picture");
    world.ok(["revert", "d", "before"]);
    assert!(picture(&world, "d") == before, "another picture");
    let pointer = world.json(["display", "d"]);
    assert_eq!((&pointer["x"], &pointer["y"]), (&300.into(), &300.into()));
    // A QEMU that was started ahead shows the same.
    until("a spare is there", || spares_of(world.home()).len() == 1);
    world.ok(["mouse", "d", "move", "700", "500"]);
    let reverted = world.json(["revert", "d", "before"]);
    assert_eq!(reverted["from_spare"], true, "{reverted}");
    assert!(picture(&world, "d") == before, "another picture of a spare");

    // The same over a pause, and in a snapshot of the memory.
    world.ok(["pause", "d"]);
    world.ok(["resume", "d"]);
    assert!(
        picture(&world, "d") == before,
        "another picture after a pause"
    );
    world.ok(["save", "d", "shot", "--memory"]);
    world.ok(["run", "-d", "--name", "e", "shot"]);
    assert!(
        picture(&world, "e") == before,
        "another picture of a snapshot"
    );
    // The size is that of the memory.
    let other = ["run", "-d", "--display", "1024x768", "shot"];
    refused(&world, &other, "not_as_saved");
    // The same on another host.
    let file = world.home().join("shot.tar.zst");
    let file = file.to_str().expect("the path is text");
    world.ok(["snapshot", "export", "shot", "-o", file]);
    let away = World::new();
    away.ok(["snapshot", "import", file]);
    away.ok(["run", "-d", "--name", "f", "shot"]);
    assert!(
        picture(&away, "f") == before,
        "another picture of an import"
    );
    fs::remove_file(file).unwrap();
    end(&away, &["f"]);
    end(&world, &["d", "e"]);
}

#[test]
fn a_screen_moves_to_a_newer_qemu_and_back() {
    let Some(newer) = moves::newer() else { return };
    let newer = newer.to_str().expect("the path is text");
    let world = World::like(base());
    start(&world, "d");
    stop_clock(&world, "d");
    world.ok(["mouse", "d", "move", "300", "300"]);
    let still = ["screenshot", "d", "--wait-still", "1s", "-o", "-"];
    let before = world.ok(still).stdout;
    world.ok(["pause", "d"]);
    world.ok(["--qemu", newer, "resume", "d"]);
    assert!(
        picture(&world, "d") == before,
        "another picture under the newer QEMU"
    );
    world.ok(["mouse", "d", "move", "310", "310"]);
    let pointer = world.json(["display", "d"]);
    assert_eq!((&pointer["x"], &pointer["y"]), (&310.into(), &310.into()));
    world.ok(["pause", "d"]);
    world.ok(["resume", "d"]);
    world.ok(["mouse", "d", "move", "300", "300"]);
    let back = world.ok(still).stdout;
    assert!(back == before, "another picture after the way back");
    end(&world, &["d"]);
}

#[test]
fn forks_have_their_own_screens_and_keyboards() {
    let world = typing();
    start_typing(&world, "d");
    let before = picture(&world, "d");
    world.ok(["fork", "d", "-n", "3"]);
    let forks = ["d-1", "d-2", "d-3"];
    for fork in forks {
        assert!(
            picture(&world, fork) == before,
            "{fork} shows something else"
        );
        // Titles of windows would show another name.
        assert_eq!(say(&world, fork, "hostname"), "desktop");
    }
    let children: Vec<Child> = forks
        .iter()
        .map(|fork| begin(&world, &["type", fork, &format!("I am {fork}")]))
        .collect();
    for child in children {
        assert_eq!(finish(child).code, 0);
    }
    for fork in forks {
        world.ok(["key", fork, "enter"]);
        await_typed(&world, fork, &format!("I am {fork}\n"));
    }
    assert_eq!(typed(&world, "d"), "");
    end(&world, &["d", "d-1", "d-2", "d-3"]);
}

#[test]
fn a_thousand_characters_arrive_in_order_in_a_busy_guest() {
    let world = typing();
    start_typing(&world, "d");
    world.ok(["exec", "-d", "d", "--", "sh", "-c", "while :; do :; done"]);
    let line: String = (0..1000)
        .map(|index| char::from(b'!' + (index * 7 % 94) as u8))
        .collect();
    type_line(&world, "d", &line);
    await_typed(&world, "d", &format!("{line}\n"));
    end(&world, &["d"]);
}

#[test]
fn every_script_can_be_typed_and_the_clipboard_stays() {
    let world = typing();
    start_typing(&world, "d");
    let clip = "in der Zwischenablage: ünï\n日本";
    world.ok(["clipboard", "d", "set", clip]);
    let text = "Grüße, Ünïcödé – Привет, Ελληνικά € 日本語 🙂";
    type_line(&world, "d", text);
    await_typed(&world, "d", &format!("{text}\n"));
    keep_figure(&world, "d");
    assert_eq!(world.ok(["clipboard", "d", "get"]).out(), clip);
    // Chords are keys, not characters: this one empties the line.
    world.ok(["type", "d", "not this"]);
    world.ok(["key", "d", "ctrl+u"]);
    type_line(&world, "d", "but this");
    await_typed(&world, "d", &format!("{text}\nbut this\n"));
    end(&world, &["d"]);
}

#[test]
fn texts_and_chords_of_several_callers_do_not_mix() {
    let world = typing();
    start_typing(&world, "d");
    let lower = "a".repeat(300);
    let digits = "7".repeat(300);
    let callers: Vec<Child> = [
        &["type", "d", &lower][..],
        &["key", "d", "shift+c"],
        &["type", "d", &digits],
        &["key", "d", "shift+d"],
    ]
    .into_iter()
    .map(|args| begin(&world, args))
    .collect();
    for caller in callers {
        assert_eq!(finish(caller).code, 0);
    }
    world.ok(["key", "d", "enter"]);
    let arrived = eventually(PATIENCE, || {
        Some(typed(&world, "d")).filter(|text| text.ends_with('\n'))
    });
    let arrived = arrived.expect("the line arrives");
    for part in [&lower, &digits, "C", "D"] {
        assert!(arrived.contains(part), "{part} is torn: {arrived}");
    }
    assert_eq!(arrived.len(), lower.len() + digits.len() + "CD\n".len());
    end(&world, &["d"]);
}

/// The window of a program that prints its events to `/tmp/events`, at 300,200.
fn open_event_window(world: &World, name: &str) {
    let watching = "exec stdbuf -oL xev -geometry 400x300+300+200 > /tmp/events";
    world.ok(["exec", "-d", name, "--", "sh", "-c", watching]);
    let shown = eventually(PATIENCE, || {
        let line = "grep -c MapNotify /tmp/events";
        (world.sh(name, line).code == 0).then_some(())
    });
    assert!(shown.is_some(), "the window does not appear");
    await_still(world, name);
}

/// How many events of a kind that window got from a button.
fn events_of(world: &World, name: &str, event: &str, number: u32) -> String {
    let line = format!("grep -A2 '{event} event' /tmp/events | grep -c 'button {number},'; true");
    say(world, name, &line)
}

#[track_caller]
fn await_events(world: &World, name: &str, wanted: &[(&str, u32, &str)]) {
    let mut last = Vec::new();
    let arrived = eventually(Duration::from_secs(20), || {
        let counts = wanted.iter();
        last = counts
            .map(|(event, number, _)| events_of(world, name, event, *number))
            .collect();
        let all = wanted.iter().zip(&last);
        all.into_iter()
            .all(|((.., wanted), count)| count == wanted)
            .then_some(())
    });
    assert!(arrived.is_some(), "{last:?} instead of {wanted:?}");
}

/// A window manager takes each press first, so fast ones queue up.
#[test]
fn every_click_and_every_step_of_the_wheel_arrives() {
    let world = World::like(base());
    start(&world, "d");
    open_event_window(&world, "d");
    world.ok(["mouse", "d", "click", "500", "400"]);
    world.ok(["mouse", "d", "scroll", "50"]);
    for _ in 0..5 {
        world.ok(["mouse", "d", "click", "--button", "right", "--count", "2"]);
    }
    let press = "ButtonPress";
    let wanted = [(press, 1, "1"), (press, 5, "50"), (press, 3, "10")];
    await_events(&world, "d", &wanted);
    world.ok(["mouse", "d", "down", "middle"]);
    await_events(&world, "d", &[(press, 2, "1"), ("ButtonRelease", 2, "0")]);
    world.ok(["mouse", "d", "up", "middle"]);
    await_events(&world, "d", &[("ButtonRelease", 2, "1")]);
    let drag = ["drag", "450", "350", "550", "420", "--button", "right"];
    world.ok([&["mouse", "d"][..], &drag].concat());
    await_events(&world, "d", &[(press, 3, "11"), ("ButtonRelease", 3, "11")]);
    let pointer = world.json(["display", "d"]);
    assert_eq!((&pointer["x"], &pointer["y"]), (&550.into(), &420.into()));
    end(&world, &["d"]);
}

/// Frame buffers are in the state of the devices, and a guest can allocate many.
#[test]
fn a_guest_that_hoards_frame_buffers_is_still_checkpointed() {
    let world = World::like(base());
    start(&world, "d");
    world.run_with_input(
        ["exec", "-i", "d", "--", "sh", "-c", "cat > /tmp/hoard.py"],
        include_bytes!("desktop/hoard.py"),
    );
    let hoarding = "sudo -n python3 /tmp/hoard.py 60 > /tmp/hoarded 2>&1";
    world.ok(["exec", "-d", "d", "--", "sh", "-c", hoarding]);
    let hoarded = eventually(PATIENCE, || {
        let count = say(&world, "d", "cat /tmp/hoarded 2> /dev/null; true");
        (!count.is_empty()).then_some(count)
    });
    assert_eq!(hoarded.as_deref(), Some("60"), "the guest does not hoard");
    // A state of more than 64 MiB of devices would be refused.
    world.ok(["checkpoint", "d", "full"]);
    world.ok(["revert", "d", "full"]);
    world.ok(["exec", "d", "--", "true"]);
    end(&world, &["d"]);
}

/// A mode needs memory of the host, and a guest may change it at any time.
#[test]
fn a_guest_that_changes_modes_takes_no_more_of_the_host() {
    let world = World::like(base());
    start(&world, "d");
    let qemu = world.inspect("d")["qemu_pid"].as_u64().unwrap();
    let line = "for i in $(seq 30); do for mode in 5120x2160 1024x768; do \
                xrandr --output Virtual-1 --mode $mode || exit 1; done; done; echo done";
    assert_eq!(say(&world, "d", line), "done");
    // The guest's own memory, and that of QEMU. Thirty times the larger mode would be 1.3 GB more.
    let taken = own_memory(qemu);
    assert!(taken < (1024 + 256) << 20, "{taken} bytes");
    assert_eq!(decoded(&picture(&world, "d")).0, 1024);
    world.ok(["checkpoint", "d"]);
    end(&world, &["d"]);
}

/// The memory that a process does not share, in bytes: also the guest's pages that were written.
fn own_memory(pid: u64) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib: u64 = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    kib << 10
}

#[test]
fn a_changed_size_is_a_part_of_the_state() {
    let world = World::like(base());
    start(&world, "d");
    let changed = world.json(["display", "d", "--size", "1024x768"]);
    assert_eq!(
        (&changed["width"], &changed["height"]),
        (&1024.into(), &768.into())
    );
    stop_clock(&world, "d");
    let still = [
        "screenshot",
        "d",
        "--wait-still",
        "2s",
        "--timeout",
        "2m",
        "-o",
        "-",
    ];
    let small = world.ok(still).stdout;
    assert_eq!(decoded(&small).0, 1024);
    world.ok(["checkpoint", "d", "small"]);
    world.ok(["display", "d", "--size", "1280x800"]);
    assert_eq!(decoded(&picture(&world, "d")).0, 1280);
    world.ok(["revert", "d", "small"]);
    assert!(picture(&world, "d") == small, "another picture");
    end(&world, &["d"]);
}

#[test]
fn pictures_and_clicks_beside_checkpoints_are_whole() {
    let world = World::like(base());
    start(&world, "d");
    open_event_window(&world, "d");
    let checkpoints = std::thread::scope(|scope| {
        let taking = scope.spawn(|| {
            for _ in 0..20 {
                world.ok(["checkpoint", "d"]);
            }
        });
        for index in 0..50_u32 {
            let x = (400 + index).to_string();
            let y = (300 + index).to_string();
            world.ok(["mouse", "d", "click", &x, &y]);
            assert_eq!(decoded(&picture(&world, "d")).0, 1280);
        }
        taking.join()
    });
    checkpoints.unwrap();
    let pointer = world.json(["display", "d"]);
    assert_eq!((&pointer["x"], &pointer["y"]), (&449.into(), &349.into()));
    let clicks = [("ButtonPress", 1, "50"), ("ButtonRelease", 1, "50")];
    await_events(&world, "d", &clicks);
    end(&world, &["d"]);
}

#[test]
fn a_guest_that_hangs_still_has_a_picture() {
    let world = World::like(base());
    start(&world, "d");
    let file = world.home().join("hung.png");
    let file = file.to_str().expect("the path is text");
    say(&world, "d", "sudo -n pkill -STOP Xorg");
    let shot = world.json(["screenshot", "d", "-o", file]);
    assert_eq!(
        (&shot["width"], &shot["ready"]),
        (&1280.into(), &false.into())
    );
    assert_eq!(decoded(&fs::read(file).unwrap()).0, 1280);
    fs::remove_file(file).unwrap();
    end(&world, &["d"]);
}

/// Debian has QEMU's devices of a screen in a package of their own.
#[test]
fn a_qemu_without_devices_for_a_screen_is_reported() {
    const MODULE: &str = "/usr/lib/x86_64-linux-gnu/qemu/hw-display-virtio-gpu-pci.so";
    if !rustix::process::geteuid().is_root() || !Path::new(MODULE).exists() {
        return eprintln!("QEMU's modules cannot be hidden here; not tested");
    }
    let home = tempfile::tempdir().unwrap();
    let world = World::empty_at(home.path().join("home"));
    let without = |args: &[&str]| {
        let hidden = format!("mount --bind /dev/null {MODULE} && exec \"$@\"");
        // starts: unshare
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &hidden, "sh"]);
        command.arg(program()).args(args);
        command.env("SANDTREE_HOME", world.home());
        let piped = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        finish(piped.spawn().expect("unshare is installed"))
    };
    let doctor = without(&["--json", "doctor"]);
    let found: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let reason = text(&found["qemu"]["found"]["screens_refused"]);
    assert!(reason.contains("virtio-gpu-pci"), "{found}");
    let shown = without(&["doctor"]);
    assert!(shown.out().contains("qemu-system-common"), "{shown:?}");
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let world = typing();
    start_typing(&world, "d");
    refused(&world, &["key", "d", "nokey"], "invalid");
    refused(&world, &["mouse", "d", "move", "1280", "0"], "invalid");
    refused(&world, &["mouse", "d", "click", "0", "800"], "invalid");
    refused(&world, &["type", "d", "a\u{1b}b"], "invalid");
    let waiting = [
        "screenshot",
        "d",
        "--wait-change",
        "--timeout",
        "1s",
        "-o",
        "-",
    ];
    world.ok(["screenshot", "d", "--wait-still", "1s", "-o", "/dev/null"]);
    refused(&world, &waiting, "screen_timeout");
    world.ok(["pause", "d"]);
    for args in [
        &["screenshot", "d", "-o", "-"][..],
        &["type", "d", "a"],
        &["key", "d", "enter"],
        &["mouse", "d", "click", "1", "1"],
        &["clipboard", "d", "get"],
        &["display", "d"],
    ] {
        refused(&world, args, "wrong_state");
    }
    world.ok(["resume", "d"]);
    // Nothing of all that was sent.
    type_line(&world, "d", "only this");
    await_typed(&world, "d", "only this\n");
    let larger = ["run", "-d", "--display", "2561x800", "desktop"];
    refused(&world, &larger, "usage");
    end(&world, &["d"]);

    let plain = World::new();
    // Its kernel has no driver.
    let dark = ["run", "-d", "--display", "1280x800", "tiny"];
    refused(&plain, &dark, "invalid");
    plain.start("p", &[]);
    for args in [
        &["screenshot", "p", "-o", "-"][..],
        &["type", "p", "a"],
        &["key", "p", "enter"],
        &["mouse", "p", "click"],
        &["clipboard", "p", "get"],
        &["display", "p"],
        &["view", "p"],
    ] {
        refused(&plain, args, "no_display");
    }
    end(&plain, &["p"]);
}
