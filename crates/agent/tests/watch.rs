//! Watches, owners and extended attributes.

mod client;

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use client::Agent;
use sandtree_proto::message::decode_item;
use sandtree_proto::{
    HostMessage, Open, Outcome, Reply, Request, WatchChange, WatchEvent, WatchScope,
};

fn bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

/// A watched directory.
struct Watched {
    agent: Agent,
    dir: tempfile::TempDir,
    channel: u32,
}

impl Watched {
    fn new(scope: WatchScope) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut agent = Agent::start(&[]);
        let channel = agent.client.open(Open::Watch {
            path: bytes(dir.path()),
            scope,
        });
        let mut watched = Self {
            agent,
            dir,
            channel,
        };
        watched.until(WatchChange::Watching, "");
        watched
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn seen(&self) -> Vec<WatchEvent> {
        let mut out = self.agent.client.channels[&self.channel].out.clone();
        std::iter::from_fn(|| decode_item(&mut out).unwrap()).collect()
    }

    fn until(&mut self, change: WatchChange, path: &str) {
        let wanted = WatchEvent {
            change,
            path: path.into(),
        };
        let channel = self.channel;
        self.agent.client.until(&format!("{wanted:?}"), |client| {
            let mut out = client.channels[&channel].out.clone();
            let mut events = std::iter::from_fn(|| decode_item(&mut out).unwrap());
            events.any(|event: WatchEvent| event == wanted)
        });
    }
}

#[test]
fn every_change_of_a_directory_is_reported() {
    let mut watched = Watched::new(WatchScope::Directory);
    fs::write(watched.path("a"), "1").unwrap();
    watched.until(WatchChange::Created, "a");
    watched.until(WatchChange::Written, "a");
    fs::rename(watched.path("a"), watched.path("b")).unwrap();
    watched.until(WatchChange::MovedAway, "a");
    watched.until(WatchChange::Created, "b");
    let mut permissions = fs::metadata(watched.path("b")).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(watched.path("b"), permissions).unwrap();
    watched.until(WatchChange::Attributes, "b");
    fs::remove_file(watched.path("b")).unwrap();
    watched.until(WatchChange::Removed, "b");
}

#[test]
fn new_directories_are_watched_with_what_is_in_them() {
    let mut watched = Watched::new(WatchScope::Tree);
    fs::create_dir_all(watched.path("x/y")).unwrap();
    fs::write(watched.path("x/y/z"), "1").unwrap();
    watched.until(WatchChange::Created, "x");
    watched.until(WatchChange::Created, "x/y");
    watched.until(WatchChange::Created, "x/y/z");
    // A directory that was moved away is not watched any more, and one that came back is.
    let outside = tempfile::tempdir().unwrap();
    let away = outside.path().join("x");
    fs::rename(watched.path("x"), &away).unwrap();
    watched.until(WatchChange::MovedAway, "x");
    fs::write(away.join("unseen"), "1").unwrap();
    fs::rename(&away, watched.path("back")).unwrap();
    watched.until(WatchChange::Created, "back/unseen");
    fs::write(watched.path("back/y/again"), "1").unwrap();
    watched.until(WatchChange::Created, "back/y/again");
    let paths = watched.seen().into_iter().map(|event| event.path);
    assert_eq!(paths.filter(|path| path == b"x/unseen").count(), 0);
}

#[test]
fn a_write_of_the_agent_shows_under_its_name_only() {
    let mut watched = Watched::new(WatchScope::Directory);
    let path = watched.path("file");
    let write = |watched: &mut Watched| {
        let client = &mut watched.agent.client;
        let channel = client.open(Open::WriteFile {
            path: bytes(&path),
            mode: 0o644,
            uid: 0,
            gid: 0,
        });
        client.feed(channel, b"hello");
        client.finish(channel);
    };
    let new = [
        WatchChange::Watching,
        WatchChange::Created,
        WatchChange::Attributes,
        WatchChange::Written,
    ];
    write(&mut watched);
    watched.until(WatchChange::Written, "file");
    let changes = |watched: &Watched| {
        let seen = watched.seen().into_iter();
        seen.map(|event| event.change).collect::<Vec<_>>()
    };
    assert_eq!(changes(&watched), new);
    // The file exists now, so it is written and not created.
    write(&mut watched);
    fs::remove_file(&path).unwrap();
    watched.until(WatchChange::Removed, "file");
    let over = [WatchChange::Written, WatchChange::Removed];
    assert_eq!(changes(&watched)[new.len()..], over);
    let staged = |event: &WatchEvent| String::from_utf8_lossy(&event.path).contains("sandtree");
    assert!(!watched.seen().iter().any(staged), "{:?}", watched.seen());
}

