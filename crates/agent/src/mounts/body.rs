//! The bytes that follow a request to the host, kept until the host has answered.
//!
//! Always: a large write keeps the buffer into which the kernel wrote it, so that its bytes are
//! copied once: into the frames of the port.

use std::ops::Range;

/// Less is copied, because a buffer has room for the largest request.
const COPIED_MAX: usize = 64 * 1024;

#[derive(Debug)]
pub enum Body {
    Own(Vec<u8>),
    /// So many bytes at the end of the kernel's request.
    Tail(usize),
    /// A part of the buffer of the kernel's request.
    Taken(Vec<u8>, Range<usize>),
}

impl Default for Body {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Body {
    /// Takes what it needs of the kernel's request, which is the first `count` bytes of `buffer`.
    /// The buffer is empty afterwards if it is taken.
    pub fn take_from(&mut self, buffer: &mut Vec<u8>, count: usize) {
        let Self::Tail(length) = *self else {
            return;
        };
        let part = count.saturating_sub(length)..count;
        *self = if length <= COPIED_MAX {
            Self::Own(buffer[part].to_vec())
        } else {
            Self::Taken(std::mem::take(buffer), part)
        };
    }

    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Tail(_) => &[],
            Self::Taken(buffer, part) => &buffer[part.clone()],
        }
    }

    /// The buffer that it has taken.
    pub fn into_buffer(self) -> Option<Vec<u8>> {
        match self {
            Self::Taken(buffer, _) => Some(buffer),
            Self::Own(_) | Self::Tail(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_tail_takes_the_buffer_and_a_small_one_does_not() {
        for (length, is_taken) in [(3, false), (COPIED_MAX + 1, true)] {
            let mut buffer: Vec<u8> = (0..length + 90).map(|i| i as u8).collect();
            let expected = buffer[80..80 + length].to_vec();
            let mut body = Body::Tail(length);
            body.take_from(&mut buffer, 80 + length);
            assert_eq!(body.as_slice(), expected);
            assert_eq!(buffer.is_empty(), is_taken);
            assert_eq!(body.into_buffer().is_some(), is_taken);
        }
    }
}
