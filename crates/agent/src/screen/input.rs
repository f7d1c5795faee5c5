//! Input: a list of keys, text and moves of the pointer becomes events of XTEST.
//!
//! ```text
//!   inputs ─► checked ─► steps ─┬► bind the missing keysyms of a batch ─► press ─► next batch
//!                               └► every EVENTS_AHEAD events, wait for the server
//! ```
//!
//! XTEST puts events into the server's own queue, in order, and keys are not lost: a client reads
//! them whenever it gets to it. A client looks up a key code when it reads the event, so a code
//! that was pressed keeps its keysym until the client has read it.
//!
//! Buttons are lost when they come fast: a window manager takes each press first and stops the
//! pointer until it has passed the press on, and of the events that come meanwhile the server drops
//! some. So the next event waits until the server shows that the last one was processed.
//!
//! Always: all of a list is checked before anything is pressed. The layout is read for each list,
//! because the user of the guest may change it.
//! When it fails: keys that were pressed by [`ScreenInput::Key`] stay in the list of held keys.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sandtree_proto::Failure;
use sandtree_proto::screen::{self, ScreenInput};
use x11rb_protocol::protocol::xproto::{
    self, ChangeKeyboardMappingRequest, GetGeometryRequest, GetKeyboardMappingRequest,
    GetModifierMappingRequest, KeyButMask, QueryKeymapRequest, QueryPointerRequest,
};
use x11rb_protocol::protocol::xtest::FakeInputRequest;

use super::keyboard::{Chord, Held, Layout};
use super::keysym;
use super::session::Session;
use crate::failure::refusal;

/// How many events the server may be behind.
const EVENTS_AHEAD: usize = 64;
/// Less than the host waits for an answer.
const LIST_WITHIN: Duration = Duration::from_secs(80);
/// A pause is interrupted within this time when the guest is restored.
const PAUSE_SLICE: Duration = Duration::from_millis(100);
/// Each binding is made for both levels, so that Shift does not change it.
const BOUND_COLUMNS: u8 = 2;
/// The buttons that the state of the pointer shows: the bits from this one on.
const FIRST_BUTTON_BIT: u16 = 8;
const SHOWN_BUTTONS: u8 = 5;
const BUTTON_BITS: u16 = 0x1f << FIRST_BUTTON_BIT;
/// After a button that the state does not show.
const UNSHOWN_PAUSE: Duration = Duration::from_millis(20);
/// How long a window manager may take to pass a click on.
const BUTTON_WITHIN: Duration = Duration::from_secs(10);
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// One thing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Press(u32),
    Release(u32),
    /// Before a text: Caps Lock must not change it.
    BeginText,
    /// A press and a release.
    Tap(u32),
    EndText,
    /// To a pixel.
    Move {
        x: u16,
        y: u16,
    },
    /// To a part of the width and of the height, of 65536.
    Point {
        x: u16,
        y: u16,
    },
    ButtonDown(u8),
    ButtonUp(u8),
    Pause(Duration),
}

impl Step {
    /// The keysym that needs a key.
    pub fn keysym(self) -> Option<u32> {
        match self {
            Self::Press(keysym) | Self::Tap(keysym) => Some(keysym),
            _ => None,
        }
    }

    fn is_of_keyboard(self) -> bool {
        self.keysym().is_some() || matches!(self, Self::Release(_))
    }
}

/// The progress of a list.
pub struct Run<'a> {
    /// Whether the guest was restored after the list was sent.
    is_void: &'a dyn Fn() -> bool,
    until: Instant,
    /// Since the last wait for their receiver.
    events: usize,
    /// The key that switches Caps Lock on again.
    relock: Option<u8>,
}

impl<'a> Run<'a> {
    /// Ends at the latest when the host stops waiting.
    pub fn new(until: Instant, is_void: &'a dyn Fn() -> bool) -> Self {
        Self {
            is_void,
            until: until.min(Instant::now() + LIST_WITHIN),
            events: 0,
            relock: None,
        }
    }

    /// The end of the next part of a pause that ends at `until`. `None`: the pause is over.
    pub fn slice(&self, until: Instant) -> Option<Instant> {
        let now = Instant::now();
        (now < until && !(self.is_void)()).then(|| until.min(now + PAUSE_SLICE))
    }

    pub fn check(&self) -> Result<(), Failure> {
        if (self.is_void)() {
            return Err(refusal(Errno::CANCELED, "the guest was restored"));
        }
        if Instant::now() < self.until {
            return Ok(());
        }
        let seconds = LIST_WITHIN.as_secs();
        Err(refusal(
            Errno::TIMEDOUT,
            format!(
                "the inputs take more than {seconds} s, and a part of them is done: send fewer"
            ),
        ))
    }
}

