//! Kernel modules: which ones a guest needs before it has a disk, and in what order they load.
//!
//! The package has no dependency table, so we read the list in each module. A module that is built
//! into the kernel is skipped; a module that is neither built in nor in the package is an error.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::elf::Elf;
use crate::error::{Error, Result, io_error};
use crate::files::read;

/// For Debian's cloud kernel: disk, network, entropy, the report of a panic, and overlayfs.
pub(crate) const NEEDED: &[&str] = &[
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "pvpanic_pci",
    "overlay",
];
/// For Debian's full kernel, which has less built in and may have a screen. Programs read keyboard
/// and pointer by `evdev`, and can add such devices by `uinput`.
pub(crate) const FULL: &[&str] = &[
    "crc32c_generic",
    "ext4",
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "pvpanic_pci",
    "overlay",
    "virtio_gpu",
    "virtio_input",
    "evdev",
    "uinput",
];
/// For a kernel of the user's own: the modules that no guest can do without.
pub(crate) const LEAST: &[&str] = &[
    "ext4",
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "virtio_net",
];
const MAX_MODULE_BYTES: u64 = 64 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Module {
    /// File name without compression: `virtio_blk.ko`.
    pub file: String,
    pub bytes: Vec<u8>,
}

/// The wanted modules of an unpacked kernel package's `lib/modules/<release>`, each after those it
/// depends on.
pub(crate) fn collect(dir: &Path, wanted: &[&str]) -> Result<Vec<Module>> {
    let builtin = read(&dir.join("modules.builtin"))?;
    let builtin = String::from_utf8_lossy(&builtin)
        .lines()
        .map(|line| name_of(Path::new(line)))
        .collect();
    let mut paths = BTreeMap::new();
    find(dir, &mut paths)?;
    let mut order = Order {
        builtin,
        paths,
        seen: BTreeSet::new(),
        modules: Vec::new(),
    };
    wanted
        .iter()
        .try_for_each(|module| order.add(module, "the guest"))?;
    Ok(order.modules)
}

struct Order {
    builtin: BTreeSet<String>,
    paths: BTreeMap<String, PathBuf>,
    seen: BTreeSet<String>,
    modules: Vec<Module>,
}

impl Order {
    fn add(&mut self, name: &str, needed_by: &str) -> Result<()> {
        if self.builtin.contains(name) || !self.seen.insert(name.to_owned()) {
            return Ok(());
        }
        let missing = || Error::ModuleMissing {
            module: name.to_owned(),
            needed_by: needed_by.to_owned(),
        };
        let path = self.paths.get(name).ok_or_else(missing)?.clone();
        let bytes = unpack(&path)?;
        for dependency in
            dependencies(&bytes).ok_or_else(|| malformed(&path, "it has no .modinfo"))?
        {
            self.add(&dependency, name)?;
        }
        self.modules.push(Module {
            file: file_name(&path),
            bytes,
        });
        Ok(())
    }
}

/// Every module below `dir` by its name.
fn find(dir: &Path, found: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(io_error("list", dir))? {
        let path = entry.map_err(io_error("list", dir))?.path();
        if path.is_dir() {
            find(&path, found)?;
        } else if file_name(&path).ends_with(".ko") {
            found.insert(name_of(&path), path);
        }
    }
    Ok(())
}

/// The kernel's name of a module: the file name without suffixes, and with `_` for `-`.
fn name_of(path: &Path) -> String {
    file_name(path).trim_end_matches(".ko").replace('-', "_")
}

/// The file name without its compression suffix.
fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.strip_suffix(".xz").unwrap_or(&name).to_owned()
}

fn unpack(path: &Path) -> Result<Vec<u8>> {
    let packed = read(path)?;
    if path.extension().is_none_or(|extension| extension != "xz") {
        return Ok(packed);
    }
    let mut bytes = Vec::new();
    let decoder = liblzma::read::XzDecoder::new(&packed[..]);
    decoder
        .take(MAX_MODULE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(io_error("unpack", path))?;
    if bytes.len() as u64 > MAX_MODULE_BYTES {
        return Err(malformed(path, "it is far larger than any module"));
    }
    Ok(bytes)
}

fn malformed(path: &Path, why: &'static str) -> Error {
    Error::Malformed {
        what: format!("kernel module {}", path.display()),
        why,
    }
}

fn dependencies(module: &[u8]) -> Option<Vec<String>> {
    let info = Elf::parse(module)?.section(".modinfo")?;
    let fields = info
        .split(|byte| *byte == 0)
        .filter_map(|field| std::str::from_utf8(field).ok());
    let lists = fields.filter_map(|field| field.strip_prefix("depends="));
    Some(
        lists
            .flat_map(|list| list.split(','))
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest ELF file with a `.modinfo`.
    fn module(info: &str) -> Vec<u8> {
        let names = b"\0.modinfo\0";
        let mut bytes = vec![0; 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let names_at = 64;
        let info_at = names_at + names.len();
        let table_at = info_at + info.len();
        bytes[40..48].copy_from_slice(&(table_at as u64).to_le_bytes());
        bytes[60] = 2;
        bytes[62] = 0;
        bytes.extend_from_slice(names);
        bytes.extend_from_slice(info.as_bytes());
        for (name, at, len) in [(0u32, names_at, names.len()), (1, info_at, info.len())] {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[24..32].copy_from_slice(&(at as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(len as u64).to_le_bytes());
            bytes.extend_from_slice(&header);
        }
        bytes
    }

    fn package(modules: &[(&str, &str)], builtin: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("kernel/drivers");
        fs::create_dir_all(&kernel).unwrap();
        fs::write(dir.path().join("modules.builtin"), builtin).unwrap();
        for (file, depends) in modules {
            fs::write(
                kernel.join(file),
                module(&format!("license=GPL\0depends={depends}\0")),
            )
            .unwrap();
        }
        dir
    }

    #[test]
    fn dependencies_load_first_and_built_in_modules_are_skipped() {
        let modules = [
            ("virtio_blk.ko", ""),
            ("virtio_net.ko", "net_failover,virtio"),
            ("net_failover.ko", "failover"),
            ("failover.ko", ""),
            ("virtio-rng.ko", ""),
            ("pvpanic-pci.ko", "pvpanic"),
            ("pvpanic.ko", ""),
        ];
        let dir = package(
            &modules,
            "kernel/fs/overlayfs/overlay.ko\nkernel/drivers/virtio/virtio.ko\n",
        );
        let files: Vec<_> = collect(dir.path(), NEEDED)
            .unwrap()
            .into_iter()
            .map(|module| module.file)
            .collect();
        let expected = [
            "virtio_blk.ko",
            "failover.ko",
            "net_failover.ko",
            "virtio_net.ko",
            "virtio-rng.ko",
        ];
        assert_eq!(files[..5], expected);
        assert_eq!(files[5..], ["pvpanic.ko", "pvpanic-pci.ko"]);
    }

    #[test]
    fn a_missing_dependency_is_named() {
        let dir = package(&[("virtio_blk.ko", "gone")], "");
        let error = collect(dir.path(), NEEDED).unwrap_err();
        assert_eq!(
            error.to_string(),
            "kernel module gone, needed by virtio_blk, is not in the kernel package"
        );
    }
}
