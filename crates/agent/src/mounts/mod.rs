//! Directories of the host in the guest: a FUSE file system whose server is the agent, and which
//! asks the host over a port of its own.
//!
//! ```text
//!   program ─► kernel ─► /dev/fuse ─► session ─► port dev.sandtree.mounts ─► host
//! ```
//!
//! Always: everything that a mount needs is in the guest's memory, so that it is captured with it.
//! No thread of this module uses a mounted directory: it would wait for itself. The agent's loop
//! never waits for the host here.

mod abi;
mod answers;
mod body;
mod fence;
mod kernel;
mod listing;
mod outbox;
mod requests;
mod session;
mod table;
mod thread;

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::Permissions;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use sandtree_proto::mount::{
    Arrived, Assembler, Attr, FromHost, MountError, MountId, PORT_NAME, Request,
};
use sandtree_proto::{Failure, MountAccess, MountEnd, MountStart};

use self::answers::{Asked, Waiting};
use self::body::Body;
use self::kernel::{Above, Kernel};
use self::outbox::Outbox;
use self::requests::Turn;
use self::session::{Mount, Question, Shared};
use self::table::Names;
use self::thread::start;
use crate::console;
use crate::failure::{OrFailure, path, refusal, tolerate};
use crate::init;

/// How long the host has to describe a directory that is to be mounted.
const HOST_ANSWERS_WITHIN: Duration = Duration::from_secs(20);
/// Read from the port at once.
const READ_SIZE: usize = 128 * 1024;
/// The size of the kernel's buffers of a port: one read returns the content of one buffer.
const PORT_BUFFER: usize = 4096;
/// How long the threads of the port sleep while its other end is closed.
const HOST_RETURNS: Duration = Duration::from_millis(20);
/// Several requests, so that the host reads while the guest receives.
const READ_AHEAD_KIB: &str = "4096";
/// Where the directories below overlays are mounted.
const LOWER: &str = "/run/sandtree/mounts";
/// Where overlays keep changes: on the guest's disk, and so in its states. The host knows this
/// path.
const KEPT: &str = sandtree_proto::mount::KEPT;

/// The mounts of this guest.
#[derive(Debug, Default)]
pub struct Mounts {
    shared: Mutex<Option<Arc<Shared>>>,
    points: Mutex<BTreeMap<MountId, Point>>,
}

/// Where a mount is.
#[derive(Debug, Clone)]
struct Point {
    target: PathBuf,
    /// Where the host's directory itself is, below an overlay at `target`.
    lower: Option<PathBuf>,
}

impl Point {
    fn new(target: &Path, start: &MountStart) -> Self {
        let is_overlay = start.access == MountAccess::CopyOnWrite;
        Self {
            target: target.to_owned(),
            lower: is_overlay.then(|| Path::new(LOWER).join(start.id.to_string())),
        }
    }

    /// Where FUSE is mounted.
    fn of_host(&self) -> &Path {
        self.lower.as_deref().unwrap_or(&self.target)
    }

    fn above(&self) -> Above {
        if self.lower.is_some() {
            Above::Overlay
        } else {
            Above::Programs
        }
    }

    fn unmount(&self, how: UnmountFlags) -> Result<(), Failure> {
        for path in [Some(&self.target), self.lower.as_ref()]
            .into_iter()
            .flatten()
        {
            match rustix::mount::unmount(path, how) {
                // Somebody in the guest has unmounted it.
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
                Err(error) => {
                    return Err(error).or_failure(|| format!("cannot unmount {}", path.display()));
                }
            }
        }
        Ok(())
    }
}

impl Mounts {
    /// Mounts a directory of the host. Waits for the host, so it needs a thread.
    pub fn mount(&self, start: &MountStart) -> Result<(), Failure> {
        let target = path(&start.path);
        if !target.is_absolute() || target == Path::new("/") {
            let shown = target.display();
            return Err(refusal(Errno::INVAL, format!("cannot mount on {shown}")));
        }
        let shared = self.shared()?;
        let id = MountId(start.id);
        shared.lock().serve(id);
        let root = ask_root(&shared, id)?;
        let point = Point::new(target, start);
        make_directory(target)?;
        make_directory(point.of_host())?;
        let fuse = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .or_failure(|| "cannot open /dev/fuse".into())?;
        attach(&fuse, point.of_host(), start.access)?;
        let begun = begin(&shared, id, fuse, (&root, &point));
        let mounted = begun.and_then(|()| overlay(&point, start.id, &root));
        if let Err(failure) = mounted {
            tolerate(point.unmount(UnmountFlags::DETACH));
            return Err(failure);
        }
        read_ahead(point.of_host());
        self.points().insert(id, point);
        Ok(())
    }

