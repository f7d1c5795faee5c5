//! Files of a guest: read, written, listed and removed.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::StatusCode;
use sandtree::{DirEntry, FileKind, FileOwner, Files, Stat};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, DuplexStream};
use tokio::sync::mpsc;
use tokio_util::io::StreamReader;
use utoipa::{IntoParams, ToSchema};

use super::request::{At, Binary, Native, OfSandbox, pieces};
use super::stream::{self, Work};
use crate::control::{Asked, Body};
use crate::error::{Fault, Result};

const BUFFER: usize = 256 * 1024;
const PIECES: usize = 4;
const ENTRIES: usize = 1000;
const ENTRIES_MAX: usize = 100_000;
const MODE_MAX: u32 = 0o7777;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct PathQuery {
    /// An absolute path in the guest.
    #[param(example = "/etc/hostname")]
    path: String,
}

/// Refuses a relative path: a request has no current directory.
fn absolute(path: &str) -> Result<&Path> {
    let path = Path::new(path);
    if path.is_absolute() && !path.as_os_str().as_bytes().contains(&0) {
        return Ok(path);
    }
    let shown = path.display();
    Err(Fault::bad_request(format!(
        "invalid path {shown:?}: use an absolute path in the guest"
    )))
}

async fn files(native: &Native, sandbox: &str) -> Result<Files> {
    Ok(native.guest(sandbox).await?.files())
}

/// Reads a file.
///
/// The connection is cut when the guest fails after the first byte.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/files", tag = "files",
    params(OfSandbox, PathQuery),
    responses((
        status = 200, description = "Its bytes.",
        body = inline(Binary), content_type = "application/octet-stream",
    )),
)]
pub async fn read_file(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Asked(query): Asked<PathQuery>,
) -> Result<Response> {
    let path = absolute(&query.path)?.to_owned();
    let files = files(&native, &of.sandbox).await?;
    let (pieces, out) = mpsc::channel(PIECES);
    let work = Work::start(async move {
        let (mut writer, reader) = tokio::io::duplex(BUFFER);
        let reading = async {
            let read = files.read(&path, &mut writer).await;
            // The other half reads the end.
            drop(writer);
            Ok(read?)
        };
        tokio::try_join!(reading, carry(reader, pieces))
    });
    stream::answer(work, out, None).await
}

/// Carries bytes to a client, until either ends.
async fn carry(mut from: DuplexStream, pieces: mpsc::Sender<bytes::Bytes>) -> Result<()> {
    loop {
        let mut piece = bytes::BytesMut::with_capacity(BUFFER);
        let read = from.read_buf(&mut piece).await;
        let count = read.map_err(|e| Fault::internal(e.to_string()))?;
        if count == 0 || pieces.send(piece.freeze()).await.is_err() {
            return Ok(());
        }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct WriteQuery {
    /// An absolute path in the guest.
    path: String,
    /// Permissions as an octal number: 644 unless given.
    #[param(example = "755")]
    mode: Option<String>,
    #[serde(default)]
    uid: u32,
    #[serde(default)]
    gid: u32,
    /// Whether missing directories above it are made.
    #[serde(default)]
    parents: bool,
}

/// What was written.
#[derive(Debug, Serialize, ToSchema)]
pub struct Written {
    pub bytes: u64,
}

/// Writes a file.
///
/// The file gets its name when all bytes have arrived: one that breaks off changes nothing.
#[utoipa::path(
    put, path = "/sandboxes/{sandbox}/files", tag = "files",
    params(OfSandbox, WriteQuery),
    request_body(content = inline(Binary), content_type = "application/octet-stream"),
    responses((status = 200, body = Written)),
)]
pub async fn write_file(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Asked(query): Asked<WriteQuery>,
    request: Request,
) -> Result<Json<Written>> {
    let path = absolute(&query.path)?;
    let owner = FileOwner {
        mode: mode(query.mode.as_deref(), 0o644)?,
        uid: query.uid,
        gid: query.gid,
    };
    let files = files(&native, &of.sandbox).await?;
    if let Some(above) = path.parent().filter(|_| query.parents) {
        files.make_dir(above, 0o755).await?;
    }
    let mut source = StreamReader::new(pieces(request.into_body()));
    let bytes = files.write(path, &mut source, owner).await?;
    Ok(Json(Written { bytes }))
}

fn mode(text: Option<&str>, default: u32) -> Result<u32> {
    let Some(text) = text else {
        return Ok(default);
    };
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= MODE_MAX)
        .ok_or_else(|| Fault::bad_request(format!("invalid mode {text:?}: use 0 to 7777, octal")))
}

