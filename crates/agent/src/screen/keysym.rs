//! Keysyms: X's names for what keys produce.

pub const RETURN: u32 = 0xff0d;
pub const TAB: u32 = 0xff09;
pub const SHIFT_LEFT: u32 = 0xffe1;
pub const SHIFT_RIGHT: u32 = 0xffe2;
pub const CAPS_LOCK: u32 = 0xffe5;
/// AltGr.
pub const LEVEL3_SHIFT: u32 = 0xfe03;
/// A key code without a meaning.
pub const NONE: u32 = 0;
/// Keysyms of Unicode characters are the code point above this.
const UNICODE: u32 = 0x0100_0000;

/// The keysym that types a character: that of Latin-1 is the character itself.
pub fn of(character: char) -> u32 {
    match character {
        '\n' => RETURN,
        '\t' => TAB,
        ' '..='~' | '\u{a0}'..='\u{ff}' => character.into(),
        _ => UNICODE + u32::from(character),
    }
}

/// Whether a key changes what others type: from the left Shift to the right Hyper.
pub fn is_modifier(keysym: u32) -> bool {
    matches!(keysym, 0xffe1..=0xffee)
}

/// The character of a keysym, or its number.
pub fn shown(keysym: u32) -> String {
    let code = keysym.checked_sub(UNICODE).unwrap_or(keysym);
    let is_character = keysym >= UNICODE || matches!(keysym, 0x20..=0x7e | 0xa0..=0xff);
    let character = char::from_u32(code).filter(|_| is_character);
    character.map_or_else(|| format!("keysym {keysym:#x}"), |found| found.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_is_shown_as_itself() {
        assert_eq!(shown(of('ü')), "ü");
        assert_eq!(shown(of('€')), "€");
        assert_eq!(shown(RETURN), "keysym 0xff0d");
    }

    #[test]
    fn latin_1_is_itself_and_the_rest_is_unicode() {
        assert_eq!(of('a'), 0x61);
        assert_eq!(of('ü'), 0xfc);
        assert_eq!(of('\n'), RETURN);
        assert_eq!(of('€'), 0x0100_20ac);
        assert_eq!(of('П'), 0x0100_041f);
        assert_eq!(of('🙂'), 0x0101_f642);
    }
}
