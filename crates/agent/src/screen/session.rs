//! A connection to the guest's X server, and what the agent has there: a window, bindings of keys,
//! the clipboard.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use sandtree_proto::Failure;
use x11rb_protocol::protocol::xproto::{
    AtomEnum, ChangePropertyRequest, CreateWindowAux, CreateWindowRequest, EventMask,
    GetPropertyReply, GetPropertyRequest, InternAtomRequest, PropMode, WindowClass,
};
use x11rb_protocol::protocol::{randr, xtest};

use super::clipboard::Owned;
use super::event::Event;
use super::keyboard::Keyboard;
use super::wire::Wire;
use crate::failure::{failure, refusal};

/// Where X servers have their sockets, each named X and the number of its display.
const SOCKETS: &str = "/tmp/.X11-unix";
/// Any program may make files there.
const ENTRIES_MAX: usize = 1024;
/// How many servers are tried.
const SERVERS_MAX: usize = 4;
/// How long the server may take to report a change that the agent made.
const OWN_EVENT_WITHIN: Duration = Duration::from_secs(20);
/// How many events are handled before other work.
const EVENTS_TURN: usize = 256;
/// The words of a short property.
const SHORT_PROPERTY: u32 = 4096;

pub struct Session {
    pub wire: Wire,
    pub root: u32,
    /// Not shown. Its properties carry clipboards and times.
    pub window: u32,
    pub keyboard: Keyboard,
    pub owned: Option<Owned>,
    atoms: BTreeMap<&'static str, u32>,
}

impl Session {
    /// Connects to the server with the lowest number.
    pub fn connect() -> Result<Self, Failure> {
        Self::over(connect_in(Path::new(SOCKETS))?)
    }

    pub fn over(socket: UnixStream) -> Result<Self, Failure> {
        let mut wire = Wire::new(socket)?;
        let Some(root) = wire.setup().roots.first().map(|screen| screen.root) else {
            return Err(refusal(Errno::NODEV, "the X server has no screen"));
        };
        wire.has_extension(randr::X11_EXTENSION_NAME)?;
        if wire.has_extension(xtest::X11_EXTENSION_NAME)? {
            // A client that grabs the server must not stop the input, which may end that grab.
            let impervious = true;
            wire.check(xtest::GrabControlRequest { impervious })?;
        }
        let mut session = Self {
            wire,
            root,
            window: 0,
            keyboard: Keyboard::default(),
            owned: None,
            atoms: BTreeMap::new(),
        };
        session.window = session.new_window()?;
        Ok(session)
    }

    /// A window that is never shown, and whose changes of properties are reported.
    pub fn new_window(&mut self) -> Result<u32, Failure> {
        let wid = self.wire.new_id()?;
        let attributes = CreateWindowAux::new().event_mask(EventMask::PROPERTY_CHANGE);
        self.wire.check(CreateWindowRequest {
            depth: 0,
            wid,
            parent: self.root,
            x: 0,
            y: 0,
            width: 1,
            height: 1,
            border_width: 0,
            class: WindowClass::INPUT_ONLY,
            visual: 0,
            value_list: Cow::Owned(attributes),
        })?;
        Ok(wid)
    }

    pub fn atom(&mut self, name: &'static str) -> Result<u32, Failure> {
        if let Some(atom) = self.atoms.get(name) {
            return Ok(*atom);
        }
        let reply = self.wire.call(InternAtomRequest {
            only_if_exists: false,
            name: name.as_bytes().into(),
        })?;
        self.atoms.insert(name, reply.atom);
        Ok(reply.atom)
    }

    /// The 32-bit numbers of a property; none if it does not exist or has another form.
    pub fn numbers(&mut self, window: u32, name: &'static str) -> Result<Vec<u32>, Failure> {
        let property = self.atom(name)?;
        let reply = self.property(window, property)?;
        Ok(reply.value32().into_iter().flatten().collect())
    }

    fn property(&mut self, window: u32, property: u32) -> Result<GetPropertyReply, Failure> {
        self.wire.call(GetPropertyRequest {
            delete: false,
            window,
            property,
            type_: AtomEnum::ANY.into(),
            long_offset: 0,
            long_length: SHORT_PROPERTY,
        })
    }

