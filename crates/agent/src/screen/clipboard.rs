//! The clipboard: X's selection CLIPBOARD as text.
//!
//! ```text
//!   read    ConvertSelection ─► owner ─► SelectionNotify ─► property   (INCR: again and again)
//!   write   SetSelectionOwner; then, for each SelectionRequest: property, SelectionNotify
//! ```
//!
//! Always: a text has at most [`CLIPBOARD_MAX`] bytes. The agent serves its text at any time, until
//! another client becomes the owner.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sandtree_proto::Failure;
use sandtree_proto::screen::CLIPBOARD_MAX;
use x11rb_protocol::protocol::xproto::{
    self, AtomEnum, ChangePropertyRequest, ConvertSelectionRequest, DeletePropertyRequest,
    DestroyWindowRequest, EventMask, GetPropertyReply, GetPropertyRequest,
    GetSelectionOwnerRequest, PropMode, Property, SelectionNotifyEvent, SelectionRequestEvent,
    SendEventRequest, SetSelectionOwnerRequest,
};

use super::event::Event;
use super::session::Session;
use crate::failure::refusal;

/// How long another client may take for each step.
const CLIENT_WITHIN: Duration = Duration::from_secs(10);
/// How long a whole transfer may take.
const TRANSFER_WITHIN: Duration = Duration::from_secs(60);
/// The head of the request that sets a property.
const PROPERTY_HEAD: usize = 64;
const PLAIN_TEXT: &str = "text/plain;charset=utf-8";
/// No atom, and no window.
const NONE: u32 = 0;

/// The text of which the agent is the owner.
#[derive(Debug)]
pub struct Owned {
    text: String,
    since: u32,
}

/// How another client gives its text.
#[derive(Clone, Copy)]
enum Encoding {
    Utf8,
    Latin1,
}

/// An answer to a request for the selection.
struct Value {
    type_: u32,
    format: u8,
    bytes: Vec<u8>,
}

impl Session {
    /// The text of the clipboard.
    pub fn clipboard(&mut self) -> Result<Option<String>, Failure> {
        let selection = self.atom("CLIPBOARD")?;
        let owner = self
            .wire
            .call(GetSelectionOwnerRequest { selection })?
            .owner;
        if owner == NONE {
            return Ok(None);
        }
        if let Some(owned) = self.owned.as_ref().filter(|_| owner == self.window) {
            return Ok(Some(owned.text.clone()));
        }
        let until = Instant::now() + TRANSFER_WITHIN;
        let forms = [
            ("UTF8_STRING", Encoding::Utf8),
            (PLAIN_TEXT, Encoding::Utf8),
            ("STRING", Encoding::Latin1),
        ];
        for (target, encoding) in forms {
            let target = self.atom(target)?;
            // The window is new, so that late parts of an earlier transfer do not count.
            let window = self.new_window()?;
            let bytes = self.convert(window, target, until);
            self.wire.try_send(DestroyWindowRequest { window })?;
            if let Some(bytes) = bytes? {
                let text = decode(bytes, encoding)?;
                refuse_long(text.len())?;
                return Ok(Some(text));
            }
        }
        Ok(None)
    }

    /// Asks the owner for the selection in one form. `None`: it does not have that form.
    fn convert(
        &mut self,
        window: u32,
        target: u32,
        until: Instant,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let selection = self.atom("CLIPBOARD")?;
        let property = self.atom("SANDTREE_CLIPBOARD")?;
        let incremental = self.atom("INCR")?;
        self.wire.check(ConvertSelectionRequest {
            requestor: window,
            selection,
            target,
            property,
            time: NONE,
        })?;
        let answered = |event: &Event| match event {
            Event::SelectionNotify(answer) if answer.requestor == window => Some(answer.property),
            _ => None,
        };
        let step = step_until(until);
        let answer = self.await_event(step, answered)?.ok_or_else(silent)?;
        if answer != property {
            return Ok(None);
        }
        let first = self.take_property(window, property)?;
        if first.type_ != incremental {
            refuse_long(length_of(&first))?;
            return Ok(Some(first.value));
        }
        self.receive_parts(window, property, until).map(Some)
    }