    /// Unmounts a directory. One that is in use stays, unless the host insists.
    pub fn unmount(&self, end: &MountEnd) -> Result<(), Failure> {
        let id = MountId(end.id);
        let Some(point) = self.points().get(&id).cloned() else {
            return Err(refusal(Errno::NOENT, "the guest has no such mount"));
        };
        let how = if end.force {
            UnmountFlags::DETACH | UnmountFlags::FORCE
        } else {
            UnmountFlags::empty()
        };
        point.unmount(how)?;
        self.points().remove(&id);
        Ok(())
    }

    /// The session with the host, which begins with the first mount.
    fn shared(&self) -> Result<Arc<Shared>, Failure> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = &*shared {
            return Ok(Arc::clone(shared));
        }
        let begun = open_session()?;
        *shared = Some(Arc::clone(&begun));
        Ok(begun)
    }

    fn points(&self) -> std::sync::MutexGuard<'_, BTreeMap<MountId, Point>> {
        self.points.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn open_session() -> Result<Arc<Shared>, Failure> {
    let device = init::find_port(PORT_NAME).ok_or_else(|| {
        let message = "the guest's machine has no port for mounts: it is from an older version";
        refusal(Errno::NODEV, message)
    })?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let port = rustix::fs::open(&device, flags, Mode::empty())
        .or_failure(|| format!("cannot open {}", device.display()))?;
    let reader = rustix::io::fcntl_dupfd_cloexec(&port, 0)
        .or_failure(|| "cannot use the port of mounts".into())?;
    let out = Outbox::new(port);
    let shared = Arc::new(Shared::new(out.clone()));
    start("the port of mounts", move || out.write_waiting())?;
    let session = Arc::clone(&shared);
    start("the port of mounts", move || hear_host(&session, &reader))?;
    Ok(shared)
}

/// Asks the host what it serves; this is the first request of a mount.
fn ask_root(shared: &Shared, id: MountId) -> Result<Attr, Failure> {
    let (sender, answer) = channel();
    let question = Question {
        request: Request::Root,
        data: Body::default(),
        asked: Asked::Root {
            answer: Waiting(sender),
        },
    };
    shared.lock_to_ask().ask(id, question);
    let answer = answer.recv_timeout(HOST_ANSWERS_WITHIN);
    let attr = answer.map_err(|_| refusal(Errno::TIMEDOUT, "the host does not answer"))?;
    attr.or_failure(|| "the host cannot serve the directory".into())
}

fn attach(fuse: &OwnedFd, target: &Path, access: MountAccess) -> Result<(), Failure> {
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read={}",
        fuse.as_raw_fd(),
        abi::DATA_MAX,
    );
    let options = CString::new(options).expect("numbers contain no zero byte");
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if access != MountAccess::ReadWrite {
        flags |= MountFlags::RDONLY;
    }
    rustix::mount::mount("sandtree", target, "fuse.sandtree", flags, Some(&*options))
        .or_failure(|| format!("cannot mount on {}", target.display()))
}

fn make_directory(path: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(path).or_failure(|| format!("cannot create {}", path.display()))
}

/// Mounts an overlay whose changes are on the guest's disk. Without redirected directories: each
/// changed file lies at its own path, where the host finds it.
fn overlay(point: &Point, id: u32, root: &Attr) -> Result<(), Failure> {
    let Some(lower) = &point.lower else {
        return Ok(());
    };
    let kept = Path::new(KEPT).join(id.to_string());
    let upper = kept.join("upper");
    let work = kept.join("work");
    if !upper.exists() {
        make_directory(&upper)?;
        let mode = Permissions::from_mode(root.mode & 0o777);
        std::fs::set_permissions(&upper, mode)
            .or_failure(|| format!("cannot set the mode of {}", upper.display()))?;
    }
    make_directory(&work)?;
    let options = format!(
        "lowerdir={},upperdir={},workdir={},redirect_dir=off,index=off,metacopy=off,xino=off",
        lower.display(),
        upper.display(),
        work.display(),
    );
    let options = CString::new(options).expect("our own paths contain no zero byte");
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("sandtree", &point.target, "overlay", flags, Some(&*options))
        .or_failure(|| format!("cannot mount an overlay on {}", point.target.display()))
}

/// Serves the kernel from now on.
fn begin(
    shared: &Arc<Shared>,
    id: MountId,
    fuse: OwnedFd,
    (root, point): (&Attr, &Point),
) -> Result<(), Failure> {
    let above = point.above();
    let kernel = Kernel::new(fuse, above)?;
    let fuse = kernel.fuse();
    let names = match above {
        Above::Programs => Names::OfFiles,
        Above::Overlay => Names::OfNumbers,
    };
    let mut mount = Mount::new(kernel, names, point.of_host().to_owned());
    mount.table.set_root(root);
    mount.table.see(table::ROOT, root, None);
    shared.lock().mounts.insert(id, mount);
    let session = Arc::clone(shared);
    start("a mount", move || hear_kernel(&session, id, &fuse))
}

