//! Files in the guest.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use sandtree_proto::message::decode_item;
use sandtree_proto::{DirEntry, FileKind, Open, Outcome, Reply, Request, Stat, WatchScope};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use super::tree::{self, Owner, Skipped};
use super::watch::Watch;
use super::{REQUEST_DEADLINE, exec, unexpected};
use crate::error::{Error, Result};
use crate::link::{Channel, Control, Input, Link, LinkError, Output};

/// The bytes of a file in flight between guest and host.
const WINDOW: u32 = 1024 * 1024;
/// Chunks between the link and a thread that packs or unpacks.
const CHUNKS: usize = 8;
const CHUNK: usize = 128 * 1024;
/// The limits of a listing: a guest can list without end, and the host keeps the entries in memory.
const LIST_ENTRIES: usize = 1_000_000;
const LIST_BYTES: usize = 256 << 20;
/// The longest line of the guest's list of left-out files; the rest of a line is dropped.
const LINE_MAX: usize = 8 * 1024;

/// The owner and mode of a written file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileOwner {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

impl Default for FileOwner {
    fn default() -> Self {
        Self {
            mode: 0o644,
            uid: 0,
            gid: 0,
        }
    }
}

/// The result of copying a tree.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transfer {
    pub bytes: u64,
    /// The files that could not be copied, with the reason: sockets, device nodes. After very many,
    /// the last line counts the others.
    pub skipped: Vec<String>,
}

/// Reads, writes and copies files of one guest.
#[derive(Debug, Clone)]
pub struct Files {
    link: Link,
    carried: Arc<AtomicU64>,
}

impl Files {
    pub(super) fn new(link: Link) -> Self {
        Self {
            link,
            carried: Arc::default(),
        }
    }

    /// The bytes that this handle and its clones have copied so far, to show progress.
    pub fn carried(&self) -> u64 {
        self.carried.load(Ordering::Relaxed)
    }

