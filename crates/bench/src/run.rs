//! A run of benchmarks: when and where it was measured, by which versions, and its figures.
//!
//! Always: the document names no host and no user.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use sandtree::{Error, Host, QemuReport, Result};
use serde::Serialize;

use crate::config::{Global, arguments};
use crate::failure::Measured;
use crate::figure::Figure;
use crate::host_load::{Busy, Load};
use crate::show;
use crate::tool;

/// The JSON document of a run.
#[derive(Debug, Serialize)]
struct Document<'a> {
    command: String,
    /// Seconds since 1970.
    measured_at: u64,
    machine: Machine,
    versions: Versions,
    /// `kvm` or `tcg`.
    accelerator: Option<String>,
    busy: Busy,
    figures: &'a [Figure],
    left_out: &'a [String],
}

#[derive(Debug, Serialize)]
struct Machine {
    processor: String,
    processors: usize,
    memory_bytes: u64,
    kernel: String,
    /// Of the store.
    file_system: String,
}

#[derive(Debug, Serialize)]
struct Versions {
    sandtree: &'static str,
    /// Of the checkout that contains this program.
    commit: String,
    qemu: String,
}

/// Begins before the first measurement.
pub struct Run {
    load: Load,
    started: SystemTime,
}

impl Run {
    pub fn begin() -> Result<Self> {
        Ok(Self {
            load: Load::now()?,
            started: SystemTime::now(),
        })
    }

    /// Prints the table, writes the JSON where it is asked for, and warns of a busy machine.
    pub async fn report(self, global: &Global, measured: &Measured) -> Result<()> {
        let busy = self.load.until_now()?;
        let document = Document {
            command: format!("sandtree-bench {}", arguments().join(" ")),
            measured_at: self
                .started
                .duration_since(UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs(),
            machine: Machine::here(global)?,
            versions: Versions::here(global)?,
            accelerator: accelerator(global).await?,
            busy,
            figures: &measured.figures,
            left_out: &measured.left_out,
        };
        let json = serde_json::to_string_pretty(&document).expect("figures are always JSON");
        match &global.json {
            Some(path) if path == Path::new("-") => println!("{json}"),
            other => {
                document.show();
                if let Some(path) = other {
                    std::fs::write(path, json + "\n").map_err(|e| Error::io("write", path, e))?;
                }
            }
        }
        show::notes(&measured.left_out);
        show::notes(&document.busy.warnings);
        Ok(())
    }
}

impl Document<'_> {
    fn show(&self) {
        let machine = &self.machine;
        println!(
            "{} x {}, {:.0} GB, {}, {}",
            machine.processors,
            machine.processor,
            machine.memory_bytes as f64 / 1e9,
            machine.kernel,
            machine.file_system,
        );
        let versions = &self.versions;
        println!(
            "sandtree {} ({}), {}",
            versions.sandtree, versions.commit, versions.qemu
        );
        Figure::show(self.figures);
    }
}

impl Machine {
    fn here(global: &Global) -> Result<Self> {
        let processors = std::thread::available_parallelism();
        let processors = processors.map_err(|e| Error::io("count", "processors", e))?;
        let memory = field("/proc/meminfo", "MemTotal")?;
        let kilobytes = memory
            .split_whitespace()
            .next()
            .and_then(|n| n.parse().ok());
        let home = global.config()?.home;
        Ok(Self {
            processor: field("/proc/cpuinfo", "model name")?,
            processors: processors.get(),
            memory_bytes: kilobytes.unwrap_or(0u64) * 1024,
            kernel: format!("Linux {}", read("/proc/sys/kernel/osrelease")?.trim()),
            file_system: file_system(&read("/proc/self/mounts")?, &home),
        })
    }
}

impl Versions {
    fn here(global: &Global) -> Result<Self> {
        let config = global.config()?;
        let qemu = config.qemu.or_else(|| tool::find("qemu-system-x86_64"));
        let qemu = qemu.map_or_else(|| Ok("no QEMU".into()), |qemu| tool::version(&qemu))?;
        Ok(Self {
            sandtree: env!("CARGO_PKG_VERSION"),
            commit: tool::commit(),
            qemu,
        })
    }
}

async fn accelerator(global: &Global) -> Result<Option<String>> {
    let host = Host::open(global.config()?).await?;
    match host.doctor().await.qemu {
        QemuReport::Found(qemu) => Ok(Some(qemu.accelerator)),
        QemuReport::Missing { .. } => Ok(None),
    }
}

fn read(path: &str) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))
}

/// The first line `name : value` of a file.
fn field(path: &str, name: &str) -> Result<String> {
    let text = read(path)?;
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let mut values = lines.filter(|(key, _)| key.trim() == name);
    let value = values.next().map(|(_, value)| value.trim().to_owned());
    Ok(value.unwrap_or_else(|| "unknown".into()))
}

/// The type of the file system with the longest mount point above `path`.
fn file_system(mounts: &str, path: &Path) -> String {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        Some((words.next()?, words.next()?))
    });
    mounts
        .filter(|(point, _)| path.starts_with(point))
        .max_by_key(|(point, _)| point.len())
        .map_or_else(|| "unknown".into(), |(_, kind)| kind.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_system_is_that_of_the_nearest_mount() {
        let mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/b /tmp/x xfs rw 0 0\n";
        let kind = |path: &str| file_system(mounts, Path::new(path));
        assert_eq!(kind("/home/a"), "ext4");
        assert_eq!(kind("/tmp/a"), "tmpfs");
        assert_eq!(kind("/tmp/x/a"), "xfs");
        assert_eq!(kind("/tmp/xy"), "tmpfs");
    }
}
