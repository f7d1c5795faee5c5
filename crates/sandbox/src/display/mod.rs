//! The screen of a sandbox, with its keyboard, pointer and clipboard.
//!
//! ```text
//!   screenshot ── driver ── QEMU                 whatever the guest does
//!   view ──────── bridge ── driver ── QEMU       from one machine to the next
//!   keys, text, pointer, clipboard, size ── agent ── X server of the guest
//!   keys, text, pointer ─────────────────── agent ── kernel of a guest without an X server
//! ```
//!
//! Keys and the pointer go through the agent: the X server takes all of them in order and
//! acknowledges them, where an emulated keyboard drops keys that a slow guest does not fetch in
//! time. In a guest without an X server they come from input devices of the agent. A list of events
//! is carried out as one unit, inside the guest. A copy that is restored from the middle of a list
//! drops the rest of it, and releases all keys.

mod keys;
mod listen;
mod picture;
mod rfb;
mod view;

use std::time::Duration;

use rustix::io::Errno;
use sandtree_proto::ScreenInput as Input;
use sandtree_proto::screen::{CLIPBOARD_MAX, InputError, check, pieces};
use sandtree_store::DisplaySize;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep};

use self::keys::Chord;
pub use self::listen::{ViewListener, Viewers};
pub use self::picture::Screenshot;
pub use self::rfb::Password;
use crate::boxed::Boxed;
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::sandbox::Sandbox;

/// The interval between pictures while a change is awaited.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// How long a press of a button lasts. Programs that draw slowly do not see a shorter one.
const PRESS_MS: u16 = 20;
/// The steps of a drag. Some programs begin to drag after a certain distance.
const DRAG_STEPS: i32 = 10;
const CLICKS_MAX: u32 = 10;
/// The characters of a refused text that its error shows.
const SHOWN_MAX: usize = 40;
const SCROLL_MAX: u32 = 100;
const HOLD_MAX: Duration = Duration::from_secs(10);
/// More than any screen is waited for.
const LONGEST: Duration = Duration::from_secs(365 * 86_400);

/// The screen of a sandbox.
#[derive(Debug, Clone)]
pub struct Display {
    sandbox: Sandbox,
}

/// What the guest reports about its screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ScreenInfo {
    pub width: u16,
    pub height: u16,
    /// The pointer.
    pub x: u16,
    pub y: u16,
    /// Whether a desktop runs: a window manager, a panel and a background.
    pub ready: bool,
}

/// A button of the mouse.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Button {
    #[default]
    Left,
    Middle,
    Right,
    Back,
    Forward,
}

impl Button {
    /// The number that X gives it.
    fn number(self) -> u8 {
        match self {
            Self::Left => 1,
            Self::Middle => 2,
            Self::Right => 3,
            Self::Back => 8,
            Self::Forward => 9,
        }
    }
}

/// The numbers that X gives to steps of the wheel.
const WHEEL_UP: u8 = 4;
const WHEEL_DOWN: u8 = 5;
const WHEEL_LEFT: u8 = 6;
const WHEEL_RIGHT: u8 = 7;

/// A place on the screen, in pixels from the upper left corner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Place {
    pub x: u16,
    pub y: u16,
}

impl Sandbox {
    /// Its screen. Fails if it was created without one.
    pub fn display(&self) -> Result<Display> {
        match self.record().display {
            Some(_) => Ok(Display {
                sandbox: self.clone(),
            }),
            None => Err(Error::NoDisplay {
                name: self.name().to_owned(),
            }),
        }
    }
}

impl Display {
    /// What the screen shows.
    pub async fn screenshot(&self) -> Result<Screenshot> {
        self.sandbox.picture().await.map(Screenshot::from)
    }