    /// The server's time, which it reports with each change of a property.
    pub fn time(&mut self) -> Result<u32, Failure> {
        let property = self.atom("SANDTREE_TIME")?;
        let window = self.window;
        self.wire.check(ChangePropertyRequest {
            mode: PropMode::APPEND,
            window,
            property,
            type_: AtomEnum::STRING.into(),
            format: 8,
            data_len: 0,
            data: (&[][..]).into(),
        })?;
        let changed = |event: &Event| match event {
            Event::Property(change) if change.window == window && change.atom == property => {
                Some(change.time)
            }
            _ => None,
        };
        let until = Instant::now() + OWN_EVENT_WITHIN;
        let time = self.await_event(until, changed)?;
        time.ok_or_else(|| refusal(Errno::TIMEDOUT, "the X server reports no time"))
    }

    /// Waits for an event, at the latest until `until`, and serves the clipboard in the meantime.
    pub fn await_event<T>(
        &mut self,
        until: Instant,
        mut wanted: impl FnMut(&Event) -> Option<T>,
    ) -> Result<Option<T>, Failure> {
        loop {
            let Some(event) = self.wire.event(until)? else {
                return Ok(None);
            };
            if let Some(found) = wanted(&event) {
                return Ok(Some(found));
            }
            self.serve(event)?;
            if Instant::now() >= until {
                return Ok(None);
            }
        }
    }

    /// Serves the events that have arrived. Returns whether there may be more.
    pub fn serve_pending(&mut self) -> Result<bool, Failure> {
        for _ in 0..EVENTS_TURN {
            match self.wire.event(Instant::now())? {
                Some(event) => self.serve(event)?,
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

/// Whether there may be an X server.
pub fn is_likely() -> bool {
    !sockets(Path::new(SOCKETS)).is_empty()
}

/// The sockets in the directory, in the order of their displays.
fn sockets(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let names = entries.take(ENTRIES_MAX).flatten();
    let mut displays: Vec<u16> = names
        .filter_map(|entry| display(entry.file_name().to_str()?))
        .collect();
    displays.sort_unstable();
    let paths = displays.iter().map(|number| dir.join(format!("X{number}")));
    paths.take(SERVERS_MAX).collect()
}

fn display(name: &str) -> Option<u16> {
    let digits = name.strip_prefix('X')?;
    let number: u16 = digits.parse().ok()?;
    // Not `X+1` or `X01`.
    (number.to_string() == digits).then_some(number)
}

/// Connects to the first server that accepts.
fn connect_in(dir: &Path) -> Result<UnixStream, Failure> {
    let mut last = None;
    for path in sockets(dir) {
        match connect(&path) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = Some((path, error)),
        }
    }
    Err(match last {
        // The socket of a server that has ended.
        Some((_, Errno::CONNREFUSED | Errno::NOENT)) | None => refusal(
            Errno::NODEV,
            format!(
                "the guest has no X server: none listens in {}",
                dir.display()
            ),
        ),
        Some((path, error)) => failure(
            &format!("cannot connect to the X server at {}", path.display()),
            &error.into(),
        ),
    })
}

/// Never waits, even if the server does not accept.
fn connect(path: &Path) -> rustix::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn the_lowest_display_that_accepts_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let missing = connect_in(&dir.path().join("none")).unwrap_err();
        assert_eq!(missing.errno, libc::ENODEV);
        for name in ["X0", "X-1", "X01", "x2", "X", "X99999"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(connect_in(dir.path()).unwrap_err().errno, libc::ENODEV);
        let ten = UnixListener::bind(dir.path().join("X10")).unwrap();
        let two = UnixListener::bind(dir.path().join("X2")).unwrap();
        connect_in(dir.path()).unwrap();
        two.set_nonblocking(true).unwrap();
        two.accept().unwrap();
        drop(two);
        connect_in(dir.path()).unwrap();
        ten.set_nonblocking(true).unwrap();
        ten.accept().unwrap();
    }
}
