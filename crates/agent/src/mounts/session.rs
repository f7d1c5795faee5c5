//! The mounts of a guest and the port to the host that serves them.
//!
//! ```text
//!   kernel ─► thread of a mount ─┐                     ┌─ answered here
//!                                ├─► Session (locked) ─┤
//!   port ───► thread ────────────┘                     └─ asked on the port
//! ```
//!
//! Always: a request stays in `pending` until the host has answered it. A host that greets gets all
//! of them again, marked as repeated if an earlier host may have carried them out. A host that does
//! not serve a mount makes its requests fail at once; without any host they wait.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use sandtree_proto::Nonce;
use sandtree_proto::frame;
use sandtree_proto::mount::{self, Answer, FromGuest, FromHost, Known, MountId, Request, Served};

use super::abi::{self, Doubt};
use super::answers::Asked;
use super::body::Body;
use super::fence::Fence;
use super::kernel::{Kernel, QUEUES};
use super::listing::Chunk;
use super::outbox::Outbox;
use super::table::{Names, ROOT, Table};
use crate::console;
use crate::failure::tolerate;

/// How much of what the guest knows one request lists.
const REVALIDATE_MAX: usize = 512 * 1024;
/// Forgotten files that wait for a request to travel with.
const FORGOTTEN_MAX: usize = 512;

/// The session and those who wait for it.
#[derive(Debug)]
pub struct Shared {
    session: Mutex<Session>,
    /// The host lets requests pass again.
    go: Condvar,
}

#[derive(Debug)]
pub struct Session {
    out: Outbox,
    /// The number of greetings so far: a report is for the host that asked.
    greeting: u64,
    /// A host has greeted and has said which mounts it serves.
    is_open: bool,
    served: HashSet<MountId>,
    pub mounts: HashMap<MountId, Mount>,
    pending: BTreeMap<u64, Pending>,
    next: u64,
    hold: Hold,
    /// Comparisons without an answer.
    comparisons: usize,
    /// Memory for the next packet: fresh memory costs more than the bytes that it gets.
    packet: Vec<u8>,
    /// A buffer for the kernel's requests that a write has given back.
    spare: Option<Vec<u8>>,
}

#[derive(Debug)]
pub struct Mount {
    /// Where FUSE is mounted.
    path: PathBuf,
    pub table: Table,
    pub kernel: Kernel,
    pub chunks: HashMap<u64, Chunk>,
    /// Counts changes, after which attributes of listed entries may be old.
    pub changes: u64,
    /// Whether something was doubted since the last report.
    pub has_doubts: Cell<bool>,
}

#[derive(Debug)]
struct Pending {
    mount: MountId,
    request: Request,
    data: Body,
    asked: Asked,
    /// A host may have carried it out.
    sent: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hold {
    No,
    /// The host wants it, and pages are written to the host first.
    Wanted,
    /// No request is sent any more, and the host waits until none is pending.
    Asked,
    Held,
}

impl Hold {
    fn stops_requests(self) -> bool {
        matches!(self, Self::Asked | Self::Held)
    }
}

/// A question to the host.
#[derive(Debug)]
pub struct Question {
    pub request: Request,
    pub data: Body,
    pub asked: Asked,
}

impl Shared {
    pub fn new(out: Outbox) -> Self {
        let session = Session {
            out,
            greeting: 0,
            is_open: false,
            served: HashSet::new(),
            mounts: HashMap::new(),
            pending: BTreeMap::new(),
            next: 1,
            hold: Hold::No,
            comparisons: 0,
            packet: Vec::new(),
            spare: None,
        };
        Self {
            session: Mutex::new(session),
            go: Condvar::new(),
        }
    }

