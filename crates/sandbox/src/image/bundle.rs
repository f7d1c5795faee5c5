//! Kernel bundles: a kernel, the modules a guest needs to find its disk, and what a user adds.
//!
//! One bundle serves all images of a kind. It is made from the host's own packages at its first
//! use, and then found, so that images are made without a network.

use std::path::{Path, PathBuf};

use sandtree_store::{Digest, KernelBundle, KernelSpec, Name, Store};
use serde::{Deserialize, Serialize};

use super::{
    Error, Progress, Stage, Watch, apt, create_dir, io_error, kernel, modules, read, write,
};
use crate::note;
use crate::spec::host_arch;

/// Counts up when bundles are made differently.
const RECIPE: u32 = 1;
/// Far above any initial file system, far below what would hurt.
const MAX_INITRAMFS_BYTES: u64 = 1 << 30;

/// The kernel of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum KernelChoice {
    /// Debian's for virtual machines: small, and with all that a guest without a screen needs.
    #[default]
    Cloud,
    /// Debian's for every machine, with graphics.
    Full,
    Own(OwnKernel),
}

/// A kernel of the user's own. It has to know ext4, virtio disks and virtio consoles, by itself or
/// by its modules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnKernel {
    /// A bzImage, or a vmlinux with a PVH entry.
    pub kernel: PathBuf,
    /// A cpio archive that is unpacked before ours.
    pub initramfs: Option<PathBuf>,
    /// The directory `lib/modules/RELEASE`, if what a guest needs is not built in.
    pub modules: Option<PathBuf>,
}

impl KernelChoice {
    /// The meta package that stands for the newest kernel of its kind.
    fn package(&self) -> Option<&'static str> {
        match self {
            Self::Cloud => Some("linux-image-6.12-cloud-amd64"),
            Self::Full => Some("linux-image-6.12-amd64"),
            Self::Own(_) => None,
        }
    }
}

/// The bundle that was asked for: found, or made.
pub(super) fn find_or_make(
    store: &Store,
    choice: &KernelChoice,
    watch: &mut Watch<'_>,
) -> Result<KernelBundle, Error> {
    match choice {
        KernelChoice::Own(own) => publish_own(store, own),
        packaged => match find(store, packaged) {
            Some(bundle) => Ok(bundle),
            None => from_package(store, packaged, watch),
        },
    }
}

fn find(store: &Store, choice: &KernelChoice) -> Option<KernelBundle> {
    let digest: Digest = store.cached(&key(choice)).ok()??;
    store.pin_kernel(&digest).ok()
}

fn key(choice: &KernelChoice) -> Name {
    let kind = if *choice == KernelChoice::Full {
        "full"
    } else {
        "cloud"
    };
    format!("kernel-{kind}-{RECIPE}")
        .parse()
        .expect("it is a name")
}

fn from_package(
    store: &Store,
    choice: &KernelChoice,
    watch: &mut Watch<'_>,
) -> Result<KernelBundle, Error> {
    let work = store.stage()?;
    watch(Progress::begin(Stage::Resolve))?;
    let package = apt::dependency(choice.package().unwrap_or_default())?;
    let (debs, unpacked) = (work.path().join("debs"), work.path().join("kernel"));
    create_dir(&debs)?;
    apt::download(&[&package], &debs, watch)?;
    watch(Progress::begin(Stage::Unpack))?;
    apt::unpack(&package, &debs, &unpacked)?;
    watch(Progress::begin(Stage::Kernel))?;
    let bundle = publish_package(store, &unpacked, choice)?;
    note::keep(
        store,
        &key(choice),
        &bundle.digest,
        "the kernel cannot be noted; it is fetched again next time",
    );
    Ok(bundle)
}

fn publish_package(
    store: &Store,
    package: &Path,
    choice: &KernelChoice,
) -> Result<KernelBundle, Error> {
    let release = release(package)?;
    let bzimage = read(&package.join("boot").join(format!("vmlinuz-{release}")))?;
    let wanted = match choice {
        KernelChoice::Full => modules::FULL,
        _ => modules::NEEDED,
    };
    let modules = modules::collect(&modules_dir(package).join(&release), wanted)?;
    publish(
        store,
        Parts {
            kernel: bzimage,
            release,
            modules,
            initramfs: None,
        },
    )
}

fn publish_own(store: &Store, own: &OwnKernel) -> Result<KernelBundle, Error> {
    let kernel = read(&own.kernel)?;
    if !kernel::is_kernel(&kernel) {
        let what = own.kernel.display().to_string();
        return Err(Error::Malformed {
            what,
            why: "neither a bzImage nor a vmlinux with a PVH entry",
        });
    }
    let modules = own
        .modules
        .as_deref()
        .map(|dir| modules::collect(dir, modules::LEAST))
        .transpose()?;
    let initramfs = own.initramfs.as_deref().map(read_initramfs).transpose()?;
    publish(
        store,
        Parts {
            kernel,
            release: "own".to_owned(),
            modules: modules.unwrap_or_default(),
            initramfs,
        },
    )
}

fn read_initramfs(path: &Path) -> Result<Vec<u8>, Error> {
    let bytes = std::fs::metadata(path)
        .map_err(io_error("look at", path))?
        .len();
    if bytes > MAX_INITRAMFS_BYTES {
        return Err(Error::Malformed {
            what: path.display().to_string(),
            why: "larger than 1 GiB",
        });
    }
    let mut content = read(path)?;
    // The kernel finds the next archive at a multiple of four.
    content.resize(content.len().next_multiple_of(4), 0);
    Ok(content)
}

struct Parts {
    kernel: Vec<u8>,
    release: String,
    modules: Vec<modules::Module>,
    initramfs: Option<Vec<u8>>,
}

fn publish(store: &Store, parts: Parts) -> Result<KernelBundle, Error> {
    let (format, kernel) = kernel::prepare(parts.kernel);
    let staged = store.stage()?;
    write(&staged.path().join("kernel"), &kernel)?;
    create_dir(&staged.path().join("modules"))?;
    for module in &parts.modules {
        write(
            &staged.path().join("modules").join(&module.file),
            &module.bytes,
        )?;
    }
    if let Some(initramfs) = &parts.initramfs {
        write(&staged.path().join("initramfs"), initramfs)?;
    }
    let modules = parts
        .modules
        .into_iter()
        .map(|module| module.file)
        .collect();
    let spec = KernelSpec {
        arch: host_arch(),
        release: parts.release,
        format,
        modules,
    };
    Ok(store.publish_kernel(staged, spec)?)
}

/// Debian 13 and later have everything below `/usr`.
fn modules_dir(package: &Path) -> PathBuf {
    let merged = package.join("usr/lib/modules");
    if merged.is_dir() {
        merged
    } else {
        package.join("lib/modules")
    }
}

/// The kernel's release is the name of its only modules directory.
fn release(package: &Path) -> Result<String, Error> {
    let dir = modules_dir(package);
    let mut entries = std::fs::read_dir(&dir).map_err(io_error("list", &dir))?;
    let first = entries
        .next()
        .and_then(|entry| entry.ok()?.file_name().into_string().ok());
    first.ok_or_else(|| Error::Incomplete {
        package: "linux-image".to_owned(),
        what: "kernel modules",
    })
}