    fn count(&self, bytes: usize) {
        self.carried.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Copies a file's bytes to `sink` and returns their number.
    pub async fn read(
        &self,
        path: impl AsRef<Path>,
        sink: &mut (impl AsyncWrite + Unpin),
    ) -> Result<u64> {
        let open = Open::ReadFile { path: raw(&path) };
        self.read_with(open, path.as_ref(), sink).await
    }

    /// Writes the bytes of a file from `range.start` on into `sink`, up to `range.end` or its end.
    /// Returns how many there were. The agent of an older state reads only whole files, and
    /// refuses this.
    pub async fn read_range(
        &self,
        path: impl AsRef<Path>,
        range: std::ops::Range<u64>,
        sink: &mut (impl AsyncWrite + Unpin),
    ) -> Result<u64> {
        let open = Open::ReadFrom {
            path: raw(&path),
            offset: range.start,
            length: range.end.saturating_sub(range.start),
        };
        self.read_with(open, path.as_ref(), sink).await
    }

    async fn read_with(
        &self,
        open: Open,
        path: &Path,
        sink: &mut (impl AsyncWrite + Unpin),
    ) -> Result<u64> {
        let operation = format!("read {} in the guest", path.display());
        let Channel {
            mut out,
            mut control,
            ..
        } = self.open(&operation, open)?;
        let mut count = 0;
        while let Some(chunk) = out.next().await.map_err(guest(&operation))? {
            sink.write_all(&chunk)
                .await
                .map_err(|e| Error::io("write the bytes of", path, e))?;
            count += chunk.len() as u64;
            self.count(chunk.len());
        }
        done(&operation, &mut control).await?;
        sink.flush()
            .await
            .map_err(|e| Error::io("write the bytes of", path, e))?;
        Ok(count)
    }

    /// A file's bytes, if there are at most `limit`.
    pub async fn read_to_vec(&self, path: impl AsRef<Path>, limit: usize) -> Result<Vec<u8>> {
        let stat = self.stat(&path).await?;
        if stat.kind == FileKind::File && stat.size > limit as u64 {
            return Err(Error::OutputLimit { limit });
        }
        let mut bytes = Limited {
            bytes: Vec::new(),
            limit,
        };
        self.read(&path, &mut bytes).await?;
        Ok(bytes.bytes)
    }

    /// Writes a file under a temporary name in its directory, and renames it when all bytes have
    /// arrived.
    pub async fn write(
        &self,
        path: impl AsRef<Path>,
        source: &mut (impl AsyncRead + Unpin),
        owner: FileOwner,
    ) -> Result<u64> {
        let operation = format!("write {} in the guest", path.as_ref().display());
        let FileOwner { mode, uid, gid } = owner;
        let Channel {
            mut input,
            mut control,
            ..
        } = self.open(
            &operation,
            Open::WriteFile {
                path: raw(&path),
                mode,
                uid,
                gid,
            },
        )?;
        let mut buffer = vec![0; CHUNK];
        let mut count = 0;
        loop {
            let read = tokio::select! {
                read = source.read(&mut buffer) => read.map_err(|e| Error::io("read the bytes for", &path, e))?,
                // A guest that cannot write reports it before the source ends.
                _ = control.ended() => break,
            };
            if read == 0 {
                break;
            }
            input
                .write(&buffer[..read])
                .await
                .map_err(guest(&operation))?;
            count += read as u64;
            self.count(read);
        }
        input.end().map_err(guest(&operation))?;
        done(&operation, &mut control).await?;
        Ok(count)
    }

    pub async fn list(&self, path: impl AsRef<Path>) -> Result<Vec<DirEntry>> {
        let operation = format!("list {} in the guest", path.as_ref().display());
        let Channel {
            mut out,
            mut control,
            ..
        } = self.open(&operation, Open::ListDir { path: raw(&path) })?;
        let mut listing = Listing::new(LIST_ENTRIES, LIST_BYTES);
        while let Some(chunk) = out.next().await.map_err(guest(&operation))? {
            listing.take(&chunk).map_err(|refused| match refused {
                Unlisted::Nonsense => unexpected(&operation),
                Unlisted::TooMany(rule) => {
                    Error::invalid("directory to list", path.as_ref().display(), &rule)
                }
            })?;
        }
        done(&operation, &mut control).await?;
        Ok(listing.entries)
    }

    /// The attributes of `path`; symbolic links are followed.
    pub async fn stat(&self, path: impl AsRef<Path>) -> Result<Stat> {
        let follow = true;
        let request = Request::Stat {
            path: raw(&path),
            follow,
        };
        self.look_at(path.as_ref(), request).await
    }

    /// The attributes of `path` itself, also if it is a symbolic link.
    pub async fn stat_link(&self, path: impl AsRef<Path>) -> Result<Stat> {
        let follow = false;
        let request = Request::Stat {
            path: raw(&path),
            follow,
        };
        self.look_at(path.as_ref(), request).await
    }

    async fn look_at(&self, path: &Path, request: Request) -> Result<Stat> {
        let operation = format!("look at {} in the guest", path.display());
        match self.request(&operation, request).await? {
            Reply::Stat(stat) => Ok(stat),
            _ => Err(unexpected(&operation)),
        }
    }

    /// Sets the owner of a file, or of a symbolic link itself.
    pub async fn set_owner(&self, path: impl AsRef<Path>, uid: u32, gid: u32) -> Result<()> {
        let operation = format!("set the owner of {} in the guest", path.as_ref().display());
        let path = raw(&path);
        self.request(&operation, Request::SetOwner { path, uid, gid })
            .await
            .map(drop)
    }

    /// The extended attributes whose names begin with `prefix`, without it.
    pub async fn attributes(
        &self,
        path: impl AsRef<Path>,
        prefix: &str,
    ) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let operation = format!(
            "read the attributes of {} in the guest",
            path.as_ref().display()
        );
        let request = Request::Attributes {
            path: raw(&path),
            prefix: prefix.into(),
        };
        match self.request(&operation, request).await? {
            Reply::Attributes(attributes) => Ok(attributes),
            _ => Err(unexpected(&operation)),
        }
    }

