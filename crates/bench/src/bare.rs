//! Bare machines: the same QEMU, kernel and initramfs as a sandbox, without the agent.
//!
//! `crates/bench-guest` is the program in the guest. It is added to the sandbox's initramfs, and
//! the kernel starts it in place of the agent:
//!
//! ```text
//! initramfs of the sandbox | cpio: "bench-init", TRAILER!!!      kernel: … rdinit=/bench-init
//! ```

use std::fs::{File, Permissions};
use std::io::{self, Read, Seek};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use sandtree::bench::bare_machine;
use sandtree::{Error, Host, Result};
use sandtree_engine::{self as engine, Machine};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::scratch::Scratch;

const INIT: &[u8] = include_bytes!(env!("SANDTREE_BENCH_GUEST"));
const INIT_NAME: &str = "bench-init";
const CHUNK: usize = 64 * 1024;

/// A guest that only answers.
#[derive(Debug)]
pub struct BareGuest {
    _machine: Machine,
    port: UnixStream,
    console: tokio::task::JoinHandle<()>,
    /// From the start of QEMU to the guest's first byte.
    pub boot: Duration,
}

impl BareGuest {
    /// Boots the machine of a stopped sandbox.
    pub async fn boot(host: &Host, sandbox: &str, scratch: &Scratch) -> Result<BareGuest> {
        let (engine, mut spec) = bare_machine(host, sandbox).await?;
        spec.initramfs = with_init(spec.initramfs, scratch)?;
        spec.cmdline = format!("{} rdinit=/{INIT_NAME}", spec.cmdline);
        let began = Instant::now();
        let mut machine = engine.start(spec).await.map_err(failed("start"))?;
        let mut port = machine.take_link().expect("a fresh machine has its link");
        let mut output = machine
            .take_console()
            .expect("a fresh machine has its console");
        // The console must be read, or QEMU stops when its buffer is full.
        let console = tokio::spawn(async move {
            // An error ends the copy, and so does the end of the machine.
            drop(tokio::io::copy(&mut output, &mut tokio::io::sink()).await);
        });
        expect_byte(&mut port).await?;
        Ok(BareGuest {
            _machine: machine,
            port,
            console,
            boot: began.elapsed(),
        })
    }

    /// Sends one byte and receives one.
    pub async fn ping(&mut self) -> Result<()> {
        self.order(b'p', 0).await?;
        expect_byte(&mut self.port).await
    }

    /// Reads `count` bytes from the guest.
    pub async fn read(&mut self, count: u64) -> Result<()> {
        self.order(b'o', count).await?;
        let mut buffer = vec![0; 4 * CHUNK];
        let mut left = count;
        while left > 0 {
            let read = self.port.read(&mut buffer).await.map_err(broken)?;
            if read == 0 {
                return Err(broken(io::ErrorKind::UnexpectedEof.into()));
            }
            left = left.saturating_sub(read as u64);
        }
        Ok(())
    }

    /// Writes `count` bytes to the guest.
    pub async fn write(&mut self, count: u64) -> Result<()> {
        self.order(b'i', count).await?;
        let zeros = vec![0; CHUNK];
        let mut left = count;
        while left > 0 {
            let chunk = left.min(CHUNK as u64) as usize;
            self.port.write_all(&zeros[..chunk]).await.map_err(broken)?;
            left -= chunk as u64;
        }
        expect_byte(&mut self.port).await
    }

    /// Starts `count` processes at once and waits for them.
    pub async fn start_processes(&mut self, count: u64) -> Result<()> {
        self.order(b'x', count).await?;
        expect_byte(&mut self.port).await
    }

    async fn order(&mut self, what: u8, count: u64) -> Result<()> {
        let mut order = vec![what];
        order.extend(count.to_le_bytes());
        self.port.write_all(&order).await.map_err(broken)
    }
}

impl Drop for BareGuest {
    fn drop(&mut self) {
        self.console.abort();
    }
}

/// How long QEMU takes to run the machine of a stopped sandbox with nothing loaded into it: from
/// its start to the answer to `cont`.
pub async fn bare_start(host: &Host, sandbox: &str) -> Result<Duration> {
    let (engine, mut spec) = bare_machine(host, sandbox).await?;
    // A restored machine does not run at first either.
    spec.extra_args.push("-S".into());
    let began = Instant::now();
    let machine = engine.start(spec).await.map_err(failed("start"))?;
    machine.cont().await.map_err(failed("continue the guest"))?;
    let took = began.elapsed();
    machine.kill().await;
    Ok(took)
}

/// Copies an initramfs and adds our init to it. Every user may read the copy: QEMU may run as
/// another one.
fn with_init(initramfs: File, scratch: &Scratch) -> Result<File> {
    let path = scratch.path("initramfs");
    copy_with_init(initramfs, &path).map_err(|e| Error::io("write", &path, e))
}

fn copy_with_init(mut initramfs: File, path: &Path) -> io::Result<File> {
    let mut bytes = Vec::new();
    initramfs.rewind()?;
    initramfs.read_to_end(&mut bytes)?;
    append(&mut bytes, INIT_NAME, INIT);
    append(&mut bytes, "TRAILER!!!", &[]);
    std::fs::write(path, bytes)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o644))?;
    File::open(path)
}

/// Appends an executable file to a `newc` cpio archive.
fn append(archive: &mut Vec<u8>, name: &str, content: &[u8]) {
    const EXECUTABLE: usize = 0o100_755;
    pad(archive);
    archive.extend_from_slice(b"070701");
    let name_bytes = name.len() + 1;
    let bytes = content.len();
    // inode, mode, uid, gid, links, mtime, size, device, special device, name, checksum
    let fields = [0, EXECUTABLE, 0, 0, 1, 0, bytes, 0, 0, 0, 0, name_bytes, 0];
    for field in fields {
        archive.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    archive.extend_from_slice(name.as_bytes());
    archive.push(0);
    pad(archive);
    archive.extend_from_slice(content);
    pad(archive);
}

fn pad(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(4), 0);
}

async fn expect_byte(port: &mut UnixStream) -> Result<()> {
    port.read_exact(&mut [0]).await.map(drop).map_err(broken)
}

fn broken(source: io::Error) -> Error {
    Error::io("measure on", "the port of a bare guest", source)
}

fn failed(operation: &'static str) -> impl FnOnce(engine::Error) -> Error {
    move |source| Error::Engine { operation, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_the_form_of_newc() {
        let mut archive = b"before".to_vec();
        append(&mut archive, "init", b"hello");
        let header = "0707010000000000\
                      0081ed00000000000000000000000100000000000000050000000000000000000000000000000000000005\
                      00000000init\0\0";
        assert_eq!(&archive[..8], b"before\0\0");
        assert_eq!(&archive[8..124], header.as_bytes());
        assert_eq!(&archive[124..], b"hello\0\0\0");
    }
}