    /// A thread that panicked has left the session between two requests or within one, which then
    /// stays unanswered.
    pub fn lock(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The session, when requests may be sent.
    pub fn lock_to_ask(&self) -> MutexGuard<'_, Session> {
        let session = self.lock();
        self.go
            .wait_while(session, |session| session.hold.stops_requests())
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// All threads have passed a fence.
    pub fn reached(&self, greeting: u64, report: &FromGuest) {
        let mut session = self.lock();
        if session.greeting != greeting {
            return;
        }
        session.send(report, &[]);
    }

    /// Another host begins to serve, or the same one begins again.
    pub fn greet(self: &Arc<Self>, nonce: Nonce) {
        let mut session = self.lock();
        session.greeting += 1;
        session.is_open = false;
        let mut preamble = Vec::new();
        frame::encode_preamble(&mut preamble, nonce);
        session.out.send(&preamble);
    }

    /// Carries out what the host says. `data` follows its message.
    pub fn hear(self: &Arc<Self>, message: FromHost, data: &[u8]) {
        match message {
            FromHost::Hello { mounts, .. } => self.begin(&mounts),
            FromHost::Reply { id, result } => self.lock().reply(self, id, result, data),
            FromHost::Changed {
                mount,
                directory,
                name,
            } => {
                if let Some(mount) = self.lock().mounts.get_mut(&mount) {
                    mount.changed(directory, &name);
                }
            }
            FromHost::ChangedAll { mount } => {
                if let Some(mount) = self.lock().mounts.get_mut(&mount) {
                    mount.doubt_all();
                }
            }
            FromHost::Mark { number } => {
                self.lock().raise(self, FromGuest::Marked { number });
            }
            FromHost::Hold => self.hold(),
            FromHost::Go => {
                self.lock().hold = Hold::No;
                self.go.notify_all();
            }
        }
    }

    /// A host serves these mounts from now on.
    fn begin(self: &Arc<Self>, mounts: &[Served]) {
        let mut session = self.lock();
        session.served = mounts.iter().map(|served| served.mount).collect();
        session.is_open = true;
        session.doubt_unserved();
        session.ask_again();
        session.revalidate();
        // The host answers in order, so what is asked from now on is answered after that. It must
        // not wait for the comparison: to drop a page, the kernel may have to write it first.
        session.hold = Hold::No;
        self.go.notify_all();
        if session.comparisons == 0 {
            session.raise(self, FromGuest::Ready);
        }
    }

    /// The guest will be captured: pages of mappings are written to the host, and then nothing is
    /// asked. The thread that calls this brings the answers, so another one waits for them.
    fn hold(self: &Arc<Self>) {
        self.lock().hold = Hold::Wanted;
        let shared = Arc::clone(self);
        let thread = std::thread::Builder::new().spawn(move || {
            let mounts = shared.lock().mounts.values().map(Mount::path).collect();
            write_mapped(mounts);
            let mut session = shared.lock();
            // The host may have given up meanwhile.
            if session.hold == Hold::Wanted {
                session.hold = Hold::Asked;
                session.held_if_idle();
            }
        });
        if let Err(error) = thread {
            console::say(format_args!("cannot start a thread for a capture: {error}"));
        }
    }
}

impl Session {
    /// Asks the host. The answer comes later.
    pub fn ask(&mut self, mount: MountId, question: Question) {
        let Question {
            request,
            data,
            asked,
        } = question;
        if self.is_open && !self.served.contains(&mount) {
            return self.fail(mount, &asked, Errno::IO);
        }
        let id = self.next;
        self.next += 1;
        let pending = Pending {
            mount,
            request,
            data,
            asked,
            sent: false,
        };
        self.pending.insert(id, pending);
        if self.is_open {
            self.forget(mount, 0);
            self.send_pending(id);
        }
    }

    /// A buffer for requests of the kernel.
    pub fn buffer(&mut self) -> Vec<u8> {
        let fresh = || vec![0; abi::REQUEST_MAX];
        self.spare.take().unwrap_or_else(fresh)
    }

    /// The host serves this mount from now on.
    pub fn serve(&mut self, mount: MountId) {
        self.served.insert(mount);
    }

    /// Reports files that the kernel does not know any longer, if there are more than `most`.
    pub fn forget(&mut self, mount: MountId, most: usize) {
        let forgotten = self.mounts.get_mut(&mount).map(|mount| &mut mount.table);
        let Some(table) = forgotten.filter(|table| table.forgotten() > most) else {
            return;
        };
        let files = table.take_forgotten();
        if let Some(mount) = self.mounts.get_mut(&mount) {
            // Listed attributes may be of directories that the host stops to watch.
            mount.changes += 1;
        }
        if self.is_open && self.served.contains(&mount) {
            for files in files.chunks(FORGOTTEN_MAX) {
                let files = files.to_vec();
                self.send(&FromGuest::Forget { mount, files }, &[]);
            }
        }
    }

    /// The same, when many have come together and nothing else is sent.
    pub fn forget_many(&mut self, mount: MountId) {
        if !self.hold.stops_requests() {
            self.forget(mount, FORGOTTEN_MAX);
        }
    }

