//! Failures told to the host: what was tried, on what, and what the kernel said.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;
use sandtree_proto::Failure;

/// Gives an error its operation, so that no bare "No such file or directory" leaves the guest.
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
    Failure { errno, message: format!("{operation}: {}", reason(error)) }
}

/// A refusal of the agent itself, with the number a system call would have given.
pub fn refusal(errno: Errno, message: impl Into<String>) -> Failure {
    Failure { errno: errno.raw_os_error(), message: message.into() }
}

/// The error's text without Rust's " (os error 2)": the number travels beside it.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    match text.find(" (os error") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

/// Paths travel as bytes.
pub fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// A result whose failure changes nothing. Who calls it says why.
pub fn tolerate<T, E>(_result: Result<T, E>) {}

/// Cuts a text to at most `max` bytes, between characters.
pub fn cut(text: &mut String, max: usize) {
    let end = (0..=max.min(text.len())).rfind(|&end| text.is_char_boundary(end)).unwrap_or(0);
    text.truncate(end);
}
