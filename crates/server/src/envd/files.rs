//! Contents of a guest's files, up and down.

use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_compression::tokio::bufread::GzipDecoder;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{Stream, TryStreamExt};
use hyper::header::{
    ACCEPT_RANGES, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, RANGE,
};
use hyper::{HeaderMap, Method, StatusCode, Uri};
use percent_encoding::percent_decode_str;
use sandtree::{Code, ErrorKind, FileKind, FileOwner, Files, Stat};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, BufReader, DuplexStream};
use tokio_util::io::{ReaderStream, StreamReader};

use super::Call;
use super::filesystem::{METADATA, make_dirs, metadata, missing};
use super::user::{self, ROOT, User, Users};
use crate::auth::{self, Signed};
use crate::clock::now_unix_ms;
use crate::error::{Fault, Result};

/// The bytes of a file between guest and client.
const BUFFER: usize = 256 * 1024;
const PARTS_MAX: usize = 10_000;
/// What a form may have beside the contents of its files, for each of them.
const PART_HEAD_MAX: usize = 256 * 1024;
const SIZELESS_MAX: usize = 4 << 20;
const LINKS_MAX: usize = 16;
/// The headers with a file's metadata.
const METADATA_HEADER: &str = "x-metadata-";
const METADATA_MAX: usize = 32 * 1024;

/// The query of an address of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
    pub path: Option<String>,
    pub username: Option<String>,
    pub signature: Option<String>,
    pub signature_expiration: Option<String>,
}

impl Query {
    pub fn of(uri: &Uri) -> Result<Self> {
        let mut query = Self::default();
        for pair in uri.query().unwrap_or_default().split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let field = match name {
                "path" => &mut query.path,
                "username" => &mut query.username,
                "signature" => &mut query.signature,
                "signature_expiration" => &mut query.signature_expiration,
                _ => continue,
            };
            // In a signature it is a digit of base64.
            let value = match name {
                "signature" => value.to_owned(),
                _ => value.replace('+', " "),
            };
            let value = percent_decode_str(&value)
                .decode_utf8()
                .map_err(|_| Fault::bad_request("the query is not UTF-8"))?;
            *field = Some(value.into_owned());
        }
        Ok(query)
    }

    /// What a signature for a request with this query must allow.
    pub fn signed(&self, method: &Method) -> Signed<'_> {
        Signed {
            path: self.path.as_deref().unwrap_or_default(),
            operation: match *method {
                Method::GET | Method::HEAD => "read",
                _ => "write",
            },
            user: self.username.as_deref().unwrap_or_default(),
            expiration: self.signature_expiration.as_deref(),
        }
    }
}

/// Refuses a request without a valid signature.
pub fn check_signature(request: &Request, token: &str) -> Result<()> {
    let query = Query::of(request.uri())?;
    let Some(signature) = &query.signature else {
        return Err(Fault::unauthorized("missing signature query parameter"));
    };
    if !query.signed(request.method()).matches(token, signature) {
        return Err(Fault::unauthorized("invalid signature"));
    }
    let Some(expiration) = &query.signature_expiration else {
        return Ok(());
    };
    let now = now_unix_ms() / 1000;
    match expiration.parse::<u64>() {
        Ok(at) if now <= at => Ok(()),
        Ok(_) => Err(Fault::unauthorized("signature is already expired")),
        Err(_) => Err(Fault::unauthorized("invalid signature expiration")),
    }
}

/// The user of a request for a file: the query's, or that of the head.
async fn asker(call: &Call, query: &Query) -> Result<User> {
    let users = Users::without_groups(&call.connection).await?;
    users.find(named(call, query))
}

fn named<'a>(call: &'a Call, query: &'a Query) -> Option<&'a str> {
    let name = query.username.as_deref().or(call.user.as_deref());
    name.filter(|name| !name.is_empty())
}

/// The file of a download and its attributes. A path that means the same to every user is looked
/// at while the user is looked up: each look costs a round trip.
async fn source(call: &Call, query: &Query, files: &Files) -> Result<(PathBuf, Stat)> {
    let path = query.path.as_deref().unwrap_or_default();
    let Some(path) = user::absolute(path) else {
        let user = asker(call, query).await?;
        return existing(files, user.path(path)?).await;
    };
    // These are users of every guest.
    if named(call, query).is_none_or(|name| name == ROOT) {
        return existing(files, path).await;
    }
    let (user, found) = tokio::join!(asker(call, query), existing(files, path));
    user?;
    found
}

