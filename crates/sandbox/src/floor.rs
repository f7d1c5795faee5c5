//! The floor that benchmarks stand on: the same QEMU, kernel and initramfs as a sandbox, with no
//! agent in them.
//!
//! `sandtree-agent`'s module of the same name is the other end.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sandtree_engine::{Engine, Machine, MachineSpec, Memory, Preload, Start};
use sandtree_store::Digest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::boot::{KERNEL_OPTIONS, Shape, machine_record, machine_spec};
use crate::capture::{blocking, engine_error};
use crate::error::{Error, Result};
use crate::host::{Host, Inner, store_error};

pub use crate::registry::fetch_layers;

const CHUNK: usize = 64 * 1024;
/// What `stat` counts in, whatever the file system does.
const STAT_BLOCK: u64 = 512;

/// Fills a store with snapshots that are all like one of another store but for a label. They can be
/// listed, and nothing else; nothing is synced.
pub async fn fill_with_snapshots(from: &Host, like: &str, into: &Host, count: usize) -> Result<()> {
    let mut manifest = from.inspect_snapshot(like).await?.manifest;
    let root = into.inner.store.root().to_owned();
    blocking(move || {
        for number in 0..count {
            manifest.labels.insert("number".into(), number.to_string());
            let bytes = manifest.to_bytes();
            let digest = Digest::of(&bytes);
            let dir = root.join("snapshots").join(digest.as_str());
            std::fs::create_dir(&dir).map_err(|e| Error::io("make directory", &dir, e))?;
            let name = root.join("names/images").join(format!("snapshot-{number}"));
            for (path, content) in [
                (dir.join("manifest.json"), bytes),
                (name, format!("snapshot {digest}\n").into()),
            ] {
                std::fs::write(&path, content).map_err(|e| Error::io("write", &path, e))?;
            }
        }
        Ok(())
    })
    .await
}

/// Gives a store on the same file system what images boot from, and some images by their names, so
/// that a benchmark fetches nothing for a store of its own. Files are shared: neither store ever
/// changes them.
pub async fn lend(from: &Host, into: &Host, images: &[&str]) -> Result<()> {
    let (from_root, into_root) = (
        from.inner.store.root().to_owned(),
        into.inner.store.root().to_owned(),
    );
    let mut shared = vec![
        "kernels".to_owned(),
        "initramfs".to_owned(),
        "cache".to_owned(),
    ];
    for name in images {
        shared.push(format!("images/{}", from.inspect_image(name)?.digest));
        shared.push(format!("names/images/{name}"));
    }
    blocking(move || {
        shared
            .iter()
            .try_for_each(|path| share(&from_root.join(path), &into_root.join(path)))
    })
    .await
}

/// Links every file of a tree, or a file. What is not here is not needed, and what is there is the
/// same.
fn share(from: &Path, to: &Path) -> Result<()> {
    let dir = if from.is_dir() { Some(to) } else { to.parent() };
    dir.map_or(Ok(()), std::fs::create_dir_all)
        .map_err(|e| Error::io("make directory", to, e))?;
    if !from.is_dir() {
        return match std::fs::hard_link(from, to) {
            Err(error) if from.exists() && error.kind() != ErrorKind::AlreadyExists => {
                Err(Error::io("link", to, error))
            }
            _ => Ok(()),
        };
    }
    for entry in from.read_dir().map_err(|e| Error::io("list", from, e))? {
        let name = entry.map_err(|e| Error::io("list", from, e))?.file_name();
        share(&from.join(&name), &to.join(&name))?;
    }
    Ok(())
}

/// A guest that does nothing but answer.
#[derive(Debug)]
pub struct Floor {
    _machine: Machine,
    port: UnixStream,
    console: tokio::task::JoinHandle<()>,
    /// From starting QEMU to the guest's first byte.
    pub boot: Duration,
}

impl Floor {
    /// Boots a machine shaped like that of a stopped sandbox.
    pub async fn boot(host: &Host, sandbox: &str) -> Result<Floor> {
        Self::boot_on(host.inner.clone(), sandbox).await
    }

    async fn boot_on(host: Arc<Inner>, sandbox: &str) -> Result<Floor> {
        let engine = host.engine().await?;
        let mut spec = bare_spec(&host, engine, sandbox).await?;
        spec.cmdline = format!("{KERNEL_OPTIONS} sandtree.init=floor");
        let failed = engine_error("start");
        let began = Instant::now();
        let mut machine = engine.start(spec).await.map_err(failed)?;
        let mut port = machine.take_link().expect("a fresh machine has its link");
        let mut console = machine
            .take_console()
            .expect("a fresh machine has its console");
        let console = tokio::spawn(async move {
            drop(tokio::io::copy(&mut console, &mut tokio::io::sink()).await)
        });
        expect(&mut port).await?;
        Ok(Floor {
            _machine: machine,
            port,
            console,
            boot: began.elapsed(),
        })
    }

