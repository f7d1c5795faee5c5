//! The image `tiny`: Debian's cloud kernel and static busybox.
//!
//! | path | what |
//! |---|---|
//! | `/bin/busybox` | the only program; every applet is a link to it |
//! | `/etc` | the usual system users and user (1000); an inittab that starts no process |
//! | `/home/user` | belongs to user |
//! | everything else | belongs to root |

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sandtree_store::{Arch, ExecDefaults, Image, ImageSpec, Init};

use crate::error::{Error, Result, io_error};
use crate::files::create_dir;
use crate::job::{Job, Stage};
use crate::new_image::{Content, NewImage, Node, PATH, put_all};
use crate::spec::KernelChoice;
use crate::tool::HostTools;
use crate::{apt, bundle};

const BUSYBOX: &str = "busybox-static";
/// The free space in the image. It is sparse, and the guest grows it to the size of its disk.
const ROOM_BYTES: u64 = 53 << 20;

const DIRS: &str = "/bin /dev /etc /etc/sandtree /etc/sandtree/resume.d /home /lib /mnt /opt /proc /run /sbin /srv /sys \
                    /usr /usr/bin /usr/lib /usr/local /usr/local/bin /usr/local/sbin /usr/sbin /usr/share \
                    /var /var/cache /var/lib /var/log /var/spool";

const FILES: [(&str, &str); 10] = [
    (
        "/etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\n\
         daemon:x:1:1:daemon:/usr/sbin:/bin/sh\n\
         user:x:1000:1000:user:/home/user:/bin/sh\n\
         nobody:x:65534:65534:nobody:/:/bin/sh\n",
    ),
    (
        "/etc/group",
        "root:x:0:\ndaemon:x:1:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n",
    ),
    ("/etc/hostname", "tiny\n"),
    ("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    (
        "/etc/profile",
        "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\numask 022\n",
    ),
    (
        "/etc/os-release",
        "NAME=\"Sandtree tiny\"\nID=sandtree-tiny\nPRETTY_NAME=\"Sandtree tiny\"\nVERSION_ID=1\n",
    ),
    // Without this file busybox init would open shells on the console. At shutdown it remounts the
    // root read-only, which writes everything out and spares the next boot a recovery.
    (
        "/etc/inittab",
        "::sysinit:/bin/true\n::ctrlaltdel:/sbin/reboot\n::shutdown:/bin/umount -a -r\n",
    ),
    ("/etc/shells", "/bin/sh\n/bin/ash\n"),
    ("/etc/resolv.conf", ""),
    (
        "/etc/nsswitch.conf",
        "passwd: files\ngroup: files\nhosts: files dns\n",
    ),
];

pub(crate) fn build(job: &mut Job<'_>) -> Result<Image> {
    let work = job.store.stage()?;
    let kernel = bundle::find_or_make(job, &KernelChoice::Cloud)?;
    let busybox = fetch(job, work.path())?;
    let applets = applets(job.tools, &busybox)?;
    let mut image = NewImage::begin(job.store)?;
    put_all(&mut image.builder, &nodes(&busybox, &applets))?;
    let spec = ImageSpec {
        arch: Arch::HOST,
        kernel: kernel.digest.clone(),
        init: Init::Agent,
        defaults: defaults(),
        disk_bytes: None,
    };
    image.publish(ROOM_BYTES, job, |_| spec)
}

/// Fetches the one program of the image.
fn fetch(job: &mut Job<'_>, work: &Path) -> Result<PathBuf> {
    job.begin(Stage::Resolve)?;
    let debs = work.join("debs");
    create_dir(&debs)?;
    apt::download(job, &[BUSYBOX], &debs)?;
    job.begin(Stage::Unpack)?;
    let unpacked = work.join("busybox");
    apt::unpack(job.tools, BUSYBOX, &debs, &unpacked)?;
    let merged = unpacked.join("usr/bin/busybox");
    Ok(if merged.is_file() {
        merged
    } else {
        unpacked.join("bin/busybox")
    })
}

/// The paths of busybox's applets, as the program itself lists them: `bin/sh`, `usr/bin/env` …
fn applets(tools: HostTools<'_>, busybox: &Path) -> Result<Vec<String>> {
    let output = tools
        .command(busybox)
        .arg("--list-full")
        .output()
        .map_err(io_error("run", busybox))?;
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    let wanted = |line: &&str| {
        line.contains('/') && *line != "bin/busybox" && !line.contains(char::is_whitespace)
    };
    let mut applets: Vec<_> = listed.lines().filter(wanted).map(str::to_owned).collect();
    applets.sort();
    if applets.is_empty() {
        return Err(Error::Incomplete {
            package: BUSYBOX.to_owned(),
            what: "applets",
        });
    }
    Ok(applets)
}

fn nodes(busybox: &Path, applets: &[String]) -> Vec<Node> {
    let dir = |path: &str, mode, owner| Node {
        path: path.to_owned(),
        mode,
        owner,
        content: Content::Dir,
    };
    let mut nodes: Vec<_> = DIRS
        .split_whitespace()
        .map(|path| dir(path, 0o755, 0))
        .collect();
    nodes.extend([dir("/root", 0o700, 0), dir("/home/user", 0o755, 1000)]);
    nodes.extend([dir("/tmp", 0o1777, 0), dir("/var/tmp", 0o1777, 0)]);
    nodes.extend(
        FILES
            .iter()
            .map(|(path, text)| file(path, 0o644, Content::Text((*text).to_owned()))),
    );
    nodes.push(file(
        "/etc/shadow",
        0o600,
        Content::Text("root:*:::::::\nuser:*:::::::\n".to_owned()),
    ));
    nodes.push(file(
        "/bin/busybox",
        0o755,
        Content::HostFile(busybox.to_owned()),
    ));
    nodes.extend(
        applets
            .iter()
            .map(|applet| link(&format!("/{applet}"), "/bin/busybox")),
    );
    nodes.extend([link("/var/run", "/run"), link("/etc/mtab", "/proc/mounts")]);
    nodes
}

fn file(path: &str, mode: u16, content: Content) -> Node {
    Node {
        path: path.to_owned(),
        mode,
        owner: 0,
        content,
    }
}

fn link(path: &str, target: &str) -> Node {
    Node {
        path: path.to_owned(),
        mode: 0o777,
        owner: 0,
        content: Content::Symlink(target.to_owned()),
    }
}

fn defaults() -> ExecDefaults {
    ExecDefaults {
        env: BTreeMap::from([("PATH".to_owned(), PATH.to_owned())]),
        user: Some("root".to_owned()),
        cmd: vec!["/bin/sh".to_owned()],
        ..ExecDefaults::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_come_before_their_entries() {
        let applets = ["bin/sh", "sbin/init", "usr/bin/env", "usr/sbin/chroot"].map(str::to_owned);
        let nodes = nodes(Path::new("/busybox"), &applets);
        let mut seen = vec![Path::new("/")];
        for node in &nodes {
            let path = Path::new(&node.path);
            assert!(
                seen.contains(&path.parent().unwrap()),
                "{} before its parent",
                node.path
            );
            assert!(!seen.contains(&path), "{} twice", node.path);
            seen.push(path);
        }
    }
}