async fn existing(files: &Files, path: PathBuf) -> Result<(PathBuf, Stat)> {
    let stat = files.stat(&path).await;
    let stat = stat.map_err(|error| missing(error, &path))?;
    Ok((path, stat))
}

pub async fn download(call: Call, request: Request) -> Result<Response> {
    let query = Query::of(request.uri())?;
    let files = call.connection.guest.files();
    let (path, stat) = source(&call, &query, &files).await?;
    if stat.kind != FileKind::File {
        let message = format!("path '{}' is not a regular file", path.display());
        return Err(Fault::bad_request(message));
    }
    if stat.size == 0 {
        // A file of the kernel's own does not say how large it is.
        let content = files.read_to_vec(&path, SIZELESS_MAX).await?;
        return Ok(content.into_response());
    }
    let range = range(request.headers(), stat.size)?;
    let range = match range {
        Some(range) if reads_ranges(&files, &path).await? => Some(range),
        // The whole file, as the standard allows.
        _ => None,
    };
    let (reader, writer) = tokio::io::duplex(BUFFER);
    tokio::spawn(read(files, path, range.clone(), writer));
    let length = range
        .as_ref()
        .map_or(stat.size, |range| range.end - range.start);
    let body = Body::from_stream(ReaderStream::with_capacity(reader.take(length), BUFFER));
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_LENGTH, length.into());
    let kind = hyper::header::HeaderValue::from_static("application/octet-stream");
    headers.insert(CONTENT_TYPE, kind);
    headers.insert(
        ACCEPT_RANGES,
        hyper::header::HeaderValue::from_static("bytes"),
    );
    if let Some(range) = range {
        let text = format!("bytes {}-{}/{}", range.start, range.end - 1, stat.size);
        headers.insert(CONTENT_RANGE, text.parse().expect("numbers are plain"));
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
    }
    Ok(response)
}

/// Whether the guest's agent reads parts of files: that of an older state does not.
async fn reads_ranges(files: &Files, path: &Path) -> Result<bool> {
    match files.read_range(path, 0..0, &mut tokio::io::sink()).await {
        Ok(_) => Ok(true),
        Err(error) if error.code() == Some(Code::AgentTooOld) => Ok(false),
        Err(error) => Err(missing(error, path)),
    }
}

/// Reads a file, or a part of it. A client that is gone, or a file that shrinks, ends the body
/// early: the client sees it.
async fn read(files: Files, path: PathBuf, range: Option<Range<u64>>, mut to: DuplexStream) {
    let read = match range {
        Some(range) => files.read_range(&path, range, &mut to).await,
        None => files.read(&path, &mut to).await,
    };
    if let Err(error) = read {
        tracing::debug!(%error, "a download ended early");
    }
}

/// The one range that a client asks for. Others are ignored, as the standard allows.
fn range(headers: &HeaderMap, size: u64) -> Result<Option<Range<u64>>> {
    let Some(text) = auth::header(headers, RANGE.as_str()) else {
        return Ok(None);
    };
    let Some((first, last)) = text
        .strip_prefix("bytes=")
        .and_then(|text| text.split_once('-'))
    else {
        return Ok(None);
    };
    let range = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) if first <= last => first..size.min(last.saturating_add(1)),
        (Ok(first), Err(_)) if last.is_empty() => first..size,
        (Err(_), Ok(count)) if first.is_empty() => size.saturating_sub(count)..size,
        _ => return Ok(None),
    };
    if range.start >= range.end {
        let message = format!("the file has {size} bytes");
        return Err(Fault::new(StatusCode::RANGE_NOT_SATISFIABLE, message));
    }
    Ok(Some(range))
}

pub async fn upload(call: Call, request: Request) -> Result<Response> {
    let query = Query::of(request.uri())?;
    let files = call.connection.guest.files();
    let attributes = attributes(request.headers())?;
    let (user, place) = tokio::join!(asker(&call, &query), place(&query, &files));
    let upload = Upload {
        files,
        user: user?,
        attributes,
        place,
    };
    let kind = auth::header(request.headers(), CONTENT_TYPE.as_str()).unwrap_or_default();
    let written = if kind.starts_with("multipart/form-data") {
        upload.parts(&query, kind.to_owned(), request).await?
    } else if kind.starts_with("application/octet-stream") {
        vec![upload.whole(&query, request).await?]
    } else {
        let message = format!(
            "unsupported content type {kind:?}: use multipart/form-data or application/octet-stream"
        );
        return Err(Fault::bad_request(message));
    };
    Ok(axum::Json(written).into_response())
}