    /// Replaces the extended attributes whose names begin with `prefix`.
    pub async fn set_attributes(
        &self,
        path: impl AsRef<Path>,
        prefix: &str,
        attributes: Vec<(Vec<u8>, Vec<u8>)>,
    ) -> Result<()> {
        let operation = format!(
            "set the attributes of {} in the guest",
            path.as_ref().display()
        );
        let request = Request::SetAttributes {
            path: raw(&path),
            prefix: prefix.into(),
            attributes,
        };
        self.request(&operation, request).await.map(drop)
    }

    /// Reports the changes below a directory, until the result is dropped.
    pub async fn watch(&self, path: impl AsRef<Path>, scope: WatchScope) -> Result<Watch> {
        Watch::start(&self.link, path.as_ref(), scope).await
    }

    /// Creates a directory and its parents.
    pub async fn make_dir(&self, path: impl AsRef<Path>, mode: u32) -> Result<()> {
        let operation = format!("make {} in the guest", path.as_ref().display());
        self.request(
            &operation,
            Request::MakeDir {
                path: raw(&path),
                parents: true,
                mode,
            },
        )
        .await
        .map(drop)
    }

    pub async fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
        let operation = format!("move {} in the guest", from.as_ref().display());
        self.request(
            &operation,
            Request::Rename {
                from: raw(&from),
                to: raw(&to),
            },
        )
        .await
        .map(drop)
    }

    /// Removes a file, or a directory with everything in it.
    pub async fn remove(&self, path: impl AsRef<Path>) -> Result<()> {
        let operation = format!("remove {} in the guest", path.as_ref().display());
        self.request(
            &operation,
            Request::Remove {
                path: raw(&path),
                recursive: true,
            },
        )
        .await
        .map(drop)
    }

    /// Copies a file or tree of the host to `to` in the guest; into `to`, if that is a directory.
    pub async fn upload(&self, from: &Path, to: &Path) -> Result<Transfer> {
        let to = self.landing(to, from).await?;
        self.send(from, &to, Owner::AsFound).await
    }

    /// Copies a file or tree of the host to exactly `to`, owned by root. A tree is merged into an
    /// existing directory; a file does not replace a directory.
    pub(crate) async fn place(&self, from: &Path, to: &Path) -> Result<Transfer> {
        let is_tree = from.is_dir();
        match self.stat(to).await {
            Ok(stat) if stat.kind == FileKind::Dir && !is_tree => Err(Error::invalid(
                "target of a file",
                to.display(),
                "it is a directory: name the file in it",
            )),
            _ => self.send(from, to, Owner::Root).await,
        }
    }

    /// Unpacks a tar archive of the host into the directory `to`, which is made if it is missing.
    /// Nothing in the archive can make the guest write anywhere else.
    pub(crate) async fn unpack(&self, archive: &Path, to: &Path) -> Result<Transfer> {
        let operation = format!("unpack {} in the guest", archive.display());
        let Channel {
            input,
            err,
            mut control,
            ..
        } = self.open(&operation, Open::TarIn { path: raw(&to) })?;
        let (chunks, queue) = mpsc::channel(CHUNKS);
        let source = archive.to_owned();
        let sending = tokio::task::spawn_blocking(move || tree::send(&source, chunks));
        let carried = tokio::try_join!(self.send_all(queue, input), left_out(err));
        let (bytes, told) = carried.map_err(guest(&operation))?;
        let unpacked = done(&operation, &mut control).await;
        sending.await.expect("sending does not panic")?;
        unpacked?;
        Ok(Transfer {
            bytes,
            skipped: told.into_lines(),
        })
    }

    async fn send(&self, from: &Path, to: &Path, owner: Owner) -> Result<Transfer> {
        let found = tokio::fs::symlink_metadata(from)
            .await
            .map_err(|e| Error::io("read", from, e))?;
        if found.is_file() {
            return self.send_file(from, to, owner, &found).await;
        }
        let (parent, name) = split(to)?;
        let operation = format!("copy {} into the guest", from.display());
        let Channel {
            input,
            err,
            mut control,
            ..
        } = self.open(&operation, Open::TarIn { path: raw(&parent) })?;
        let (chunks, queue) = mpsc::channel(CHUNKS);
        let source = from.to_owned();
        let packing =
            tokio::task::spawn_blocking(move || tree::pack(&source, &name, owner, chunks));
        let carried = tokio::try_join!(self.send_all(queue, input), left_out(err));
        let (bytes, told) = carried.map_err(guest(&operation))?;
        let unpacked = done(&operation, &mut control).await;
        // Our failure comes first: the guest cannot unpack an archive that we cut off. If the guest
        // stops reading, packing does not fail, because the rest is dropped.
        let mut skipped = packing.await.expect("packing does not panic")?;
        unpacked?;
        skipped.join(told);
        Ok(Transfer {
            bytes,
            skipped: skipped.into_lines(),
        })
    }

    async fn send_file(
        &self,
        from: &Path,
        to: &Path,
        owner: Owner,
        found: &std::fs::Metadata,
    ) -> Result<Transfer> {
        use std::os::unix::fs::MetadataExt;
        let mut file = tokio::fs::File::open(from)
            .await
            .map_err(|e| Error::io("open", from, e))?;
        let (uid, gid) = if owner == Owner::Root {
            (0, 0)
        } else {
            (found.uid(), found.gid())
        };
        let owner = FileOwner {
            mode: found.mode() & 0o7777,
            uid,
            gid,
        };
        let bytes = self.write(to, &mut file, owner).await?;
        Ok(Transfer {
            bytes,
            skipped: Vec::new(),
        })
    }

    /// Copies a file or tree of the guest to `to` on the host; into `to`, if that is a directory.
    /// Nothing in the tree can make it write anywhere else.
    pub async fn download(&self, from: &Path, to: &Path) -> Result<Transfer> {
        let operation = format!("copy {} out of the guest", from.display());
        let unnamed = || {
            Error::invalid(
                "file to copy into a directory",
                from.display(),
                "it must have a name",
            )
        };
        let to = if to.is_dir() {
            to.join(from.file_name().ok_or_else(unnamed)?)
        } else {
            to.to_owned()
        };
        let Channel {
            out,
            err,
            mut control,
            ..
        } = self.open(&operation, Open::TarOut { path: raw(&from) })?;
        let (chunks, queue) = mpsc::channel(CHUNKS);
        let unpacking = tokio::task::spawn_blocking(move || tree::unpack(queue, &to));
        let received = self
            .receive(out, err, &chunks)
            .await
            .map_err(guest(&operation))?;
        let stopped = chunks.is_closed();
        drop(chunks);
        let unpacked = unpacking.await.expect("unpacking does not panic");
        // The guest's failure comes first: we cannot unpack a stream that the guest cut off, and a
        // complete archive may still lack files that the guest could not read. If we failed, the
        // guest has no failure.
        if !(stopped && unpacked.is_err()) {
            done(&operation, &mut control).await?;
        }
        let mut skipped = unpacked?;
        skipped.join(received.told);
        Ok(Transfer {
            bytes: received.bytes,
            skipped: skipped.into_lines(),
        })
    }

    /// Receives an archive and its list of left-out files, until both have ended or the reader of
    /// the archive is gone.
    async fn receive(
        &self,
        mut out: Output,
        mut err: Output,
        chunks: &mpsc::Sender<Bytes>,
    ) -> Result<Received, LinkError> {
        let mut bytes = 0;
        let mut lines = Lines::default();
        let mut out_ended = false;
        let mut err_ended = false;
        while !(out_ended && err_ended) {
            tokio::select! {
                chunk = out.next(), if !out_ended => match chunk? {
                    Some(chunk) => {
                        bytes += chunk.len() as u64;
                        self.count(chunk.len());
                        if chunks.send(chunk).await.is_err() {
                            break;
                        }
                    }
                    None => out_ended = true,
                },
                chunk = err.next(), if !err_ended => match chunk? {
                    Some(chunk) => lines.take(&chunk),
                    None => err_ended = true,
                },
            }
        }
        Ok(Received {
            bytes,
            told: lines.finish(),
        })
    }

    /// The target of a copy to `to`: inside, if that is a directory.
    async fn landing(&self, to: &Path, from: &Path) -> Result<PathBuf> {
        let wants_directory = to.as_os_str().as_bytes().ends_with(b"/");
        let inside = || Ok(to.join(file_name(from)?));
        match self.stat(to).await {
            Ok(stat) if stat.kind == FileKind::Dir => inside(),
            Ok(_) => Ok(to.to_owned()),
            Err(error) if error.kind() == crate::ErrorKind::NotFound && wants_directory => inside(),
            Err(error) if error.kind() == crate::ErrorKind::NotFound => Ok(to.to_owned()),
            Err(error) => Err(error),
        }
    }

    async fn send_all(
        &self,
        mut queue: mpsc::Receiver<Bytes>,
        mut input: Input,
    ) -> Result<u64, LinkError> {
        let mut count = 0;
        while let Some(chunk) = queue.recv().await {
            input.write(&chunk).await?;
            count += chunk.len() as u64;
            self.count(chunk.len());
        }
        input.end()?;
        Ok(count)
    }

    fn open(&self, operation: &str, open: Open) -> Result<Channel> {
        self.link.open(open, WINDOW).map_err(guest(operation))
    }

    async fn request(&self, operation: &str, request: Request) -> Result<Reply> {
        self.link
            .request(request, REQUEST_DEADLINE)
            .await
            .map_err(guest(operation))
    }
}

