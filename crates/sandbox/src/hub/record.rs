//! The commands of a guest at one moment: what a captured state keeps of them, and how the next hub
//! takes them over.
//!
//! ```text
//!   execs/TAG/out.0 out.1 …   --record-->   into/TAG/out.0 out.1 …   --inherit-->   another hub's execs/TAG/…
//!      (the last one grows)     hard links, none of which ever changes again
//! ```
//!
//! Always: a recorded file is exactly as long as its segment. Files are never replaced: an existing
//! name is skipped, so an old hub of the same sandbox may still write next to the new one.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use sandtree_proto::{Failure, Outcome, StreamId};
use serde::{Deserialize, Serialize};

use super::details::ExecDetails;
use crate::error::Error;

/// A command of a guest at the moment of a capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecRecord {
    pub tag: String,
    /// For people.
    pub command: String,
    pub pid: Option<u32>,
    /// `None` while it runs.
    pub ended: Option<Outcome>,
    /// The window of its streams, in bytes.
    pub window: u32,
    /// The output kept so far; empty for a client's command, because the client has it.
    pub out: Vec<Segment>,
    pub err: Vec<Segment>,
    /// Older programs have none.
    #[serde(default)]
    pub details: ExecDetails,
}

/// A piece of a command's kept output, in a file of its own below the directory named by the
/// command's tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// The position of its first byte in the command's stream.
    pub start: u64,
    pub bytes: u64,
    pub file: String,
}

impl Segment {
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }
}

/// The rule for a tag that names a directory. Guests and imported states choose tags, too.
pub(super) fn is_plain(tag: &str) -> bool {
    (1..=64).contains(&tag.len()) && tag.bytes().all(|b| b.is_ascii_alphanumeric())
}

pub(super) fn file_name(stream: StreamId, number: usize) -> String {
    match stream {
        StreamId::Err => format!("err.{number}"),
        StreamId::Out | StreamId::In => format!("out.{number}"),
    }
}

/// Links the segments of a command from its own directory into the one of a state.
pub(super) fn keep(record: &ExecRecord, from: &Path, into: &Path) -> Result<(), Error> {
    fs::create_dir_all(into).map_err(|e| Error::io("create", into, e))?;
    for segment in record.out.iter().chain(&record.err) {
        let target = into.join(&segment.file);
        link(&from.join(&segment.file), &target, segment.bytes)
            .map_err(|e| Error::io("keep output in", target, e))?;
    }
    Ok(())
}

/// Takes over the commands that a state kept. If the output of one cannot be taken over, its record
/// has the reason.
pub(super) fn inherit(records: Vec<ExecRecord>, from: &Path, execs: &Path) -> Vec<ExecRecord> {
    let usable = records.into_iter().filter(|record| is_plain(&record.tag));
    usable
        .map(|record| inherit_one(record, from, execs))
        .collect()
}

fn inherit_one(mut record: ExecRecord, from: &Path, execs: &Path) -> ExecRecord {
    let from = from.join(&record.tag);
    let dir = execs.join(&record.tag);
    let out = inherit_stream(StreamId::Out, &record.out, &from, &dir);
    match out.and_then(|out| {
        Ok((
            out,
            inherit_stream(StreamId::Err, &record.err, &from, &dir)?,
        ))
    }) {
        Ok((out, err)) => (record.out, record.err) = (out, err),
        Err(error) => {
            tracing::error!(exec = record.tag, %error, "the kept output of a command is lost");
            (record.out, record.err) = (Vec::new(), Vec::new());
            let message = format!("its kept output is lost: {error}");
            let lost = Outcome::Failed(Failure {
                errno: error.raw_os_error().unwrap_or(0),
                message,
            });
            record.ended = record.ended.map(|_| lost);
        }
    }
    record
}

fn inherit_stream(
    stream: StreamId,
    segments: &[Segment],
    from: &Path,
    dir: &Path,
) -> io::Result<Vec<Segment>> {
    let joined = segments
        .windows(2)
        .all(|pair| pair[0].end() == pair[1].start);
    if !joined || segments.iter().any(|segment| !is_of(stream, &segment.file)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "its segments do not make sense",
        ));
    }
    let mut inherited = Vec::with_capacity(segments.len());
    for segment in segments {
        fs::create_dir_all(dir)?;
        let linked = |target: PathBuf| link(&from.join(&segment.file), &target, segment.bytes);
        let (file, ()) = unused(stream, inherited.len(), dir, linked)?;
        inherited.push(Segment {
            file,
            ..segment.clone()
        });
    }
    Ok(inherited)
}