impl Session {
    /// Does a whole list, and waits until the server has processed it.
    pub fn input(
        &mut self,
        inputs: &[ScreenInput],
        until: Instant,
        is_void: &dyn Fn() -> bool,
    ) -> Result<(), Failure> {
        let steps = checked(inputs)?;
        self.check_positions(inputs)?;
        if steps.iter().any(|step| step.is_of_keyboard()) {
            self.look_at_keyboard()?;
            self.check_keys(&steps)?;
        }
        let mut run = Run::new(until, is_void);
        let held: Vec<u32> = self.keyboard.held.iter().map(|held| held.keysym).collect();
        let buttons = self.keyboard.buttons.clone();
        let done = self.do_steps(&steps, &mut run);
        if done.is_err() && !self.wire.is_broken() && !is_void() {
            self.let_go(&held, &buttons)?;
        }
        let relocked = self.relock(&mut run);
        done.and(relocked).and(self.wire.sync())
    }

    /// The size of the screen.
    pub fn size(&mut self) -> Result<(u16, u16), Failure> {
        let drawable = self.root;
        let root = self.wire.call(GetGeometryRequest { drawable })?;
        Ok((root.width, root.height))
    }

    fn check_positions(&mut self, inputs: &[ScreenInput]) -> Result<(), Failure> {
        let is_move = |input: &&ScreenInput| matches!(input, ScreenInput::Move { .. });
        if inputs.iter().find(is_move).is_none() {
            return Ok(());
        }
        let (width, height) = self.size()?;
        for input in inputs {
            if let ScreenInput::Move { x, y } = input
                && (*x >= width || *y >= height)
            {
                return Err(refusal(
                    Errno::INVAL,
                    format!("{x},{y} is outside of the screen, which has {width}x{height}"),
                ));
            }
        }
        Ok(())
    }

    fn state(&mut self) -> Result<u16, Failure> {
        let window = self.root;
        let pointer = self.wire.call(QueryPointerRequest { window })?;
        Ok(pointer.mask.into())
    }

    /// Reads the layout of the keyboard.
    fn look_at_keyboard(&mut self) -> Result<(), Failure> {
        let first = self.wire.setup().min_keycode;
        let last = self.wire.setup().max_keycode;
        // The server shows the layout of the keyboard that was used last. The release of a key that
        // is not down changes nothing else, and makes that the keyboard of XTEST.
        if !self.is_down(last)? {
            self.fake(xproto::KEY_RELEASE_EVENT, last)?;
        }
        let mapping = self.wire.call(GetKeyboardMappingRequest {
            first_keycode: first,
            count: last.saturating_sub(first).saturating_add(1),
        })?;
        let modifiers = self.wire.call(GetModifierMappingRequest)?.keycodes;
        let state = self.state()?;
        let layout = Layout::new(first, mapping.keysyms_per_keycode, mapping.keysyms);
        let layout = layout.with_modifiers(&modifiers, state);
        self.keyboard.update(layout);
        Ok(())
    }

    fn is_down(&mut self, code: u8) -> Result<bool, Failure> {
        let keys = self.wire.call(QueryKeymapRequest)?.keys;
        Ok(is_set(&keys, code))
    }

    fn check_keys(&mut self, steps: &[Step]) -> Result<(), Failure> {
        if self.keyboard.has_spare() {
            return Ok(());
        }
        let mut wanted = steps.iter().filter_map(|step| step.keysym());
        match wanted.find(|&keysym| self.keyboard.find(keysym).is_none()) {
            Some(keysym) => Err(unbound(keysym)),
            None => Ok(()),
        }
    }

    fn do_steps(&mut self, steps: &[Step], run: &mut Run<'_>) -> Result<(), Failure> {
        let mut rest = steps;
        while !rest.is_empty() {
            let count = self.prepare(rest)?;
            let (now, later) = rest.split_at(count);
            for step in now {
                run.check()?;
                self.do_step(*step, run)?;
                if run.events >= EVENTS_AHEAD {
                    run.events = 0;
                    self.wire.sync()?;
                }
            }
            rest = later;
        }
        Ok(())
    }