struct Received {
    bytes: u64,
    told: Skipped,
}

/// The guest's list of left-out files, until it ends.
async fn left_out(mut err: Output) -> Result<Skipped, LinkError> {
    let mut lines = Lines::default();
    while let Some(chunk) = err.next().await? {
        lines.take(&chunk);
    }
    Ok(lines.finish())
}

/// The guest's lines, which arrive in pieces.
#[derive(Default)]
struct Lines {
    begun: Vec<u8>,
    skipped: Skipped,
}

impl Lines {
    fn take(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let text = piece.strip_suffix(b"\n").unwrap_or(piece);
            let room = LINE_MAX - self.begun.len();
            self.begun.extend_from_slice(&text[..text.len().min(room)]);
            if text.len() < piece.len() {
                self.end_line();
            }
        }
    }

    fn end_line(&mut self) {
        if !self.begun.is_empty() {
            self.skipped.add(&String::from_utf8_lossy(&self.begun));
            self.begun.clear();
        }
    }

    fn finish(mut self) -> Skipped {
        self.end_line();
        self.skipped
    }
}

/// The entries of a directory, which arrive in pieces and are limited.
struct Listing {
    entries: Vec<DirEntry>,
    begun: Vec<u8>,
    entries_max: usize,
    bytes_max: usize,
    bytes: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Unlisted {
    Nonsense,
    TooMany(String),
}

impl Listing {
    fn new(entries_max: usize, bytes_max: usize) -> Self {
        Self {
            entries: Vec::new(),
            begun: Vec::new(),
            entries_max,
            bytes_max,
            bytes: 0,
        }
    }

