//! The changes below a directory of the guest, as they happen.

use std::collections::VecDeque;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use sandtree_proto::message::decode_item;
use sandtree_proto::{Open, WatchChange, WatchEvent, WatchScope};

use super::{exec, unexpected};
use crate::error::{Error, Result};
use crate::link::{Channel, Control, Input, Link, LinkError, Output};

/// The bytes of events in flight between guest and host.
const WINDOW: u32 = 256 * 1024;

/// A watched directory. It is watched until this is dropped.
#[derive(Debug)]
pub struct Watch {
    operation: String,
    out: Output,
    control: Control,
    /// An end of the channel that stays open with it.
    _input: Input,
    /// The beginning of an event that has not arrived whole.
    begun: Vec<u8>,
    arrived: VecDeque<WatchEvent>,
}

impl Watch {
    pub(super) async fn start(link: &Link, path: &Path, scope: WatchScope) -> Result<Self> {
        let operation = format!("watch {} in the guest", path.display());
        let open = Open::Watch {
            path: path.as_os_str().as_bytes().to_vec(),
            scope,
        };
        let opened = link.open(open, WINDOW);
        let Channel {
            out,
            input,
            control,
            ..
        } = opened.map_err(guest(&operation))?;
        let mut watch = Self {
            operation,
            out,
            control,
            _input: input,
            begun: Vec::new(),
            arrived: VecDeque::new(),
        };
        match watch.next().await? {
            Some(event) if event.change == WatchChange::Watching => Ok(watch),
            _ => Err(unexpected(&watch.operation)),
        }
    }

    /// The next change. `None`: the directory was removed.
    pub async fn next(&mut self) -> Result<Option<WatchEvent>> {
        loop {
            if let Some(event) = self.arrived.pop_front() {
                return Ok(Some(event));
            }
            let chunk = self.out.next().await.map_err(guest(&self.operation))?;
            let Some(chunk) = chunk else {
                return self.ended().await;
            };
            self.begun.extend_from_slice(&chunk);
            while let Some(event) = self.decode()? {
                self.arrived.push_back(event);
            }
        }
    }

    fn decode(&mut self) -> Result<Option<WatchEvent>> {
        decode_item(&mut self.begun).map_err(|_| unexpected(&self.operation))
    }

    async fn ended(&mut self) -> Result<Option<WatchEvent>> {
        let outcome = self.control.ended().await.map_err(guest(&self.operation))?;
        match outcome {
            sandtree_proto::Outcome::Done => Ok(None),
            outcome => Err(guest(&self.operation)(exec::lost(outcome))),
        }
    }
}

fn guest(operation: &str) -> impl Fn(LinkError) -> Error {
    move |source| Error::Guest {
        operation: operation.to_owned(),
        source,
    }
}
