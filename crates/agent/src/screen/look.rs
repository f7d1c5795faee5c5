//! What is on the screen: its size, the pointer, the session, and the window that gets the keys.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use sandtree_proto::{Failure, ScreenState};
use x11rb_protocol::protocol::xproto::{
    ChangeWindowAttributesAux, ChangeWindowAttributesRequest, ClientMessageEvent, EventMask,
    GetInputFocusRequest, QueryPointerRequest, QueryTreeRequest, SendEventRequest,
};

use super::event::Event;
use super::session::Session;

/// How many windows are looked at; a desktop and its panels are among the first or the last.
const WINDOWS_MAX: usize = 256;
/// How deep a window with the focus is below its program's main window.
const DEPTH_MAX: usize = 16;
/// How long a program may take to read what was typed.
const PING_WITHIN: Duration = Duration::from_secs(5);
/// How long a program without pings gets.
const READ_WITHIN: Duration = Duration::from_secs(1);

impl Session {
    pub fn look(&mut self) -> Result<ScreenState, Failure> {
        let (width, height) = self.size()?;
        let window = self.root;
        let pointer = self.wire.call(QueryPointerRequest { window })?;
        let inside = |position: i16, size: u16| {
            let last = size.saturating_sub(1);
            u16::try_from(position).unwrap_or(0).min(last)
        };
        Ok(ScreenState {
            width,
            height,
            x: inside(pointer.root_x, width),
            y: inside(pointer.root_y, height),
            session: self.has_session()?,
        })
    }

    /// Whether a window manager runs, and a desktop and a panel are shown.
    fn has_session(&mut self) -> Result<bool, Failure> {
        if !self.has_window_manager()? {
            return Ok(false);
        }
        let desktop = self.atom("_NET_WM_WINDOW_TYPE_DESKTOP")?;
        let dock = self.atom("_NET_WM_WINDOW_TYPE_DOCK")?;
        let mut has_desktop = false;
        let mut has_dock = false;
        for window in self.windows()? {
            let types = self.numbers_of_other(window, "_NET_WM_WINDOW_TYPE")?;
            has_desktop |= types.contains(&desktop);
            has_dock |= types.contains(&dock);
            if has_desktop && has_dock {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The window that the root names names itself, unless its window manager is gone.
    fn has_window_manager(&mut self) -> Result<bool, Failure> {
        let name = "_NET_SUPPORTING_WM_CHECK";
        let named = self.numbers(self.root, name)?;
        match named.first() {
            Some(&window) => Ok(self.numbers_of_other(window, name)?.first() == Some(&window)),
            None => Ok(false),
        }
    }

    /// The lowest windows and the highest ones.
    fn windows(&mut self) -> Result<Vec<u32>, Failure> {
        let mut windows = self.numbers(self.root, "_NET_CLIENT_LIST_STACKING")?;
        if windows.len() > WINDOWS_MAX {
            let high = windows.split_off(windows.len() - WINDOWS_MAX / 2);
            windows.truncate(WINDOWS_MAX / 2);
            windows.extend(high);
        }
        Ok(windows)
    }

    /// A window of another client may be gone: then it has no properties.
    fn numbers_of_other(&mut self, window: u32, name: &'static str) -> Result<Vec<u32>, Failure> {
        let numbers = self.numbers(window, name);
        self.unless_broken(numbers)
    }

    fn unless_broken<T: Default>(&self, result: Result<T, Failure>) -> Result<T, Failure> {
        match result {
            Err(_) if !self.wire.is_broken() => Ok(T::default()),
            other => other,
        }
    }

    /// Waits until the program with the focus has read all keys: it answers a ping after them. A
    /// program without pings, or one that is too busy, gets some time.
    pub fn settle_clients(&mut self) -> Result<(), Failure> {
        let pinged = self.pinged_window()?;
        match pinged {
            Some(window) => self.ping(window)?,
            None => {
                let until = Instant::now() + READ_WITHIN;
                while Instant::now() < until {
                    self.await_event(until, |_| None::<()>)?;
                }
            }
        }
        self.keyboard.settle();
        Ok(())
    }

    /// The window of the program with the focus that takes pings.
    fn pinged_window(&mut self) -> Result<Option<u32>, Failure> {
        let ping = self.atom("_NET_WM_PING")?;
        let focus = self.wire.call(GetInputFocusRequest)?.focus;
        let mut window = focus;
        for _ in 0..DEPTH_MAX {
            // 0 is no window, 1 the one below the pointer.
            if window <= 1 || window == self.root {
                break;
            }
            if self
                .numbers_of_other(window, "WM_PROTOCOLS")?
                .contains(&ping)
            {
                return Ok(Some(window));
            }
            let tree = self.wire.call(QueryTreeRequest { window });
            window = self.unless_broken(tree.map(|tree| tree.parent))?;
        }
        Ok(None)
    }

    fn ping(&mut self, window: u32) -> Result<(), Failure> {
        let protocols = self.atom("WM_PROTOCOLS")?;
        let ping = self.atom("_NET_WM_PING")?;
        let time = self.time()?;
        // The answer is an event of the root, for those who watch its windows.
        self.watch_root(EventMask::SUBSTRUCTURE_NOTIFY)?;
        let message = ClientMessageEvent::new(32, window, protocols, [ping, time, window, 0, 0]);
        let event: [u8; 32] = message.into();
        self.wire.try_send(SendEventRequest {
            propagate: false,
            destination: window,
            event_mask: EventMask::NO_EVENT,
            event: Cow::Owned(event),
        })?;
        let answer = |event: &Event| match event {
            Event::Message(message) if message.type_ == protocols => {
                let [what, when, of, ..] = message.data.as_data32();
                (what == ping && when == time && of == window).then_some(())
            }
            _ => None,
        };
        // Without an answer the program hangs, and reads no keys either.
        self.await_event(Instant::now() + PING_WITHIN, answer)?;
        self.watch_root(EventMask::NO_EVENT)
    }

    fn watch_root(&mut self, events: EventMask) -> Result<(), Failure> {
        let attributes = ChangeWindowAttributesAux::new().event_mask(events);
        self.wire.check(ChangeWindowAttributesRequest {
            window: self.root,
            value_list: Cow::Owned(attributes),
        })
    }
}
