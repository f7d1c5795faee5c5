//! The files that a copy leaves out, reported to the host line by line: `PATH: a socket cannot be
//! copied`.
//!
//! Always: the text fits the window of its stream, so a host that never reads it delays nothing; a
//! last line counts the entries that do not fit.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::failure::cut;

const LINES_MAX: usize = 1000;
const BYTES_MAX: usize = 64 * 1024;
const PATH_MAX: usize = 4096;
/// Reserved for the last line.
const COUNT_MAX: usize = 48;

#[derive(Debug)]
pub struct LeftOut {
    text: String,
    lines: usize,
    uncounted: usize,
    limit: usize,
}

impl LeftOut {
    pub fn new(window: usize) -> Self {
        Self {
            text: String::new(),
            lines: 0,
            uncounted: 0,
            limit: window.min(BYTES_MAX),
        }
    }

    /// Adds a path and the reason why it is left out.
    pub fn add(&mut self, path: &Path, why: &str) {
        let line = format!("{}: {why}\n", on_one_line(path));
        if self.lines < LINES_MAX && self.text.len() + line.len() + COUNT_MAX <= self.limit {
            self.text.push_str(&line);
            self.lines += 1;
        } else {
            self.uncounted += 1;
        }
    }

    pub fn tell(self, to: OwnedFd) -> io::Result<()> {
        File::from(to).write_all(self.into_text().as_bytes())
    }

    fn into_text(mut self) -> String {
        if self.uncounted > 0 {
            self.text
                .push_str(&format!("and {} more\n", self.uncounted));
            cut(&mut self.text, self.limit);
        }
        self.text
    }
}

/// A name in a guest may contain any byte; it must neither end a line here nor move the cursor of a
/// terminal there.
fn on_one_line(path: &Path) -> String {
    let mut shown = String::new();
    for character in path.to_string_lossy().chars() {
        if character.is_control() {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    cut(&mut shown, PATH_MAX);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_stays_on_its_line() {
        let mut left_out = LeftOut::new(1 << 20);
        left_out.add(Path::new("/a\nb\x1b[2J"), "a socket cannot be copied");
        assert_eq!(
            left_out.into_text(),
            "/a\\nb\\u{1b}[2J: a socket cannot be copied\n"
        );
    }

    #[test]
    fn lines_are_limited_and_the_rest_is_counted() {
        let mut left_out = LeftOut::new(1 << 20);
        (0..1234).for_each(|_| left_out.add(Path::new("/s"), "no"));
        let text = left_out.into_text();
        assert_eq!(
            (text.lines().count(), text.lines().last()),
            (1001, Some("and 234 more"))
        );
    }

    #[test]
    fn the_text_fits_any_window() {
        for window in [1, 40, 60, 100, 70_000] {
            let mut left_out = LeftOut::new(window);
            (0..100).for_each(|_| left_out.add(Path::new(&"/long".repeat(500)), "no"));
            assert!(left_out.into_text().len() <= window.min(BYTES_MAX));
        }
    }
}
