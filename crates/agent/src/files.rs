//! Files: read, write, list, inspect, create, move and remove. All of these may wait for a disk and
//! run in threads.
//!
//! When it fails: a failed write leaves the old file unchanged and no temporary file. A recursive
//! removal leaves the files that it could not remove.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;
use sandtree_proto::message::encode_item;
use sandtree_proto::{DirEntry, Failure, FileKind, Reply, Stat};

use crate::channel::Cancel;
use crate::failure::{OrFailure, refusal, tolerate};
use crate::feed::Intake;
use crate::open::open_without_waiting;
use crate::sparse::write_pieces;

const COPY_SIZE: usize = 256 * 1024;
/// How much of a name the temporary name keeps, so that it stays below the 255 bytes of a file
/// system.
const STAGED_NAME_MAX: usize = 200;
const STAGING_DIGITS: usize = 16;

pub fn read(path: &Path, out: OwnedFd) -> Result<(), Failure> {
    let message = || format!("cannot open {}", path.display());
    let mut file = open_without_waiting(path, OFlags::empty()).or_failure(message)?;
    refuse_endless(path, &file.metadata().or_failure(message)?)?;
    let mut out = File::from(out);
    copy(&mut file, &mut out).or_failure(|| format!("cannot read {}", path.display()))
}

/// At most `length` bytes from `offset` on. A file that ends before has fewer, or none.
pub fn read_from(path: &Path, offset: u64, length: u64, out: OwnedFd) -> Result<(), Failure> {
    let message = || format!("cannot open {}", path.display());
    let mut file = open_without_waiting(path, OFlags::empty()).or_failure(message)?;
    refuse_endless(path, &file.metadata().or_failure(message)?)?;
    let cannot_read = || format!("cannot read {}", path.display());
    file.seek(SeekFrom::Start(offset)).or_failure(cannot_read)?;
    let mut out = File::from(out);
    copy(&mut file.take(length), &mut out).or_failure(cannot_read)
}

/// Reading a pipe or a device may never end.
fn refuse_endless(path: &Path, metadata: &fs::Metadata) -> Result<(), Failure> {
    match kind(metadata) {
        FileKind::File => Ok(()),
        FileKind::Dir => Err(refusal(
            Errno::ISDIR,
            format!("cannot read {}: Is a directory", path.display()),
        )),
        FileKind::Symlink | FileKind::Other => Err(refusal(
            Errno::INVAL,
            format!("cannot read {}: it is not a regular file", path.display()),
        )),
    }
}

/// Copies in large pieces: `io::copy` would need a system call for each 8 KiB.
pub fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; COPY_SIZE];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(count) => to.write_all(&buffer[..count])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// A file to be written: its path, mode and owner.
#[derive(Debug)]
pub struct Target {
    pub path: PathBuf,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// Writes the bytes of `input` to a temporary file in the target's directory and renames it over
/// the target, unless cancelled.
pub fn write(target: &Target, mut input: Intake, cancel: &Cancel) -> Result<(), Failure> {
    let path = &target.path;
    let staged = Staged::create(path)?;
    write_pieces(&staged.file, &mut input)
        .or_failure(|| format!("cannot write {}", path.display()))?;
    own(&staged.file, target.uid, target.gid)
        .or_failure(|| format!("cannot set the owner of {}", path.display()))?;
    rustix::fs::fchmod(&staged.file, Mode::from_raw_mode(target.mode & 0o7777))
        .or_failure(|| format!("cannot set the mode of {}", path.display()))?;
    if cancel.is_cancelled() {
        return Err(refusal(
            Errno::CANCELED,
            format!("writing {} was cancelled", path.display()),
        ));
    }
    staged.publish(path)
}

/// Only root can give files away; in tests the agent may be any user.
pub fn own(file: &File, uid: u32, gid: u32) -> rustix::io::Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    rustix::fs::fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
}

/// A temporary file that removes itself unless it was published.
struct Staged {
    file: File,
    path: Option<PathBuf>,
}

impl Staged {
    fn create(target: &Path) -> Result<Self, Failure> {
        let staging = staging_for(target)?;
        let Some(name) = target.file_name() else {
            return Err(refusal(
                Errno::ISDIR,
                format!("cannot write {}: it names no file", target.display()),
            ));
        };
        let path = target.with_file_name(staging.name(name)?);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        let file = file.or_failure(|| format!("cannot create {}", target.display()))?;
        Ok(Self {
            file,
            path: Some(path),
        })
    }

