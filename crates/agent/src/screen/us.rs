//! The US keyboard: key codes of Linux, and the keysyms that their keys produce.

use super::keyboard::Layout;
use super::keysym::{self, CAPS_LOCK, NONE, RETURN, SHIFT_LEFT, SHIFT_RIGHT, TAB};

/// Rows of keys that produce characters: the code of the first one, and the characters without and
/// with Shift.
const ROWS: [(u8, &str, &str); 5] = [
    (2, "1234567890-=", "!@#$%^&*()_+"),
    (16, "qwertyuiop[]", "QWERTYUIOP{}"),
    (30, "asdfghjkl;'`", "ASDFGHJKL:\"~"),
    (43, "\\zxcvbnm,./", "|ZXCVBNM<>?"),
    (57, " ", " "),
];

/// Runs of other keys: the code of the first one, and their keysyms.
const RUNS: [(u8, &[u32]); 13] = [
    (1, &[0xff1b]),
    (14, &[0xff08, TAB]),
    (28, &[RETURN, 0xffe3]),
    (42, &[SHIFT_LEFT]),
    (54, &[SHIFT_RIGHT, 0xffaa, 0xffe9]),
    (58, &[CAPS_LOCK]),
    // F1 to F10, Num Lock, Scroll Lock, the keypad.
    (
        59,
        &[
            0xffbe, 0xffbf, 0xffc0, 0xffc1, 0xffc2, 0xffc3, 0xffc4, 0xffc5, 0xffc6, 0xffc7, 0xff7f,
            0xff14, 0xffb7, 0xffb8, 0xffb9, 0xffad, 0xffb4, 0xffb5, 0xffb6, 0xffab, 0xffb1, 0xffb2,
            0xffb3, 0xffb0, 0xffae,
        ],
    ),
    (87, &[0xffc8, 0xffc9]),
    (96, &[0xff8d, 0xffe4, 0xffaf, 0xff61, 0xffea]),
    // Home, up, page up, left, right, end, down, page down, insert, delete.
    (
        102,
        &[
            0xff50, 0xff52, 0xff55, 0xff51, 0xff53, 0xff57, 0xff54, 0xff56, 0xff63, 0xffff,
        ],
    ),
    (119, &[0xff13]),
    (125, &[0xffeb, 0xffec, 0xff67]),
    // F13 to F24.
    (
        183,
        &[
            0xffca, 0xffcb, 0xffcc, 0xffcd, 0xffce, 0xffcf, 0xffd0, 0xffd1, 0xffd2, 0xffd3, 0xffd4,
            0xffd5,
        ],
    ),
];

const LEFT_SHIFT: u8 = 42;
const WIDTH: u8 = 2;

/// All keys, each with its keysyms without and with Shift.
fn keys() -> impl Iterator<Item = (u8, [u32; 2])> {
    let rows = ROWS.iter().flat_map(|(first, plain, shifted)| {
        let keysyms = plain.chars().map(keysym::of);
        let keysyms = keysyms.zip(shifted.chars().map(keysym::of));
        (*first..).zip(keysyms.map(|(plain, shifted)| [plain, shifted]))
    });
    let runs = RUNS.iter().flat_map(|(first, keysyms)| {
        let keysyms = keysyms.iter().map(|keysym| [*keysym, *keysym]);
        (*first..).zip(keysyms)
    });
    rows.chain(runs)
}

/// The codes of all keys.
pub fn codes() -> impl Iterator<Item = u8> {
    keys().map(|(code, _)| code)
}

pub fn layout() -> Layout {
    let mut keysyms = vec![[NONE; 2]; usize::from(u8::MAX) + 1];
    for (code, both) in keys() {
        keysyms[usize::from(code)] = both;
    }
    // One key of each modifier: only Shift is needed to find a character.
    let modifiers = [LEFT_SHIFT, 0, 0, 0, 0, 0, 0, 0];
    Layout::new(0, WIDTH, keysyms.concat()).with_modifiers(&modifiers, 0)
}

#[cfg(test)]
mod tests {
    use super::super::keyboard::Chord;
    use super::*;

    #[test]
    fn no_code_stands_for_two_keys() {
        let mut all: Vec<u8> = codes().collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn all_of_ascii_is_typed() {
        let layout = layout();
        for character in (' '..='~').chain(['\n', '\t']) {
            assert!(layout.find(keysym::of(character)).is_some(), "{character}");
        }
        assert_eq!(layout.find(keysym::of('ü')), None);
    }

    /// Codes of `linux/input-event-codes.h`.
    #[test]
    fn keys_have_the_codes_of_linux() {
        let layout = layout();
        let cases = [
            ('a', 30, false),
            ('A', 30, true),
            ('\\', 43, false),
            ('z', 44, false),
            ('/', 53, false),
            ('~', 41, true),
            ('"', 40, true),
            ('+', 13, true),
            ('0', 11, false),
            (']', 27, false),
            ('\n', 28, false),
        ];
        for (character, code, is_shifted) in cases {
            let with = if is_shifted { vec![LEFT_SHIFT] } else { vec![] };
            let chord = layout.find(keysym::of(character));
            assert_eq!(chord, Some(Chord { code, with }), "{character}");
        }
        for (keysym, code) in [
            (0xffc7, 68),
            (0xff7f, 69),
            (0xffae, 83),
            (0xffea, 100),
            (0xffff, 111),
            (0xffd5, 194),
            (SHIFT_RIGHT, 54),
        ] {
            let found = layout.find(keysym).map(|chord| chord.code);
            assert_eq!(found, Some(code), "{keysym:#x}");
        }
    }
}