    fn take(&mut self, chunk: &[u8]) -> Result<(), Unlisted> {
        self.bytes += chunk.len();
        if self.bytes > self.bytes_max {
            return Err(Unlisted::TooMany(format!(
                "its entries must not take more than {} bytes",
                self.bytes_max
            )));
        }
        self.begun.extend_from_slice(chunk);
        while let Some(entry) = decode_item(&mut self.begun).map_err(|_| Unlisted::Nonsense)? {
            if self.entries.len() == self.entries_max {
                return Err(Unlisted::TooMany(format!(
                    "it must not have more than {} entries",
                    self.entries_max
                )));
            }
            self.entries.push(entry);
        }
        Ok(())
    }
}

fn guest(operation: &str) -> impl Fn(LinkError) -> Error {
    move |source| Error::Guest {
        operation: operation.to_owned(),
        source,
    }
}

async fn done(operation: &str, control: &mut Control) -> Result<()> {
    match control.ended().await.map_err(guest(operation))? {
        Outcome::Done => Ok(()),
        outcome => Err(guest(operation)(exec::lost(outcome))),
    }
}

fn raw(path: &impl AsRef<Path>) -> Vec<u8> {
    path.as_ref().as_os_str().as_bytes().to_vec()
}

/// The last component; for `.` and `dir/..` the real one.
fn file_name(path: &Path) -> Result<OsString> {
    let named = |path: &Path| path.file_name().map(|name| name.to_owned());
    named(path)
        .or_else(|| path.canonicalize().ok().as_deref().and_then(named))
        .ok_or_else(|| Error::invalid("file to copy", path.display(), "it must have a name"))
}

fn split(path: &Path) -> Result<(PathBuf, OsString)> {
    let name = file_name(path)?;
    let parent = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("/"));
    Ok((parent.to_owned(), OsString::from_vec(name.into_vec())))
}