    /// Receives a text in parts, of which an empty one is the end.
    fn receive_parts(
        &mut self,
        window: u32,
        property: u32,
        until: Instant,
    ) -> Result<Vec<u8>, Failure> {
        let written = |event: &Event| match event {
            Event::Property(change)
                if change.window == window
                    && change.atom == property
                    && change.state == Property::NEW_VALUE =>
            {
                Some(())
            }
            _ => None,
        };
        let mut text = Vec::new();
        let mut length = 0usize;
        loop {
            let step = step_until(until);
            self.await_event(step, written)?.ok_or_else(silent)?;
            let part = self.take_property(window, property)?;
            // An event may still be of a value that was taken before.
            if part.type_ == NONE {
                continue;
            }
            if part.value.is_empty() {
                refuse_long(length)?;
                return Ok(text);
            }
            // A text that is too long is received to its end, because many an owner waits for that
            // and answers no other program until then.
            length = length.saturating_add(length_of(&part));
            if length <= CLIPBOARD_MAX {
                text.extend(part.value);
            }
        }
    }

    /// Reads and deletes a property, which asks the owner for the next part.
    fn take_property(&mut self, window: u32, property: u32) -> Result<GetPropertyReply, Failure> {
        let reply = self.wire.call(GetPropertyRequest {
            delete: true,
            window,
            property,
            type_: AtomEnum::ANY.into(),
            long_offset: 0,
            long_length: (CLIPBOARD_MAX / 4) as u32,
        })?;
        if reply.bytes_after > 0 {
            // The server deletes only what was read to its end.
            self.wire
                .check(DeletePropertyRequest { window, property })?;
        }
        Ok(reply)
    }

    /// Becomes the owner of the clipboard.
    pub fn set_clipboard(&mut self, text: String) -> Result<(), Failure> {
        refuse_long(text.len())?;
        if text.len() + PROPERTY_HEAD > self.wire.request_max() {
            return Err(refusal(
                Errno::FBIG,
                format!(
                    "the X server accepts no text of {} bytes: it lacks BIG-REQUESTS",
                    text.len()
                ),
            ));
        }
        let selection = self.atom("CLIPBOARD")?;
        let since = self.time()?;
        let owner = self.window;
        self.wire.check(SetSelectionOwnerRequest {
            owner,
            selection,
            time: since,
        })?;
        let now = self
            .wire
            .call(GetSelectionOwnerRequest { selection })?
            .owner;
        if now != owner {
            return Err(refusal(
                Errno::BUSY,
                "another program took the clipboard at the same time",
            ));
        }
        self.owned = Some(Owned { text, since });
        Ok(())
    }