    fn send_pending(&mut self, id: u64) {
        let Some(pending) = self.pending.get_mut(&id) else {
            return;
        };
        let message = FromGuest::Request {
            id,
            mount: pending.mount,
            replay: std::mem::replace(&mut pending.sent, true),
            request: pending.request.clone(),
        };
        self.packet.clear();
        let encoded = mount::encode(&message, pending.data.as_slice(), &mut self.packet);
        match encoded {
            Ok(()) => self.out.send(&self.packet),
            Err(_) => {
                if let Some(pending) = self.pending.remove(&id) {
                    self.fail(pending.mount, &pending.asked, Errno::NAMETOOLONG);
                }
            }
        }
    }

    fn send(&mut self, message: &FromGuest, data: &[u8]) {
        self.packet.clear();
        match mount::encode(message, data, &mut self.packet) {
            Ok(()) => self.out.send(&self.packet),
            Err(error) => console::say(format_args!("cannot send to the host: {error}")),
        }
    }

    /// Sends everything unanswered to a host that greeted, in the order of the requests. What an
    /// earlier host was asked about itself is void.
    fn ask_again(&mut self) {
        self.comparisons = 0;
        self.pending
            .retain(|_, pending| !pending.asked.is_comparison());
        let all: Vec<u64> = self.pending.keys().copied().collect();
        for id in all {
            let mount = self.pending[&id].mount;
            if self.served.contains(&mount) {
                self.send_pending(id);
            } else if let Some(pending) = self.pending.remove(&id) {
                self.fail(mount, &pending.asked, Errno::IO);
            }
        }
    }

    /// Makes the kernel ask about mounts that have no directory: it gets an error then.
    fn doubt_unserved(&mut self) {
        for (id, mount) in &mut self.mounts {
            if !self.served.contains(id) {
                mount.doubt_all();
            }
        }
    }

    /// Asks which of the files that the guest knows are what they were. Directories come first:
    /// the host watches them before it compares what is in them.
    fn revalidate(&mut self) {
        let mounts = self.mounts.keys().copied();
        let served: Vec<MountId> = mounts.filter(|id| self.served.contains(id)).collect();
        for id in served {
            self.mounts.get_mut(&id).into_iter().for_each(Mount::renew);
            let questions = self.mounts.get(&id).map(known_files).unwrap_or_default();
            self.comparisons += questions.len();
            for question in questions {
                self.ask(id, question);
            }
        }
    }

    /// Reports to the host when the kernel knows of all doubts so far.
    fn raise(&self, shared: &Arc<Shared>, report: FromGuest) {
        self.mounts.values().for_each(Mount::settle_doubts);
        // One pass more, so that a guest without mounts reports as well.
        let passes = self.mounts.len() * QUEUES + 1;
        let fence = Fence::new(passes, Arc::clone(shared), self.greeting, report);
        for mount in self.mounts.values() {
            mount.kernel.reach(&fence);
        }
        // Another thread passes it: this one has the session.
        let last = fence;
        if let Err(error) = std::thread::Builder::new().spawn(move || last.pass()) {
            console::say(format_args!("cannot start a thread: {error}"));
        }
    }

    fn held_if_idle(&mut self) {
        if self.hold == Hold::Asked && self.pending.is_empty() {
            self.hold = Hold::Held;
            self.send(&FromGuest::Held, &[]);
        }
    }

    fn reply(
        &mut self,
        shared: &Arc<Shared>,
        id: u64,
        result: Result<Answer, mount::Errno>,
        data: &[u8],
    ) {
        let Some(pending) = self.pending.remove(&id) else {
            return;
        };
        let result = result.map_err(|error| Errno::from_raw_os_error(error.0.clamp(1, 4095)));
        let is_comparison = pending.asked.is_comparison();
        if let Some(mount) = self.mounts.get_mut(&pending.mount) {
            mount.answer(pending.asked, result, data);
        } else if let Asked::Root { answer } = pending.asked {
            answer.give(result);
        }
        self.spare = pending.data.into_buffer().or(self.spare.take());
        if is_comparison {
            self.compared(shared, 1);
        }
        self.held_if_idle();
    }

    fn fail(&mut self, mount: MountId, asked: &Asked, error: Errno) {
        if let Asked::Root { answer } = asked {
            answer.give(Err(error));
        }
        if let (Some(unique), Some(mount)) = (asked.unique(), self.mounts.get(&mount)) {
            mount.kernel.answer(unique, &Err(error));
        }
    }

