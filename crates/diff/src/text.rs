//! The differences in the content of one file, as text.

use std::time::Duration;

use sandtree_disk::ext4::read::{Error, FileSystem, Kind, Path};
use similar::TextDiff;

/// The largest version that is compared line by line.
const MAX_BYTES: u64 = 4 << 20;
/// How many bytes are searched for a NUL, which text does not have. Git does the same.
const LOOKED_AT_BYTES: usize = 8000;
/// How long the shortest diff is searched for. The result after that is correct, but may be longer.
const SEARCH: Duration = Duration::from_secs(2);

/// How two versions of a file differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ContentDiff {
    Same,
    /// They differ, and at least one is binary.
    Binary,
    /// At least one is too large to compare.
    TooLarge {
        limit_bytes: u64,
    },
    /// The output of `diff -u`. A byte that is not UTF-8 becomes `\xHH`.
    Text(String),
}

/// Compares the content of one file. One of the disks may lack it.
pub fn content_diff(
    a: &FileSystem<'_>,
    b: &FileSystem<'_>,
    path: &Path,
) -> Result<ContentDiff, Error> {
    let before = Version::read(a, path)?;
    let after = Version::read(b, path)?;
    match (&before, &after) {
        (Version::Missing, Version::Missing) => Err(Error::NotFound(path.clone())),
        _ => Ok(compared(&before, &after, path)),
    }
}

/// Two versions of a file; `None`: it does not exist.
#[derive(Debug, Clone, Copy)]
pub struct Versions<'a> {
    pub before: Option<&'a [u8]>,
    pub after: Option<&'a [u8]>,
}

/// Compares two versions of a file.
pub fn text_diff(versions: Versions<'_>, path: &Path) -> ContentDiff {
    let version = |bytes: Option<&[u8]>| match bytes {
        None => Version::Missing,
        Some(bytes) if bytes.len() as u64 > MAX_BYTES => Version::TooLarge,
        Some(bytes) => Version::Content(bytes.to_vec()),
    };
    compared(&version(versions.before), &version(versions.after), path)
}

fn compared(before: &Version, after: &Version, path: &Path) -> ContentDiff {
    match (before, after) {
        (Version::TooLarge, _) | (_, Version::TooLarge) => ContentDiff::TooLarge {
            limit_bytes: MAX_BYTES,
        },
        (Version::Content(old), Version::Content(new)) if old == new => ContentDiff::Same,
        _ if before.is_binary() || after.is_binary() => ContentDiff::Binary,
        _ => ContentDiff::Text(unified(before, after, path)),
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
    let old = before.text();
    let new = after.text();
    let diff = TextDiff::configure()
        .timeout(SEARCH)
        .diff_lines(old.as_str(), new.as_str());
    diff.unified_diff()
        .header(&before.header("a", path), &after.header("b", path))
        .to_string()
}
