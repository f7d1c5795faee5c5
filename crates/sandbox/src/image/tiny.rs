//! The image `tiny`: Debian's cloud kernel and static busybox.
//!
//! | path | what |
//! |---|---|
//! | `/bin/busybox` | the only program; every applet is a link to it |
//! | `/etc` | users root, daemon, nobody and user (1000); an inittab that starts nothing by itself |
//! | `/home/user` | belongs to user |
//! | everything else | belongs to root |

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sandtree_store::{Arch, ExecDefaults, ImageSpec, Init, KernelBundle, KernelSpec, Store};

use super::ext4::{self, Content, Node};
use super::{Error, ImageRef, Progress, Stage, Watch, apt, create_dir, io_error, kernel, modules, read, write};

const NAME: &str = "tiny";
/// Stands for the newest 6.12 cloud kernel of the host's release.
const KERNEL_META: &str = "linux-image-6.12-cloud-amd64";
const BUSYBOX: &str = "busybox-static";
/// Sparse, and grown by the guest to the size of its disk.
const ROOTFS_BYTES: u64 = 64 << 20;
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

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
    ("/etc/group", "root:x:0:\ndaemon:x:1:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n"),
    ("/etc/hostname", "tiny\n"),
    ("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"),
    ("/etc/profile", "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\numask 022\n"),
    ("/etc/os-release", "NAME=\"Sandtree tiny\"\nID=sandtree-tiny\nPRETTY_NAME=\"Sandtree tiny\"\nVERSION_ID=1\n"),
    // Without this file busybox init would open shells on the console. At its end it leaves the root read-only, which
    // writes everything out and spares the next boot a recovery.
    ("/etc/inittab", "::sysinit:/bin/true\n::ctrlaltdel:/sbin/reboot\n::shutdown:/bin/umount -a -r\n"),
    ("/etc/shells", "/bin/sh\n/bin/ash\n"),
    ("/etc/resolv.conf", ""),
    ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
];

pub(super) fn build(store: &Store, progress: &mut Watch<'_>) -> Result<ImageRef, Error> {
    let work = store.stage()?;
    let packages = fetch(work.path(), progress)?;
    progress(Progress::begin(Stage::Kernel))?;
    let kernel = publish_kernel(store, &packages.kernel)?;
    progress(Progress::begin(Stage::Rootfs))?;
    let staged = store.stage()?;
    make_rootfs(&packages.busybox, &staged.path().join("rootfs.raw"), work.path())?;
    progress(Progress::begin(Stage::Publish))?;
    let spec = ImageSpec { arch: Arch::X86_64, kernel: kernel.digest.clone(), init: Init::Agent, defaults: defaults() };
    // Kernel and image are held until a name reaches them, lest they are collected meanwhile.
    let image = store.publish_image(staged, spec)?;
    let name = NAME.parse()?;
    store.set_image_name(&name, &image.digest)?;
    Ok(ImageRef { name, digest: image.digest.clone() })
}

/// Unpacked packages.
struct Packages {
    kernel: PathBuf,
    busybox: PathBuf,
}

fn fetch(work: &Path, progress: &mut Watch<'_>) -> Result<Packages, Error> {
    progress(Progress::begin(Stage::Resolve))?;
    let kernel_package = apt::dependency(KERNEL_META)?;
    let debs = work.join("debs");
    create_dir(&debs)?;
    apt::download(&[&kernel_package, BUSYBOX], &debs, progress)?;
    progress(Progress::begin(Stage::Unpack))?;
    let packages = Packages { kernel: work.join("kernel"), busybox: work.join("busybox") };
    apt::unpack(&kernel_package, &debs, &packages.kernel)?;
    apt::unpack(BUSYBOX, &debs, &packages.busybox)?;
    Ok(packages)
}

fn publish_kernel(store: &Store, package: &Path) -> Result<KernelBundle, Error> {
    let release = release(package)?;
    let bzimage = read(&package.join("boot").join(format!("vmlinuz-{release}")))?;
    let modules = modules::collect(&modules_dir(package).join(&release))?;
    let (format, kernel) = kernel::prepare(bzimage);
    let staged = store.stage()?;
    write(&staged.path().join("kernel"), &kernel)?;
    create_dir(&staged.path().join("modules"))?;
    for module in &modules {
        write(&staged.path().join("modules").join(&module.file), &module.bytes)?;
    }
    let modules = modules.into_iter().map(|module| module.file).collect();
    let spec = KernelSpec { arch: Arch::X86_64, release, format, modules };
    Ok(store.publish_kernel(staged, spec)?)
}