/// The metadata in the headers of an upload.
fn attributes(headers: &HeaderMap) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut found = Vec::new();
    let mut bytes = 0;
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(METADATA_HEADER) else {
            continue;
        };
        bytes += key.len() + value.len();
        found.push((key.as_bytes().to_vec(), value.as_bytes().to_vec()));
    }
    if bytes > METADATA_MAX {
        return Err(Fault::bad_request("metadata is too large: at most 32 KiB"));
    }
    Ok(found)
}

/// The place of a file whose path means the same to every user.
async fn place(query: &Query, files: &Files) -> Option<(PathBuf, Place)> {
    let path = user::absolute(query.path.as_deref()?)?;
    // A failed look is repeated, and fails with its reason.
    let place = end_of_links(files, &path).await.ok()?;
    Some((path, place))
}

/// Where a path leads, and the file that is there.
type Place = (PathBuf, Option<Stat>);

struct Upload {
    files: Files,
    user: User,
    attributes: Vec<(Vec<u8>, Vec<u8>)>,
    /// The place of the query's path, looked up together with the user.
    place: Option<(PathBuf, Place)>,
}

impl Upload {
    async fn whole(&self, query: &Query, request: Request) -> Result<Value> {
        let Some(path) = query.path.as_deref().filter(|path| !path.is_empty()) else {
            return Err(Fault::bad_request("path is missing"));
        };
        let path = self.user.path(path)?;
        let encoding = auth::header(request.headers(), CONTENT_ENCODING.as_str());
        let encoding = encoding.map(str::to_owned);
        let stream = request.into_body().into_data_stream();
        let mut reader = StreamReader::new(stream.map_err(std::io::Error::other));
        match encoding.as_deref() {
            None | Some("identity") => self.write(&path, &mut reader).await,
            Some("gzip") => {
                let mut plain = GzipDecoder::new(BufReader::new(reader));
                self.write(&path, &mut plain).await
            }
            Some(other) => Err(Fault::bad_request(format!(
                "unsupported content encoding {other:?}"
            ))),
        }
    }

    async fn parts(&self, query: &Query, kind: String, request: Request) -> Result<Vec<Value>> {
        let malformed = |error: multer::Error| Fault::bad_request(format!("invalid form: {error}"));
        let boundary = multer::parse_boundary(kind).map_err(malformed)?;
        let heads = Heads::default();
        let stream = heads.clone().limit(request.into_body());
        let mut form = multer::Multipart::new(stream, boundary);
        let mut written = Vec::new();
        let mut seen = Vec::new();
        let mut count = 0;
        while let Some(field) = {
            heads.begin();
            let field = form.next_field().await.map_err(malformed)?;
            heads.end();
            field
        } {
            count += 1;
            if count > PARTS_MAX {
                return Err(Fault::bad_request("too many files in one request"));
            }
            if field.name() != Some("file") {
                continue;
            }
            let own = field.file_name().map(|name| name.replace("%22", "\""));
            let named = query.path.clone().filter(|path| !path.is_empty()).or(own);
            let Some(named) = named else {
                return Err(Fault::bad_request("a file has neither a path nor a name"));
            };
            let path = self.user.path(&named)?;
            if seen.contains(&path) {
                let message = format!("path '{named}' is in the request twice");
                return Err(Fault::bad_request(message));
            }
            let mut reader = StreamReader::new(field.map_err(std::io::Error::other));
            written.push(self.write(&path, &mut reader).await?);
            seen.push(path);
        }
        Ok(written)
    }

