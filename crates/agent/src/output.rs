//! A stream to the host: bytes from a descriptor for an [`Outgoing`].
//!
//! Always: the descriptor is read only while the window has room, so a host that stops reading
//! stops the writer. After a command has ended, the bytes that are in the pipe at that moment still
//! belong to it; later bytes of its background children do not.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use sandtree_proto::Outgoing;

#[derive(Debug)]
pub struct Output {
    stream: Outgoing,
    source: Option<OwnedFd>,
    /// How much must still be read, once that is known.
    left: Option<usize>,
}

impl Output {
    pub fn new(window: usize, source: Option<OwnedFd>) -> Self {
        let mut stream = Outgoing::new(window);
        if source.is_none() {
            stream.end();
        }
        Self {
            stream,
            source,
            left: None,
        }
    }

    /// A stream that gets its descriptor later, by [`attach`](Self::attach).
    pub fn awaiting(window: usize) -> Self {
        Self {
            stream: Outgoing::new(window),
            source: None,
            left: None,
        }
    }

    pub fn attach(&mut self, source: OwnedFd) {
        self.source = Some(source);
    }

    pub fn stream(&mut self) -> &mut Outgoing {
        &mut self.stream
    }

    /// The offset of the first byte that is held, and the number of bytes produced.
    pub fn held(&self) -> (u64, u64) {
        (self.stream.base(), self.stream.produced())
    }

    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.source.as_ref().map(OwnedFd::as_fd)
    }

    pub fn is_ended(&self) -> bool {
        self.stream.is_ended()
    }

    /// The descriptor to wait for, if the window has room.
    pub fn wanted(&self) -> Option<BorrowedFd<'_>> {
        let fd = self.source.as_ref()?;
        (self.stream.room() > 0 && !self.is_ended()).then(|| fd.as_fd())
    }

    /// Reads all available bytes that fit the window.
    pub fn pull(&mut self, scratch: &mut [u8]) -> Result<(), Errno> {
        while let Some(fd) = self.source.as_ref().filter(|_| !self.stream.is_ended()) {
            let want = self
                .stream
                .room()
                .min(scratch.len())
                .min(self.left.unwrap_or(usize::MAX));
            if want == 0 {
                break;
            }
            match rustix::io::read(fd, &mut scratch[..want]) {
                // A terminal without a user returns EIO.
                Ok(0) | Err(Errno::IO) => self.end(),
                Ok(count) => self.push(&scratch[..count]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => {
                    self.end();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, bytes: &[u8]) {
        self.stream.push(bytes);
        if let Some(left) = &mut self.left {
            *left -= bytes.len();
            if *left == 0 {
                self.stream.end();
            }
        }
    }

    /// Ends the stream at its present offset and closes the descriptor.
    pub fn end(&mut self) {
        self.source = None;
        self.stream.end();
    }

    /// The command has ended: the stream ends after the bytes that are in the pipe now.
    pub fn end_after_present(&mut self) {
        let Some(fd) = &self.source else { return };
        let present = rustix::io::ioctl_fionread(fd).unwrap_or(0) as usize;
        self.left = Some(present);
        if present == 0 {
            self.stream.end();
        }
    }

    /// The descriptor of an ended stream, if other processes may still write to it.
    pub fn take_source(&mut self) -> Option<OwnedFd> {
        self.source.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_the_end_only_earlier_bytes_are_read_even_with_a_small_window() {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        let mut output = Output::new(3, Some(reader));
        rustix::io::write(&writer, b"abcdef").unwrap();
        output.end_after_present();
        rustix::io::write(&writer, b"later").unwrap();
        let mut scratch = [0; 64];
        let mut seen = Vec::new();
        while !output.is_ended() {
            output.pull(&mut scratch).unwrap();
            let (offset, bytes) = output.stream().take(9).unwrap();
            seen.extend_from_slice(&bytes);
            output
                .stream()
                .consumed(offset + bytes.len() as u64)
                .unwrap();
        }
        assert_eq!(seen, b"abcdef");
        assert!(output.take_source().is_some());
    }
}
