//! Input in a guest without an X server: a keyboard and a pointer that the agent makes with uinput.
//!
//! The kernel passes their events to the text console and to every program that reads input
//! devices: a Wayland compositor, a game that draws to the screen itself.
//!
//! ```text
//!   inputs ─► checked ─► steps ─► reports of a device, with a rest after each burst
//! ```
//!
//! The kernel queues 64 events for a program that reads a device, and drops the queue when it is
//! full. Hence the rests: a program has to read a burst before the next but one. The text console
//! takes every event at once.
//!
//! Always: all of a list is checked before anything is pressed. The keyboard has the US layout.
//! When it fails: what the list has pressed is released.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sandtree_proto::Failure;
use sandtree_proto::screen::ScreenInput;

use super::input::{Run, Step, checked};
use super::keyboard::{Chord, Layout};
use super::{keysym, us};
use crate::failure::{OrFailure, failure, refusal};
use crate::sys::{self, InputBit};

const UINPUT: &str = "/dev/uinput";
/// The reports of a burst: two events each, so half of what the kernel queues for a program.
const BURST: usize = 16;
const REST: Duration = Duration::from_millis(20);
/// How long programs may take to open a new device.
const OPENED_WITHIN: Duration = Duration::from_secs(1);

/// Kinds of events, and codes, of `linux/input-event-codes.h`.
const EV_SYN: u16 = 0;
const EV_KEY: u16 = 1;
const EV_REL: u16 = 2;
const EV_ABS: u16 = 3;
const ABS_X: u16 = 0;
const ABS_Y: u16 = 1;
const REL_HWHEEL: u16 = 6;
const REL_WHEEL: u16 = 8;
/// By X's numbers of buttons. The wheel has no code.
const BUTTONS: [(u8, u16); 5] = [(1, 0x110), (2, 0x112), (3, 0x111), (8, 0x113), (9, 0x114)];
/// By X's numbers of buttons: the axis, and the way.
const WHEELS: [(u8, u16, i32); 4] = [
    (4, REL_WHEEL, 1),
    (5, REL_WHEEL, -1),
    (6, REL_HWHEEL, -1),
    (7, REL_HWHEEL, 1),
];

/// `struct uinput_user_dev`: a name, four numbers of identity, a count of effects, and four numbers
/// for each of 64 axes.
const NAME_BYTES: usize = 80;
const IDENTITY_BYTES: usize = 12;
const AXES: usize = 64;
const BUS_VIRTUAL: u16 = 6;

#[derive(Debug)]
pub struct Devices {
    keyboard: Device,
    pointer: Device,
    layout: Layout,
    /// The codes of keys and buttons that are down.
    held: BTreeSet<u16>,
    /// Those that went down with each keysym: modifiers that were down before are not among them.
    pressed: BTreeMap<u32, Vec<u16>>,
    /// Reports since the last rest, also of earlier lists.
    reports: usize,
}

impl Devices {
    /// Adds both to the guest. The kernel removes them when they are dropped.
    pub fn add() -> Result<Self, Failure> {
        let cannot = |error: io::Error| match error.raw_os_error() {
            // A name without a driver: ENODEV would mean that only the X server is missing.
            Some(libc::ENODEV) => refusal(Errno::NOENT, format!("{UINPUT} has no driver")),
            _ => failure(&format!("cannot add input devices by {UINPUT}"), &error),
        };
        let devices = Self {
            keyboard: keyboard().map_err(cannot)?,
            pointer: pointer().map_err(cannot)?,
            layout: us::layout(),
            held: BTreeSet::new(),
            pressed: BTreeMap::new(),
            reports: 0,
        };
        sleep(OPENED_WITHIN);
        Ok(devices)
    }

    /// Does a whole list.
    pub fn input(
        &mut self,
        inputs: &[ScreenInput],
        until: Instant,
        is_void: &dyn Fn() -> bool,
    ) -> Result<(), Failure> {
        let steps = checked(inputs)?;
        self.check(&steps)?;
        let run = Run::new(until, is_void);
        let held = self.held.clone();
        let done = steps.iter().try_for_each(|step| {
            run.check()?;
            self.do_step(*step, &run)
        });
        if done.is_err() && !is_void() {
            self.release(|code| !held.contains(&code))?;
        }
        done
    }

