//! Names of keys and chords of keys.
//!
//! A key is an X keysym: what it stands for, not where it is. So the same chord works with every
//! layout of the guest's keyboard.

use crate::error::{Error, Result};

/// Keys of a chord.
const CHORD_MAX: usize = 8;
const SHIFT: u32 = 0xffe1;
/// Keysyms of characters beyond Latin-1 are this plus the code point.
const UNICODE: u32 = 0x0100_0000;

/// A key, by its keysym.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key(pub u32);

/// Keys that are pressed together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chord(pub Vec<Key>);

/// Keysyms by name. Names of other tools are accepted, too: those of X, and those of QEMU.
const NAMES: &[(&[&str], u32)] = &[
    (&["ctrl", "control", "ctrl_l", "control_l"], 0xffe3),
    (&["ctrl_r", "control_r"], 0xffe4),
    (&["shift", "shift_l"], SHIFT),
    (&["shift_r"], 0xffe2),
    (&["alt", "alt_l", "option"], 0xffe9),
    (&["alt_r"], 0xffea),
    (&["altgr", "iso_level3_shift"], 0xfe03),
    (
        &["super", "super_l", "win", "cmd", "meta", "meta_l"],
        0xffeb,
    ),
    (&["super_r", "meta_r"], 0xffec),
    (&["caps_lock", "capslock"], 0xffe5),
    (&["num_lock", "numlock"], 0xff7f),
    (&["scroll_lock", "scrolllock"], 0xff14),
    (&["enter", "return", "ret"], 0xff0d),
    (&["space", "spc"], 0x20),
    (&["tab"], 0xff09),
    (&["backspace"], 0xff08),
    (&["escape", "esc"], 0xff1b),
    (&["delete", "del"], 0xffff),
    (&["insert", "ins"], 0xff63),
    (&["home"], 0xff50),
    (&["end"], 0xff57),
    (&["page_up", "pageup", "pgup", "prior"], 0xff55),
    (&["page_down", "pagedown", "pgdn", "next"], 0xff56),
    (&["up", "arrowup"], 0xff52),
    (&["down", "arrowdown"], 0xff54),
    (&["left", "arrowleft"], 0xff51),
    (&["right", "arrowright"], 0xff53),
    (&["print", "printscreen", "sysrq"], 0xff61),
    (&["pause"], 0xff13),
    (&["menu"], 0xff67),
    (&["minus"], 0x2d),
    (&["plus"], 0x2b),
    (&["equal"], 0x3d),
    (&["bracket_left", "bracketleft"], 0x5b),
    (&["bracket_right", "bracketright"], 0x5d),
    (&["backslash"], 0x5c),
    (&["semicolon"], 0x3b),
    (&["apostrophe", "quote"], 0x27),
    (&["grave_accent", "grave", "backtick"], 0x60),
    (&["comma"], 0x2c),
    (&["dot", "period"], 0x2e),
    (&["slash"], 0x2f),
    (&["kp_add"], 0xffab),
    (&["kp_subtract"], 0xffad),
    (&["kp_multiply"], 0xffaa),
    (&["kp_divide"], 0xffaf),
    (&["kp_decimal"], 0xffae),
    (&["kp_enter"], 0xff8d),
];

const F1: u32 = 0xffbe;
const F_KEYS: u32 = 24;
const KP_0: u32 = 0xffb0;

impl Key {
    fn named(name: &str) -> Option<Self> {
        let name = name.to_lowercase();
        let known = NAMES
            .iter()
            .find(|(names, _)| names.contains(&name.as_str()));
        let numbered = |prefix: &str, most: u32| {
            let digits = name.strip_prefix(prefix)?;
            let number: u32 = digits.parse().ok()?;
            (number <= most && number.to_string() == digits).then_some(number)
        };
        known
            .map(|(_, keysym)| *keysym)
            .or_else(|| numbered("kp_", 9).map(|number| KP_0 + number))
            .or_else(|| {
                let number = numbered("f", F_KEYS).filter(|number| *number > 0)?;
                Some(F1 + number - 1)
            })
            .map(Self)
    }

    fn of_char(char: char) -> Option<Self> {
        let code = char as u32;
        match code {
            0..0x20 | 0x7f..0xa0 => None,
            0x20..=0xff => Some(Self(code)),
            _ => Some(Self(UNICODE + code)),
        }
    }
}

impl Chord {
    /// Parses names that are joined by `+`, such as `ctrl+shift+t`, `F5` or `ctrl++`.
    pub fn parse(text: &str) -> Result<Self> {
        let refused = |rule: &str| Error::invalid("key", text, rule);
        let names = names(text);
        if names.len() > CHORD_MAX {
            return Err(refused("a chord has at most 8 keys"));
        }
        let is_alone = names.len() == 1;
        let mut keys = Vec::new();
        for name in names {
            let mut chars = name.chars();
            let key = match (chars.next(), chars.next()) {
                // With other keys, the case of a letter means nothing.
                (Some(char), None) if !is_alone => Key::of_char(lower(char)),
                (Some(char), None) if lower(char) != char => {
                    keys.push(Key(SHIFT));
                    Key::of_char(lower(char))
                }
                (Some(char), None) => Key::of_char(char),
                _ => Key::named(name),
            };
            let rule =
                "names of keys are those like ctrl, enter, f5, page_up and single characters";
            keys.push(key.ok_or_else(|| refused(rule))?);
        }
        Ok(Self(keys))
    }
}

fn lower(char: char) -> char {
    let mut lower = char.to_lowercase();
    match (lower.next(), lower.next()) {
        (Some(one), None) => one,
        _ => char,
    }
}

/// Splits at each `+` that follows a name.
fn names(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.char_indices().skip(1).find(|(_, char)| *char == '+') {
        names.push(&rest[..at.0]);
        rest = &rest[at.0 + 1..];
    }
    names.push(rest);
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, keysyms: &[u32]) {
        let chord = Chord::parse(text).expect("it names keys");
        let found: Vec<u32> = chord.0.iter().map(|key| key.0).collect();
        assert_eq!(found, keysyms, "{text}");
    }

    #[test]
    fn chords_are_parsed() {
        check("ctrl+l", &[0xffe3, 0x6c]);
        check("Ctrl+Shift+T", &[0xffe3, 0xffe1, 0x74]);
        check("F5", &[0xffc2]);
        check("f24", &[0xffd5]);
        check("kp_7", &[0xffb7]);
        check("a", &[0x61]);
        check("A", &[0xffe1, 0x61]);
        check("ä", &[0xe4]);
        check("я", &[0x0100_044f]);
        check("+", &[0x2b]);
        check("ctrl++", &[0xffe3, 0x2b]);
        check("page_up", &[0xff55]);
        check("5", &[0x35]);
    }

    #[test]
    fn what_names_no_key_is_refused() {
        for text in [
            "",
            "ctrl+",
            "nokey",
            "f0",
            "f25",
            "f05",
            "kp_10",
            "\n",
            "ctrl+\u{7f}",
            "a+b+c+d+e+f+g+h+i",
        ] {
            assert!(Chord::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn no_name_stands_for_two_keys() {
        let mut all: Vec<&str> = NAMES
            .iter()
            .flat_map(|(names, _)| *names)
            .copied()
            .collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
        assert!(all.iter().all(|name| name.chars().count() > 1));
    }
}