    /// The kernel has unmounted it.
    pub fn remove(&mut self, shared: &Arc<Shared>, mount: MountId) {
        self.mounts.remove(&mount);
        let is_lost = |pending: &&Pending| pending.mount == mount && pending.asked.is_comparison();
        let lost = self.pending.values().filter(is_lost).count();
        self.pending.retain(|_, pending| pending.mount != mount);
        if lost > 0 {
            self.compared(shared, lost);
        }
        self.held_if_idle();
    }

    /// So many comparisons have come to an end.
    fn compared(&mut self, shared: &Arc<Shared>, count: usize) {
        self.comparisons = self.comparisons.saturating_sub(count);
        if self.comparisons == 0 {
            self.raise(shared, FromGuest::Ready);
        }
    }
}

/// Writes pages of mappings to the host. A mount that cannot be opened has none.
fn write_mapped(mounts: Vec<PathBuf>) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    for path in mounts {
        let root = rustix::fs::open(path, flags, Mode::empty());
        tolerate(root.and_then(rustix::fs::syncfs));
    }
}

/// The requests that compare everything that a mount knows.
fn known_files(mount: &Mount) -> Vec<Question> {
    let mut nodes: Vec<(bool, u64)> = mount
        .table
        .nodes()
        .filter(|(node, file)| *node != ROOT && !file.is_kept())
        .map(|(node, file)| (!file.is_directory(), node))
        .collect();
    nodes.sort_unstable();
    let root = Question {
        request: Request::Root,
        data: Body::default(),
        asked: Asked::RootAgain,
    };
    let mut questions = vec![root];
    let mut data = Vec::new();
    let mut asked = Vec::new();
    for (_, node) in nodes {
        // One without a path is found out when it is used.
        let (Ok(at), Some(file)) = (mount.table.at(node), mount.table.get(node)) else {
            continue;
        };
        let version = file.fresh().map_or(file.seen(), |attr| attr.version);
        mount::encode_item(&Known { node: at, version }, &mut data);
        asked.push(node);
        if data.len() >= REVALIDATE_MAX {
            questions.push(comparison(&mut data, &mut asked));
        }
    }
    if !asked.is_empty() {
        questions.push(comparison(&mut data, &mut asked));
    }
    questions
}

fn comparison(data: &mut Vec<u8>, nodes: &mut Vec<u64>) -> Question {
    Question {
        request: Request::Revalidate,
        data: Body::Own(std::mem::take(data)),
        asked: Asked::Verdicts {
            nodes: std::mem::take(nodes),
        },
    }
}

impl Mount {
    pub fn new(kernel: Kernel, names: Names, path: PathBuf) -> Self {
        Self {
            path,
            table: Table::new(names),
            kernel,
            chunks: HashMap::new(),
            changes: 0,
            has_doubts: Cell::new(false),
        }
    }

    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Lists are read again, and attributes in them are old.
    pub fn renew(&mut self) {
        self.chunks.clear();
        self.changes += 1;
    }

    /// Called before a report to the host: whatever was doubted must not be shown any longer.
    fn settle_doubts(&self) {
        if self.has_doubts.replace(false) {
            self.kernel.end_doubts();
        }
    }

    /// Somebody else changed what is at a name, or a directory itself.
    fn changed(&mut self, directory: mount::FileId, name: &[u8]) {
        self.changes += 1;
        self.has_doubts.set(true);
        let Some(node) = self.table.find(directory, libc::S_IFDIR) else {
            return;
        };
        if name.is_empty() {
            // It may have been moved, and then the host does not watch it any longer.
            return self.doubt_directory(node);
        }
        self.table.stale(node);
        self.kernel.doubt(node, Doubt::Data);
        if let Some(child) = self.table.named(node, name) {
            self.table.stale(child);
            self.kernel.doubt(child, Doubt::Data);
        }
        self.table.doubt_name(node, name);
        self.kernel.doubt_name(node, name.to_vec());
    }

    fn doubt_all(&mut self) {
        self.renew();
        self.has_doubts.set(true);
        let nodes: Vec<u64> = self.table.nodes().map(|(node, _)| node).collect();
        for node in nodes {
            self.table.stale(node);
            self.kernel.doubt(node, Doubt::Data);
            for name in self.table.names_in(node) {
                self.kernel.doubt_name(node, name);
            }
        }
    }
}