/// Debian 13 and later have everything below `/usr`.
fn modules_dir(package: &Path) -> PathBuf {
    let merged = package.join("usr/lib/modules");
    if merged.is_dir() { merged } else { package.join("lib/modules") }
}

/// The kernel's release is the name of its only modules directory.
fn release(package: &Path) -> Result<String, Error> {
    let dir = modules_dir(package);
    let mut entries = fs::read_dir(&dir).map_err(io_error("list", &dir))?;
    let first = entries.next().and_then(|entry| entry.ok()?.file_name().into_string().ok());
    first.ok_or_else(|| Error::Incomplete { package: KERNEL_META.to_owned(), what: "kernel modules" })
}

fn make_rootfs(package: &Path, image: &Path, work: &Path) -> Result<(), Error> {
    let merged = package.join("usr/bin/busybox");
    let busybox = if merged.is_file() { merged } else { package.join("bin/busybox") };
    let scratch = work.join("texts");
    create_dir(&scratch)?;
    ext4::make(image, ROOTFS_BYTES, &nodes(&busybox, &applets(&busybox)?), &scratch)
}

/// Where busybox wants to be found, as it says itself: `bin/sh`, `usr/bin/env` …
fn applets(busybox: &Path) -> Result<Vec<String>, Error> {
    let output = Command::new(busybox).arg("--list-full").output().map_err(io_error("run", busybox))?;
    let listed = String::from_utf8_lossy(&output.stdout).into_owned();
    let wanted = |line: &&str| line.contains('/') && *line != "bin/busybox" && !line.contains(char::is_whitespace);
    let mut applets: Vec<_> = listed.lines().filter(wanted).map(str::to_owned).collect();
    applets.sort();
    if applets.is_empty() {
        return Err(Error::Incomplete { package: BUSYBOX.to_owned(), what: "applets" });
    }
    Ok(applets)
}

fn nodes(busybox: &Path, applets: &[String]) -> Vec<Node> {
    let dir = |path: &str, mode, owner| Node { path: path.to_owned(), mode, owner, content: Content::Dir };
    let mut nodes: Vec<_> = DIRS.split_whitespace().map(|path| dir(path, 0o755, 0)).collect();
    nodes.extend([dir("/root", 0o700, 0), dir("/home/user", 0o755, 1000)]);
    nodes.extend([dir("/tmp", 0o1777, 0), dir("/var/tmp", 0o1777, 0)]);
    nodes.extend(FILES.iter().map(|(path, text)| file(path, 0o644, Content::Text((*text).to_owned()))));
    nodes.push(file("/etc/shadow", 0o600, Content::Text("root:*:::::::\nuser:*:::::::\n".to_owned())));
    nodes.push(file("/bin/busybox", 0o755, Content::HostFile(busybox.to_owned())));
    nodes.extend(applets.iter().map(|applet| link(&format!("/{applet}"), "/bin/busybox")));
    nodes.extend([link("/var/run", "/run"), link("/etc/mtab", "/proc/mounts")]);
    nodes
}

fn file(path: &str, mode: u32, content: Content) -> Node {
    Node { path: path.to_owned(), mode, owner: 0, content }
}

fn link(path: &str, target: &str) -> Node {
    Node { path: path.to_owned(), mode: 0o777, owner: 0, content: Content::Symlink(target.to_owned()) }
}

fn defaults() -> ExecDefaults {
    ExecDefaults {
        env: BTreeMap::from([("PATH".to_owned(), PATH.to_owned())]),
        user: Some("root".to_owned()),
        workdir: Some("/root".to_owned()),
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
            assert!(seen.contains(&path.parent().unwrap()), "{} before its parent", node.path);
            assert!(!seen.contains(&path), "{} twice", node.path);
            seen.push(path);
        }
    }
}
