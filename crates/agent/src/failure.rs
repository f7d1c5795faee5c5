//! Failures that the agent reports to the host: the operation, its object, and the kernel's error.
//!
//! Always: a failure made here has a text of at most [`MESSAGE_MAX`] bytes. A path that is not
//! UTF-8 triples when it is shown, and a reply that is larger than a frame could not be sent.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;
use sandtree_proto::Failure;

const MESSAGE_MAX: usize = 4096;
/// How much of the end of a long text is kept, because the reason stands there.
const TAIL: usize = 1024;
const ELLIPSIS: &str = " … ";

/// Adds the operation to an error, so that no bare "No such file or directory" leaves the guest.
pub trait OrFailure<T> {
    fn or_failure(self, operation: impl FnOnce() -> String) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> OrFailure<T> for Result<T, E> {
    fn or_failure(self, operation: impl FnOnce() -> String) -> Result<T, Failure> {
        self.map_err(|error| failure(&operation(), &error.into()))
    }
}

pub fn failure(operation: &str, error: &io::Error) -> Failure {
    let errno = error.raw_os_error().unwrap_or(0);
    numbered(errno, format!("{operation}: {}", reason(error)))
}

/// A refusal by the agent itself, with the error number of a similar system call.
pub fn refusal(errno: Errno, message: impl Into<String>) -> Failure {
    numbered(errno.raw_os_error(), message)
}

pub fn numbered(errno: i32, message: impl Into<String>) -> Failure {
    Failure {
        errno,
        message: bounded(message.into()),
    }
}

/// Removes the middle of a text that is too long.
fn bounded(mut text: String) -> String {
    if text.len() > MESSAGE_MAX {
        let from = (text.len() - TAIL..=text.len()).find(|&at| text.is_char_boundary(at));
        let tail = text.split_off(from.unwrap_or(text.len()));
        cut(&mut text, MESSAGE_MAX - TAIL - ELLIPSIS.len());
        text.push_str(ELLIPSIS);
        text.push_str(&tail);
    }
    text
}

/// The error's text without Rust's " (os error 2)": the number is a field of its own.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

/// The protocol has paths as bytes.
pub fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// Ignores a failure that changes nothing. A comment at each call says why.
pub fn tolerate<T, E>(_result: Result<T, E>) {}

/// Cuts a text to at most `max` bytes, between characters.
pub fn cut(text: &mut String, max: usize) {
    let end = (0..=max.min(text.len()))
        .rfind(|&end| text.is_char_boundary(end))
        .unwrap_or(0);
    text.truncate(end);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_loses_its_middle_and_keeps_its_reason() {
        let name = String::from_utf8_lossy(&[0xff; 60_000]).into_owned();
        let failure = failure(
            &format!("cannot open {name}"),
            &io::Error::from_raw_os_error(libc::ENAMETOOLONG),
        );
        assert!(failure.message.len() <= MESSAGE_MAX);
        assert!(
            failure.message.starts_with("cannot open ")
                && failure.message.ends_with(": File name too long")
        );
        assert_eq!(bounded("x".repeat(MESSAGE_MAX)).len(), MESSAGE_MAX);
    }
}