    /// One byte there and one back.
    pub async fn ping(&mut self) -> Result<()> {
        self.order(b'p', 0).await?;
        expect(&mut self.port).await
    }

    /// `count` bytes out of the guest.
    pub async fn read(&mut self, count: u64) -> Result<()> {
        self.order(b'o', count).await?;
        let mut buffer = vec![0; 4 * CHUNK];
        let mut left = count;
        while left > 0 {
            let read = self.port.read(&mut buffer).await.map_err(broken)?;
            if read == 0 {
                return Err(broken(std::io::ErrorKind::UnexpectedEof.into()));
            }
            left = left.saturating_sub(read as u64);
        }
        Ok(())
    }

    /// `count` bytes into the guest.
    pub async fn write(&mut self, count: u64) -> Result<()> {
        self.order(b'i', count).await?;
        let zeros = vec![0; CHUNK];
        let mut left = count;
        while left > 0 {
            let chunk = left.min(CHUNK as u64) as usize;
            self.port.write_all(&zeros[..chunk]).await.map_err(broken)?;
            left -= chunk as u64;
        }
        expect(&mut self.port).await
    }

    /// Starts `count` processes at once and waits for them.
    pub async fn start_processes(&mut self, count: u64) -> Result<()> {
        self.order(b'x', count).await?;
        expect(&mut self.port).await
    }

    async fn order(&mut self, what: u8, count: u64) -> Result<()> {
        let mut order = vec![what];
        order.extend(count.to_le_bytes());
        self.port.write_all(&order).await.map_err(broken)
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        self.console.abort();
    }
}

/// How long QEMU takes to run a machine shaped like that of a sandbox without one, with nothing
/// loaded into it: from starting it to the answer to `cont`.
pub async fn bare_start(host: &Host, sandbox: &str) -> Result<Duration> {
    let host = &host.inner;
    let engine = host.engine().await?;
    let mut spec = bare_spec(host, engine, sandbox).await?;
    // As a restored one it stands still at first.
    spec.extra_args.push("-S".into());
    let began = Instant::now();
    let machine = engine.start(spec).await.map_err(engine_error("start"))?;
    machine.cont().await.map_err(engine_error("go on"))?;
    let took = began.elapsed();
    machine.kill().await;
    Ok(took)
}

/// The machine of a sandbox that has none now, without anything of ours in it.
async fn bare_spec(host: &Inner, engine: &Engine, sandbox: &str) -> Result<MachineSpec> {
    let (dir, _) = host.settled(sandbox)?;
    let accel = engine
        .accel(Default::default())
        .map_err(engine_error("be used"))?;
    let disk = dir
        .head()
        .map_err(store_error("read where a sandbox stands"))?
        .disk;
    let machine = &machine_record(host, dir.record(), accel).await?;
    let shape = Shape {
        memory: Memory::Empty,
        preload: Preload::Skip,
        start: Start::Run,
        disk: &disk,
        machine,
    };
    machine_spec(host, &dir, accel, shape)
}

/// What a sandbox takes on the disk, layers that it shares with others included.
pub fn disk_usage(host: &Host, sandbox: &str) -> Result<u64> {
    let dir = host.inner.find(sandbox)?;
    let mut seen = HashSet::new();
    let mut open = vec![dir.path().to_owned()];
    let mut bytes = 0;
    while let Some(path) = open.pop() {
        for entry in path.read_dir().map_err(|e| Error::io("list", &path, e))? {
            let entry = entry.map_err(|e| Error::io("list", &path, e))?;
            let status = entry
                .metadata()
                .map_err(|e| Error::io("look at", entry.path(), e))?;
            if status.is_dir() {
                open.push(entry.path());
            }
            if seen.insert(status.ino()) {
                bytes += status.blocks() * STAT_BLOCK;
            }
        }
    }
    Ok(bytes)
}

async fn expect(port: &mut UnixStream) -> Result<()> {
    port.read_exact(&mut [0]).await.map(drop).map_err(broken)
}

fn broken(source: std::io::Error) -> Error {
    Error::io("measure on", "the port of a bare guest", source)
}
