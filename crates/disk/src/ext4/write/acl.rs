//! POSIX access control lists: the form that programs use (version 2), and the form that ext4
//! stores (version 1, without unused ids).

const SEEN_VERSION: [u8; 4] = 2u32.to_le_bytes();
const KEPT_VERSION: [u8; 4] = 1u32.to_le_bytes();
const SEEN_ENTRY_BYTES: usize = 8;

mod tag {
    pub const USER_OBJECT: u16 = 0x01;
    pub const USER: u16 = 0x02;
    pub const GROUP_OBJECT: u16 = 0x04;
    pub const GROUP: u16 = 0x08;
    pub const MASK: u16 = 0x10;
    pub const OTHER: u16 = 0x20;
}

/// Converts an access control list to its stored form. `None`: the value is not such a list.
pub(super) fn encode(seen: &[u8]) -> Option<Vec<u8>> {
    let entries = seen.strip_prefix(&SEEN_VERSION)?;
    let (entries, rest) = entries.as_chunks::<SEEN_ENTRY_BYTES>();
    if !rest.is_empty() {
        return None;
    }
    let mut kept = KEPT_VERSION.to_vec();
    for entry in entries {
        let kept_bytes = match u16::from_le_bytes([entry[0], entry[1]]) {
            tag::USER | tag::GROUP => SEEN_ENTRY_BYTES,
            tag::USER_OBJECT | tag::GROUP_OBJECT | tag::MASK | tag::OTHER => 4,
            _ => return None,
        };
        kept.extend_from_slice(&entry[..kept_bytes]);
    }
    Some(kept)
}

#[cfg(test)]
mod tests {
    use super::encode;

    #[test]
    fn only_entries_for_named_users_and_groups_keep_an_id() {
        let seen = [
            2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 232, 3, 0, 0,
        ];
        assert_eq!(
            encode(&seen).unwrap(),
            [1, 0, 0, 0, 1, 0, 6, 0, 2, 0, 4, 0, 232, 3, 0, 0]
        );
        assert_eq!(encode(&seen[..19]), None);
        assert_eq!(encode(&[1, 0, 0, 0]), None);
        assert_eq!(encode(&[2, 0, 0, 0, 3, 0, 6, 0, 0, 0, 0, 0]), None);
    }
}
