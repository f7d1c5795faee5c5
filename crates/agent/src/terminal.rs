//! Pseudo-terminals.

use std::os::fd::{AsFd, OwnedFd};

use rustix::pty::OpenptFlags;
use rustix::termios::{LocalModes, SpecialCodeIndex, Winsize};
use sandtree_proto::TermSize;

use crate::console;

/// A new terminal: the agent's end, non-blocking, and the command's.
pub fn open(size: TermSize) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&master)?;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    resize(&master, size)?;
    rustix::io::ioctl_fionbio(&master, true)?;
    Ok((master, slave))
}

pub fn resize(master: impl AsFd, size: TermSize) -> rustix::io::Result<()> {
    let size = Winsize {
        ws_row: size.rows,
        ws_col: size.cols,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    rustix::termios::tcsetwinsize(master, size)
}

/// Types end-of-file if a program reads lines; a program that reads keys would take it for a key.
pub fn type_eof(master: &OwnedFd) {
    let typed = rustix::termios::tcgetattr(master).and_then(|modes| {
        if modes.local_modes.contains(LocalModes::ICANON) {
            rustix::io::write(master, &[modes.special_codes[SpecialCodeIndex::VEOF]])?;
        }
        Ok(())
    });
    if let Err(error) = typed {
        console::say(format_args!("cannot end a terminal's input: {error}"));
    }
}
