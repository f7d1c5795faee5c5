//! A guest without a guest: a client of the protocol, and a directory to serve.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Duration;

use sandtree_mounts::{Access, Directory, Outcome, Owner, Server, Status};
use sandtree_proto::Nonce;
use sandtree_proto::frame::encode_preamble;
use sandtree_proto::mount::{
    Answer, Arrived, Assembler, Attr, FileId, FromGuest, FromHost, Make, MountId, Node, Remove,
    Rename, Request, Served, decode, encode,
};

pub const NONCE: Nonce = Nonce([5; 16]);
pub const MOUNT: MountId = MountId(1);
pub const OWNER: Owner = Owner { uid: 501, gid: 502 };
/// Every wait ends by then.
pub const DEADLINE: Duration = Duration::from_secs(60);

pub fn open_directory(path: &Path) -> OwnedFd {
    let flags = 0o10000000 | 0o200000; // O_PATH, O_DIRECTORY
    let opened = File::options().read(true).custom_flags(flags).open(path);
    opened.expect("the directory exists").into()
}

pub fn directory(mount: MountId, path: &Path, access: Access) -> Directory {
    Directory {
        mount,
        root: open_directory(path),
        path: path.to_owned(),
        access,
        owner: OWNER,
    }
}

/// A server, its client, and the host's files: `shared` is served, `outside` is not.
pub struct World {
    pub client: Client,
    pub server: Server,
    pub temporary: tempfile::TempDir,
}

impl World {
    pub fn new() -> Self {
        Self::with(Access::ReadWrite)
    }

    pub fn with(access: Access) -> Self {
        Self::around(tempfile::tempdir().expect("a temporary directory"), access)
    }

    /// For many files: on a disk, most of the time is the disk's.
    pub fn in_memory() -> Self {
        let temporary = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Self::around(temporary.expect("a temporary directory"), Access::ReadWrite)
    }

    fn around(temporary: tempfile::TempDir, access: Access) -> Self {
        fs::create_dir(temporary.path().join("shared")).expect("room for a directory");
        fs::create_dir(temporary.path().join("outside")).expect("room for a directory");
        fs::write(temporary.path().join("outside/canary"), "canary").expect("room for a file");
        let served = directory(MOUNT, &temporary.path().join("shared"), access);
        let (port, stream) = UnixStream::pair().expect("a pair of sockets");
        let server = Server::start(port, NONCE, vec![served]).expect("the server starts");
        let client = Client::connect(stream, NONCE);
        Self {
            client,
            server,
            temporary,
        }
    }

    /// A path on the host beneath the mount.
    pub fn host(&self, path: &str) -> PathBuf {
        self.temporary.path().join("shared").join(path)
    }

    pub fn write(&self, path: &str, content: &str) {
        fs::write(self.host(path), content).expect("the host writes");
    }

    pub fn read(&self, path: &str) -> Vec<u8> {
        fs::read(self.host(path)).expect("the host reads")
    }

    pub fn status(&self) -> Status {
        let (sender, receiver) = channel();
        self.server
            .status(move |status| sender.send(status).expect("the test waits"));
        let mut all = receiver.recv_timeout(DEADLINE).expect("a status");
        all.remove(0)
    }

    /// The canary is as it was, and alone.
    pub fn assert_outside_is_untouched(&self) {
        let outside = self.temporary.path().join("outside");
        assert_eq!(
            fs::read(outside.join("canary")).expect("the canary"),
            b"canary"
        );
        assert_eq!(
            fs::read_dir(outside).expect("the directory").count(),
            1,
            "something was made outside"
        );
    }
}

/// A call to the server whose end is awaited.
pub struct Call(std::sync::mpsc::Receiver<Outcome>);

impl Call {
    pub fn new(call: impl FnOnce(Box<dyn FnOnce(Outcome) + Send>)) -> Self {
        let (sender, receiver) = channel();
        call(Box::new(move |outcome| {
            sender.send(outcome).expect("the test waits");
        }));
        Self(receiver)
    }

    pub fn wait(self) -> Outcome {
        self.0.recv_timeout(DEADLINE).expect("the call ends")
    }

