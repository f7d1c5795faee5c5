//! The guest's screen, through its X server: keys, text, pointer, size and clipboard.
//!
//! Always: what the guest sends is bounded, and every call ends. Text and inputs beyond the limits
//! of one request (`sandtree_proto::screen`) are the caller's to split.
//! When it fails: [`Guest::lacks_screen`] is true of the error of a guest without an X server.
//! Nothing was typed then.

use std::time::Duration;

use rustix::io::Errno;
use sandtree_proto::screen::CLIPBOARD_MAX;
use sandtree_proto::{Open, Outcome, Reply, Request, ScreenInput, ScreenRequest, ScreenState};

use super::{Guest, exec, unexpected};
use crate::error::{Error, Result};
use crate::link::{Channel, LinkError, Output, Refusal};

/// More than the agent takes for the longest list of inputs.
const SCREEN_DEADLINE: Duration = Duration::from_secs(90);
/// The bytes of the clipboard in flight between guest and host.
const WINDOW: u32 = 256 * 1024;

impl Guest {
    /// The size of the screen, the position of the pointer, and whether a session runs.
    pub async fn look_at_screen(&self) -> Result<ScreenState> {
        let operation = "look at the guest's screen";
        match self.screen(operation, ScreenRequest::Look).await? {
            Reply::Screen(state) => Ok(state),
            _ => Err(unexpected(operation)),
        }
    }

    /// Does a list of inputs as one unit. Returns when the X server has processed all of them; the
    /// program that gets them may still have to read them.
    pub async fn screen_input(&self, inputs: Vec<ScreenInput>) -> Result<()> {
        let request = ScreenRequest::Input(inputs);
        self.screen("send input to the guest's screen", request)
            .await
            .map(drop)
    }

    pub async fn set_screen_size(&self, width: u16, height: u16) -> Result<()> {
        let request = ScreenRequest::SetSize { width, height };
        self.screen("set the size of the guest's screen", request)
            .await
            .map(drop)
    }

    async fn screen(&self, operation: &'static str, request: ScreenRequest) -> Result<Reply> {
        let request = Request::Screen(request);
        self.refuse_old(operation, request.version())?;
        self.request_within(operation, request, SCREEN_DEADLINE)
            .await
    }

    /// The text of the clipboard. `None`: it has no text.
    pub async fn clipboard(&self) -> Result<Option<String>> {
        let operation = "read the guest's clipboard";
        let Channel {
            out, mut control, ..
        } = self.open_clipboard(operation, Open::ReadClipboard)?;
        let transfer = async {
            let bytes = read(operation, out).await?;
            match control.ended().await.map_err(guest(operation))? {
                Outcome::Done => {
                    let text = String::from_utf8(bytes).map_err(|_| unexpected(operation))?;
                    Ok(Some(text))
                }
                Outcome::Failed(failure) if failure.errno == Errno::NODATA.raw_os_error() => {
                    Ok(None)
                }
                outcome => Err(guest(operation)(exec::lost(outcome))),
            }
        };
        in_time(operation, transfer).await
    }

    /// Gives the clipboard a text of at most 1 MiB.
    pub async fn set_clipboard(&self, text: &str) -> Result<()> {
        let operation = "set the guest's clipboard";
        let Channel {
            mut input,
            mut control,
            ..
        } = self.open_clipboard(operation, Open::WriteClipboard)?;
        let transfer = async {
            tokio::select! {
                written = input.write(text.as_bytes()) => written.map_err(guest(operation))?,
                // A guest that cannot set it reports that before it has read all.
                _ = control.ended() => {}
            }
            input.end().map_err(guest(operation))?;
            match control.ended().await.map_err(guest(operation))? {
                Outcome::Done => Ok(()),
                outcome => Err(guest(operation)(exec::lost(outcome))),
            }
        };
        in_time(operation, transfer).await
    }

    /// Whether a call failed because the guest has no X server.
    pub fn lacks_screen(error: &Error) -> bool {
        Self::refused_with(error, Errno::NODEV).is_some()
    }

    /// What the guest says, if it refused a call with this error.
    pub fn refused_with(error: &Error, errno: Errno) -> Option<&str> {
        match error {
            Error::Guest {
                source: LinkError::Refused(Refusal::Guest(failure)),
                ..
            } if failure.errno == errno.raw_os_error() => Some(&failure.message),
            _ => None,
        }
    }

    fn open_clipboard(&self, operation: &'static str, open: Open) -> Result<Channel> {
        self.refuse_old(operation, open.version())?;
        self.link.open(open, WINDOW).map_err(guest(operation))
    }

    /// The keeper of an older program does not know the messages. The hub refuses those that the
    /// agent does not know.
    fn refuse_old(&self, operation: &'static str, version: u16) -> Result<()> {
        if self.link.version() >= version {
            return Ok(());
        }
        Err(guest(operation)(LinkError::Refused(Refusal::AgentTooOld)))
    }
}

async fn read(operation: &'static str, mut out: Output) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while let Some(chunk) = out.next().await.map_err(guest(operation))? {
        if bytes.len() + chunk.len() > CLIPBOARD_MAX {
            return Err(unexpected(operation));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

async fn in_time<T>(
    operation: &'static str,
    transfer: impl Future<Output = Result<T>>,
) -> Result<T> {
    let after = SCREEN_DEADLINE;
    let late = |_| Err(guest(operation)(LinkError::Timeout { after }));
    tokio::time::timeout(after, transfer)
        .await
        .unwrap_or_else(late)
}

fn guest(operation: &'static str) -> impl Fn(LinkError) -> Error {
    move |source| Error::Guest {
        operation: operation.into(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use sandtree_proto::Failure;

    use super::*;

    fn refused(refusal: Refusal) -> Error {
        guest("look")(LinkError::Refused(refusal))
    }

    fn by_guest(errno: i32) -> Error {
        let message = "no".into();
        refused(Refusal::Guest(Failure { errno, message }))
    }

    #[test]
    fn only_a_missing_server_is_no_screen() {
        assert!(Guest::lacks_screen(&by_guest(Errno::NODEV.raw_os_error())));
        assert!(!Guest::lacks_screen(&refused(Refusal::AgentTooOld)));
        assert!(!Guest::lacks_screen(&by_guest(Errno::INVAL.raw_os_error())));
        assert!(!Guest::lacks_screen(&refused(Refusal::QueueFull)));
        let ended = guest("look")(LinkError::ended());
        assert!(!Guest::lacks_screen(&ended));
    }
}