    /// Answers requests for the agent's text. Other events came too late for their waiter.
    pub fn serve(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::SelectionClear(clear) if clear.owner == self.window => {
                // An event of an earlier ownership does not end this one.
                let is_older = |owned: &Owned| before(clear.time, owned.since);
                if !self.owned.as_ref().is_some_and(is_older) {
                    self.owned = None;
                }
                Ok(())
            }
            Event::SelectionRequest(asked) if asked.owner == self.window => self.answer(&asked),
            _ => Ok(()),
        }
    }

    fn answer(&mut self, asked: &SelectionRequestEvent) -> Result<(), Failure> {
        // Old clients name no property.
        let property = if asked.property == NONE {
            asked.target
        } else {
            asked.property
        };
        let value = self.value(asked)?;
        let answered = if value.is_some() { property } else { NONE };
        if let Some(Value {
            type_,
            format,
            bytes,
        }) = value
        {
            self.wire.try_send(ChangePropertyRequest {
                mode: PropMode::REPLACE,
                window: asked.requestor,
                property,
                type_,
                format,
                data_len: (bytes.len() / usize::from(format / 8)) as u32,
                data: bytes.into(),
            })?;
        }
        let notice = SelectionNotifyEvent {
            response_type: xproto::SELECTION_NOTIFY_EVENT,
            sequence: 0,
            time: asked.time,
            requestor: asked.requestor,
            selection: asked.selection,
            target: asked.target,
            property: answered,
        };
        let event: [u8; 32] = notice.into();
        self.wire.try_send(SendEventRequest {
            propagate: false,
            destination: asked.requestor,
            event_mask: EventMask::NO_EVENT,
            event: Cow::Owned(event),
        })
    }

    /// The agent's text in the form that a client asked for, if it has that form.
    fn value(&mut self, asked: &SelectionRequestEvent) -> Result<Option<Value>, Failure> {
        let clipboard = self.atom("CLIPBOARD")?;
        let utf8 = self.atom("UTF8_STRING")?;
        let plain = self.atom(PLAIN_TEXT)?;
        let targets = self.atom("TARGETS")?;
        let timestamp = self.atom("TIMESTAMP")?;
        let string: u32 = AtomEnum::STRING.into();
        let Some(owned) = self.owned.as_ref().filter(|_| asked.selection == clipboard) else {
            return Ok(None);
        };
        let latin1 = latin1(&owned.text);
        let value = |type_, format, bytes| {
            Some(Value {
                type_,
                format,
                bytes,
            })
        };
        Ok(if asked.target == utf8 || asked.target == plain {
            value(asked.target, 8, owned.text.clone().into_bytes())
        } else if asked.target == string {
            latin1.and_then(|bytes| value(string, 8, bytes))
        } else if asked.target == timestamp {
            value(AtomEnum::INTEGER.into(), 32, words(&[owned.since]))
        } else if asked.target == targets {
            let mut all = vec![targets, timestamp, utf8, plain];
            all.extend(latin1.map(|_| string));
            value(AtomEnum::ATOM.into(), 32, words(&all))
        } else {
            None
        })
    }
}

fn step_until(until: Instant) -> Instant {
    until.min(Instant::now() + CLIENT_WITHIN)
}

/// Whether a time of the server's is before another: it wraps around after 49 days.
fn before(time: u32, other: u32) -> bool {
    (time.wrapping_sub(other) as i32) < 0
}

/// The length of a whole property in bytes, also of what was not read.
fn length_of(reply: &GetPropertyReply) -> usize {
    let left = reply.bytes_after as usize;
    reply.value.len().saturating_add(left)
}

fn silent() -> Failure {
    refusal(
        Errno::TIMEDOUT,
        "the program that owns the clipboard does not answer",
    )
}

pub fn refuse_long(bytes: usize) -> Result<(), Failure> {
    if bytes <= CLIPBOARD_MAX {
        return Ok(());
    }
    Err(refusal(
        Errno::FBIG,
        format!("the clipboard has more than {CLIPBOARD_MAX} bytes: use a file"),
    ))
}

fn decode(bytes: Vec<u8>, encoding: Encoding) -> Result<String, Failure> {
    match encoding {
        Encoding::Latin1 => Ok(bytes.into_iter().map(char::from).collect()),
        Encoding::Utf8 => String::from_utf8(bytes)
            .map_err(|_| refusal(Errno::ILSEQ, "the text of the clipboard is not UTF-8")),
    }
}

/// The text in Latin-1, if it has no other characters.
fn latin1(text: &str) -> Option<Vec<u8>> {
    text.chars()
        .map(|character| u8::try_from(character).ok())
        .collect()
}

fn words(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_ne_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_latin_1_is_given_as_string() {
        assert_eq!(latin1("Grüße"), Some(b"Gr\xfc\xdfe".to_vec()));
        assert_eq!(latin1("€"), None);
        let back = decode(b"Gr\xfc\xdfe".to_vec(), Encoding::Latin1);
        assert_eq!(back.unwrap(), "Grüße");
    }

    #[test]
    fn what_is_not_utf_8_or_too_long_is_refused() {
        let refused = decode(vec![0xff], Encoding::Utf8).unwrap_err();
        assert_eq!(refused.errno, libc::EILSEQ);
        assert!(refuse_long(CLIPBOARD_MAX).is_ok());
        assert_eq!(
            refuse_long(CLIPBOARD_MAX + 1).unwrap_err().errno,
            libc::EFBIG
        );
    }

    #[test]
    fn times_wrap_around() {
        assert!(before(1, 2));
        assert!(before(u32::MAX, 2));
        assert!(!before(2, 2));
    }
}
