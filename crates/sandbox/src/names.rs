//! Names and tags as users write them.

use sandtree_store::{Name, Tag};

use crate::error::{Error, Result};

pub(crate) fn parse_name(what: &str, name: &str) -> Result<Name> {
    let rule = "1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or digit";
    name.parse().map_err(|_| Error::invalid(what, name, rule))
}

pub(crate) fn parse_tag(tag: &str) -> Result<Tag> {
    let rule = "1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or digit, and not like a state's id";
    tag.parse().map_err(|_| Error::invalid("tag", tag, rule))
}

/// Refuses what can be neither a sandbox's name nor its id. Touches nothing.
pub fn check_reference(reference: &str) -> Result<()> {
    parse_name("sandbox name or id", reference).map(drop)
}
