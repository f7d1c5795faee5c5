//! A stream to the host: bytes from a descriptor, which are [`Held`] until the host has used them.
//!
//! Always: the descriptor is read only while the window has room, so a host that stops reading
//! stops the writer. After a command has ended, the bytes that are in the pipe at that moment still
//! belong to it; later bytes of its background children do not.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use std::io::IoSliceMut;

use rustix::io::Errno;

use crate::held::{FrameBuffer, Held, PIECE, Spares};

/// The frames that one read can fill. A large read lets the writer fill its pipe again before the
/// next one, and each change between the two costs an emulated guest its translated addresses.
const BATCH: usize = 4;

#[derive(Debug)]
pub struct Output {
    stream: Held,
    source: Option<OwnedFd>,
    /// How much must still be read, once that is known.
    left: Option<usize>,
}

impl Output {
    pub fn new(window: usize, source: Option<OwnedFd>) -> Self {
        let mut stream = Held::new(window);
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
            stream: Held::new(window),
            source: None,
            left: None,
        }
    }

    pub fn attach(&mut self, source: OwnedFd) {
        self.source = Some(source);
    }

    pub fn stream(&mut self) -> &mut Held {
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
    pub fn pull(&mut self, spares: &mut Spares) -> Result<(), Errno> {
        while let Some(fd) = self.source.as_ref().filter(|_| !self.stream.is_ended()) {
            let want = self
                .stream
                .room()
                .min(self.left.unwrap_or(usize::MAX))
                .min(BATCH * PIECE);
            if want == 0 {
                break;
            }
            let count = want.div_ceil(PIECE);
            let mut frames: Vec<FrameBuffer> = (0..count).map(|_| spares.take()).collect();
            let read = read_into(fd, &mut frames, want);
            self.push(frames, read.unwrap_or(0), spares);
            match read {
                // A terminal without a user returns EIO.
                Ok(0) | Err(Errno::IO) => self.end(),
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => {
                    self.end();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Keeps the first `count` bytes of the frames.
    fn push(&mut self, frames: Vec<FrameBuffer>, count: usize, spares: &mut Spares) {
        let mut unkept = count;
        for frame in frames {
            let length = unkept.min(PIECE);
            let unused = if length > 0 {
                self.stream.push(frame, length)
            } else {
                Some(frame)
            };
            if let Some(frame) = unused {
                spares.put(frame);
            }
            unkept -= length;
        }
        if let Some(left) = &mut self.left {
            *left -= count;
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

/// Reads at most `want` bytes into the frames, one after the other.
fn read_into(fd: impl AsFd, frames: &mut [FrameBuffer], want: usize) -> rustix::io::Result<usize> {
    let mut left = want;
    let mut rooms: Vec<IoSliceMut<'_>> = Vec::with_capacity(frames.len());
    for frame in frames {
        let length = left.min(PIECE);
        rooms.push(IoSliceMut::new(&mut frame.room()[..length]));
        left -= length;
    }
    rustix::io::readv(fd, &mut rooms)
}

#[cfg(test)]
mod tests {
    use sandtree_proto::StreamId;

    use super::*;
    use crate::held::Piece;

    #[test]
    fn after_the_end_only_earlier_bytes_are_read_even_with_a_small_window() {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        let mut output = Output::new(3, Some(reader));
        rustix::io::write(&writer, b"abcdef").unwrap();
        output.end_after_present();
        rustix::io::write(&writer, b"later").unwrap();
        let mut spares = Spares::default();
        let mut seen = Vec::new();
        while !output.is_ended() {
            output.pull(&mut spares).unwrap();
            let Some(Piece::Bytes { bytes, .. }) = output.stream().take(1, StreamId::Out) else {
                panic!("the window is small")
            };
            seen.extend_from_slice(bytes);
            let used = seen.len() as u64;
            output.stream().consumed(used, &mut spares).unwrap();
        }
        assert_eq!(seen, b"abcdef");
        assert!(output.take_source().is_some());
    }
}