    /// Binds the keysyms of the next steps. Returns how many steps can be done then.
    fn prepare(&mut self, steps: &[Step]) -> Result<usize, Failure> {
        let wanted: Vec<u32> = steps.iter().filter_map(|step| step.keysym()).collect();
        let batch = self.keyboard.prepare(&wanted);
        if batch.must_settle {
            self.settle_clients()?;
        }
        self.change_mapping(&batch.changes)?;
        let Some(&first_left) = wanted.get(batch.count) else {
            return Ok(steps.len());
        };
        if batch.count == 0 {
            return Err(unbound(first_left));
        }
        Ok(steps_before(steps, batch.count))
    }

    /// One request for each run of adjacent key codes.
    fn change_mapping(&mut self, changes: &[(u8, u32)]) -> Result<(), Failure> {
        for adjacent in changes.chunk_by(|(code, _), (next, _)| code.checked_add(1) == Some(*next))
        {
            let Some(&(first_keycode, _)) = adjacent.first() else {
                continue;
            };
            let keysyms = adjacent.iter().flat_map(|(_, keysym)| [*keysym, *keysym]);
            self.wire.send(ChangeKeyboardMappingRequest {
                keycode_count: adjacent.len() as u8,
                first_keycode,
                keysyms_per_keycode: BOUND_COLUMNS,
                keysyms: keysyms.collect::<Vec<u32>>().into(),
            })?;
        }
        if changes.is_empty() {
            return Ok(());
        }
        self.wire.sync()
    }

    fn do_step(&mut self, step: Step, run: &mut Run<'_>) -> Result<(), Failure> {
        match step {
            Step::Tap(keysym) => self.tap(keysym, run),
            Step::Press(keysym) => self.press(keysym, run),
            Step::Release(keysym) => self.release(keysym, run),
            Step::BeginText => self.unlock(run),
            Step::EndText => self.relock(run),
            Step::Move { x, y } => self.move_to(x, y, run),
            Step::Point { x, y } => {
                let (width, height) = self.size()?;
                self.move_to(pixel(x, width), pixel(y, height), run)
            }
            Step::ButtonDown(number) => {
                self.keyboard.buttons.insert(number);
                self.button(xproto::BUTTON_PRESS_EVENT, number, run)
            }
            Step::ButtonUp(number) => {
                self.keyboard.buttons.remove(&number);
                self.button(xproto::BUTTON_RELEASE_EVENT, number, run)
            }
            Step::Pause(time) => self.pause(time, run),
        }
    }

    fn move_to(&mut self, x: u16, y: u16, run: &mut Run<'_>) -> Result<(), Failure> {
        run.events += 1;
        self.wire.send(FakeInputRequest {
            type_: xproto::MOTION_NOTIFY_EVENT,
            root: self.root,
            root_x: x as i16,
            root_y: y as i16,
            ..FakeInputRequest::default()
        })
    }

    /// Releases what a list that failed has pressed.
    fn let_go(&mut self, held: &[u32], buttons: &BTreeSet<u8>) -> Result<(), Failure> {
        let is_new = |key: &Held| !held.contains(&key.keysym);
        let pressed: Vec<Held> = self
            .keyboard
            .held
            .extract_if(.., |key| is_new(key))
            .collect();
        for key in pressed.iter().rev() {
            for code in std::iter::once(&key.chord.code).chain(&key.chord.with) {
                self.fake(xproto::KEY_RELEASE_EVENT, *code)?;
            }
        }
        let new: Vec<u8> = self.keyboard.buttons.difference(buttons).copied().collect();
        for number in new {
            self.keyboard.buttons.remove(&number);
            self.fake(xproto::BUTTON_RELEASE_EVENT, number)?;
        }
        Ok(())
    }