/// Removes a file, or a directory with everything in it.
#[utoipa::path(
    delete, path = "/sandboxes/{sandbox}/files", tag = "files",
    params(OfSandbox, PathQuery),
    responses((status = 204, description = "It is gone.")),
)]
pub async fn remove_file(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Asked(query): Asked<PathQuery>,
) -> Result<StatusCode> {
    let path = absolute(&query.path)?;
    let files = files(&native, &of.sandbox).await?;
    files.remove(path).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileType {
    File,
    Directory,
    Symlink,
    /// A device, a socket or a FIFO.
    Other,
}

/// The attributes of a file of a guest.
#[derive(Debug, Serialize, ToSchema)]
pub struct FileStat {
    pub kind: FileType,
    pub size: u64,
    /// Permission bits, as a number.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub modified_unix_ns: i64,
    /// The target of a symbolic link. Bytes that are not UTF-8 are replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

impl From<Stat> for FileStat {
    fn from(stat: Stat) -> Self {
        let target = String::from_utf8_lossy(&stat.target).into_owned();
        Self {
            kind: match stat.kind {
                FileKind::File => FileType::File,
                FileKind::Dir => FileType::Directory,
                FileKind::Symlink => FileType::Symlink,
                FileKind::Other => FileType::Other,
            },
            size: stat.size,
            mode: stat.mode,
            uid: stat.uid,
            gid: stat.gid,
            modified_unix_ns: stat.modified_ns,
            target: Some(target).filter(|target| !target.is_empty()),
        }
    }
}

/// The attributes of a file, directory or link. Links are not followed.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/files/stat", tag = "files",
    params(OfSandbox, PathQuery),
    responses((status = 200, body = FileStat)),
)]
pub async fn stat_file(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Asked(query): Asked<PathQuery>,
) -> Result<Json<FileStat>> {
    let path = absolute(&query.path)?;
    let files = files(&native, &of.sandbox).await?;
    Ok(Json(files.stat_link(path).await?.into()))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct EntriesQuery {
    /// An absolute path of a directory in the guest.
    path: String,
    /// How many entries a page has: 1 to 100000, 1000 unless given.
    #[param(minimum = 1, maximum = 100000)]
    limit: Option<usize>,
    /// `next` of the page before.
    after: Option<String>,
}

/// An entry of a directory.
#[derive(Debug, Serialize, ToSchema)]
pub struct FileEntry {
    /// Missing if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name_base64: Option<String>,
    #[serde(flatten)]
    pub stat: FileStat,
}

impl From<DirEntry> for FileEntry {
    fn from(entry: DirEntry) -> Self {
        let name = String::from_utf8(entry.name);
        let name_base64 = name.as_ref().err().map(|e| STANDARD.encode(e.as_bytes()));
        Self {
            name: name.ok(),
            name_base64,
            stat: entry.stat.into(),
        }
    }
}

/// A page of a directory, by name.
#[derive(Debug, Serialize, ToSchema)]
pub struct FilePage {
    pub entries: Vec<FileEntry>,
    /// Where the next page begins; null on the last page.
    pub next: Option<String>,
}

/// Lists a directory, a page at a time.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/files/list", tag = "files",
    params(OfSandbox, EntriesQuery),
    responses((status = 200, body = FilePage)),
)]
pub async fn list_files(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Asked(query): Asked<EntriesQuery>,
) -> Result<Json<FilePage>> {
    let path = absolute(&query.path)?;
    let limit = query.limit.unwrap_or(ENTRIES);
    if !(1..=ENTRIES_MAX).contains(&limit) {
        let message = format!("invalid limit {limit}: use 1 to {ENTRIES_MAX}");
        return Err(Fault::bad_request(message));
    }
    let after = query.after.map(|text| STANDARD.decode(text)).transpose();
    let invalid = |_| Fault::bad_request("invalid after: use `next` of another page");
    let after = after.map_err(invalid)?;
    // A guest may list very much, which is sorted as a whole.
    let _place = native.transfer()?;
    let files = files(&native, &of.sandbox).await?;
    let mut entries = files.list(path).await?;
    entries.retain(|entry| after.as_ref().is_none_or(|after| entry.name > *after));
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    let has_more = entries.len() > limit;
    entries.truncate(limit);
    let last = entries.last().filter(|_| has_more);
    let next = last.map(|entry| STANDARD.encode(&entry.name));
    let entries = entries.into_iter().map(FileEntry::from).collect();
    Ok(Json(FilePage { entries, next }))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DirectoryOptions {
    /// An absolute path in the guest.
    path: String,
    /// Permissions as an octal number: 755 unless given.
    #[serde(default)]
    mode: Option<String>,
}

/// Makes a directory, and those above it.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/files/directory", tag = "files",
    params(OfSandbox), request_body = DirectoryOptions,
    responses((status = 204, description = "It exists.")),
)]
pub async fn make_directory(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Body(options): Body<DirectoryOptions>,
) -> Result<StatusCode> {
    let path = absolute(&options.path)?;
    let mode = mode(options.mode.as_deref(), 0o755)?;
    let files = files(&native, &of.sandbox).await?;
    files.make_dir(path, mode).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RenameOptions {
    /// Absolute paths in the guest.
    from: String,
    to: String,
}

/// Renames a file or a directory.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/files/rename", tag = "files",
    params(OfSandbox), request_body = RenameOptions,
    responses((status = 204, description = "It has its new name.")),
)]
pub async fn rename_file(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Body(options): Body<RenameOptions>,
) -> Result<StatusCode> {
    let from = absolute(&options.from)?;
    let to = absolute(&options.to)?;
    let files = files(&native, &of.sandbox).await?;
    files.rename(from, to).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_modes_are_checked() {
        assert!(absolute("/etc/hostname").is_ok());
        assert!(absolute("etc").is_err());
        assert!(absolute("").is_err());
        assert!(absolute("/a\0b").is_err());
        assert_eq!(mode(Some("755"), 0).unwrap(), 0o755);
        assert_eq!(mode(None, 0o644).unwrap(), 0o644);
        assert!(mode(Some("8"), 0).is_err());
        assert!(mode(Some("17777"), 0).is_err());
    }
}
