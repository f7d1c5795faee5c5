//! Kernel bundles: a kernel, the modules that a guest needs to find its disk, and the user's own
//! initramfs.
//!
//! One bundle serves all images with the same choice of kernel. It is made from the host's packages
//! at its first use and found in the store afterwards, so that later images need no network for it.

use std::path::{Path, PathBuf};

use sandtree_store::{Arch, Digest, Image, ImageSpec, KernelBundle, KernelSpec, Name, Store};

use crate::error::{Error, Result, io_error, store_error};
use crate::files::{create_dir, read, write};
use crate::job::{Job, Stage};
use crate::spec::{KernelChoice, OwnKernel};
use crate::{apt, kernel as boot, memo, modules};

/// Far above any initramfs, and far below the host's memory.
const MAX_INITRAMFS_BYTES: u64 = 1 << 30;

/// A kernel that Debian packages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packaged {
    Cloud,
    Full,
}

impl Packaged {
    /// The meta package that stands for the newest kernel of its kind.
    fn meta_package(self) -> &'static str {
        match self {
            Self::Cloud => "linux-image-6.12-cloud-amd64",
            Self::Full => "linux-image-6.12-amd64",
        }
    }

    fn modules(self) -> &'static [&'static str] {
        match self {
            Self::Cloud => modules::NEEDED,
            Self::Full => modules::FULL,
        }
    }

    /// The number changes when a bundle of this kind is made differently.
    fn memo_key(self) -> Name {
        let recipe = match self {
            Self::Cloud => "cloud-1",
            Self::Full => "full-2",
        };
        format!("kernel-{recipe}").parse().expect("it is a name")
    }
}

/// The bundle for a choice of kernel: found in the store, or made.
pub fn kernel(job: &mut Job<'_>, choice: &KernelChoice) -> Result<KernelBundle> {
    find_or_make(job, choice).map_err(|error| error.making("the kernel"))
}

/// The same image with a kernel of the user's own.
pub fn with_kernel(job: &mut Job<'_>, image: &Image, own: OwnKernel) -> Result<Image> {
    let kernel = kernel(job, &KernelChoice::Own(own))?;
    let record = image.record.clone();
    let spec = ImageSpec {
        arch: record.arch,
        kernel: kernel.digest.clone(),
        init: record.init,
        defaults: record.defaults,
        disk_bytes: record.disk_bytes,
    };
    let derived = job.store.derive_image(image, spec);
    derived.map_err(store_error("publish an image"))
}

pub(crate) fn find_or_make(job: &mut Job<'_>, choice: &KernelChoice) -> Result<KernelBundle> {
    let packaged = match choice {
        KernelChoice::Own(own) => return publish_own(job.store, own),
        KernelChoice::Cloud => Packaged::Cloud,
        KernelChoice::Full => Packaged::Full,
    };
    match find(job.store, packaged) {
        Some(bundle) => Ok(bundle),
        None => from_package(job, packaged),
    }
}

fn find(store: &Store, kernel: Packaged) -> Option<KernelBundle> {
    let digest: Digest = store.cached(&kernel.memo_key()).ok()??;
    store.pin_kernel(&digest).ok()
}

fn from_package(job: &mut Job<'_>, kernel: Packaged) -> Result<KernelBundle> {
    let work = job.store.stage()?;
    job.begin(Stage::Resolve)?;
    let package = apt::dependency(job.tools, kernel.meta_package())?;
    let debs = work.path().join("debs");
    create_dir(&debs)?;
    apt::download(job, &[&package], &debs)?;
    job.begin(Stage::Unpack)?;
    let unpacked = work.path().join("kernel");
    apt::unpack(job.tools, &package, &debs, &unpacked)?;
    job.begin(Stage::Kernel)?;
    let bundle = publish_package(job.store, &unpacked, kernel)?;
    memo::record(
        job.store,
        &kernel.memo_key(),
        &bundle.digest,
        "a kernel cannot be recorded; it will be fetched again next time",
    );
    Ok(bundle)
}

fn publish_package(store: &Store, package: &Path, kernel: Packaged) -> Result<KernelBundle> {
    let release = release(package)?;
    let bzimage = read(&package.join("boot").join(format!("vmlinuz-{release}")))?;
    let modules = modules::collect(&modules_dir(package).join(&release), kernel.modules())?;
    let parts = Parts {
        kernel: bzimage,
        release,
        modules,
        initramfs: None,
    };
    publish(store, parts)
}

fn publish_own(store: &Store, own: &OwnKernel) -> Result<KernelBundle> {
    let kernel = read(&own.kernel)?;
    if !boot::is_kernel(&kernel) {
        return Err(Error::Malformed {
            what: own.kernel.display().to_string(),
            why: "neither a bzImage nor a vmlinux with a PVH entry",
        });
    }
    let modules = own
        .modules
        .as_deref()
        .map(|dir| modules::collect(dir, modules::LEAST))
        .transpose()?;
    let initramfs = own.initramfs.as_deref().map(read_initramfs).transpose()?;
    let parts = Parts {
        kernel,
        release: "own".to_owned(),
        modules: modules.unwrap_or_default(),
        initramfs,
    };
    publish(store, parts)
}

fn read_initramfs(path: &Path) -> Result<Vec<u8>> {
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
    // The kernel looks for the next archive at a multiple of four bytes.
    content.resize(content.len().next_multiple_of(4), 0);
    Ok(content)
}

struct Parts {
    kernel: Vec<u8>,
    release: String,
    modules: Vec<modules::Module>,
    initramfs: Option<Vec<u8>>,
}

fn publish(store: &Store, parts: Parts) -> Result<KernelBundle> {
    let (format, kernel) = boot::prepare(parts.kernel);
    let staged = store.stage()?;
    write(&staged.path().join("kernel"), &kernel)?;
    let modules_dir = staged.path().join("modules");
    create_dir(&modules_dir)?;
    for module in &parts.modules {
        write(&modules_dir.join(&module.file), &module.bytes)?;
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
        arch: Arch::HOST,
        release: parts.release,
        format,
        modules,
    };
    Ok(store.publish_kernel(staged, spec)?)
}

/// From Debian 13 on, everything is below `/usr`.
fn modules_dir(package: &Path) -> PathBuf {
    let merged = package.join("usr/lib/modules");
    if merged.is_dir() {
        merged
    } else {
        package.join("lib/modules")
    }
}

/// The kernel's release is the name of its only modules directory.
fn release(package: &Path) -> Result<String> {
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
