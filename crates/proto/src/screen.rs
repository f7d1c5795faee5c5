//! Requests to the guest's X server: keys, text, pointer, and the size of the screen. In a guest
//! without one, keys and the pointer are those of input devices.
//!
//! Always: one list of inputs is one unit. The agent checks all of it before it does any of it, no
//! other list comes in between, and it answers when the X server has processed the list.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How many inputs one request may have.
pub const INPUTS_MAX: usize = 4096;
/// The bytes of text of all inputs of one request. A longer text is sent in several requests.
pub const TEXT_MAX: usize = 4 * 1024;
/// The milliseconds of all pauses of one request.
pub const PAUSES_MAX_MS: u32 = 10_000;
/// The bytes of a clipboard.
pub const CLIPBOARD_MAX: usize = 1024 * 1024;
/// The highest number of a button; see [`ScreenInput::Button`].
pub const BUTTON_MAX: u8 = 9;
/// The highest keysym that X defines.
const KEYSYM_MAX: u32 = 0x1fff_ffff;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScreenRequest {
    /// Answered with a [`ScreenState`].
    Look,
    /// Answered when the X server has processed all of them.
    Input(Vec<ScreenInput>),
    /// Gives the screen another size, by RandR.
    SetSize { width: u16, height: u16 },
}

/// What a user does with keyboard and mouse.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScreenInput {
    /// A key by its X keysym. A key that was pressed stays down until it is released.
    Key {
        keysym: u32,
        down: bool,
    },
    /// Each character once, whatever the layout of the keyboard is. A newline is Return.
    Text(String),
    /// The pointer to a pixel of the screen.
    Move {
        x: u16,
        y: u16,
    },
    /// As X numbers buttons: 1 left, 2 middle, 3 right, 4 and 5 wheel up and down, 6 and 7 wheel
    /// left and right, 8 and 9 back and forward.
    Button {
        number: u8,
        down: bool,
    },
    Pause {
        ms: u16,
    },
    /// The pointer to a part of the width and of the height, of 65536: for guests whose pixels the
    /// agent does not know. From version 9 on.
    Point {
        x: u16,
        y: u16,
    },
}

impl ScreenRequest {
    /// The lowest version of the protocol that knows it.
    pub fn version(&self) -> u16 {
        match self {
            Self::Input(inputs) if inputs.iter().any(ScreenInput::is_point) => 9,
            Self::Look | Self::Input(_) | Self::SetSize { .. } => 8,
        }
    }
}