#[test]
fn a_watch_ends_with_its_channel_or_its_directory() {
    let mut watched = Watched::new(WatchScope::Directory);
    let channel = watched.channel;
    fs::remove_dir(watched.dir.path()).unwrap();
    let seen = watched.agent.client.finish(channel);
    assert_eq!(seen.outcome, Some(Outcome::Done));

    // A closed channel leaves the pipe of the watch without a reader, so its thread stops watching.
    let mut watched = Watched::new(WatchScope::Directory);
    let channel = watched.channel;
    let open = format!("/proc/{}/fd", watched.agent.process.id());
    let is_watching = || {
        let files = fs::read_dir(&open).unwrap().flatten();
        let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
        targets.any(|target| target == Path::new("anon_inode:inotify"))
    };
    assert!(is_watching());
    watched.agent.client.send(&HostMessage::Close { channel });
    let client = &mut watched.agent.client;
    client.until("end of the watch", |_| !is_watching());
}

#[test]
fn what_is_no_directory_cannot_be_watched() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let mut agent = Agent::start(&[]);
    for (path, errno) in [(file, libc::ENOTDIR), (dir.path().join("no"), libc::ENOENT)] {
        let open = Open::Watch {
            path: bytes(&path),
            scope: WatchScope::Tree,
        };
        let channel = agent.client.open(open);
        match agent.client.finish(channel).outcome {
            Some(Outcome::Failed(failure)) => assert_eq!(failure.errno, errno),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn attributes_are_replaced_as_a_whole() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("file");
    fs::write(&path, "").unwrap();
    let mut agent = Agent::start(&[]);
    let mut set = |attributes: &[(&str, &str)]| {
        let attributes = attributes
            .iter()
            .map(|(name, value)| (name.as_bytes().to_vec(), value.as_bytes().to_vec()))
            .collect();
        let request = Request::SetAttributes {
            path: bytes(&path),
            prefix: b"user.test.".to_vec(),
            attributes,
        };
        match agent.client.request(request) {
            Err(failure) if failure.errno == libc::EOPNOTSUPP => return None,
            done => assert_eq!(done, Ok(Reply::Done)),
        }
        let request = Request::Attributes {
            path: bytes(&path),
            prefix: b"user.test.".to_vec(),
        };
        match agent.client.request(request) {
            Ok(Reply::Attributes(mut found)) => {
                found.sort();
                Some(found)
            }
            other => panic!("{other:?}"),
        }
    };
    let Some(first) = set(&[("a", "1"), ("b", "2")]) else {
        eprintln!("not checked: the file system of /var/tmp has no attributes");
        return;
    };
    assert_eq!(first.len(), 2);
    let second = set(&[("b", "3")]).unwrap();
    assert_eq!(second, [(b"b".to_vec(), b"3".to_vec())]);
    assert_eq!(set(&[]).unwrap(), []);
}

#[test]
fn the_owner_of_a_link_is_set_and_not_that_of_its_target() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("/nowhere", &link).unwrap();
    let mut agent = Agent::start(&[]);
    let request = Request::SetOwner {
        path: bytes(&link),
        uid: 1234,
        gid: 4321,
    };
    assert_eq!(agent.client.request(request), Ok(Reply::Done));
    if rustix::process::geteuid().is_root() {
        use std::os::unix::fs::MetadataExt;
        let status = fs::symlink_metadata(&link).unwrap();
        assert_eq!((status.uid(), status.gid()), (1234, 4321));
    }
}
