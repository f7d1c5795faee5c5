//! Paths: any bytes, not necessarily UTF-8.

use std::fmt;

use serde::{Serialize, Serializer};

/// An absolute path, such as `/etc/hosts`: any bytes except NUL.
///
/// Displayed and serialized as text that can be converted back to the bytes: printable characters
/// stay, a backslash becomes `\\`, and every byte of anything else (control characters, bytes that
/// are not UTF-8) becomes `\xHH`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Path(Vec<u8>);

impl Path {
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The names in the path, without empty ones and `.`.
    pub(super) fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.0
            .split(|byte| *byte == b'/')
            .filter(|part| !part.is_empty() && *part != b".")
    }

    /// The path of `name` in this directory.
    pub fn join(&self, name: &[u8]) -> Self {
        let mut bytes = self.0.clone();
        if bytes.last() != Some(&b'/') {
            bytes.push(b'/');
        }
        bytes.extend_from_slice(name);
        Self(bytes)
    }
}

impl<T: Into<Vec<u8>>> From<T> for Path {
    fn from(bytes: T) -> Self {
        Self(bytes.into())
    }
}

impl fmt::Display for Path {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            chunk
                .valid()
                .chars()
                .try_for_each(|char| write_char(char, out))?;
            chunk
                .invalid()
                .iter()
                .try_for_each(|byte| write!(out, "\\x{byte:02x}"))?;
        }
        Ok(())
    }
}

fn write_char(char: char, out: &mut fmt::Formatter<'_>) -> fmt::Result {
    match char {
        '\\' => out.write_str("\\\\"),
        _ if is_printable(char) => write!(out, "{char}"),
        _ => char
            .encode_utf8(&mut [0; 4])
            .bytes()
            .try_for_each(|byte| write!(out, "\\x{byte:02x}")),
    }
}

/// Excludes control characters, invisible characters, and those that change the text direction.
fn is_printable(char: char) -> bool {
    !char.is_control() && !char.escape_debug().to_string().starts_with("\\u")
}

impl fmt::Debug for Path {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "\"{self}\"")
    }
}

impl Serialize for Path {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displayed_paths_show_every_byte_unambiguously() {
        let shown = |bytes: &[u8]| Path::from(bytes).to_string();
        assert_eq!(
            shown("/etc/Käse 'n \"ham\"".as_bytes()),
            "/etc/Käse 'n \"ham\""
        );
        assert_eq!(shown(b"/a\nb\x1b[1m"), "/a\\x0ab\\x1b[1m");
        assert_eq!(shown(b"/\xff\xc3"), "/\\xff\\xc3");
        assert_eq!(shown(b"/\\x0a"), "/\\\\x0a");
        assert_eq!(shown("/\u{202e}gnp".as_bytes()), "/\\xe2\\x80\\xaegnp");
    }

    #[test]
    fn names_are_joined_with_one_slash() {
        let root = Path::from("/");
        assert_eq!(root.join(b"a").join(b"b").as_bytes(), b"/a/b");
        assert_eq!(
            Path::from("//a/./b/").components().collect::<Vec<_>>(),
            [b"a", b"b"]
        );
    }
}
