//! The header `WWW-Authenticate`, by which a registry asks for credentials.
//!
//! ```text
//! Bearer realm="https://auth.example/token",service="registry.example",scope="repository:team/app:pull"
//! ```

/// The kinds of challenge that we can answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

const HEADER_MAX: usize = 8 << 10;

impl Challenge {
    /// The first challenge of the best kind in these headers, each of which may hold several.
    pub(crate) fn best<'a>(headers: impl Iterator<Item = &'a str>) -> Option<Self> {
        let all = headers
            .filter(|header| header.len() <= HEADER_MAX)
            .filter_map(challenges)
            .flatten()
            .collect::<Vec<_>>();
        all.iter()
            .find(|challenge| **challenge != Self::Basic)
            .or_else(|| all.first())
            .cloned()
    }
}

/// One scheme with its parameters, as written in the header.
struct Raw {
    scheme: String,
    parameters: Vec<(String, String)>,
}

impl Raw {
    fn known(self) -> Option<Challenge> {
        if self.scheme.eq_ignore_ascii_case("basic") {
            return Some(Challenge::Basic);
        }
        if !self.scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        Some(Challenge::Bearer {
            realm: self.value("realm")?,
            service: self.value("service"),
            scope: self.value("scope"),
        })
    }

    fn value(&self, name: &str) -> Option<String> {
        self.parameters
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.clone())
    }
}

/// The challenges of one header that we can answer. A header that is malformed anywhere has none.
fn challenges(header: &str) -> Option<Vec<Challenge>> {
    let mut rest = header;
    let mut all: Vec<Raw> = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        if rest.is_empty() {
            return Some(all.into_iter().filter_map(Raw::known).collect());
        }
        let (word, after) = token(rest)?;
        let spaced = after.trim_start_matches([' ', '\t']);
        if let Some(value) = spaced.strip_prefix('=') {
            let (value, after) = value_of(value.trim_start_matches([' ', '\t']))?;
            all.last_mut()?.parameters.push((word.to_owned(), value));
            rest = after;
        } else {
            all.push(Raw {
                scheme: word.to_owned(),
                parameters: Vec::new(),
            });
            rest = spaced;
        }
    }
}

fn token(text: &str) -> Option<(&str, &str)> {
    let inside = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    let end = text.find(|c| !inside(c)).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

fn value_of(text: &str) -> Option<(String, &str)> {
    match text.strip_prefix('"') {
        Some(quoted) => unquoted(quoted),
        None => token(text).map(|(value, rest)| (value.to_owned(), rest)),
    }
}

/// Reads up to the closing quotation mark; without one the header is malformed.
fn unquoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(chars.next()?.1),
            c if c.is_control() => return None,
            c => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn best(header: &str) -> Option<Challenge> {
        Challenge::best([header].into_iter())
    }

    fn bearer(realm: &str, service: Option<&str>, scope: Option<&str>) -> Option<Challenge> {
        Some(Challenge::Bearer {
            realm: realm.to_owned(),
            service: service.map(str::to_owned),
            scope: scope.map(str::to_owned),
        })
    }

    #[test]
    fn challenges_of_real_registries_are_read() {
        let header = r#"Bearer realm="https://a.example/t",service="r.example",scope="repository:a/b:pull,push""#;
        assert_eq!(
            best(header),
            bearer(
                "https://a.example/t",
                Some("r.example"),
                Some("repository:a/b:pull,push")
            )
        );
        assert_eq!(best(r#"Basic realm="basic-realm""#), Some(Challenge::Basic));
        assert_eq!(
            best(r#"bearer realm = "x" , service=y"#),
            bearer("x", Some("y"), None)
        );
        assert_eq!(
            best(r#"Basic realm="b", Bearer realm="x""#),
            bearer("x", None, None)
        );
        assert_eq!(best(r#"Bearer realm="a\"b""#), bearer("a\"b", None, None));
    }

    #[test]
    fn a_malformed_or_unknown_header_is_no_challenge() {
        for header in [
            "",
            "Negotiate",
            r#"Bearer realm="x"#,
            "Bearer",
            r#"realm="x""#,
            "Bearer =x",
            "Bearer realm=\"x\n\"",
        ] {
            assert_eq!(best(header), None, "{header}");
        }
    }

    proptest! {
        #[test]
        fn any_header_is_read_without_a_panic(header in r#"(Bearer|Basic)?[ a-z="\\,é]{0,40}"#) {
            best(&header);
        }
    }
}
