//! Which key types what: the layout of the X server's keyboard, and the keys that the agent adds.
//!
//! ```text
//!   keysym ──► a key of the layout, with Shift and AltGr as needed
//!          └─► a spare key code, bound to the keysym; the least recently used one is bound anew
//! ```
//!
//! Nothing here talks to the server.
//!
//! Always: a key that is held down keeps its binding, and so does one that the same batch needs.

use std::collections::{BTreeMap, BTreeSet};

use super::keysym;

/// The columns of a mapping: the first group without and with Shift, the second group without and
/// with Shift, the first group with AltGr, and with AltGr and Shift.
const SHIFT_COLUMN: usize = 1;
const SECOND_GROUP_COLUMN: usize = 2;
const LEVEL3_COLUMN: usize = 4;
const LEVEL3_SHIFT_COLUMN: usize = 5;
const MODIFIERS: usize = 8;

/// What the server says about its keyboard.
#[derive(Debug, Clone, Default)]
pub struct Layout {
    first: u8,
    width: usize,
    /// For each key code, `width` keysyms.
    keysyms: Vec<u32>,
    /// The key codes of each modifier: Shift, Lock, Control, Mod1 to Mod5.
    modifiers: Vec<Vec<u8>>,
    /// The active group: another one when the user has switched the layout.
    group: u16,
}

/// A key, and the modifiers that it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chord {
    pub code: u8,
    pub with: Vec<u8>,
}

impl Layout {
    /// From the reply to GetKeyboardMapping: from the key code `first` on, so many keysyms each.
    pub fn new(first: u8, width: u8, keysyms: Vec<u32>) -> Self {
        Self {
            first,
            width: usize::from(width).max(1),
            keysyms,
            ..Self::default()
        }
    }

    /// Adds the reply to GetModifierMapping, and the state of the modifiers, whose bits 13 and 14
    /// are the group.
    pub fn with_modifiers(mut self, modifiers: &[u8], state: u16) -> Self {
        let per_modifier = (modifiers.len() / MODIFIERS).max(1);
        let modifiers = modifiers.chunks(per_modifier).map(|codes| {
            let used = codes.iter().copied().filter(|&code| code != 0);
            used.collect()
        });
        self.modifiers = modifiers.collect();
        self.group = (state >> 13) & 3;
        self
    }

    /// The key codes, each with its keysyms.
    fn keys(&self) -> impl Iterator<Item = (u8, &[u32])> {
        (self.first..=u8::MAX).zip(self.keysyms.chunks_exact(self.width))
    }

    /// The key that types a keysym with the fewest modifiers.
    pub fn find(&self, keysym: u32) -> Option<Chord> {
        self.columns().into_iter().find_map(|(column, with)| {
            let has = |keysyms: &[u32]| keysyms.get(column) == Some(&keysym);
            let (code, _) = self.keys().find(|(_, keysyms)| has(keysyms))?;
            Some(Chord { code, with })
        })
    }

    /// The columns of the mapping that can be typed, with their modifiers. The columns of the third
    /// group and of those after it depend on the width of others: they are not used.
    fn columns(&self) -> Vec<(usize, Vec<u8>)> {
        let base = match self.group {
            0 => 0,
            1 => SECOND_GROUP_COLUMN,
            _ => return Vec::new(),
        };
        let shift = self.modifier(&[keysym::SHIFT_LEFT, keysym::SHIFT_RIGHT], 0..1);
        let level3 = self.modifier(&[keysym::LEVEL3_SHIFT], 3..MODIFIERS);
        let level3 = level3.filter(|_| self.group == 0);
        let both = shift.zip(level3);
        let columns = [
            Some((base, Vec::new())),
            shift.map(|shift| (base + SHIFT_COLUMN, vec![shift])),
            level3.map(|level3| (LEVEL3_COLUMN, vec![level3])),
            both.map(|(shift, level3)| (LEVEL3_SHIFT_COLUMN, vec![shift, level3])),
        ];
        columns.into_iter().flatten().collect()
    }

    /// The key with one of these keysyms that is one of these modifiers.
    fn modifier(&self, keysyms: &[u32], of: std::ops::Range<usize>) -> Option<u8> {
        let modifiers = self
            .modifiers
            .get(of.start..of.end.min(self.modifiers.len()))?;
        let mut codes = modifiers.iter().flatten().copied();
        codes.find(|&code| keysyms.contains(&self.keysym(code)))
    }

    /// The key that switches Caps Lock.
    pub fn caps_lock(&self) -> Option<u8> {
        self.modifier(&[keysym::CAPS_LOCK], 1..2)
    }

    /// The first keysym of a key.
    pub fn keysym(&self, code: u8) -> u32 {
        let found = self.keys().find(|(key, _)| *key == code);
        found.map_or(keysym::NONE, |(_, keysyms)| keysyms[0])
    }

    /// Gives a key a keysym, whatever the modifiers are.
    fn set(&mut self, code: u8, keysym: u32) {
        let at = usize::from(code.saturating_sub(self.first)) * self.width;
        if let Some(keysyms) = self.keysyms.get_mut(at..at + self.width) {
            keysyms.fill(keysym);
        }
    }

