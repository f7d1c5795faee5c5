//! Directories and attributes of a guest's files.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use axum::extract::Request;
use axum::response::Response;
use sandtree::{ErrorKind, FileKind, Files, Stat, WatchChange, WatchEvent, WatchScope};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Call;
use super::rpc::{self, Answers};
use super::user::{User, Users};
use crate::error::{Fault, Result};
use crate::watchers::Events;

/// The prefix of the attributes that hold a file's metadata.
pub const METADATA: &str = "user.e2b.";
const DEPTH_MAX: u32 = 64;
const ENTRIES_MAX: usize = 100_000;
/// The bytes of all paths of a listing.
const LISTING_BYTES_MAX: usize = 16 << 20;
/// How many entries of a listing are shown with their metadata.
const METADATA_ENTRIES_MAX: usize = 1000;
const LINKS_MAX: usize = 16;

#[derive(Debug, Deserialize)]
struct AtPath {
    #[serde(default)]
    path: String,
}

#[derive(Debug, Deserialize)]
struct ListDir {
    #[serde(default)]
    path: String,
    depth: Option<u32>,
}

#[derive(Debug, Deserialize)]
struct Move {
    source: String,
    destination: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WatchDir {
    #[serde(default)]
    path: String,
    #[serde(default)]
    recursive: bool,
    #[serde(default)]
    include_entry: bool,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OfWatcher {
    watcher_id: String,
}

/// What all calls need: the guest's files, its users, and the one who asks.
struct Asker {
    files: Files,
    users: Users,
    user: User,
}

impl Asker {
    async fn of(call: &Call) -> Result<Self> {
        let users = Users::of(&call.connection).await?;
        let user = users.find(call.user.as_deref())?;
        Ok(Self {
            files: call.connection.guest.files(),
            users,
            user,
        })
    }
}

pub async fn serve(call: Call, method: &str, request: Request) -> Result<Response> {
    if method == "WatchDir" {
        let watched = watch_dir(&call, request).await;
        return Ok(watched.unwrap_or_else(|fault| rpc::failed_stream(&fault)));
    }
    let answered = match method {
        "Stat" => stat(&call, request).await,
        "ListDir" => list_dir(&call, request).await,
        "MakeDir" => make_dir(&call, request).await,
        "Move" => rename(&call, request).await,
        "Remove" => remove(&call, request).await,
        "CreateWatcher" => create_watcher(&call, request).await,
        "GetWatcherEvents" => watcher_events(&call, request).await,
        "RemoveWatcher" => remove_watcher(&call, request).await,
        other => {
            let message = format!("there is no filesystem.Filesystem/{other}");
            return Err(Fault::not_found(message));
        }
    };
    Ok(rpc::answer(answered))
}

async fn stat(call: &Call, request: Request) -> Result<Value> {
    let AtPath { path } = rpc::read(request).await?;
    let asker = Asker::of(call).await?;
    let path = asker.user.path(&path)?;
    let entry = entry(&asker.files, &asker.users, &path).await?;
    Ok(json!({ "entry": entry }))
}

async fn list_dir(call: &Call, request: Request) -> Result<Value> {
    let ListDir { path, depth } = rpc::read(request).await?;
    let asker = Asker::of(call).await?;
    let top = asker.user.path(&path)?;
    let depth = depth.unwrap_or(1).clamp(1, DEPTH_MAX);
    let stat = asker
        .files
        .stat(&top)
        .await
        .map_err(|error| missing(error, &top))?;
    if stat.kind != FileKind::Dir {
        let message = format!("path is not a directory: {}", top.display());
        return Err(Fault::bad_request(message));
    }
    let mut entries = Vec::new();
    let mut bytes = 0;
    // The last one is shown next, and what is in it follows at once.
    let mut left = children(&asker.files, &top, 1).await?;
    while let Some(Found { path, stat, level }) = left.pop() {
        if entries.len() + left.len() >= ENTRIES_MAX || bytes > LISTING_BYTES_MAX {
            return Err(Fault::bad_request("the directory has too many entries"));
        }
        bytes += path.as_os_str().len();
        let mut entry = shown(&asker.files, &asker.users, &path, &stat).await;
        // Each costs a round trip to the guest.
        if entries.len() < METADATA_ENTRIES_MAX {
            add_metadata(&mut entry, &asker.files, &path, &stat).await;
        }
        entries.push(entry);
        if stat.kind == FileKind::Dir && level < depth {
            left.extend(children(&asker.files, &path, level + 1).await?);
        }
    }
    Ok(json!({ "entries": entries }))
}

/// A file that a listing has not shown yet.
struct Found {
    path: PathBuf,
    stat: Stat,
    level: u32,
}

/// What is in a directory, the first by name at the end.
async fn children(files: &Files, directory: &Path, level: u32) -> Result<Vec<Found>> {
    let mut found = match files.list(directory).await {
        Ok(found) => found,
        // It was removed meanwhile.
        Err(error) if level > 1 && error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(missing(error, directory)),
    };
    found.sort_by(|a, b| b.name.cmp(&a.name));
    let found = found.into_iter().map(|item| Found {
        path: directory.join(std::ffi::OsStr::from_bytes(&item.name)),
        stat: item.stat,
        level,
    });
    Ok(found.collect())
}

async fn make_dir(call: &Call, request: Request) -> Result<Value> {
    let AtPath { path } = rpc::read(request).await?;
    let asker = Asker::of(call).await?;
    let path = asker.user.path(&path)?;
    match asker.files.stat(&path).await {
        Ok(stat) if stat.kind == FileKind::Dir => {
            let message = format!("directory already exists: {}", path.display());
            return Err(Fault::conflict(message));
        }
        Ok(_) => {
            let message = format!(
                "path already exists but it is not a directory: {}",
                path.display()
            );
            return Err(Fault::bad_request(message));
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    make_dirs(&asker.files, &asker.user, &path).await?;
    let entry = entry(&asker.files, &asker.users, &path).await?;
    Ok(json!({ "entry": entry }))
}

/// Makes a directory with its parents; those that are new belong to the user.
pub async fn make_dirs(files: &Files, user: &User, path: &Path) -> Result<()> {
    let mut new = Vec::new();
    for directory in path.ancestors() {
        match files.stat(directory).await {
            Ok(stat) if stat.kind == FileKind::Dir => break,
            Ok(_) => {
                let message = format!("not a directory: {}", directory.display());
                return Err(Fault::bad_request(message));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => new.push(directory),
            Err(error) => return Err(missing(error, directory)),
        }
    }
    for directory in new.into_iter().rev() {
        files.make_dir(directory, 0o755).await?;
        files.set_owner(directory, user.uid, user.gid).await?;
    }
    Ok(())
}

async fn rename(call: &Call, request: Request) -> Result<Value> {
    let Move {
        source,
        destination,
    } = rpc::read(request).await?;
    let asker = Asker::of(call).await?;
    let from = asker.user.path(&source)?;
    let to = asker.user.path(&destination)?;
    asker
        .files
        .stat_link(&from)
        .await
        .map_err(|error| missing(error, &from))?;
    if let Some(parent) = to.parent() {
        make_dirs(&asker.files, &asker.user, parent).await?;
    }
    asker.files.rename(&from, &to).await?;
    let entry = entry(&asker.files, &asker.users, &to).await?;
    Ok(json!({ "entry": entry }))
}

/// A file that does not exist is removed already.
async fn remove(call: &Call, request: Request) -> Result<Value> {
    let AtPath { path } = rpc::read(request).await?;
    let asker = Asker::of(call).await?;
    let path = asker.user.path(&path)?;
    match asker.files.remove(&path).await {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        removed => removed?,
    }
    Ok(json!({}))
}

/// A file that does not exist, in the words that clients know.
pub fn missing(error: sandtree::Error, path: &Path) -> Fault {
    if error.kind() == ErrorKind::NotFound {
        return Fault::not_found(format!("path '{}' does not exist", path.display()));
    }
    error.into()
}

async fn entry(files: &Files, users: &Users, path: &Path) -> Result<Value> {
    let stat = files
        .stat_link(path)
        .await
        .map_err(|error| missing(error, path))?;
    let mut entry = shown(files, users, path, &stat).await;
    add_metadata(&mut entry, files, path, &stat).await;
    Ok(entry)
}

/// A file as clients see it. A link is shown with the type and mode of its target.
async fn shown(files: &Files, users: &Users, path: &Path, stat: &Stat) -> Value {
    let target = match stat.kind {
        FileKind::Symlink => Some(followed(files, path, stat).await),
        _ => None,
    };
    let seen = target.as_ref().map_or(stat, |(_, target)| target);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut entry = json!({
        "name": name,
        "type": type_name(seen.kind),
        "path": path.to_string_lossy(),
        "size": stat.size.to_string(),
        "mode": seen.mode & 0o777,
        "permissions": permissions(stat),
        "owner": users.user_name(stat.uid),
        "group": users.group_name(stat.gid),
        "modifiedTime": time(stat.modified_ns),
    });
    if let Some((target, _)) = target {
        entry["symlinkTarget"] = target.to_string_lossy().into();
    }
    entry
}

async fn add_metadata(entry: &mut Value, files: &Files, path: &Path, stat: &Stat) {
    if stat.kind != FileKind::File {
        return;
    }
    let metadata = metadata(files, path).await;
    if !metadata.is_empty() {
        entry["metadata"] = Value::Object(metadata);
    }
}

/// Where a link leads in the end. A link that leads nowhere leads to itself.
async fn followed(files: &Files, path: &Path, link: &Stat) -> (PathBuf, Stat) {
    let Ok(end) = files.stat(path).await else {
        return (path.to_owned(), link.clone());
    };
    let mut at = path.to_owned();
    let mut stat = link.clone();
    for _ in 0..LINKS_MAX {
        if stat.kind != FileKind::Symlink {
            break;
        }
        let target = Path::new(std::ffi::OsStr::from_bytes(&stat.target));
        at = at.parent().unwrap_or(Path::new("/")).join(target);
        match files.stat_link(&at).await {
            Ok(next) => stat = next,
            Err(_) => break,
        }
    }
    (at, end)
}

/// The metadata that was given to a file when it was written.
pub async fn metadata(files: &Files, path: &Path) -> serde_json::Map<String, Value> {
    // An earlier agent knows no attributes, and neither do some file systems.
    let found = files.attributes(path, METADATA).await.unwrap_or_default();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let pairs = found.into_iter();
    pairs
        .map(|(name, value)| (text(name), Value::String(text(value))))
        .collect()
}

fn type_name(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "FILE_TYPE_FILE",
        FileKind::Dir => "FILE_TYPE_DIRECTORY",
        FileKind::Symlink => "FILE_TYPE_SYMLINK",
        FileKind::Other => "FILE_TYPE_UNSPECIFIED",
    }
}

/// As `ls -l` shows them.
fn permissions(stat: &Stat) -> String {
    let kind = match stat.kind {
        FileKind::File => '-',
        FileKind::Dir => 'd',
        FileKind::Symlink => 'L',
        FileKind::Other => '?',
    };
    let letters = "rwxrwxrwx".chars().enumerate().map(|(place, letter)| {
        let is_set = stat.mode & (0o400 >> place) != 0;
        if is_set { letter } else { '-' }
    });
    std::iter::once(kind).chain(letters).collect()
}

fn time(unix_ns: i64) -> String {
    let since = Duration::from_nanos(unix_ns.max(0).unsigned_abs());
    humantime::format_rfc3339_nanos(UNIX_EPOCH + since).to_string()
}

/// What events are reported with, in addition to names.
struct Entries {
    directory: PathBuf,
    /// If events come with the file's entry.
    users: Option<Users>,
}

/// A watch of a directory, and what its events are reported with.
async fn watch(call: &Call, asked: &WatchDir) -> Result<(sandtree::Watch, Entries)> {
    let asker = Asker::of(call).await?;
    let path = asker.user.path(&asked.path)?;
    let stat = asker
        .files
        .stat(&path)
        .await
        .map_err(|error| missing(error, &path))?;
    if stat.kind != FileKind::Dir {
        let message = format!("path is not a directory: {}", path.display());
        return Err(Fault::bad_request(message));
    }
    let scope = if asked.recursive {
        WatchScope::Tree
    } else {
        WatchScope::Directory
    };
    let watch = asker.files.watch(&path, scope).await?;
    let entries = Entries {
        directory: path,
        users: asked.include_entry.then_some(asker.users),
    };
    Ok((watch, entries))
}

/// An event as clients see it. `None`: it concerns no file.
async fn shown_event(files: &Files, entries: &Entries, event: WatchEvent) -> Option<Value> {
    let kind = match event.change {
        WatchChange::Created => "EVENT_TYPE_CREATE",
        WatchChange::Written => "EVENT_TYPE_WRITE",
        WatchChange::Removed => "EVENT_TYPE_REMOVE",
        WatchChange::MovedAway => "EVENT_TYPE_RENAME",
        WatchChange::Attributes => "EVENT_TYPE_CHMOD",
        WatchChange::Watching | WatchChange::Missed => return None,
    };
    let name = Path::new(std::ffi::OsStr::from_bytes(&event.path));
    let mut shown = json!({ "name": name.to_string_lossy(), "type": kind });
    let has_entry = matches!(
        event.change,
        WatchChange::Created | WatchChange::Written | WatchChange::Attributes
    );
    if let Some(users) = entries.users.as_ref().filter(|_| has_entry) {
        let path = entries.directory.join(name);
        // It may be gone again.
        if let Ok(entry) = entry(files, users, &path).await {
            shown["entry"] = entry;
        }
    }
    Some(shown)
}

async fn create_watcher(call: &Call, request: Request) -> Result<Value> {
    let asked: WatchDir = rpc::read(request).await?;
    let (mut watch, entries) = watch(call, &asked).await?;
    let files = call.connection.guest.files();
    let events = Events::default();
    let kept = events.clone();
    // The link of a paused sandbox waits for its guest, and so does this.
    let task = tokio::spawn(async move {
        while let Ok(Some(event)) = watch.next().await {
            if let Some(shown) = shown_event(&files, &entries, event).await {
                kept.push(shown);
            }
        }
    });
    let watchers = call.gateway.watchers();
    let name = watchers.add(call.connection.id(), events, task.abort_handle())?;
    Ok(json!({ "watcherId": name }))
}

async fn watcher_events(call: &Call, request: Request) -> Result<Value> {
    let OfWatcher { watcher_id } = rpc::read(request).await?;
    let events = call
        .gateway
        .watchers()
        .take(call.connection.id(), &watcher_id)?;
    Ok(json!({ "events": events }))
}

async fn remove_watcher(call: &Call, request: Request) -> Result<Value> {
    let OfWatcher { watcher_id } = rpc::read(request).await?;
    call.gateway
        .watchers()
        .remove(call.connection.id(), &watcher_id)?;
    Ok(json!({}))
}

async fn watch_dir(call: &Call, request: Request) -> Result<Response> {
    let every = rpc::keepalive(request.headers());
    let asked: WatchDir = rpc::read_one(request).await?;
    let (mut watch, entries) = watch(call, &asked).await?;
    let connection = call.connection.clone();
    let files = connection.guest.files();
    let (answers, response) = Answers::new();
    tokio::spawn(async move {
        let mut is_there = answers.send(&json!({ "start": {} })).await;
        while is_there {
            // The link of a paused sandbox waits for its guest, and so does this.
            let event = tokio::select! {
                event = watch.next() => event,
                () = answers.closed() => return,
                () = tokio::time::sleep(every) => {
                    is_there = answers.send(&json!({ "keepalive": {} })).await;
                    continue;
                }
            };
            match event {
                Ok(Some(event)) => {
                    if let Some(shown) = shown_event(&files, &entries, event).await {
                        is_there = answers.send(&json!({ "filesystem": shown })).await;
                    }
                }
                Ok(None) => return answers.end().await,
                Err(error) if connection.is_alive() => return answers.fail(&error.into()).await,
                Err(_) => {
                    connection.recorded().await;
                    return drop(answers);
                }
            }
        }
    });
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(kind: FileKind, mode: u32) -> Stat {
        Stat {
            kind,
            mode,
            uid: 0,
            gid: 0,
            size: 0,
            modified_ns: 0,
            target: Vec::new(),
        }
    }

    #[test]
    fn permissions_are_shown_as_in_a_listing() {
        assert_eq!(permissions(&stat(FileKind::File, 0o644)), "-rw-r--r--");
        assert_eq!(permissions(&stat(FileKind::Dir, 0o750)), "drwxr-x---");
    }

    #[test]
    fn times_are_in_utc() {
        assert_eq!(time(1_000_000_001), "1970-01-01T00:00:01.000000001Z");
        assert_eq!(time(-5), "1970-01-01T00:00:00.000000000Z");
    }
}