    /// Releases all keys and buttons.
    pub fn release_all(&mut self) -> Result<(), Failure> {
        self.release(|_| true)
    }

    fn release(&mut self, which: impl Fn(u16) -> bool) -> Result<(), Failure> {
        let held = self.held.iter().copied();
        let mut codes: Vec<u16> = held.filter(|code| which(*code)).collect();
        // A key that repeats without its modifier would type another character.
        let of_code =
            |code: u16| u8::try_from(code).map_or(keysym::NONE, |code| self.layout.keysym(code));
        codes.sort_by_key(|code| keysym::is_modifier(of_code(*code)));
        codes
            .into_iter()
            .try_for_each(|code| self.key(code, Way::Up))?;
        let held = &self.held;
        self.pressed
            .retain(|_, codes| codes.iter().any(|code| held.contains(code)));
        Ok(())
    }

    /// Refuses what these devices cannot do.
    fn check(&self, steps: &[Step]) -> Result<(), Failure> {
        for step in steps {
            if let Step::Move { .. } = step {
                return Err(refusal(
                    Errno::NODEV,
                    "the guest has no X server with pixels",
                ));
            }
            let missing = step
                .keysym()
                .filter(|&keysym| self.layout.find(keysym).is_none());
            if let Some(keysym) = missing {
                let what = keysym::shown(keysym);
                let rule = "is not on a US keyboard: it needs an X server in the guest";
                return Err(refusal(Errno::INVAL, format!("{what} {rule}")));
            }
        }
        Ok(())
    }

    fn do_step(&mut self, step: Step, run: &Run<'_>) -> Result<(), Failure> {
        match step {
            Step::Tap(keysym) => {
                let chord = self.chord(keysym);
                let codes = self.down(&chord)?;
                codes
                    .iter()
                    .rev()
                    .try_for_each(|&code| self.paced(code, Way::Up))
            }
            Step::Press(keysym) => {
                let chord = self.chord(keysym);
                let codes = self.down(&chord)?;
                // A key that is pressed again stays down with what it was pressed with.
                self.pressed.entry(keysym).or_insert(codes);
                Ok(())
            }
            Step::Release(keysym) => {
                let codes = self.pressed.remove(&keysym).unwrap_or_default();
                let mut codes = codes.into_iter().rev();
                codes.try_for_each(|code| self.paced(code, Way::Up))
            }
            // Caps Lock is the console's: text is typed as it is set.
            Step::BeginText | Step::EndText | Step::Move { .. } => Ok(()),
            Step::Point { x, y } => {
                self.rest_if_due();
                let place = [(EV_ABS, ABS_X, x.into()), (EV_ABS, ABS_Y, y.into())];
                self.pointer.report(&place).or_failure(moving)
            }
            Step::ButtonDown(number) => self.button(number, Way::Down),
            Step::ButtonUp(number) => self.button(number, Way::Up),
            Step::Pause(time) => {
                let until = Instant::now() + time;
                while let Some(slice) = run.slice(until) {
                    sleep(slice.saturating_duration_since(Instant::now()));
                }
                Ok(())
            }
        }
    }

    fn chord(&self, keysym: u32) -> Chord {
        self.layout.find(keysym).expect("the list was checked")
    }

    /// Presses the keys of a chord that are not down, modifiers first. Returns their codes.
    fn down(&mut self, chord: &Chord) -> Result<Vec<u16>, Failure> {
        let codes = chord.with.iter().chain(std::iter::once(&chord.code));
        let codes = codes.map(|code| u16::from(*code));
        let codes: Vec<u16> = codes.filter(|code| !self.held.contains(code)).collect();
        for code in &codes {
            self.paced(*code, Way::Down)?;
        }
        Ok(codes)
    }

    fn button(&mut self, number: u8, way: Way) -> Result<(), Failure> {
        if let Some((_, code)) = BUTTONS.iter().find(|(button, _)| *button == number) {
            return self.paced(*code, way);
        }
        let wheel = WHEELS.iter().find(|(button, ..)| *button == number);
        match wheel.filter(|_| way == Way::Down) {
            Some((_, axis, value)) => {
                self.rest_if_due();
                self.pointer
                    .report(&[(EV_REL, *axis, *value)])
                    .or_failure(moving)
            }
            None => Ok(()),
        }
    }