    /// The key codes without any keysym.
    fn spare(&self) -> impl Iterator<Item = u8> {
        let is_modifier = |code: &u8| self.modifiers.iter().flatten().any(|used| used == code);
        let is_empty = |keysyms: &[u32]| keysyms.iter().all(|&keysym| keysym == keysym::NONE);
        let empty = self.keys().filter(move |(_, keysyms)| is_empty(keysyms));
        empty
            .map(|(code, _)| code)
            .filter(move |code| !is_modifier(code))
    }
}

/// A key code that the agent has given a keysym.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Binding {
    code: u8,
    keysym: u32,
    /// When it was last used: a count of uses.
    used: u64,
    /// Whether all clients have seen the last press.
    is_settled: bool,
}

/// A key that the agent holds down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub keysym: u32,
    pub chord: Chord,
}

/// How far a list of keysyms can be typed, and what must be bound for that.
#[derive(Debug, PartialEq, Eq)]
pub struct Batch {
    /// How many of the keysyms can be typed.
    pub count: usize,
    /// Key codes and their new keysyms, by code.
    pub changes: Vec<(u8, u32)>,
    /// Whether a client may still have to look up the old keysym of one of them.
    pub must_settle: bool,
}

#[derive(Debug, Default)]
pub struct Keyboard {
    layout: Layout,
    bindings: Vec<Binding>,
    /// The keys that were found, because a text asks for the same ones again and again.
    found: BTreeMap<u32, Chord>,
    uses: u64,
    pub held: Vec<Held>,
    pub buttons: BTreeSet<u8>,
}

