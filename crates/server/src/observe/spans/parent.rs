//! The place of a request in a trace of its client: the header `traceparent` of W3C's Trace
//! Context.

/// The trace of a client, and the span in it that sent the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    /// 32 hexadecimal digits.
    pub trace: String,
    /// 16 hexadecimal digits.
    pub span: String,
}

impl Parent {
    /// `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`. `None`: it has another form, or
    /// the client does not record its trace.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let version = parts.next()?;
        let trace = parts.next()?;
        let span = parts.next()?;
        let flags = parts.next()?;
        let is_version = is_digits(version, 2) && version != "ff";
        // Later versions may have more parts.
        let is_whole = version != "00" || parts.next().is_none();
        let is_recorded = is_digits(flags, 2) && u8::from_str_radix(flags, 16).ok()? & 1 == 1;
        let is_valid = is_version && is_whole && is_recorded && is_id(trace, 32) && is_id(span, 16);
        is_valid.then(|| Self {
            trace: trace.to_owned(),
            span: span.to_owned(),
        })
    }
}

fn is_digits(text: &str, length: usize) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == length && text.bytes().all(is_digit)
}

/// An id is not zero.
fn is_id(text: &str, length: usize) -> bool {
    is_digits(text, length) && text.bytes().any(|byte| byte != b'0')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_that_of_the_standard() {
        let parse = Parent::parse;
        let whole = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let parent = parse(whole).unwrap();
        assert_eq!(parent.trace, "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(parent.span, "00f067aa0ba902b7");
        assert!(parse(&whole.replacen("00-", "01-", 1)).is_some());
        assert!(parse(&format!("{}-more", whole.replacen("00-", "01-", 1))).is_some());
        for other in [
            "",
            "00",
            &format!("{whole}-more"),
            &whole.replace("-01", "-00"),
            &whole.replace("4bf9", "4BF9"),
            &whole.replacen("00-", "ff-", 1),
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