impl ScreenInput {
    fn is_point(&self) -> bool {
        matches!(self, Self::Point { .. })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScreenState {
    pub width: u16,
    pub height: u16,
    /// The position of the pointer.
    pub x: u16,
    pub y: u16,
    /// Whether a window manager runs, and a desktop and a panel are there.
    pub session: bool,
}

/// Why a list of inputs is refused before any of it is done.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InputError {
    #[error("{0} inputs are more than {INPUTS_MAX}: send them in several requests")]
    TooMany(usize),
    #[error("{0} bytes of text are more than {TEXT_MAX}: send it in several requests")]
    TooMuchText(usize),
    #[error("pauses of {0} ms are longer than {PAUSES_MAX_MS} ms")]
    TooLong(u32),
    #[error("character U+{0:04X} cannot be typed: of control characters only newline and tab can")]
    Character(u32),
    #[error("keysym {0:#x} is not one of X")]
    Keysym(u32),
    #[error("button {0} does not exist: use 1 to {BUTTON_MAX}")]
    Button(u8),
}

/// Checks what does not depend on the guest.
pub fn check(inputs: &[ScreenInput]) -> Result<(), InputError> {
    if inputs.len() > INPUTS_MAX {
        return Err(InputError::TooMany(inputs.len()));
    }
    let mut text_bytes = 0;
    let mut pauses_ms = 0;
    for input in inputs {
        match input {
            ScreenInput::Key { keysym, .. } if !(1..=KEYSYM_MAX).contains(keysym) => {
                return Err(InputError::Keysym(*keysym));
            }
            ScreenInput::Button { number, .. } if !(1..=BUTTON_MAX).contains(number) => {
                return Err(InputError::Button(*number));
            }
            ScreenInput::Text(text) => {
                check_text(text)?;
                text_bytes += text.len();
            }
            ScreenInput::Pause { ms } => pauses_ms += u32::from(*ms),
            ScreenInput::Key { .. }
            | ScreenInput::Button { .. }
            | ScreenInput::Move { .. }
            | ScreenInput::Point { .. } => {}
        }
    }
    if text_bytes > TEXT_MAX {
        return Err(InputError::TooMuchText(text_bytes));
    }
    if pauses_ms > PAUSES_MAX_MS {
        return Err(InputError::TooLong(pauses_ms));
    }
    Ok(())
}

/// Cuts a text into pieces of at most [`TEXT_MAX`] bytes, between characters.
pub fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let longest = rest.len().min(TEXT_MAX);
        let end = (0..=longest).rfind(|&end| rest.is_char_boundary(end))?;
        let (piece, after) = rest.split_at(end);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

fn check_text(text: &str) -> Result<(), InputError> {
    match text.chars().find(|&character| !is_typed(character)) {
        Some(character) => Err(InputError::Character(character.into())),
        None => Ok(()),
    }
}

fn is_typed(character: char) -> bool {
    matches!(character, '\n' | '\t') || !character.is_control()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{HostMessage, Request, to_frame};

    fn key(keysym: u32) -> ScreenInput {
        ScreenInput::Key { keysym, down: true }
    }

    #[test]
    fn the_largest_list_fits_one_frame() {
        let mut inputs = vec![
            ScreenInput::Move {
                x: u16::MAX,
                y: u16::MAX
            };
            INPUTS_MAX - 1
        ];
        inputs.push(ScreenInput::Text("a".repeat(TEXT_MAX)));
        assert_eq!(check(&inputs), Ok(()));
        let request = Request::Screen(ScreenRequest::Input(inputs));
        to_frame(&HostMessage::Request {
            id: u32::MAX,
            request,
        })
        .unwrap();
    }

    #[test]
    fn lists_over_a_limit_are_refused() {
        let text = |bytes| ScreenInput::Text("a".repeat(bytes));
        let pause = ScreenInput::Pause { ms: 5_001 };
        let cases = [
            (vec![key(1); INPUTS_MAX + 1], InputError::TooMany(4097)),
            (
                vec![text(TEXT_MAX), text(1)],
                InputError::TooMuchText(4_097),
            ),
            (vec![pause.clone(), pause], InputError::TooLong(10_002)),
            (vec![key(0)], InputError::Keysym(0)),
            (vec![key(1 << 29)], InputError::Keysym(1 << 29)),
        ];
        for (inputs, error) in cases {
            assert_eq!(check(&inputs), Err(error));
        }
        for number in [0, 10] {
            let button = ScreenInput::Button { number, down: true };
            assert_eq!(check(&[button]), Err(InputError::Button(number)));
        }
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let text = "a€".repeat(TEXT_MAX);
        let cut: Vec<&str> = pieces(&text).collect();
        assert!(cut.iter().all(|piece| piece.len() <= TEXT_MAX));
        assert_eq!(cut.concat(), text);
        assert_eq!(pieces("").count(), 0);
    }

    #[test]
    fn of_control_characters_only_newline_and_tab_are_typed() {
        let typed = |text: &str| check(&[ScreenInput::Text(text.into())]);
        assert_eq!(typed("Grüße\n\tПривет 日本語 🙂"), Ok(()));
        for character in ['\0', '\r', '\u{1b}', '\u{7f}', '\u{9f}'] {
            let refused = Err(InputError::Character(character.into()));
            assert_eq!(typed(&format!("a{character}")), refused);
        }
    }
}