impl Keyboard {
    /// Takes the layout as it is now. Another program may have changed it: bindings that are gone
    /// are forgotten.
    pub fn update(&mut self, layout: Layout) {
        self.layout = layout;
        self.found.clear();
        let layout = &self.layout;
        self.bindings
            .retain(|binding| layout.keysym(binding.code) == binding.keysym);
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn is_held(&self, code: u8) -> bool {
        let mut held = self.held.iter();
        held.any(|held| held.chord.code == code || held.chord.with.contains(&code))
    }

    /// The key that types a keysym now.
    pub fn find(&mut self, keysym: u32) -> Option<Chord> {
        if let Some(chord) = self.found.get(&keysym) {
            return Some(chord.clone());
        }
        let bound = || {
            let binding = self.bindings.iter().find(|bound| bound.keysym == keysym)?;
            Some(Chord {
                code: binding.code,
                with: Vec::new(),
            })
        };
        let chord = self.layout.find(keysym).or_else(bound)?;
        self.found.insert(keysym, chord.clone());
        Some(chord)
    }

    /// Notes that a key was pressed.
    pub fn use_key(&mut self, code: u8) {
        self.uses += 1;
        if let Some(binding) = self.bindings.iter_mut().find(|bound| bound.code == code) {
            binding.used = self.uses;
            binding.is_settled = false;
        }
    }

    /// All clients have seen all presses.
    pub fn settle(&mut self) {
        for binding in &mut self.bindings {
            binding.is_settled = true;
        }
    }

    /// Finds keys for as many of `keysyms` as possible, from the first on, and binds what has none.
    pub fn prepare(&mut self, keysyms: &[u32]) -> Batch {
        let mut needed: BTreeSet<u8> = BTreeSet::new();
        let mut changes = Vec::new();
        let mut must_settle = false;
        let mut count = 0;
        for &keysym in keysyms {
            let code = match self.find(keysym) {
                Some(chord) => chord.code,
                None => {
                    let Some((code, is_settled)) = self.bind(keysym, &needed) else {
                        break;
                    };
                    must_settle |= !is_settled;
                    changes.push((code, keysym));
                    code
                }
            };
            needed.insert(code);
            count += 1;
        }
        changes.sort_unstable();
        Batch {
            count,
            changes,
            must_settle,
        }
    }

    /// Whether there is any key code to bind.
    pub fn has_spare(&self) -> bool {
        !self.bindings.is_empty() || self.layout.spare().next().is_some()
    }

    /// Binds a keysym to a spare key code, or to the one that was used the longest ago. Returns it,
    /// and whether all clients have seen its last press.
    fn bind(&mut self, keysym: u32, needed: &BTreeSet<u8>) -> Option<(u8, bool)> {
        self.uses += 1;
        let spare = self.layout.spare().next();
        let free = match spare {
            Some(code) => Binding {
                code,
                keysym: keysym::NONE,
                used: 0,
                is_settled: true,
            },
            None => self.give_up_oldest(needed)?,
        };
        self.bindings.push(Binding {
            keysym,
            used: self.uses,
            is_settled: true,
            ..free
        });
        self.layout.set(free.code, keysym);
        self.found.clear();
        Some((free.code, free.is_settled))
    }

    fn give_up_oldest(&mut self, needed: &BTreeSet<u8>) -> Option<Binding> {
        let is_free = |bound: &Binding| !needed.contains(&bound.code) && !self.is_held(bound.code);
        let bindings = self.bindings.iter().enumerate();
        let free = bindings.filter(|(_, bound)| is_free(bound));
        let (oldest, _) = free.min_by_key(|(_, bound)| bound.used)?;
        Some(self.bindings.swap_remove(oldest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shift on 10, Caps Lock on 11, AltGr on 12, `q Q q Q @ Ω` on 13, `2 " 2 "` on 14; 8, 9 and
    /// 15 are spare.
    fn layout(state: u16) -> Layout {
        let keys: [[u32; 6]; 8] = [
            [0; 6],
            [0; 6],
            [keysym::SHIFT_LEFT, 0, keysym::SHIFT_LEFT, 0, 0, 0],
            [keysym::CAPS_LOCK, 0, 0, 0, 0, 0],
            [keysym::LEVEL3_SHIFT, 0, 0, 0, 0, 0],
            [0x71, 0x51, 0x6ca, 0x6ea, 0x40, 0x7d9],
            [0x32, 0x22, 0x32, 0x22, 0, 0],
            [0; 6],
        ];
        let modifiers = [10, 0, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 0];
        Layout::new(8, 6, keys.concat()).with_modifiers(&modifiers, state)
    }

    fn keyboard() -> Keyboard {
        let mut keyboard = Keyboard::default();
        keyboard.update(layout(0));
        keyboard
    }

    fn chord(code: u8, with: &[u8]) -> Option<Chord> {
        Some(Chord {
            code,
            with: with.to_vec(),
        })
    }

    #[test]
    fn a_character_of_the_layout_has_a_key_and_its_modifiers() {
        let layout = layout(0);
        assert_eq!(layout.find(0x71), chord(13, &[]));
        assert_eq!(layout.find(0x51), chord(13, &[10]));
        assert_eq!(layout.find(0x40), chord(13, &[12]));
        assert_eq!(layout.find(0x7d9), chord(13, &[10, 12]));
        assert_eq!(layout.find(0x78), None);
        assert_eq!(layout.caps_lock(), Some(11));
    }

    #[test]
    fn another_group_types_its_own_column() {
        let second = layout(1 << 13);
        assert_eq!(second.find(0x6ca), chord(13, &[]));
        assert_eq!(second.find(0x6ea), chord(13, &[10]));
        assert_eq!(second.find(0x71), None);
        assert_eq!(second.find(0x40), None);
        assert_eq!(layout(2 << 13).find(0x71), None);
    }

    #[test]
    fn what_no_key_types_is_bound_to_spare_codes_all_at_once() {
        let mut keyboard = keyboard();
        let batch = keyboard.prepare(&[0x78, 0x71, 0x79, 0x78]);
        assert_eq!(batch.count, 4);
        assert_eq!(batch.changes, [(8, 0x78), (9, 0x79)]);
        assert!(!batch.must_settle);
        assert_eq!(keyboard.find(0x79), chord(9, &[]));
        assert_eq!(keyboard.prepare(&[0x79]).changes, []);
    }

    #[test]
    fn the_least_recently_used_code_is_bound_anew_after_clients_have_seen_it() {
        let mut keyboard = keyboard();
        let batch = keyboard.prepare(&[1, 2, 3, 4, 1]);
        assert_eq!(batch.count, 3, "three codes are spare");
        [9, 15, 8]
            .into_iter()
            .for_each(|code| keyboard.use_key(code));
        let batch = keyboard.prepare(&[4, 3, 1]);
        assert_eq!(batch.changes, [(9, 4)]);
        assert!(batch.must_settle);
        keyboard.settle();
        assert!(!keyboard.prepare(&[5]).must_settle);
    }

    #[test]
    fn a_held_key_keeps_its_binding() {
        let mut keyboard = keyboard();
        keyboard.prepare(&[1, 2, 3]);
        let held = |keysym: u32, code| Held {
            keysym,
            chord: Chord {
                code,
                with: Vec::new(),
            },
        };
        keyboard.held = vec![held(1, 8), held(2, 9), held(3, 15)];
        assert_eq!(keyboard.prepare(&[4]).count, 0);
        keyboard.held.remove(1);
        assert_eq!(keyboard.prepare(&[4]).changes, [(9, 4)]);
    }

    #[test]
    fn bindings_that_another_program_removed_are_forgotten() {
        let mut keyboard = keyboard();
        keyboard.prepare(&[1, 2]);
        keyboard.update(layout(0));
        assert_eq!(keyboard.find(1), None);
        assert_eq!(keyboard.prepare(&[5]).changes, [(8, 5)]);
    }

    #[test]
    fn a_server_without_keys_has_nothing_to_bind() {
        let mut keyboard = Keyboard::default();
        keyboard.update(Layout::new(8, 0, Vec::new()));
        assert!(!keyboard.has_spare());
        assert_eq!(keyboard.prepare(&[1]).count, 0);
    }
}