    fn publish(mut self, target: &Path) -> Result<(), Failure> {
        let path = self.path.as_ref().expect("a staged file is published once");
        fs::rename(path, target).or_failure(|| format!("cannot replace {}", target.display()))?;
        self.path = None;
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(path) = self.path.take() {
            // The caller reports the failure that led here.
            tolerate(fs::remove_file(path));
        }
    }
}

/// What a write does to its target. The temporary name shows it, so that watches can report it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Staging {
    /// The target does not exist.
    New,
    /// The target is replaced.
    Over,
}

impl Staging {
    /// What stands before the digits of a temporary name. All have the same length.
    fn suffix(self) -> &'static str {
        match self {
            Self::New => ".sandtree-",
            Self::Over => ".sandtree+",
        }
    }

    /// The name is random, because a guest that lost power leaves its temporary files behind, and
    /// all counters of the agent start again.
    fn name(self, of: &OsStr) -> Result<OsString, Failure> {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, GetRandomFlags::empty())
            .or_failure(|| "cannot choose a temporary name".into())?;
        let kept = &of.as_bytes()[..of.len().min(STAGED_NAME_MAX)];
        let digits = format!("{:016x}", u64::from_ne_bytes(random));
        let name = [b".", kept, self.suffix().as_bytes(), digits.as_bytes()];
        Ok(OsString::from_vec(name.concat()))
    }

    /// The kind of write that has this temporary name. `None`: it is the name of another file.
    pub fn of_name(name: &OsStr) -> Option<Self> {
        let name = name.as_bytes();
        let (begin, digits) = name.split_at_checked(name.len().checked_sub(STAGING_DIGITS)?)?;
        if !begin.starts_with(b".") || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let both = [Self::New, Self::Over].into_iter();
        let mut fitting = both.filter(|staging| begin.ends_with(staging.suffix().as_bytes()));
        fitting.next()
    }
}

/// Refuses what a file may not replace: renaming over a device would replace it, for example
/// `/dev/null` by a file.
fn staging_for(target: &Path) -> Result<Staging, Failure> {
    let Ok(metadata) = fs::symlink_metadata(target) else {
        return Ok(Staging::New);
    };
    let kind = metadata.file_type();
    if metadata.is_dir() {
        return Err(refusal(
            Errno::ISDIR,
            format!("cannot write {}: it is a directory", target.display()),
        ));
    }
    if kind.is_block_device() || kind.is_char_device() || kind.is_fifo() || kind.is_socket() {
        return Err(refusal(
            Errno::INVAL,
            format!(
                "cannot write {}: it is not a regular file",
                target.display()
            ),
        ));
    }
    Ok(Staging::Over)
}

pub fn list(path: &Path, out: OwnedFd) -> Result<(), Failure> {
    let message = || format!("cannot list {}", path.display());
    let mut out = BufWriter::with_capacity(COPY_SIZE, File::from(out));
    for entry in fs::read_dir(path).or_failure(message)? {
        let entry = entry.or_failure(message)?;
        let stat = match stat(&entry.path(), false) {
            // It was removed after the directory was read.
            Err(failure) if failure.errno == libc::ENOENT => continue,
            other => other?,
        };
        let entry = DirEntry {
            name: entry.file_name().as_bytes().to_vec(),
            stat,
        };
        out.write_all(&encode_item(&entry)).or_failure(message)?;
    }
    out.flush().or_failure(message)
}

pub fn stat(path: &Path, follow: bool) -> Result<Stat, Failure> {
    let message = || format!("cannot stat {}", path.display());
    let metadata = if follow {
        fs::metadata(path)
    } else {
        fs::symlink_metadata(path)
    }
    .or_failure(message)?;
    let kind = kind(&metadata);
    let target = match kind {
        FileKind::Symlink => fs::read_link(path)
            .or_failure(message)?
            .as_os_str()
            .as_bytes()
            .to_vec(),
        _ => Vec::new(),
    };
    Ok(Stat {
        kind,
        mode: metadata.mode() & 0o7777,
        uid: metadata.uid(),
        gid: metadata.gid(),
        size: metadata.size(),
        modified_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
        target,
    })
}

