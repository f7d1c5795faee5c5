//! The floor: what the same kernel and the same port do with no agent on them.
//!
//! `sandtree bench` boots a guest with `sandtree.init=floor` on its command line and measures this
//! against the real thing. It mounts no root, loads no module and knows no frames:
//!
//! ```text
//!   guest: 'R' when it is up
//!   host:  'p' and a u64      guest: one byte             a round trip
//!          'o' and a u64 n    guest: n bytes              output
//!          'i' and a u64 n, then n bytes   guest: one byte   input
//!          'x' and a u64 n    guest: one byte             n processes at once, started and awaited
//! ```

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::process::Command;

/// What a started process is told, so that it ends at once.
pub const NOTHING: &str = "--nothing";

/// As large as one buffer of the port.
const CHUNK: usize = 32 * 1024;

/// Serves until the host is gone.
pub fn serve(port: OwnedFd) -> io::Result<()> {
    let mut port = File::from(port);
    port.write_all(b"R")?;
    loop {
        let mut order = [0; 9];
        port.read_exact(&mut order)?;
        let count =
            u64::from_le_bytes(order[1..].try_into().expect("eight bytes follow the first"));
        match order[0] {
            b'o' => write(&mut port, count)?,
            b'i' => read(&mut port, count)?,
            b'x' => start(count)?,
            _ => {}
        }
        if order[0] != b'o' {
            port.write_all(b".")?;
        }
    }
}

fn write(port: &mut File, count: u64) -> io::Result<()> {
    let zeros = [0; CHUNK];
    let mut left = count;
    while left > 0 {
        let chunk = left.min(CHUNK as u64);
        port.write_all(&zeros[..chunk as usize])?;
        left -= chunk;
    }
    Ok(())
}

fn read(port: &mut File, count: u64) -> io::Result<()> {
    io::copy(&mut port.take(count), &mut io::sink()).map(drop)
}

fn start(count: u64) -> io::Result<()> {
    let children: io::Result<Vec<_>> = (0..count)
        .map(|_| Command::new("/init").arg(NOTHING).spawn())
        .collect();
    children?
        .iter_mut()
        .try_for_each(|child| child.wait().map(drop))
}