    /// Presses or releases a button, and waits until the server has processed that.
    fn button(&mut self, event: u8, number: u8, run: &Run<'_>) -> Result<(), Failure> {
        let before = self.state()? & BUTTON_BITS;
        self.fake(event, number)?;
        if !(1..=SHOWN_BUTTONS).contains(&number) {
            self.wire.sync()?;
            std::thread::sleep(UNSHOWN_PAUSE);
            return Ok(());
        }
        let was_down = before & (1 << (FIRST_BUTTON_BIT + u16::from(number) - 1)) != 0;
        let is_change = was_down == (event == xproto::BUTTON_RELEASE_EVENT);
        let until = Instant::now() + BUTTON_WITHIN;
        while is_change && self.state()? & BUTTON_BITS == before {
            run.check()?;
            if Instant::now() > until {
                let what = "a program of the guest holds the pointer, so a click is not processed";
                return Err(refusal(Errno::TIMEDOUT, what));
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }

    fn chord(&mut self, keysym: u32) -> Result<Chord, Failure> {
        self.keyboard.find(keysym).ok_or_else(|| unbound(keysym))
    }

    fn tap(&mut self, keysym: u32, run: &mut Run<'_>) -> Result<(), Failure> {
        let chord = self.chord(keysym)?;
        let chord = self.down(chord, run)?;
        self.up(&chord, run)
    }

    fn press(&mut self, keysym: u32, run: &mut Run<'_>) -> Result<(), Failure> {
        let chord = self.chord(keysym)?;
        let chord = self.down(chord, run)?;
        if !self.keyboard.is_held(chord.code) {
            self.keyboard.held.push(Held { keysym, chord });
        }
        Ok(())
    }

    /// Also a key that the agent does not hold, but may have held before it connected again.
    fn release(&mut self, keysym: u32, run: &mut Run<'_>) -> Result<(), Failure> {
        let mut held = self.keyboard.held.iter();
        if let Some(at) = held.position(|held| held.keysym == keysym) {
            let held = self.keyboard.held.remove(at);
            return self.up(&held.chord, run);
        }
        match self.keyboard.find(keysym) {
            Some(Chord { code, .. }) => {
                run.events += 1;
                self.fake(xproto::KEY_RELEASE_EVENT, code)
            }
            None => Ok(()),
        }
    }

    /// Presses a key, and before it those of its modifiers that are not held. Returns what is to be
    /// released.
    fn down(&mut self, chord: Chord, run: &mut Run<'_>) -> Result<Chord, Failure> {
        let Chord { code, with } = chord;
        let missing = with
            .into_iter()
            .filter(|&code| !self.keyboard.is_held(code));
        let with: Vec<u8> = missing.collect();
        for &modifier in &with {
            self.fake(xproto::KEY_PRESS_EVENT, modifier)?;
        }
        self.fake(xproto::KEY_PRESS_EVENT, code)?;
        self.keyboard.use_key(code);
        run.events += 1 + with.len();
        Ok(Chord { code, with })
    }

    fn up(&mut self, chord: &Chord, run: &mut Run<'_>) -> Result<(), Failure> {
        self.fake(xproto::KEY_RELEASE_EVENT, chord.code)?;
        for &modifier in chord.with.iter().rev() {
            self.fake(xproto::KEY_RELEASE_EVENT, modifier)?;
        }
        run.events += 1 + chord.with.len();
        Ok(())
    }

    fn fake(&mut self, type_: u8, detail: u8) -> Result<(), Failure> {
        self.wire.send(FakeInputRequest {
            type_,
            detail,
            ..FakeInputRequest::default()
        })
    }

    /// Switches Caps Lock off for a text.
    fn unlock(&mut self, run: &mut Run<'_>) -> Result<(), Failure> {
        if self.state()? & u16::from(KeyButMask::LOCK) == 0 {
            return Ok(());
        }
        let caps_lock = self.keyboard.layout().caps_lock();
        if let Some(code) = caps_lock {
            self.toggle(code)?;
            run.relock = Some(code);
        }
        if self.state()? & u16::from(KeyButMask::LOCK) == 0 {
            return Ok(());
        }
        Err(refusal(
            Errno::BUSY,
            "Caps Lock is on and no key switches it off: text would have the wrong case",
        ))
    }

    fn relock(&mut self, run: &mut Run<'_>) -> Result<(), Failure> {
        run.relock.take().map_or(Ok(()), |code| self.toggle(code))
    }

    fn toggle(&mut self, code: u8) -> Result<(), Failure> {
        self.fake(xproto::KEY_PRESS_EVENT, code)?;
        self.fake(xproto::KEY_RELEASE_EVENT, code)
    }

    /// Serves the clipboard in the meantime.
    fn pause(&mut self, time: Duration, run: &Run<'_>) -> Result<(), Failure> {
        let until = Instant::now() + time;
        while let Some(slice) = run.slice(until) {
            self.await_event(slice, |_| None::<()>)?;
        }
        Ok(())
    }

    /// Releases all keys and buttons that are down, also those that the agent did not press.
    pub fn release_all(&mut self) -> Result<(), Failure> {
        let keys = self.wire.call(QueryKeymapRequest)?.keys;
        let modifiers = self.wire.call(GetModifierMappingRequest)?.keycodes;
        let down = (0..=u8::MAX).filter(|&code| is_set(&keys, code));
        let mut down: Vec<u8> = down.collect();
        // A key that repeats without its modifier would type another character.
        down.sort_by_key(|code| modifiers.contains(code));
        for code in down {
            self.fake(xproto::KEY_RELEASE_EVENT, code)?;
        }
        let state = self.state()?;
        let shown = (1..=SHOWN_BUTTONS)
            .filter(|number| state >> (FIRST_BUTTON_BIT - 1 + u16::from(*number)) & 1 == 1);
        let mut buttons = std::mem::take(&mut self.keyboard.buttons);
        buttons.extend(shown);
        for number in buttons {
            self.fake(xproto::BUTTON_RELEASE_EVENT, number)?;
        }
        self.keyboard.held.clear();
        self.wire.sync()
    }
}

fn unbound(keysym: u32) -> Failure {
    refusal(
        Errno::BUSY,
        format!("the keyboard has no spare key for keysym {keysym:#x}: release held keys"),
    )
}

/// A bit for each key code.
fn is_set(keys: &[u8; 32], code: u8) -> bool {
    keys[usize::from(code / 8)] >> (code % 8) & 1 == 1
}

/// The pixel at a part of a length, of 65536.
fn pixel(part: u16, length: u16) -> u16 {
    (u32::from(part) * u32::from(length) / (u32::from(u16::MAX) + 1)) as u16
}

/// The steps of a list. Refuses one that no guest can do.
pub fn checked(inputs: &[ScreenInput]) -> Result<Vec<Step>, Failure> {
    screen::check(inputs).map_err(|error| refusal(Errno::INVAL, error.to_string()))?;
    Ok(steps(inputs))
}

fn steps(inputs: &[ScreenInput]) -> Vec<Step> {
    let mut steps = Vec::new();
    for input in inputs {
        match input {
            ScreenInput::Key { keysym, down: true } => steps.push(Step::Press(*keysym)),
            ScreenInput::Key {
                keysym,
                down: false,
            } => steps.push(Step::Release(*keysym)),
            ScreenInput::Text(text) => {
                steps.push(Step::BeginText);
                steps.extend(
                    text.chars()
                        .map(|character| Step::Tap(keysym::of(character))),
                );
                steps.push(Step::EndText);
            }
            ScreenInput::Move { x, y } => steps.push(Step::Move { x: *x, y: *y }),
            ScreenInput::Point { x, y } => steps.push(Step::Point { x: *x, y: *y }),
            ScreenInput::Button { number, down: true } => steps.push(Step::ButtonDown(*number)),
            ScreenInput::Button {
                number,
                down: false,
            } => steps.push(Step::ButtonUp(*number)),
            ScreenInput::Pause { ms } => {
                steps.push(Step::Pause(Duration::from_millis(u64::from(*ms))))
            }
        }
    }
    steps
}

/// How many steps come before the one that needs the keysym after the first `count`.
fn steps_before(steps: &[Step], count: usize) -> usize {
    let needing = steps.iter().enumerate();
    let mut needing = needing.filter(|(_, step)| step.keysym().is_some());
    needing.nth(count).map_or(steps.len(), |(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_becomes_steps_in_its_order() {
        let inputs = [
            ScreenInput::Key {
                keysym: 5,
                down: true,
            },
            ScreenInput::Text("a\n".into()),
            ScreenInput::Pause { ms: 7 },
            ScreenInput::Key {
                keysym: 5,
                down: false,
            },
        ];
        assert_eq!(
            steps(&inputs),
            [
                Step::Press(5),
                Step::BeginText,
                Step::Tap(0x61),
                Step::Tap(keysym::RETURN),
                Step::EndText,
                Step::Pause(Duration::from_millis(7)),
                Step::Release(5),
            ]
        );
    }

    #[test]
    fn a_batch_ends_before_the_first_key_that_is_not_bound() {
        let inputs = [
            ScreenInput::Text("ab".into()),
            ScreenInput::Text("c".into()),
        ];
        let steps = steps(&inputs);
        assert_eq!(steps_before(&steps, 1), 2);
        assert_eq!(steps_before(&steps, 2), 5);
        assert_eq!(steps_before(&steps, 3), 7);
    }

    #[test]
    fn the_ends_of_a_length_are_its_first_and_last_pixel() {
        assert_eq!(pixel(0, 1280), 0);
        assert_eq!(pixel(u16::MAX, 1280), 1279);
        assert_eq!(pixel(u16::MAX, 0), 0);
        assert_eq!(pixel(u16::MAX / 2, 801), 400);
        assert_eq!(pixel(76, 1280), 1);
    }

    #[test]
    fn keys_have_a_bit_each() {
        let mut keys = [0; 32];
        keys[6] = 4;
        assert!(is_set(&keys, 50));
        assert!(!is_set(&keys, 49));
    }
}