    /// Waits until the screen differs from a picture of it, and returns the new picture.
    pub fn wait_change<'a>(
        &'a self,
        from: &'a Screenshot,
        deadline: Duration,
    ) -> Boxed<'a, Result<Screenshot>> {
        Box::pin(async move {
            let end = Instant::now() + deadline.min(LONGEST);
            loop {
                let now = self.screenshot().await?;
                if now != *from {
                    return Ok(now);
                }
                pause(end, "change", deadline).await?;
            }
        })
    }

    /// Waits until the screen has not changed for some time, and returns its picture.
    pub fn wait_still(&self, still: Duration, deadline: Duration) -> Boxed<'_, Result<Screenshot>> {
        Box::pin(async move {
            let end = Instant::now() + deadline.min(LONGEST);
            let mut last = self.screenshot().await?;
            let mut since = Instant::now();
            while since.elapsed() < still {
                pause(end, "become still", deadline).await?;
                let now = self.screenshot().await?;
                if now != last {
                    last = now;
                    since = Instant::now();
                }
            }
            Ok(last)
        })
    }

    /// What the guest reports about its screen. Needs an X server in the guest.
    pub async fn info(&self) -> Result<ScreenInfo> {
        let state = self.guest().await?.look_at_screen().await;
        let state = state.map_err(self.explained())?;
        Ok(ScreenInfo {
            width: state.width,
            height: state.height,
            x: state.x,
            y: state.y,
            ready: state.session,
        })
    }

    /// Changes the size of the screen.
    pub async fn set_size(&self, size: DisplaySize) -> Result<()> {
        let guest = self.guest().await?;
        let set = guest.set_screen_size(size.width(), size.height()).await;
        set.map_err(self.explained())
    }

    /// Types a text, in any script. A line break is the key Enter. Fails before the first key if a
    /// character cannot be typed.
    pub fn type_text<'a>(&'a self, text: &'a str) -> Boxed<'a, Result<()>> {
        Box::pin(async move {
            let inputs = pieces(text).map(|piece| Input::Text(piece.to_owned()));
            let inputs: Vec<Input> = inputs.collect();
            for input in &inputs {
                check(std::slice::from_ref(input)).map_err(invalid)?;
            }
            // The guest checks each piece on its own.
            if inputs.len() > 1 && !text.chars().all(is_on_us_keyboard) {
                self.info().await?;
            }
            for input in inputs {
                self.input(vec![input]).await?;
            }
            Ok(())
        })
    }

    /// Refuses what names no keys.
    pub fn check_keys(chord: &str) -> Result<()> {
        Chord::parse(chord).map(drop)
    }

    /// Presses keys together and releases them: `ctrl+shift+t`, `F5`, `enter`.
    pub async fn press(&self, chord: &str, hold: Option<Duration>) -> Result<()> {
        let Chord(keys) = Chord::parse(chord)?;
        let hold = hold.unwrap_or_default();
        if hold > HOLD_MAX {
            let rule = "10 s are the longest";
            return Err(Error::invalid("time to hold a key", hold.as_secs(), rule));
        }
        let key = |down| {
            move |key: &keys::Key| Input::Key {
                keysym: key.0,
                down,
            }
        };
        let mut events: Vec<Input> = keys.iter().map(key(true)).collect();
        if !hold.is_zero() {
            let ms = hold.as_millis() as u16;
            events.push(Input::Pause { ms });
        }
        events.extend(keys.iter().rev().map(key(false)));
        self.input(events).await
    }

    /// Moves the pointer.
    pub async fn move_to(&self, place: Place) -> Result<()> {
        self.input_at(&[place], vec![moved(place)]).await
    }

    /// Clicks so many times, at a place or where the pointer is.
    pub async fn click(&self, at: Option<Place>, button: Button, count: u32) -> Result<()> {
        if !(1..=CLICKS_MAX).contains(&count) {
            return Err(Error::invalid("number of clicks", count, "from 1 to 10"));
        }
        let mut events: Vec<Input> = at.map(moved).into_iter().collect();
        for _ in 0..count {
            events.extend(pressed(button.number()));
        }
        self.input_at(at.as_slice(), events).await
    }

    /// Presses a button and holds it.
    pub async fn button_down(&self, button: Button) -> Result<()> {
        self.input(vec![down(button.number())]).await
    }

    pub async fn button_up(&self, button: Button) -> Result<()> {
        self.input(vec![up(button.number())]).await
    }

    /// Drags from one place to another.
    pub async fn drag(&self, from: Place, to: Place, button: Button) -> Result<()> {
        let number = button.number();
        let pause = Input::Pause { ms: PRESS_MS };
        let between = |a: u16, b: u16, step: i32| {
            let way = i32::from(b) - i32::from(a);
            (i32::from(a) + way * step / DRAG_STEPS) as u16
        };
        let mut events = vec![moved(from), down(number), pause.clone()];
        for step in 1..=DRAG_STEPS {
            events.push(moved(Place {
                x: between(from.x, to.x, step),
                y: between(from.y, to.y, step),
            }));
            events.push(pause.clone());
        }
        events.push(up(number));
        self.input_at(&[from, to], events).await
    }

    /// Turns the wheel: down and right are positive.
    pub async fn scroll(&self, at: Option<Place>, downward: i32, right: i32) -> Result<()> {
        let most = downward.unsigned_abs().max(right.unsigned_abs());
        if most > SCROLL_MAX {
            return Err(Error::invalid("number of steps", most, "at most 100"));
        }
        let mut events: Vec<Input> = at.map(moved).into_iter().collect();
        let ways = [
            (downward, WHEEL_DOWN, WHEEL_UP),
            (right, WHEEL_RIGHT, WHEEL_LEFT),
        ];
        for (steps, positive, negative) in ways {
            let number = if steps > 0 { positive } else { negative };
            for _ in 0..steps.unsigned_abs() {
                events.extend([down(number), up(number)]);
            }
        }
        self.input_at(at.as_slice(), events).await
    }

    /// The text of the clipboard. `None`: it has no text.
    pub async fn clipboard(&self) -> Result<Option<String>> {
        let text = self.guest().await?.clipboard().await;
        text.map_err(self.explained())
    }

    pub async fn set_clipboard(&self, text: &str) -> Result<()> {
        if text.len() > CLIPBOARD_MAX {
            let rule = "1 MiB is the most";
            return Err(Error::invalid("length of the clipboard", text.len(), rule));
        }
        let set = self.guest().await?.set_clipboard(text).await;
        set.map_err(self.explained())
    }

    /// Serves a VNC client, until it leaves or the sandbox stops. A revert, a pause and a resume do
    /// not end it. Without a password, the caller has checked who the viewer is.
    pub fn serve_view<'a, S>(
        &'a self,
        viewer: S,
        password: Option<&'a Password>,
    ) -> Boxed<'a, Result<()>>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'a,
    {
        Box::pin(view::serve(&self.sandbox, viewer, password))
    }

    /// Opens a port of 127.0.0.1 for VNC clients; 0 is a free one.
    pub async fn listen(&self, port: u16, viewers: Viewers) -> Result<ViewListener> {
        ViewListener::open(self.clone(), port, viewers).await
    }

    /// Carries out a list of events as [`input`](Self::input) does. Places outside of the screen
    /// are refused before the first event.
    async fn input_at(&self, places: &[Place], events: Vec<Input>) -> Result<()> {
        check(&events).map_err(invalid)?;
        let guest = self.guest().await?;
        let mut events = events;
        if !places.is_empty() {
            match guest.look_at_screen().await {
                Ok(state) => check_places(places, state.width.into(), state.height.into())?,
                Err(error) if Guest::lacks_screen(&error) => {
                    let shown = self.screenshot().await?;
                    check_places(places, shown.width(), shown.height())?;
                    for event in &mut events {
                        *event = in_parts(event.clone(), &shown);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let text: Option<String> = events.iter().find_map(|event| match event {
            Input::Text(text) => Some(text.chars().take(SHOWN_MAX).collect()),
            _ => None,
        });
        let text = text.unwrap_or_else(|| "keys".to_owned());
        let done = guest.screen_input(events).await.map_err(self.explained());
        done.map_err(|error| match Guest::refused_with(&error, Errno::INVAL) {
            Some(rule) => Error::invalid("input", text, rule),
            None => error,
        })
    }

    /// Carries out a list of events as one unit. A list that is not possible is refused before its
    /// first event.
    async fn input(&self, events: Vec<Input>) -> Result<()> {
        self.input_at(&[], events).await
    }

    async fn guest(&self) -> Result<Guest> {
        self.sandbox.guest().await
    }

    fn explained(&self) -> impl FnOnce(Error) -> Error {
        let name = self.sandbox.name().to_owned();
        |error| {
            if Guest::lacks_screen(&error) {
                Error::NoXServer { name }
            } else {
                error
            }
        }
    }
}

/// Refuses places outside of the screen.
fn check_places(places: &[Place], width: u32, height: u32) -> Result<()> {
    let is_outside = |place: &&Place| u32::from(place.x) >= width || u32::from(place.y) >= height;
    match places.iter().find(is_outside) {
        None => Ok(()),
        Some(Place { x, y }) => {
            let rule = format!("the screen has {width}x{height} pixels");
            Err(Error::invalid("place", format!("{x},{y}"), &rule))
        }
    }
}

/// Whether a character can be typed in a guest without an X server.
fn is_on_us_keyboard(character: char) -> bool {
    matches!(character, ' '..='~' | '\n' | '\t')
}

fn invalid(error: InputError) -> Error {
    Error::Invalid {
        what: "input".into(),
        value: match error {
            InputError::Character(code) => char::from_u32(code).unwrap_or_default().to_string(),
            _ => String::new(),
        },
        rule: error.to_string(),
    }
}

/// Waits a moment. Fails at the end of the time.
async fn pause(end: Instant, what: &'static str, after: Duration) -> Result<()> {
    if Instant::now() >= end {
        return Err(Error::ScreenTimeout { what, after });
    }
    sleep(LOOK_INTERVAL).await;
    Ok(())
}

/// A move to a pixel as one to a part of the screen: an agent without an X server does not know the
/// pixels.
fn in_parts(event: Input, shown: &Screenshot) -> Input {
    // The middle of the pixel, whichever way the guest rounds.
    let part = |pixel: u16, length: u32| {
        let middle = (2 * u64::from(pixel) + 1) * (u64::from(u16::MAX) + 1);
        (middle / (2 * u64::from(length))) as u16
    };
    match event {
        Input::Move { x, y } => Input::Point {
            x: part(x, shown.width()),
            y: part(y, shown.height()),
        },
        other => other,
    }
}

fn moved(place: Place) -> Input {
    Input::Move {
        x: place.x,
        y: place.y,
    }
}

fn down(number: u8) -> Input {
    Input::Button { number, down: true }
}

fn up(number: u8) -> Input {
    Input::Button {
        number,
        down: false,
    }
}

fn pressed(number: u8) -> [Input; 3] {
    let pause = Input::Pause { ms: PRESS_MS };
    [down(number), pause, up(number)]
}