    pub fn is_done(&self) -> bool {
        // A short wait for what must not come.
        match self.0.recv_timeout(Duration::from_millis(30)) {
            Ok(outcome) => panic!("the call ended early: {outcome:?}"),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => false,
            Err(error) => panic!("the completion was dropped: {error}"),
        }
    }
}

pub struct Client {
    pub stream: UnixStream,
    input: Assembler,
    next_id: u64,
    /// What came between replies.
    pub news: Vec<FromHost>,
    /// What the last greeting listed.
    pub served: Vec<Served>,
}

impl Client {
    pub fn connect(stream: UnixStream, nonce: Nonce) -> Self {
        stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        stream.set_write_timeout(Some(DEADLINE)).expect("a timeout");
        let mut client = Self {
            stream,
            input: Assembler::default(),
            next_id: 1,
            news: Vec::new(),
            served: Vec::new(),
        };
        assert_eq!(client.greeting(), nonce);
        client
    }

    /// Waits for a greeting, and answers it.
    pub fn greeting(&mut self) -> Nonce {
        let nonce = loop {
            match self.arrived() {
                Ok(Arrived::Preamble(nonce)) => break nonce,
                Ok(Arrived::Packet(_)) | Err(_) => {}
            }
        };
        let (FromHost::Hello { version: 1, mounts }, _) = self.receive() else {
            panic!("a Hello follows the preamble")
        };
        self.served = mounts;
        let mut echo = Vec::new();
        encode_preamble(&mut echo, nonce);
        self.stream.write_all(&echo).expect("the server reads");
        nonce
    }

    fn arrived(&mut self) -> Result<Arrived, String> {
        loop {
            if let Some(found) = self.input.next() {
                return found.map_err(|error| error.to_string());
            }
            let spare = self.input.spare(64 * 1024);
            match self.stream.read(spare) {
                Ok(0) => panic!("the server closed the port"),
                Ok(count) => self.input.filled(count),
                Err(error) => panic!("the server is silent: {error}"),
            }
        }
    }

    pub fn receive(&mut self) -> (FromHost, Vec<u8>) {
        match self.arrived() {
            Ok(Arrived::Packet(packet)) => {
                let (message, data) = decode(&packet).expect("the server speaks the protocol");
                (message, data.to_vec())
            }
            other => panic!("no packet: {other:?}"),
        }
    }

