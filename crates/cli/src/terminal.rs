//! The user's terminal: in raw mode while it shows a terminal of the guest, and restored
//! afterwards.

use std::io::IsTerminal;

use rustix::termios::{self, OptionalActions, Termios};
use sandtree::{Error, Result, TermSize};

/// The terminal in raw mode. Dropping it restores the mode.
#[derive(Debug)]
pub struct Raw {
    before: Termios,
}

impl Raw {
    pub fn enter() -> Result<Raw> {
        let failed = |e: rustix::io::Errno| Error::io("set the mode of", "the terminal", e.into());
        let stdin = rustix::stdio::stdin();
        let before = termios::tcgetattr(stdin).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(stdin, OptionalActions::Drain, &raw).map_err(failed)?;
        Ok(Raw { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Err(error) =
            termios::tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, &self.before)
        {
            eprintln!("sandtree: cannot set the terminal back: {error}; try `reset`");
        }
    }
}

pub fn is_interactive() -> bool {
    std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
}

/// The size of the terminal, or 24 by 80 if it is unknown.
pub fn size() -> TermSize {
    match termios::tcgetwinsize(rustix::stdio::stdout()) {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => TermSize {
            rows: size.ws_row,
            cols: size.ws_col,
        },
        _ => TermSize { rows: 24, cols: 80 },
    }
}
