//! Images written by QEMU.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use super::super::samples::{root, tool};
use super::{import, padded};

/// QEMU's block layer without a machine, controlled through its monitor.
struct Daemon {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Daemon {
    /// Starts it with the nodes `raw` and `image`. `None`: it is not installed.
    fn start(raw: &Path, image: &Path) -> Option<Self> {
        let mut command = tool("qemu-storage-daemon");
        command.args([
            "--chardev",
            "stdio,id=monitor",
            "--monitor",
            "chardev=monitor",
        ]);
        command.args([
            "--blockdev",
            &format!("file,node-name=raw,read-only=on,filename={}", raw.display()),
        ]);
        command.args([
            "--blockdev",
            &format!("file,node-name=image,filename={}", image.display()),
        ]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Some(Self {
            child,
            input,
            output,
        })
    }

    /// Runs a command, and reads until a line contains the expected text.
    fn run(&mut self, command: &str, arguments: &str, done: &str) {
        writeln!(
            self.input,
            r#"{{"execute":"{command}","arguments":{{{arguments}}}}}"#
        )
        .unwrap();
        let mut line = String::new();
        while !line.contains(done) {
            line.clear();
            assert!(
                self.output.read_line(&mut line).unwrap() > 0,
                "{command} did not end"
            );
            assert!(!line.contains(r#""error""#), "{command}: {line}");
        }
    }

    fn end(mut self) {
        writeln!(self.input, r#"{{"execute":"quit"}}"#).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

#[test]
fn a_qcow2_written_by_qemu_is_imported() {
    let dir = tempfile::tempdir().unwrap();
    let raw = dir.path().join("raw");
    let image = dir.path().join("image");
    let disk = padded(root());
    fs::write(&raw, &disk).unwrap();
    let made = [
        (r#""version":"v2","cluster-size":65536"#, false),
        (r#""version":"v2","cluster-size":4096"#, true),
        (r#""version":"v3","cluster-size":512"#, true),
        (r#""version":"v3","cluster-size":2097152"#, true),
        (
            r#""version":"v3","cluster-size":65536,"compression-type":"zstd""#,
            true,
        ),
        (
            r#""version":"v3","cluster-size":65536,"lazy-refcounts":true"#,
            false,
        ),
    ];
    for (options, compress) in made {
        File::create(&image).unwrap();
        let Some(mut daemon) = Daemon::start(&raw, &image) else {
            eprintln!("not checked: qemu-storage-daemon is not installed");
            return;
        };
        let create = format!(
            r#""driver":"qcow2","file":"image","size":{},{options}"#,
            disk.len()
        );
        daemon.run("qmp_capabilities", "", r#""return""#);
        daemon.run(
            "blockdev-create",
            &format!(r#""job-id":"make","options":{{{create}}}"#),
            r#""concluded""#,
        );
        let node = r#""driver":"qcow2","node-name":"target","file":"image","detect-zeroes":"on""#;
        daemon.run("blockdev-add", node, r#""return""#);
        let copy = format!(
            r#""job-id":"copy","device":"raw","target":"target","sync":"full","compress":{compress}"#
        );
        daemon.run("blockdev-backup", &copy, "BLOCK_JOB_COMPLETED");
        daemon.end();
        let (_, bytes) = import(&fs::read(&image).unwrap()).unwrap();
        assert!(bytes == disk, "{options}");
    }
}