/// A sink that refuses more bytes than its limit.
struct Limited {
    bytes: Vec<u8>,
    limit: usize,
}

impl AsyncWrite for Limited {
    fn poll_write(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
        bytes: &[u8],
    ) -> std::task::Poll<std::io::Result<usize>> {
        if self.bytes.len() + bytes.len() > self.limit {
            return std::task::Poll::Ready(Err(std::io::ErrorKind::FileTooLarge.into()));
        }
        self.bytes.extend_from_slice(bytes);
        std::task::Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn poll_shutdown(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<std::io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use sandtree_proto::message::encode_item;

    use super::*;

    fn entry(name: &str) -> Vec<u8> {
        let stat = Stat {
            kind: FileKind::File,
            mode: 0o644,
            uid: 0,
            gid: 0,
            size: 0,
            modified_ns: 0,
            target: vec![],
        };
        encode_item(&DirEntry {
            name: name.into(),
            stat,
        })
    }

    #[test]
    fn an_endless_list_is_refused() {
        let mut listing = Listing::new(3, 1000);
        let three = ["a", "b", "c"].map(entry).concat();
        three
            .chunks(5)
            .for_each(|piece| listing.take(piece).unwrap());
        assert_eq!(listing.entries.len(), 3);
        assert!(
            matches!(listing.take(&entry("d")), Err(Unlisted::TooMany(rule)) if rule.contains("3 entries"))
        );
        let mut listing = Listing::new(1000, 100);
        assert!(
            matches!(listing.take(&entry(&"x".repeat(100))), Err(Unlisted::TooMany(rule)) if rule.contains("100 bytes"))
        );
        assert_eq!(
            Listing::new(3, 1000).take(&[0xff; 4]),
            Err(Unlisted::Nonsense)
        );
    }

    #[test]
    fn the_list_of_left_out_files_has_lines_and_a_limit() {
        let lines = |pieces: &[&[u8]]| {
            let mut lines = Lines::default();
            pieces.iter().for_each(|piece| lines.take(piece));
            lines.finish().into_lines()
        };
        assert!(lines(&[]).is_empty());
        assert_eq!(
            lines(&[b"/a: a so", b"cket\n/b: \xff", b"\n\n", b"last"]),
            ["/a: a socket", "/b: \u{fffd}", "last"]
        );
        let long = lines(&[&[b'x'; 3 * LINE_MAX], b"\nshort\n"]);
        assert_eq!((long[0].len(), &long[1][..]), (LINE_MAX, "short"));
        assert_eq!(
            lines(&[&b"x\n".repeat(5000)]).last().unwrap(),
            "and 4000 more"
        );
    }
}
