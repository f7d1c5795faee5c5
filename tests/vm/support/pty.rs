//! A terminal with a program in it, like a user's window.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use super::{DEADLINE, eventually};

pub struct Window {
    master: File,
    child: Child,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Window {
    /// Runs `command` with a new controlling terminal on all its streams.
    pub fn open(command: &Command, (rows, cols): (u16, u16)) -> Window {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        set_size(&master, rows, cols);
        let slave = File::options()
            .read(true)
            .write(true)
            .open(ptsname(&master, Vec::new()).unwrap().to_str().unwrap());
        let slave = slave.unwrap();
        let mut on_terminal = Command::new("setsid");
        on_terminal
            .arg("--ctty")
            .arg(command.get_program())
            .args(command.get_args())
            .env("TERM", "xterm");
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => on_terminal.env(key, value),
                None => on_terminal.env_remove(key),
            };
        }
        on_terminal
            .stdin(slave.try_clone().unwrap())
            .stdout(slave.try_clone().unwrap())
            .stderr(slave);
        let child = on_terminal.spawn().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let master = File::from(master);
        std::thread::spawn({
            let reader = master.try_clone().unwrap();
            let seen = seen.clone();
            move || watch(reader, &seen)
        });
        Window {
            master,
            child,
            seen,
        }
    }

    pub fn type_in(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).unwrap();
    }

    pub fn resize(&self, rows: u16, cols: u16) {
        set_size(&self.master, rows, cols);
    }

    /// Everything shown so far.
    pub fn shown(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().unwrap()).into_owned()
    }

    /// Waits until `text` appears, and discards everything up to it.
    pub fn expect(&self, text: &str) {
        let found = eventually(DEADLINE, || {
            let mut seen = self.seen.lock().unwrap();
            let at = seen
                .windows(text.len())
                .position(|part| part == text.as_bytes())?;
            seen.drain(..at + text.len());
            Some(())
        });
        assert!(
            found.is_some(),
            "{text:?} was not shown, but: {:?}",
            self.shown()
        );
    }

    /// Waits for the program's end.
    pub fn close(mut self, deadline: Duration) -> Option<i32> {
        super::wait(&mut self.child, deadline)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            self.child.kill().unwrap();
            self.child.wait().unwrap();
        }
    }
}

fn set_size(master: &impl std::os::fd::AsFd, rows: u16, cols: u16) {
    tcsetwinsize(
        master,
        Winsize {
            ws_row: rows,
            ws_col: cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        },
    )
    .unwrap();
}

/// Reads until the last user of the terminal is gone, which shows as an error.
fn watch(mut reader: File, seen: &Mutex<Vec<u8>>) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = reader.read(&mut buffer) {
        seen.lock().unwrap().extend_from_slice(&buffer[..count]);
    }
}
