//! What differs in one file, as text.

use std::time::Duration;

use similar::TextDiff;

use crate::{Error, FileSystem, Kind, Path};

/// Of each version. More is not compared line by line.
const MAX_BYTES: u64 = 4 << 20;
/// As git does: text has no NUL near its beginning.
const LOOKED_AT_BYTES: usize = 8000;
/// After this the shortest diff is no longer looked for; what is then shown is right and may be
/// longer.
const SEARCH: Duration = Duration::from_secs(2);

/// How two versions of a file differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContentDiff {
    Same,
    /// They differ, and at least one is not text.
    Binary,
    /// At least one has more bytes than are compared here.
    TooLarge {
        limit_bytes: u64,
    },
    /// As `diff -u` prints it. A byte that is not UTF-8 is `\xHH`.
    Text(String),
}

/// Compares the content of one file. On one of the disks it may be missing.
pub fn content_diff(
    a: &FileSystem<'_>,
    b: &FileSystem<'_>,
    path: &Path,
) -> Result<ContentDiff, Error> {
    let (before, after) = (Version::read(a, path)?, Version::read(b, path)?);
    match (&before, &after) {
        (Version::Missing, Version::Missing) => Err(Error::NotFound(path.clone())),
        (Version::TooLarge, _) | (_, Version::TooLarge) => Ok(ContentDiff::TooLarge {
            limit_bytes: MAX_BYTES,
        }),
        (Version::Content(old), Version::Content(new)) if old == new => Ok(ContentDiff::Same),
        _ if before.is_binary() || after.is_binary() => Ok(ContentDiff::Binary),
        _ => Ok(ContentDiff::Text(unified(&before, &after, path))),
    }
}

/// A file on one of the disks.
enum Version {
    Missing,
    TooLarge,
    Content(Vec<u8>),
}

impl Version {
    fn read(fs: &FileSystem<'_>, path: &Path) -> Result<Self, Error> {
        match fs.stat(path)? {
            None => Ok(Self::Missing),
            Some(node) if node.kind == Kind::File && node.size > MAX_BYTES => Ok(Self::TooLarge),
            Some(_) => fs
                .read_file(path)?
                .read_at_most(MAX_BYTES)
                .map(Self::Content),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Missing | Self::TooLarge => &[],
            Self::Content(bytes) => bytes,
        }
    }

    fn is_binary(&self) -> bool {
        self.bytes()
            .iter()
            .take(LOOKED_AT_BYTES)
            .any(|byte| *byte == 0)
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for chunk in self.bytes().utf8_chunks() {
            text.push_str(chunk.valid());
            text.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
        }
        text
    }

    fn header(&self, side: &str, path: &Path) -> String {
        match self {
            Self::Missing => "/dev/null".into(),
            Self::TooLarge | Self::Content(_) => format!("{side}{path}"),
        }
    }
}

fn unified(before: &Version, after: &Version, path: &Path) -> String {
    let (old, new) = (before.text(), after.text());
    let diff = TextDiff::configure()
        .timeout(SEARCH)
        .diff_lines(old.as_str(), new.as_str());
    let (old_header, new_header) = (before.header("a", path), after.header("b", path));
    diff.unified_diff()
        .header(&old_header, &new_header)
        .to_string()
}
