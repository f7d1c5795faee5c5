//! Splits output into whole lines, which can be printed above a spinner.

/// A longer line is cut.
const LINE_MAX: usize = 8 << 10;

/// Makes lines of chunks. Of a line that carriage returns overwrite, the last version counts.
#[derive(Debug, Default)]
pub struct Lines {
    begun: Vec<u8>,
}

impl Lines {
    /// Returns the lines that these bytes complete.
    pub fn take(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut ended = Vec::new();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            for part in piece.chunks(LINE_MAX) {
                self.begun.extend_from_slice(part);
                if part.ends_with(b"\n") || self.begun.len() >= LINE_MAX {
                    ended.extend(self.rest());
                }
            }
        }
        ended
    }

    /// Returns the line that has no newline yet.
    pub fn rest(&mut self) -> Option<String> {
        let begun = std::mem::take(&mut self.begun);
        let line = String::from_utf8_lossy(&begun);
        let line = line.trim_end_matches(['\r', '\n']);
        let last = line.rsplit('\r').next().unwrap_or_default();
        (!begun.is_empty()).then(|| last.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_become_lines() {
        let mut lines = Lines::default();
        assert_eq!(lines.take(b"a\nb"), ["a"]);
        assert_eq!(lines.take(b"c\r\n\nd"), ["bc", ""]);
        assert_eq!(lines.rest().as_deref(), Some("d"));
        assert_eq!(lines.rest(), None);
    }

    #[test]
    fn a_line_that_is_drawn_again_has_its_last_text() {
        assert_eq!(Lines::default().take(b"10%\r50%\r100%\n"), ["100%"]);
    }

    #[test]
    fn an_endless_line_is_cut() {
        let mut lines = Lines::default();
        let cut = lines.take(&vec![b'x'; 3 * LINE_MAX + 5]);
        assert_eq!(cut.iter().map(String::len).sum::<usize>(), 3 * LINE_MAX);
        assert_eq!(lines.rest().map(|rest| rest.len()), Some(5));
    }
}