/// Whether a name has the form of [`file_name`].
fn is_of(stream: StreamId, name: &str) -> bool {
    name.get(4..)
        .and_then(|number| number.parse().ok())
        .is_some_and(|number| file_name(stream, number) == name)
}

/// Creates a file under the first free name, from `number` on.
pub(super) fn unused<T>(
    stream: StreamId,
    number: usize,
    dir: &Path,
    mut make: impl FnMut(PathBuf) -> io::Result<T>,
) -> io::Result<(String, T)> {
    for number in number.. {
        let name = file_name(stream, number);
        match make(dir.join(&name)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => return other.map(|made| (name, made)),
        }
    }
    unreachable!("no directory holds so many files")
}

/// Gives a file a second name. If that is impossible, or the file is longer than its kept part, the
/// bytes are copied.
fn link(from: &Path, to: &Path, bytes: u64) -> io::Result<()> {
    let metadata = fs::symlink_metadata(from)?;
    if !metadata.is_file() || metadata.len() < bytes {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a segment is not as long as it should be",
        ));
    }
    if metadata.len() == bytes {
        match fs::hard_link(from, to) {
            // Another file system, or one without links, or too many links.
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {}
            other => return other,
        }
    }
    let source = File::options()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(from)?;
    let mut target = File::create_new(to)?;
    match io::copy(&mut source.take(bytes), &mut target)? {
        copied if copied == bytes => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(start: u64, bytes: u64, file: &str) -> Segment {
        Segment {
            start,
            bytes,
            file: file.into(),
        }
    }

    fn record(out: Vec<Segment>) -> ExecRecord {
        let tag = "tag".to_owned();
        let command = "true".to_owned();
        let ended = Some(Outcome::Exited { code: 0 });
        ExecRecord {
            tag,
            command,
            pid: Some(7),
            ended,
            window: 1000,
            out,
            err: Vec::new(),
            details: ExecDetails::default(),
        }
    }

    fn root_with(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("from/tag")).unwrap();
        for (name, text) in files {
            fs::write(root.path().join("from/tag").join(name), text).unwrap();
        }
        root
    }

    fn inherited(root: &Path, record: ExecRecord) -> ExecRecord {
        inherit(vec![record], &root.join("from"), &root.join("execs")).remove(0)
    }

    #[test]
    fn taken_names_are_skipped_and_longer_files_are_cut() {
        let root = root_with(&[("out.0", "abc"), ("out.1", "defgh")]);
        let taken = root.path().join("execs/tag");
        fs::create_dir_all(&taken).unwrap();
        fs::write(taken.join("out.0"), "another's").unwrap();
        let found = inherited(
            root.path(),
            record(vec![segment(0, 3, "out.0"), segment(3, 2, "out.1")]),
        );
        assert_eq!(found.out, [segment(0, 3, "out.1"), segment(3, 2, "out.2")]);
        let texts =
            ["out.0", "out.1", "out.2"].map(|name| fs::read_to_string(taken.join(name)).unwrap());
        assert_eq!(texts, ["another's", "abc", "de"]);
    }

    #[test]
    fn invalid_segments_are_refused() {
        let root = root_with(&[("out.0", "abc")]);
        let hostile = [
            vec![segment(0, 3, "../tag/out.0")],
            vec![segment(0, 3, "out.0"), segment(4, 1, "out.0")],
            vec![segment(0, 4, "out.0")],
            vec![segment(0, 3, "err.0")],
            vec![segment(0, 3, "out.00")],
        ];
        for segments in hostile {
            let found = inherited(root.path(), record(segments.clone()));
            assert!(
                found.out.is_empty() && matches!(found.ended, Some(Outcome::Failed(_))),
                "{segments:?}: {found:?}"
            );
        }
        let named = ExecRecord {
            tag: "../x".into(),
            ..record(Vec::new())
        };
        assert!(inherit(vec![named], root.path(), root.path()).is_empty());
    }
}
