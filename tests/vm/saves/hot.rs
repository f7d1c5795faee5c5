//! A save of the disk alone: the guest continues, and the save is whole.

use super::{end, save, say, say_in, start_from};
use crate::support::{World, until};

/// A process that writes numbered lines with the guest's time to its disk in an endless loop.
const TICKS: &str = "n=0; while :; do n=$((n+1)); read -r up rest < /proc/uptime; echo $n $up; sleep 0.02; done > /srv/ticks";

/// No freeze lasts longer, because the guest then ends it itself.
const FROZEN_LONGEST_S: f64 = 10.0;

/// The times of all lines but the last, which may be incomplete; the numbers have no gap.
fn ticks(text: &str) -> Vec<f64> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.pop();
    let tick = |(index, line): (usize, &&str)| {
        let (number, time) = line
            .split_once(' ')
            .unwrap_or_else(|| panic!("line {index}: {line:?}"));
        assert_eq!(number, (index + 1).to_string(), "a line is missing");
        time.parse()
            .unwrap_or_else(|_| panic!("line {index}: {line:?}"))
    };
    lines.iter().enumerate().map(tick).collect()
}

#[test]
fn a_guest_continues_during_a_save_and_its_saves_boot_clean() {
    let world = World::new();
    world.start("a", &["--disk", "256M"]);
    world.ok(["exec", "-d", "a", "--", "sh", "-c", TICKS]);
    let qemu = world.inspect("a")["qemu_pid"].clone();
    for n in 1..=5 {
        say(&world, "a", &format!("echo {n} > /srv/part-{n}"));
        let saved = save(&world, &["a", &format!("hot-{n}")]);
        assert_eq!(saved["pause_ms"], 0.0, "{saved}");
        assert_eq!(
            (&saved["consistency"], &saved["memory"]),
            (&"frozen".into(), &false.into()),
            "{saved}"
        );
        assert_eq!(saved["degraded"], serde_json::json!([]), "{saved}");
        let written = ticks(&say(&world, "a", "cat /srv/ticks")).len();
        until("it writes on", || {
            ticks(&say(&world, "a", "cat /srv/ticks")).len() > written
        });
    }
    // None of this is on the guest's disk when it is saved.
    let fill = "dd if=/dev/urandom of=/srv/big bs=1M count=40 2> /dev/null; sha256sum /srv/big";
    let big = say(&world, "a", fill);
    let saved = save(&world, &["a", "big"]);
    assert_eq!(
        (&saved["consistency"], &saved["pause_ms"]),
        (&"frozen".into(), &0.0.into()),
        "{saved}"
    );
    assert!(saved["bytes"].as_u64().unwrap() > 40 << 20, "{saved}");

    let times = ticks(&say(&world, "a", "cat /srv/ticks"));
    let longest = times
        .windows(2)
        .map(|pair| pair[1] - pair[0])
        .fold(0.0, f64::max);
    assert!(
        longest < FROZEN_LONGEST_S,
        "it could not write for {longest} s"
    );
    assert_eq!(world.inspect("a")["qemu_pid"], qemu);

    start_from(&world, "big", "b", &[]);
    assert_eq!(say(&world, "b", "sha256sum /srv/big"), big);
    assert_eq!(say(&world, "b", "cat /srv/part-*"), "1\n2\n3\n4\n5");
    assert!(!ticks(&say(&world, "b", "cat /srv/ticks")).is_empty());
    let journal = say(&world, "b", "dmesg | grep -cE 'recovery|orphan' || true");
    assert_eq!(journal, "0", "a frozen disk needs no recovery");
    assert_eq!(
        say_in(&world, "hot-2", "ls /srv/part-*"),
        "/srv/part-1\n/srv/part-2"
    );
    end(&world, &["a", "b"]);
}
