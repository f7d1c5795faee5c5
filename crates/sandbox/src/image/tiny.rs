//! The image `tiny`: Debian's cloud kernel and static busybox.
//!
//! | path | what |
//! |---|---|
//! | `/bin/busybox` | the only program; every applet is a link to it |
//! | `/etc` | users root, daemon, nobody and user (1000); an inittab that starts nothing by itself |
//! | `/home/user` | belongs to user |
//! | everything else | belongs to root |

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use sandtree_store::{ExecDefaults, Image, ImageSpec, Init, Store};

use super::bundle::{self, KernelChoice};
use super::making::{Content, Making, Node, put_all};
use super::{Error, PATH, Progress, Stage, Watch, apt, create_dir, io_error};
use crate::spec::host_arch;

const BUSYBOX: &str = "busybox-static";
/// Beside what is in it. Sparse, and grown by the guest to the size of its disk.
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
    // Without this file busybox init would open shells on the console. At its end it leaves the
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

pub(super) fn build(store: &Store, watch: &mut Watch<'_>) -> Result<Image, Error> {
    let work = store.stage()?;
    let kernel = bundle::find_or_make(store, &KernelChoice::Cloud, watch)?;
    let busybox = fetch(work.path(), watch)?;
    let mut making = Making::begin(store)?;
    put_all(&mut making.builder, &nodes(&busybox, &applets(&busybox)?))?;
    let (arch, init, kernel) = (host_arch(), Init::Agent, kernel.digest.clone());
    let spec = ImageSpec {
        arch,
        kernel,
        init,
        defaults: defaults(),
        disk_bytes: None,
    };
    making.publish(ROOM_BYTES, watch, |_| spec)
}

/// The one program of the image.
fn fetch(work: &Path, watch: &mut Watch<'_>) -> Result<PathBuf, Error> {
    watch(Progress::begin(Stage::Resolve))?;
    let (debs, unpacked) = (work.join("debs"), work.join("busybox"));
    create_dir(&debs)?;
    apt::download(&[BUSYBOX], &debs, watch)?;
    watch(Progress::begin(Stage::Unpack))?;
    apt::unpack(BUSYBOX, &debs, &unpacked)?;
    let merged = unpacked.join("usr/bin/busybox");
    Ok(if merged.is_file() {
        merged
    } else {
        unpacked.join("bin/busybox")
    })
}

/// Where busybox wants to be found, as it says itself: `bin/sh`, `usr/bin/env` …
fn applets(busybox: &Path) -> Result<Vec<String>, Error> {
    // starts: our own program (unpacked from its package)
    let output = Command::new(busybox)
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
        workdir: None,
        entrypoint: Vec::new(),
        cmd: vec!["/bin/sh".to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_come_before_what_is_in_them() {
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
