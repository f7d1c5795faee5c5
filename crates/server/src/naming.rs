//! Names of templates as clients write them: `team/name:tag`.
//!
//! The store has one name for each tag: `name` for the tag `default`, `name.tag` for others. A
//! template's own name has no dot, so the first dot begins the tag.

use crate::error::{Fault, Result};

/// The tag of a name without one.
pub const DEFAULT: &str = "default";
/// The store's names are no longer.
const STORED_MAX: usize = 63;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateName {
    pub name: String,
    pub tag: Option<String>,
}

impl TemplateName {
    pub fn parse(text: &str) -> Result<Self> {
        let (path, tag) = match text.split_once(':') {
            Some((path, tag)) => (path, Some(tag)),
            None => (text, None),
        };
        // E2B's names may begin with the name of a team.
        let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
        let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let has = |text: &str, others: &[u8]| {
            let fits = |byte: u8| is_plain(byte) || others.contains(&byte);
            text.bytes().next().is_some_and(is_plain) && text.bytes().all(fits)
        };
        let valid = has(name, b"-_") && tag.is_none_or(|tag| has(tag, b"-_."));
        if !valid || stored(name, tag.unwrap_or(DEFAULT)).len() > STORED_MAX {
            let rule = "use a-z, 0-9, '-' and '_', in a tag also '.', the first a letter or \
                        digit, and 62 characters together";
            let message = format!("invalid template name {text:?}: {rule}");
            return Err(Fault::bad_request(message));
        }
        Ok(Self {
            name: name.to_owned(),
            tag: tag.map(str::to_owned),
        })
    }

    pub fn tag(&self) -> &str {
        self.tag.as_deref().unwrap_or(DEFAULT)
    }

    pub fn stored(&self) -> String {
        stored(&self.name, self.tag())
    }
}

/// The name in the store of a template's tag.
pub fn stored(name: &str, tag: &str) -> String {
    match tag {
        DEFAULT => name.to_owned(),
        tag => format!("{name}.{tag}"),
    }
}

/// The template and the tag of a name in the store.
pub fn of_stored(stored: &str) -> (&str, &str) {
    stored.split_once('.').unwrap_or((stored, DEFAULT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_part_of_the_name_in_the_store() {
        let stored = |text: &str| TemplateName::parse(text).unwrap().stored();
        assert_eq!(stored("mine"), "mine");
        assert_eq!(stored("mine:default"), "mine");
        assert_eq!(stored("team/mine:v1.2"), "mine.v1.2");
        assert_eq!(of_stored("mine.v1.2"), ("mine", "v1.2"));
        assert_eq!(of_stored("mine"), ("mine", DEFAULT));
    }

    #[test]
    fn other_names_are_refused() {
        for text in [
            "", ":", "a:", "A", "a.b", "a b", "-a", "a:../x", "a:.x", "a/",
        ] {
            assert!(TemplateName::parse(text).is_err(), "{text}");
        }
        assert!(TemplateName::parse(&"a".repeat(64)).is_err());
    }
}