    async fn write(&self, path: &Path, source: &mut (impl AsyncRead + Unpin)) -> Result<Value> {
        let place = match &self.place {
            Some((of, place)) if of == path => place.clone(),
            _ => end_of_links(&self.files, path).await?,
        };
        let (path, before) = &place;
        let owner = match before {
            Some(stat) if stat.kind == FileKind::Dir => {
                let message = format!("path '{}' is a directory", path.display());
                return Err(Fault::bad_request(message));
            }
            Some(stat) => FileOwner {
                mode: stat.mode,
                uid: self.user.uid,
                gid: self.user.gid,
            },
            None => {
                if let Some(parent) = path.parent() {
                    make_dirs(&self.files, &self.user, parent).await?;
                }
                FileOwner {
                    mode: 0o644,
                    uid: self.user.uid,
                    gid: self.user.gid,
                }
            }
        };
        self.files
            .write(path, source, owner)
            .await
            .map_err(broken)?;
        if !self.attributes.is_empty() {
            let attributes = self.attributes.clone();
            self.files
                .set_attributes(path, METADATA, attributes)
                .await?;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let mut shown = json!({ "path": path.to_string_lossy(), "name": name, "type": "file" });
        if !self.attributes.is_empty() {
            let metadata = metadata(&self.files, path).await;
            shown["metadata"] = Value::Object(metadata);
        }
        Ok(shown)
    }
}

/// Limits what a form has between the contents of its files: its parser keeps that in memory.
#[derive(Debug, Clone, Default)]
struct Heads {
    is_head: Arc<AtomicBool>,
    bytes: Arc<AtomicUsize>,
}

impl Heads {
    fn begin(&self) {
        self.bytes.store(0, Ordering::Relaxed);
        self.is_head.store(true, Ordering::Relaxed);
    }

    fn end(&self) {
        self.is_head.store(false, Ordering::Relaxed);
    }

    /// Fails the body when a head is too long.
    fn limit(self, body: Body) -> impl Stream<Item = std::io::Result<Bytes>> {
        let body = body.into_data_stream().map_err(std::io::Error::other);
        body.and_then(move |bytes| {
            let is_head = self.is_head.load(Ordering::Relaxed);
            let before = self.bytes.fetch_add(bytes.len(), Ordering::Relaxed);
            let is_too_long = is_head && before > PART_HEAD_MAX;
            let passed = match is_too_long.then_some("the head of a part is too long") {
                Some(reason) => Err(std::io::Error::other(reason)),
                None => Ok(bytes),
            };
            std::future::ready(passed)
        })
    }
}

/// A body that breaks off, or is not what it claims to be, is the client's mistake.
fn broken(error: sandtree::Error) -> Fault {
    match error {
        sandtree::Error::Io { .. } => Fault::bad_request(format!(
            "the body cannot be read: {}",
            error.report().one_line()
        )),
        error => error.into(),
    }
}

/// The file that a path leads to, if it is there: a file is written in place of the link's target,
/// not of the link.
async fn end_of_links(files: &Files, path: &Path) -> Result<Place> {
    let mut at = path.to_owned();
    for _ in 0..LINKS_MAX {
        match files.stat_link(&at).await {
            Ok(stat) if stat.kind == FileKind::Symlink => {
                let target = Path::new(std::ffi::OsStr::from_bytes(&stat.target));
                at = at.parent().unwrap_or(Path::new("/")).join(target);
            }
            Ok(stat) => return Ok((at, Some(stat))),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok((at, None)),
            Err(error) => return Err(error.into()),
        }
    }
    let message = format!("path '{}' leads through too many links", path.display());
    Err(Fault::bad_request(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        let uri: Uri = "/files?path=%2Fa%20b&username=root&signature=v1_x"
            .parse()
            .unwrap();
        let query = Query::of(&uri).unwrap();
        assert_eq!(query.path.as_deref(), Some("/a b"));
        assert_eq!(query.username.as_deref(), Some("root"));
        assert_eq!(query.signature.as_deref(), Some("v1_x"));
        assert!(Query::of(&"/files?path=%ff".parse().unwrap()).is_err());
    }

    #[test]
    fn ranges_are_within_the_file() {
        let asked = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RANGE, text.parse().unwrap());
            range(&headers, 10)
        };
        assert_eq!(asked("bytes=2-4").unwrap(), Some(2..5));
        assert_eq!(asked("bytes=2-99").unwrap(), Some(2..10));
        assert_eq!(asked("bytes=8-").unwrap(), Some(8..10));
        assert_eq!(asked("bytes=-3").unwrap(), Some(7..10));
        assert_eq!(asked("bytes=4-2").unwrap(), None);
        assert_eq!(asked("lines=1-2").unwrap(), None);
        assert!(asked("bytes=10-").is_err());
        let end = u64::MAX;
        assert_eq!(asked(&format!("bytes=0-{end}")).unwrap(), Some(0..10));
    }
}
