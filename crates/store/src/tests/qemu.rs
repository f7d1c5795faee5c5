//! Overlays as the real QEMU sees and writes them.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::disk::check::{Verdict, file as check};
use crate::disk::overlay;

/// Opens the overlay in a QEMU without a machine, runs `qemu-io` commands on it, and returns each
/// reply.
fn qemu_io(path: &Path, commands: &[&str]) -> Option<Vec<Value>> {
    let blockdev = format!(
        "driver=qcow2,node-name=d,discard=unmap,file.driver=file,file.filename={}",
        path.display()
    );
    let spawned = Command::new("qemu-system-x86_64")
        .args([
            "-machine",
            "none",
            "-nodefaults",
            "-display",
            "none",
            "-qmp",
            "stdio",
            "-blockdev",
            &blockdev,
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut qemu) = spawned else {
        eprintln!("SKIPPED: qemu-system-x86_64 is not installed, so no overlay was shown to it");
        return None;
    };
    let mut requests = String::from(
        "{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"query-named-block-nodes\"}\n",
    );
    for command in commands {
        let line = format!("qemu-io d \"{command}\"");
        let request = serde_json::json!({"execute": "human-monitor-command", "arguments": {"command-line": line}});
        writeln!(requests, "{request}").unwrap();
    }
    requests.push_str("{\"execute\":\"quit\"}\n");
    qemu.stdin
        .take()
        .unwrap()
        .write_all(requests.as_bytes())
        .unwrap();
    let lines = BufReader::new(qemu.stdout.take().unwrap()).lines();
    // What `qemu-io` prints stands between the replies.
    let replies: Vec<Value> = lines
        .filter_map(|line| serde_json::from_str(&line.unwrap()).ok())
        .collect();
    assert!(qemu.wait().unwrap().success());
    assert!(
        replies.iter().all(|reply| reply.get("error").is_none()),
        "{replies:?}"
    );
    Some(replies)
}

#[test]
fn qemu_takes_our_overlays_at_their_size() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("overlay.qcow2");
    for disk_bytes in [512, 1 << 20, 2 << 30, 5u64 << 40] {
        std::fs::write(&path, overlay::empty(disk_bytes).unwrap()).unwrap();
        let Some(replies) = qemu_io(&path, &[]) else {
            return;
        };
        let nodes = replies
            .iter()
            .find_map(|reply| reply["return"].as_array())
            .unwrap();
        let node = nodes.iter().find(|node| node["node-name"] == "d").unwrap();
        assert_eq!(node["image"]["virtual-size"], disk_bytes);
        assert_eq!(node["image"]["format"], "qcow2");
    }
}

#[test]
fn what_qemu_wrote_is_clean_and_damage_to_it_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("overlay.qcow2");
    std::fs::write(&path, overlay::empty(4 << 30).unwrap()).unwrap();
    let commands = [
        "write 0 1M",
        "write 700M 3M",
        "write 3G 64k",
        "discard 512k 512k",
        "write -z 701M 1M",
        "flush",
    ];
    if qemu_io(&path, &commands).is_none() {
        return;
    }
    assert!(matches!(check(&path).unwrap(), Verdict::Clean { .. }));
    let whole = std::fs::read(&path).unwrap();
    assert!(
        whole.len() > 4 << 20,
        "QEMU wrote only {} bytes",
        whole.len()
    );
    let table = 1 << 16;
    let block = 2 << 16;
    for damage in [table..table + 8, block..block + 64] {
        let mut damaged = whole.clone();
        damaged[damage].fill(0);
        std::fs::write(&path, damaged).unwrap();
        assert!(matches!(check(&path).unwrap(), Verdict::Corrupt(_)));
    }
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    assert!(matches!(check(&path).unwrap(), Verdict::Corrupt(_)));
}