/// Dates after the year 2262, which 64 bits cannot count in nanoseconds, become the last possible
/// date.
fn nanoseconds(seconds: i64, rest: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(rest)
}

fn kind(metadata: &fs::Metadata) -> FileKind {
    let kind = metadata.file_type();
    if kind.is_file() {
        FileKind::File
    } else if kind.is_dir() {
        FileKind::Dir
    } else if kind.is_symlink() {
        FileKind::Symlink
    } else {
        FileKind::Other
    }
}

/// Creates a directory. With `parents`, an existing directory is no error, and the mode is for the
/// last directory only.
pub fn make_dir(path: &Path, parents: bool, mode: u32) -> Result<Reply, Failure> {
    let message = || format!("cannot make directory {}", path.display());
    if parents {
        if path.is_dir() {
            return Ok(Reply::Done);
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).or_failure(message)?;
        }
    }
    fs::DirBuilder::new()
        .mode(mode)
        .create(path)
        .or_failure(message)?;
    // Sets the requested mode regardless of the agent's umask.
    rustix::fs::chmod(path, Mode::from_raw_mode(mode & 0o7777)).or_failure(message)?;
    Ok(Reply::Done)
}

pub fn rename(from: &Path, to: &Path) -> Result<Reply, Failure> {
    fs::rename(from, to)
        .or_failure(|| format!("cannot rename {} to {}", from.display(), to.display()))?;
    Ok(Reply::Done)
}

/// Removes a file, a link or a directory; never the target of a link.
pub fn remove(path: &Path, recursive: bool) -> Result<Reply, Failure> {
    let message = || format!("cannot remove {}", path.display());
    let is_dir = fs::symlink_metadata(path).or_failure(message)?.is_dir();
    let removed = match (is_dir, recursive) {
        (true, true) => fs::remove_dir_all(path),
        (true, false) => fs::remove_dir(path),
        (false, _) => fs::remove_file(path),
    };
    removed.or_failure(message)?;
    Ok(Reply::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_does_not_follow_links() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        let kept = dir.path().join("kept");
        fs::create_dir_all(tree.join("a")).unwrap();
        fs::write(&kept, b"x").unwrap();
        std::os::unix::fs::symlink(dir.path(), tree.join("a/up")).unwrap();
        assert_eq!(remove(&tree, false).unwrap_err().errno, libc::ENOTEMPTY);
        remove(&tree, true).unwrap();
        assert!(kept.exists() && !tree.exists());
    }

    #[test]
    fn devices_are_not_replaced_by_files() {
        assert_eq!(
            staging_for(Path::new("/dev/null")).unwrap_err().errno,
            libc::EINVAL
        );
    }

    #[test]
    fn dates_after_2262_become_the_last_possible_date() {
        assert_eq!(nanoseconds(1, 5), 1_000_000_005);
        assert_eq!(nanoseconds(1 << 34, 0), i64::MAX);
        assert_eq!(nanoseconds(-(1 << 34), 0), i64::MIN);
    }

    #[test]
    fn a_staging_name_is_bounded_and_unique() {
        let name = OsString::from_vec(vec![b'n'; 255]);
        for staging in [Staging::New, Staging::Over] {
            let one = staging.name(&name).unwrap();
            let other = staging.name(&name).unwrap();
            assert!(one.len() <= 255 && one != other);
            assert_eq!(Staging::of_name(&one), Some(staging));
        }
        for other in [
            "",
            ".a",
            "0123456789abcdef",
            "a.sandtree-0123456789abcdef",
            ".a.sandtree-0123456789abcdeg",
            ".a.sandtree=0123456789abcdef",
        ] {
            assert_eq!(Staging::of_name(OsStr::new(other)), None, "{other}");
        }
    }

    #[test]
    fn a_write_knows_whether_it_replaces_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("file");
        assert_eq!(staging_for(&target).unwrap(), Staging::New);
        std::os::unix::fs::symlink("nowhere", &target).unwrap();
        assert_eq!(staging_for(&target).unwrap(), Staging::Over);
    }

    #[test]
    fn creating_a_directory_with_parents_can_be_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        assert_eq!(
            make_dir(&path, false, 0o755).unwrap_err().errno,
            libc::ENOENT
        );
        make_dir(&path, true, 0o2750).unwrap();
        make_dir(&path, true, 0o755).unwrap();
        assert_eq!(stat(&path, false).unwrap().mode, 0o2750);
    }
}