    /// Whether the server has closed the port, after whatever it sent.
    pub fn is_closed(&mut self) -> bool {
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return true,
                Err(_) => return false,
            }
        }
    }

    pub fn send(&mut self, message: &FromGuest, data: &[u8]) {
        let mut bytes = Vec::new();
        encode(message, data, &mut bytes).expect("a request fits");
        self.stream.write_all(&bytes).expect("the server reads");
    }

    pub fn request(&mut self, request: Request, data: &[u8], replay: bool) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let message = FromGuest::Request {
            id,
            mount: MOUNT,
            replay,
            request,
        };
        self.send(&message, data);
        id
    }

    pub fn reply(&mut self, id: u64) -> (Result<Answer, i32>, Vec<u8>) {
        loop {
            match self.receive() {
                (FromHost::Reply { id: of, result }, data) => {
                    assert_eq!(of, id, "replies come in the order of requests");
                    return (result.map_err(|errno| errno.0), data);
                }
                (news, _) => self.news.push(news),
            }
        }
    }

    pub fn ask_with(&mut self, request: Request, data: &[u8]) -> (Result<Answer, i32>, Vec<u8>) {
        let id = self.request(request, data, false);
        self.reply(id)
    }

    pub fn ask(&mut self, request: Request) -> Result<Answer, i32> {
        self.ask_with(request, &[]).0
    }

    pub fn again(&mut self, request: Request) -> Result<Answer, i32> {
        self.again_with(request, &[])
    }

    pub fn again_with(&mut self, request: Request, data: &[u8]) -> Result<Answer, i32> {
        let id = self.request(request, data, true);
        self.reply(id).0
    }

    /// The attributes of whatever has a path.
    pub fn attr(&mut self, path: &str) -> Attr {
        match self.ask(Request::Stat { node: at(path) }) {
            Ok(Answer::Attr(attr)) => attr,
            other => panic!("{path}: {other:?}"),
        }
    }

    /// A file as a guest that knows it names it.
    pub fn node(&mut self, path: &str) -> Node {
        Node {
            id: self.attr(path).id,
            ..at(path)
        }
    }

    pub fn make(&mut self, path: &str, what: Make) -> Result<Answer, i32> {
        let (directory, name) = split(path);
        self.ask(Request::Make {
            directory,
            name,
            what,
        })
    }

    pub fn make_file(&mut self, path: &str) -> Attr {
        let what = Make::File {
            mode: 0o644,
            exclusive: true,
        };
        made(self.make(path, what))
    }

    pub fn make_directory(&mut self, path: &str) -> Attr {
        made(self.make(path, Make::Directory { mode: 0o755 }))
    }

    pub fn remove(&mut self, path: &str, what: Remove, keep: bool) -> Result<Answer, i32> {
        let (directory, name) = split(path);
        self.ask(Request::Remove {
            directory,
            name,
            what,
            keep,
            file: FileId::default(),
        })
    }

    pub fn rename(&mut self, path: &str, new: &str, how: Rename) -> Result<Answer, i32> {
        self.ask(rename(path, new, how))
    }

    pub fn write(&mut self, node: Node, offset: u64, data: &[u8]) -> Result<Answer, i32> {
        let request = Request::Write {
            node,
            offset,
            append: false,
        };
        self.ask_with(request, data).0
    }

    pub fn read(&mut self, node: Node, offset: u64, length: u32) -> Result<Vec<u8>, i32> {
        let request = Request::Read {
            node,
            offset,
            length,
        };
        let (answer, data) = self.ask_with(request, &[]);
        answer.map(|answer| {
            assert_eq!(answer, Answer::Done);
            data
        })
    }

    pub fn ready(&mut self) {
        self.send(&FromGuest::Ready, &[]);
    }

    /// The next change, however long it takes.
    pub fn next_change(&mut self) -> FromHost {
        if !self.news.is_empty() {
            return self.news.remove(0);
        }
        self.receive().0
    }

    /// Everything that is reported before the reply to a request that changes nothing.
    pub fn changes_so_far(&mut self) -> Vec<FromHost> {
        self.ask(Request::Space).expect("the space is known");
        std::mem::take(&mut self.news)
    }
}

/// Whatever has a path.
pub fn at(path: &str) -> Node {
    Node {
        path: path.as_bytes().to_vec(),
        id: FileId::default(),
        kept: false,
    }
}

pub fn kept(id: FileId) -> Node {
    Node {
        path: Vec::new(),
        id,
        kept: true,
    }
}

pub fn split(path: &str) -> (Node, Vec<u8>) {
    let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
    (at(directory), name.as_bytes().to_vec())
}

pub fn rename(path: &str, new: &str, how: Rename) -> Request {
    let (from, name) = split(path);
    let (to, new_name) = split(new);
    Request::Rename {
        from,
        name,
        to,
        new_name,
        how,
        keep: false,
        file: FileId::default(),
    }
}

pub fn made(answer: Result<Answer, i32>) -> Attr {
    match answer {
        Ok(Answer::Made { attr, .. }) => attr,
        other => panic!("{other:?}"),
    }
}

pub const ENOENT: i32 = 2;
pub const EIO: i32 = 5;
pub const ENXIO: i32 = 6;
pub const EEXIST: i32 = 17;
pub const EXDEV: i32 = 18;
pub const ENOTDIR: i32 = 20;
pub const EISDIR: i32 = 21;
pub const EINVAL: i32 = 22;
pub const EROFS: i32 = 30;
pub const ENAMETOOLONG: i32 = 36;
pub const ENOTEMPTY: i32 = 39;
pub const ENODATA: i32 = 61;
pub const EOPNOTSUPP: i32 = 95;
pub const ESTALE: i32 = 116;
pub const EPERM: i32 = 1;
