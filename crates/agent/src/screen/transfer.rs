//! The text of the clipboard, from and to the streams of a channel. For workers: both wait.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use sandtree_proto::Failure;
use sandtree_proto::screen::CLIPBOARD_MAX;

use super::Screen;
use super::clipboard::refuse_long;
use crate::channel::Cancel;
use crate::failure::{OrFailure, refusal};
use crate::feed::Intake;

impl Screen {
    pub fn send_clipboard(&self, out: OwnedFd) -> Result<(), Failure> {
        let text = self.read_clipboard()?;
        File::from(out)
            .write_all(text.as_bytes())
            .or_failure(|| "cannot send the clipboard".into())
    }

    /// Sets the clipboard to the bytes of `input`, unless cancelled.
    pub fn receive_clipboard(&self, input: Intake, cancel: &Cancel) -> Result<(), Failure> {
        let mut bytes = Vec::new();
        let limit = CLIPBOARD_MAX as u64 + 1;
        let read = input.take(limit).read_to_end(&mut bytes);
        read.or_failure(|| "cannot receive the clipboard".into())?;
        if cancel.is_cancelled() {
            return Err(refusal(
                Errno::CANCELED,
                "writing the clipboard was cancelled",
            ));
        }
        refuse_long(bytes.len())?;
        let text = String::from_utf8(bytes)
            .map_err(|_| refusal(Errno::ILSEQ, "the text for the clipboard is not UTF-8"))?;
        self.write_clipboard(text)
    }
}
