//! Parses a user's reference to an image or a snapshot: a name, a digest, or the path of a
//! snapshot's directory.
//!
//! Always: a text that has a `/` or begins with a `.` is a path, and never a name. 64 hexadecimal
//! digits are a digest, because no name is as long. Sandboxes have names of their own; a sandbox's
//! name with `@` and a tag is one of its states.

use std::fmt;
use std::path::{Path, PathBuf};

use sandtree_store::{Digest, Name};

use crate::error::{Error, Result};
use crate::names::parse_name;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reference {
    Name(Name),
    Digest(Digest),
    Path(PathBuf),
}

impl Reference {
    pub fn parse(text: &str) -> Result<Self> {
        if is_path(text) {
            return Ok(Self::Path(Path::new(text).to_owned()));
        }
        match text.strip_prefix("sha256:").unwrap_or(text).parse() {
            Ok(digest) => Ok(Self::Digest(digest)),
            Err(_) => parse_name("name of an image or snapshot", text).map(Self::Name),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Digest(digest) => digest.fmt(f),
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

/// Whether a reference is a path of the host.
pub fn is_path(text: &str) -> bool {
    text.contains('/') || text.starts_with('.')
}

/// Makes a reference of a user in the directory `cwd` valid in every directory: a path becomes
/// absolute. The library takes no other paths.
pub fn absolute_reference(text: &str, cwd: &Path) -> Result<String> {
    if !is_path(text) {
        return Ok(text.to_owned());
    }
    let path: PathBuf = cwd.join(text).components().collect();
    path.to_str()
        .map(str::to_owned)
        .ok_or_else(|| Error::invalid("path", path.display(), "a text"))
}

/// A snapshot, or a sandbox as it is now or as it was: what can be exported and compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Point {
    Snapshot(Reference),
    /// The present, or a state by tag or id.
    Sandbox {
        sandbox: String,
        state: Option<String>,
    },
}

impl Point {
    /// `a@` is a sandbox as it is now, whatever else is called `a`.
    pub fn parse(text: &str) -> Result<Self> {
        let Some((sandbox, state)) = text.split_once('@').filter(|_| !text.contains('/')) else {
            return Reference::parse(text).map(Self::Snapshot);
        };
        parse_name("sandbox name or id", sandbox)?;
        let state = (!state.is_empty()).then(|| state.to_owned());
        Ok(Self::Sandbox {
            sandbox: sandbox.to_owned(),
            state,
        })
    }
}

pub(crate) fn no_snapshot(reference: &str) -> Error {
    Error::NoSnapshot {
        reference: reference.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_names_and_digests_are_never_each_other() {
        let name = |text: &str| Reference::Name(text.parse().unwrap());
        assert_eq!(Reference::parse("dev-env").unwrap(), name("dev-env"));
        for path in ["./dir", "../x", "/abs", ".", "a/b", ".hidden"] {
            assert_eq!(
                Reference::parse(path).unwrap(),
                Reference::Path(path.into()),
                "{path}"
            );
        }
        let digest = "ab".repeat(32);
        for text in [digest.clone(), format!("sha256:{digest}")] {
            assert_eq!(
                Reference::parse(&text).unwrap(),
                Reference::Digest(digest.parse().unwrap())
            );
        }
        for bad in ["", "A", "a b", "-a", "sha256:12"] {
            assert!(Reference::parse(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_path_is_one_in_the_directory_of_the_user() {
        let absolute = |text| absolute_reference(text, Path::new("/work")).unwrap();
        assert_eq!(absolute("./a/./b/"), "/work/a/b");
        assert_eq!(absolute("../x"), "/work/../x");
        assert_eq!(absolute("/abs"), "/abs");
        assert_eq!(absolute("dev-env"), "dev-env");
    }

    #[test]
    fn an_at_sign_marks_a_sandbox() {
        let sandbox = |state: Option<&str>| Point::Sandbox {
            sandbox: "a".into(),
            state: state.map(str::to_owned),
        };
        assert_eq!(Point::parse("a@t").unwrap(), sandbox(Some("t")));
        assert_eq!(Point::parse("a@").unwrap(), sandbox(None));
        assert!(matches!(
            Point::parse("a").unwrap(),
            Point::Snapshot(Reference::Name(_))
        ));
        assert!(matches!(
            Point::parse("./a@b").unwrap(),
            Point::Snapshot(Reference::Path(_))
        ));
        assert!(Point::parse("../x@t").is_ok());
        assert!(Point::parse("@t").is_err());
    }
}
