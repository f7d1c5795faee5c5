//! An ext4 file system from a list of nodes, without mounting and without root.
//!
//! `mke2fs` makes it empty and `debugfs` puts the nodes in, in the order given. `mke2fs -d` would take them from a host
//! directory, with that file system's order, owners and times; this way the result depends on the list alone.

use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};

use super::tool::{self, Tool};
use super::{Error, io_error, write};

const E2FSPROGS: &str = "install the package e2fsprogs";
const MKE2FS: Tool = Tool { program: "mke2fs", hint: E2FSPROGS };
const DEBUGFS: Tool = Tool { program: "debugfs", hint: E2FSPROGS };

/// The date of everything in the file system.
const EPOCH: &str = "1700000000";
const UUID: &str = "7d0e4bd5-8b1e-4a52-9a6c-2f1c5a7e0001";
const HASH_SEED: &str = "7d0e4bd5-8b1e-4a52-9a6c-2f1c5a7e0002";
/// Blocks of 4 KiB, inodes of 256 bytes, one per 8 KiB; nothing reserved for root; the smallest journal.
const GEOMETRY: [&str; 10] = ["-b", "4096", "-I", "256", "-i", "8192", "-m", "0", "-J", "size=4"];
/// Room in the group descriptors to grow to while mounted: 1 TiB.
const RESIZE_BLOCKS: u64 = 1 << 28;
/// Spelled out, because each host's `mke2fs.conf` says something else.
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,\
                        large_file,huge_file,dir_nlink,extra_isize,metadata_csum";

#[derive(Debug, Clone)]
pub(super) enum Content {
    Dir,
    Text(String),
    HostFile(PathBuf),
    Symlink(String),
}

/// Something in the root file system. Parents come before what is in them.
#[derive(Debug, Clone)]
pub(super) struct Node {
    /// Absolute, with no blanks.
    pub path: String,
    pub mode: u32,
    /// User and group alike.
    pub owner: u32,
    pub content: Content,
}

/// Makes the file system in a sparse file at `image`. `scratch` is an empty directory for texts on their way.
pub(super) fn make(image: &Path, bytes: u64, nodes: &[Node], scratch: &Path) -> Result<(), Error> {
    let file = File::create_new(image).map_err(io_error("create", image))?;
    file.set_len(bytes).map_err(io_error("grow", image))?;
    format(image)?;
    fill(image, nodes, scratch)
}

fn format(image: &Path) -> Result<(), Error> {
    let options = format!(
        "hash_seed={HASH_SEED},lazy_itable_init=0,lazy_journal_init=1,nodiscard,root_owner=0:0,resize={RESIZE_BLOCKS}"
    );
    MKE2FS.run(|command| {
        command.env("E2FSPROGS_FAKE_TIME", EPOCH).env("SOURCE_DATE_EPOCH", EPOCH);
        command.args(["-q", "-F", "-t", "ext4", "-O", FEATURES, "-U", UUID, "-L", "sandtree-root", "-E", &options]);
        command.args(GEOMETRY).arg(image);
    })?;
    Ok(())
}

fn fill(image: &Path, nodes: &[Node], scratch: &Path) -> Result<(), Error> {
    let path = scratch.join("debugfs.commands");
    write(&path, script(nodes, scratch)?.as_bytes())?;
    let output = DEBUGFS.output(|command| {
        command.env("E2FSPROGS_FAKE_TIME", EPOCH).arg("-w").arg("-f").arg(&path).arg(image);
    })?;
    // It goes on after a command that failed and succeeds in the end: the only sign is a word on stderr.
    let stderr = tool::stderr(&output);
    let complaints: Vec<_> = stderr.lines().filter(|line| !line.starts_with("debugfs ")).collect();
    if output.status.success() && complaints.is_empty() {
        return Ok(());
    }
    Err(Error::ToolFailed { program: DEBUGFS.program, status: output.status, stderr: complaints.join("; ") })
}

fn script(nodes: &[Node], scratch: &Path) -> Result<String, Error> {
    let mut script = format!("set_current_time @{EPOCH}\n");
    for (index, node) in nodes.iter().enumerate() {
        let make = match &node.content {
            Content::Dir => format!("mkdir {}", node.path),
            Content::HostFile(source) => format!("write {} {}", quoted(source), node.path),
            Content::Symlink(target) => format!("symlink {} {target}", node.path),
            Content::Text(text) => {
                let source = scratch.join(format!("text-{index}"));
                write(&source, text.as_bytes())?;
                format!("write {} {}", quoted(&source), node.path)
            }
        };
        push(&mut script, &make);
        push(&mut script, &attributes(node));
    }
    Ok(script)
}

/// A host path for debugfs, which splits at blanks outside quotes.
fn quoted(path: &Path) -> String {
    format!("\"{}\"", path.display().to_string().replace('"', "\"\""))
}

fn attributes(node: &Node) -> String {
    let (path, owner) = (&node.path, node.owner);
    let kind = match node.content {
        Content::Dir => 0o040_000,
        Content::Text(_) | Content::HostFile(_) => 0o100_000,
        Content::Symlink(_) => return String::new(),
    };
    let mut lines = format!("sif {path} mode 0{:o}", kind | node.mode);
    if owner != 0 {
        lines.push_str(&format!("\nsif {path} uid {owner}\nsif {path} gid {owner}"));
    }
    lines
}

fn push(script: &mut String, lines: &str) {
    if !lines.is_empty() {
        writeln!(script, "{lines}").expect("a string takes any text");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(path: &str, mode: u32, owner: u32, content: Content) -> Node {
        Node { path: path.to_owned(), mode, owner, content }
    }

    #[test]
    fn a_node_becomes_commands() {
        let dir = tempfile::tempdir().unwrap();
        let nodes = [
            node("/home/user", 0o755, 1000, Content::Dir),
            node("/bin/sh", 0o777, 0, Content::Symlink("busybox".to_owned())),
            node("/bin/busybox", 0o755, 0, Content::HostFile("/a b/busybox".into())),
        ];
        let expected = "set_current_time @1700000000\n\
                        mkdir /home/user\nsif /home/user mode 040755\nsif /home/user uid 1000\nsif /home/user gid 1000\n\
                        symlink /bin/sh busybox\n\
                        write \"/a b/busybox\" /bin/busybox\nsif /bin/busybox mode 0100755\n";
        assert_eq!(script(&nodes, dir.path()).unwrap(), expected);
    }

    #[test]
    fn equal_nodes_give_equal_bytes_and_a_bad_one_an_error() {
        let build = |nodes: &[Node]| {
            let dir = tempfile::tempdir().unwrap();
            let image = dir.path().join("image");
            make(&image, 64 << 20, nodes, dir.path()).map(|()| std::fs::read(&image).unwrap())
        };
        let nodes = [node("/etc", 0o755, 0, Content::Dir), node("/etc/x", 0o600, 7, Content::Text("text".to_owned()))];
        assert_eq!(build(&nodes).unwrap(), build(&nodes).unwrap());
        let orphan = [node("/missing/x", 0o644, 0, Content::Text(String::new()))];
        assert!(matches!(build(&orphan), Err(Error::ToolFailed { program: "debugfs", .. })));
    }
}