/// The kernel reads ahead by 128 KiB by itself.
fn read_ahead(target: &Path) {
    let Ok(stat) = rustix::fs::stat(target) else {
        return;
    };
    let major = rustix::fs::major(stat.st_dev);
    let minor = rustix::fs::minor(stat.st_dev);
    let setting = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    // Without it, reads are slower.
    tolerate(std::fs::write(setting, READ_AHEAD_KIB));
}

/// Carries out what the kernel asks, until the directory is unmounted.
fn hear_kernel(shared: &Arc<Shared>, id: MountId, fuse: &OwnedFd) {
    let mut buffer = Vec::new();
    loop {
        if buffer.is_empty() {
            buffer = shared.lock().buffer();
        }
        match rustix::io::read(fuse, &mut buffer) {
            Ok(count) => hear_request(shared, id, &mut buffer, count),
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
            Err(Errno::NODEV) => break,
            Err(error) => {
                console::say(format_args!("cannot read requests of a mount: {error}"));
                break;
            }
        }
    }
    shared.lock().remove(shared, id);
}

/// Carries out the request in the first `count` bytes of a buffer. One that waits for the host
/// may take the buffer.
fn hear_request(shared: &Shared, id: MountId, buffer: &mut Vec<u8>, count: usize) {
    let Some((unique, request)) = abi::Request::parse(&buffer[..count]) else {
        return;
    };
    let is_silent = request
        .as_ref()
        .is_ok_and(|request| Mount::is_silent(&request.operation));
    let mut session = if is_silent {
        shared.lock()
    } else {
        shared.lock_to_ask()
    };
    let Some(mount) = session.mounts.get_mut(&id) else {
        return;
    };
    let turn = match request {
        Ok(request) => mount.request(&request),
        Err(error) => Turn::Answer(Err(error)),
    };
    match turn {
        Turn::Answer(result) => mount.kernel.answer(unique, &result),
        Turn::AnswerBehindDoubts(result) => mount.kernel.answer_behind_doubts(unique, result),
        Turn::Ask(mut question) => {
            question.data.take_from(buffer, count);
            session.ask(id, *question);
        }
        Turn::Nothing => session.forget_many(id),
    }
}

/// Carries out what the host says. The port is never closed.
fn hear_host(shared: &Arc<Shared>, port: &OwnedFd) {
    let mut assembler = Assembler::default();
    loop {
        match read_port(port, assembler.spare(READ_SIZE)) {
            // The other end is closed.
            Ok(0) => std::thread::sleep(HOST_RETURNS),
            Ok(count) => {
                assembler.filled(count);
                hear_packets(shared, &mut assembler);
                // A buffer that is not full was the last one.
                if !count.is_multiple_of(PORT_BUFFER) {
                    wait(port);
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(port),
            Err(error) => {
                console::say(format_args!("cannot read the port of mounts: {error}"));
                std::thread::sleep(HOST_RETURNS);
            }
        }
    }
}

/// Reads as many of the port's buffers as are filled, by one call.
fn read_port(port: &OwnedFd, into: &mut [u8]) -> rustix::io::Result<usize> {
    let mut pieces: Vec<IoSliceMut<'_>> = into
        .chunks_exact_mut(PORT_BUFFER)
        .take(READ_SIZE / PORT_BUFFER)
        .map(IoSliceMut::new)
        .collect();
    rustix::io::readv(port, &mut pieces)
}

fn wait(port: &OwnedFd) {
    let mut port = [PollFd::new(port, PollFlags::IN)];
    match rustix::event::poll(&mut port, None) {
        // The port reports a hang-up as long as the host is away.
        Ok(_) if port[0].revents().contains(PollFlags::HUP) => {
            std::thread::sleep(HOST_RETURNS);
        }
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => console::say(format_args!("cannot wait for the host: {error}")),
    }
}

fn hear_packets(shared: &Arc<Shared>, assembler: &mut Assembler) {
    while let Some(arrived) = assembler.next() {
        match arrived {
            Ok(Arrived::Preamble(nonce)) => shared.greet(nonce),
            Ok(Arrived::Packet(packet)) => {
                match sandtree_proto::mount::decode::<FromHost>(&packet) {
                    Ok((message, data)) => shared.hear(message, data),
                    Err(error) => {
                        console::say(format_args!("the host's message about mounts: {error}"));
                        assembler.resync();
                    }
                }
                assembler.reuse(packet);
            }
            // A host that greets sends zeros first.
            Err(MountError::Frame(_)) => {}
            Err(error) => console::say(format_args!("the port of mounts: {error}")),
        }
    }
}