    fn paced(&mut self, code: u16, way: Way) -> Result<(), Failure> {
        self.rest_if_due();
        self.key(code, way)
    }

    fn rest_if_due(&mut self) {
        self.reports += 1;
        if self.reports >= BURST {
            self.reports = 0;
            sleep(REST);
        }
    }

    fn key(&mut self, code: u16, way: Way) -> Result<(), Failure> {
        let is_button = BUTTONS.iter().any(|(_, button)| *button == code);
        let device = if is_button {
            &mut self.pointer
        } else {
            &mut self.keyboard
        };
        let reported = device.report(&[(EV_KEY, code, way.value())]);
        reported.or_failure(|| "cannot press a key of the agent's keyboard".into())?;
        match way {
            Way::Down => self.held.insert(code),
            Way::Up => self.held.remove(&code),
        };
        Ok(())
    }
}

fn moving() -> String {
    "cannot move the agent's pointer".into()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Down,
    Up,
}

impl Way {
    fn value(self) -> i32 {
        match self {
            Self::Down => 1,
            Self::Up => 0,
        }
    }
}

#[derive(Debug)]
struct Device(File);

impl Device {
    fn add(name: &str, bits: &[InputBit], most: i32) -> io::Result<Self> {
        let device = OpenOptions::new().write(true).open(UINPUT)?;
        for bit in bits {
            sys::add_input_bit(&device, *bit)?;
        }
        (&device).write_all(&description(name, most))?;
        sys::create_input_device(&device)?;
        Ok(Self(device))
    }

    /// Sends events that belong together.
    fn report(&mut self, events: &[(u16, u16, i32)]) -> io::Result<()> {
        let all = events.iter().chain(std::iter::once(&(EV_SYN, 0, 0)));
        let bytes: Vec<u8> = all
            .flat_map(|(kind, code, value)| event(*kind, *code, *value))
            .collect();
        self.0.write_all(&bytes)
    }
}

fn keyboard() -> io::Result<Device> {
    let mut bits = vec![InputBit::Kind(EV_KEY)];
    bits.extend(us::codes().map(|code| InputBit::Key(code.into())));
    Device::add("Sandtree keyboard", &bits, 0)
}

fn pointer() -> io::Result<Device> {
    let mut bits = vec![
        InputBit::Kind(EV_KEY),
        InputBit::Kind(EV_REL),
        InputBit::Kind(EV_ABS),
        InputBit::Relative(REL_WHEEL),
        InputBit::Relative(REL_HWHEEL),
        InputBit::Absolute(ABS_X),
        InputBit::Absolute(ABS_Y),
    ];
    bits.extend(BUTTONS.map(|(_, code)| InputBit::Key(code)));
    Device::add("Sandtree pointer", &bits, u16::MAX.into())
}

/// `struct uinput_user_dev`. The axes x and y go from 0 to `most`.
fn description(name: &str, most: i32) -> Vec<u8> {
    let mut bytes = vec![0; NAME_BYTES];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    bytes.extend(BUS_VIRTUAL.to_ne_bytes());
    bytes.resize(NAME_BYTES + IDENTITY_BYTES, 0);
    // The highest values of all axes come first.
    let is_used = |axis: usize| axis == usize::from(ABS_X) || axis == usize::from(ABS_Y);
    for axis in 0..AXES {
        let highest = if is_used(axis) { most } else { 0 };
        bytes.extend(highest.to_ne_bytes());
    }
    bytes.resize(NAME_BYTES + IDENTITY_BYTES + 4 * AXES * size_of::<i32>(), 0);
    bytes
}

/// `struct input_event`. The kernel sets the time.
fn event(kind: u16, code: u16, value: i32) -> impl Iterator<Item = u8> {
    let time = [0; size_of::<libc::timeval>()];
    time.into_iter()
        .chain(kind.to_ne_bytes())
        .chain(code.to_ne_bytes())
        .chain(value.to_ne_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_s_structures_have_their_sizes() {
        let description = description("a", 1);
        assert_eq!(description.len(), size_of::<libc::uinput_user_dev>());
        assert_eq!(event(1, 30, 1).count(), size_of::<libc::input_event>());
    }
}
