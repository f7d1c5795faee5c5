//! Uploads of blobs.
//!
//! ```text
//! HEAD blob ─exists─► done
//!    └─► POST uploads ─► PATCH all of it ─► PUT ?digest= ─► done
//!             ▲             │                 └─lost─► HEAD blob ─exists─► done
//!             │             └─lost─► GET: how much has arrived? ─► PATCH a chunk from there ─► … ─► PUT
//!             └── nothing, or the registry has forgotten the upload
//! ```
//!
//! Chunks are for an upload that broke off or was too large for one request. Not every registry
//! accepts them.
//!
//! Always: a blob that the registry has is not sent. The watch receives each byte once, however
//! often it is sent.

use std::io::{self, Read};
use std::time::Duration;

use ureq::http::header::{CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, LOCATION, RANGE};
use ureq::http::{HeaderName, Method, StatusCode};

use crate::auth::Scope;
use crate::client::Client;
use crate::document::Descriptor;
use crate::error::{Error, Said};
use crate::retry::Retry;
use crate::url::{Url, escaped};
use crate::watch::Watch;
use crate::wire::{Answer, Ask, Authorization, Fault, asked_wait, is_asked_to_wait, is_transient};

const CHUNK_MIN: HeaderName = HeaderName::from_static("oci-chunk-min-length");

/// Opens the content of a blob, starting at a byte.
pub type Open<'a> = &'a mut dyn FnMut(u64) -> io::Result<Box<dyn Read + Send>>;

impl Client {
    /// Stores a blob, unless the registry has it.
    pub fn push_blob(
        &self,
        repository: &str,
        descriptor: &Descriptor,
        open: Open,
        watch: Watch,
    ) -> Result<(), Error> {
        let scope = Scope::push(repository);
        if self.has_blob_as(repository, &descriptor.digest, &scope, watch)? {
            return Ok(());
        }
        let push = Push {
            client: self,
            repository,
            scope,
            descriptor,
            watch,
        };
        push.run(open)
    }
}

struct Push<'a> {
    client: &'a Client,
    repository: &'a str,
    scope: Scope,
    descriptor: &'a Descriptor,
    watch: Watch<'a>,
}

/// An upload that the registry has started.
struct Upload {
    location: Url,
    mode: Mode,
    chunk_bytes: u64,
    sent: u64,
}

/// How the content is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// In one request, which every registry accepts.
    Whole,
    /// In several requests, each with its range. Some registries refuse large chunks, and some all.
    Chunks,
}

/// The outcome of one step of an upload, unless it is a final error.
enum Step {
    Stored,
    Accepted,
    /// It is not known how much the registry has.
    Broken(Fault),
    /// The same, and the content should be sent in another mode.
    Otherwise(Mode, Error),
    /// There is a new token.
    Renewed,
    /// The registry asks for a wait.
    AskedToWait(Option<Duration>),
}

/// The progress and the failures of an upload so far.
struct History<'a> {
    registry: &'a str,
    retry: Retry<'a>,
    furthest: u64,
    /// Whether there was a new token since the last progress.
    renewed: bool,
    /// Failures before the registry had any byte.
    failed_starts: u32,
}

impl History<'_> {
    fn reached(&mut self, sent: u64) {
        if sent > self.furthest {
            self.furthest = sent;
            self.renewed = false;
            self.retry.progressed();
        }
    }

    /// The mode to continue in after a step that was no success. Fails if there were enough tries.
    fn after(&mut self, step: Step, mode: Mode) -> Result<Mode, Error> {
        match step {
            Step::Stored | Step::Accepted => {}
            Step::Renewed if self.renewed => {
                return Err(Error::Unauthorized {
                    registry: self.registry.to_owned(),
                    said: Said::default(),
                });
            }
            Step::Renewed => self.renewed = true,
            Step::AskedToWait(wait) => self.retry.asked(self.registry, wait)?,
            Step::Broken(fault) if !self.retry.again()? => {
                return Err(fault.after(self.retry.tries()));
            }
            Step::Broken(_) if self.furthest == 0 => {
                self.failed_starts += 1;
                // A proxy may refuse the request for its size, and close before we can read that.
                return Ok(if self.failed_starts > 1 {
                    Mode::Chunks
                } else {
                    mode
                });
            }
            Step::Broken(_) => {}
            Step::Otherwise(_, error) if !self.retry.again()? => return Err(error),
            Step::Otherwise(mode, _) => return Ok(mode),
        }
        Ok(mode)
    }
}

impl Push<'_> {
    fn run(&self, open: Open) -> Result<(), Error> {
        let retry = Retry::new(&self.client.wire.limits, self.watch);
        let mut history = History {
            registry: self.client.registry(),
            retry,
            furthest: 0,
            renewed: false,
            failed_starts: 0,
        };
        let mut reported = 0;
        let mut upload = self.begin(Mode::Whole)?;
        loop {
            let step = if upload.sent < self.descriptor.size {
                self.content(&mut upload, open, &mut reported)?
            } else {
                self.finish(&upload)?
            };
            self.client.wire.check_cancelled()?;
            match step {
                Step::Stored => return Ok(()),
                Step::Accepted => {}
                step => {
                    upload.mode = history.after(step, upload.mode)?;
                    upload = self.resumed(upload)?;
                }
            }
            history.reached(upload.sent);
        }
    }

    fn begin(&self, mode: Mode) -> Result<Upload, Error> {
        let ask = Ask::new(
            Method::POST,
            self.client.url(self.repository, "blobs/uploads/")?,
        );
        let answer = self.client.send(&ask, &self.scope, self.watch)?;
        if answer.status() != StatusCode::ACCEPTED {
            return Err(answer.refusal(&format!("repository {}", self.repository)));
        }
        let least = answer
            .header(&CHUNK_MIN)
            .and_then(|text| text.parse().ok())
            .unwrap_or(0);
        let chunk_bytes = self.client.wire.limits.chunk_bytes.max(least).max(1);
        Ok(Upload {
            location: answer.location()?,
            mode,
            chunk_bytes,
            sent: 0,
        })
    }

    /// Sends the rest of the content, or a chunk of it.
    fn content(&self, upload: &mut Upload, open: Open, reported: &mut u64) -> Result<Step, Error> {
        self.refresh(upload)?;
        let start = upload.sent;
        let size = self.descriptor.size;
        let end = match upload.mode {
            Mode::Whole => size,
            Mode::Chunks => size.min(start.saturating_add(upload.chunk_bytes)),
        };
        let mut ask = Ask::new(Method::PATCH, upload.location.clone())
            .header(CONTENT_TYPE, "application/octet-stream")
            .header(CONTENT_LENGTH, (end - start).to_string());
        if upload.mode == Mode::Chunks {
            ask = ask.header(CONTENT_RANGE, format!("{start}-{}", end - 1));
        }
        let source = open(start).map_err(|source| Error::io("open", self.what(), source))?;
        let mut body = Body {
            push: self,
            source,
            at: start,
            end,
            reported,
            failed: None,
        };
        let outcome = self
            .client
            .wire
            .stream(&ask, &self.authorization(), &mut body);
        if let Some(error) = body.failed {
            return Err(error);
        }
        match outcome {
            Ok(answer) => self.content_answered(answer, upload, end),
            Err(fault @ Fault::Lost { .. }) => Ok(Step::Broken(fault)),
            Err(Fault::Final(error)) => Err(error),
        }
    }

    /// Renews an old token with a small request, so that no large one is refused for it.
    fn refresh(&self, upload: &Upload) -> Result<(), Error> {
        if self.is_own(&upload.location) && self.client.auth.is_stale(&self.scope) {
            self.client.send(
                &Ask::new(Method::GET, upload.location.clone()),
                &self.scope,
                self.watch,
            )?;
        }
        Ok(())
    }

    fn content_answered(
        &self,
        answer: Answer,
        upload: &mut Upload,
        end: u64,
    ) -> Result<Step, Error> {
        match (answer.status(), upload.mode) {
            (StatusCode::ACCEPTED | StatusCode::CREATED | StatusCode::NO_CONTENT, _) => {
                self.accepted(&answer, upload, end)
            }
            (StatusCode::PAYLOAD_TOO_LARGE, Mode::Whole) => {
                Ok(Step::Otherwise(Mode::Chunks, answer.refusal("such upload")))
            }
            (StatusCode::RANGE_NOT_SATISFIABLE, Mode::Chunks) if upload.sent == 0 => {
                Ok(Step::Otherwise(Mode::Whole, answer.refusal("such upload")))
            }
            _ => self.not_taken(answer),
        }
    }

    /// The step that an answer means which is no success.
    fn not_taken(&self, answer: Answer) -> Result<Step, Error> {
        match answer.status() {
            // Another host never gets our credentials.
            StatusCode::UNAUTHORIZED if self.is_own(&answer.url) => {
                self.client
                    .auth
                    .answer(answer, &self.scope, &self.client.wire, self.watch)?;
                Ok(Step::Renewed)
            }
            StatusCode::NOT_FOUND | StatusCode::RANGE_NOT_SATISFIABLE => {
                Ok(Step::Broken(Fault::Final(answer.refusal("such upload"))))
            }
            _ if is_asked_to_wait(&answer) => {
                Ok(Step::AskedToWait(asked_wait(answer.response.headers())))
            }
            status if is_transient(status) => {
                Ok(Step::Broken(Fault::Final(answer.refusal("such upload"))))
            }
            _ => Err(answer.refusal("such upload")),
        }
    }

    fn accepted(&self, answer: &Answer, upload: &mut Upload, end: u64) -> Result<Step, Error> {
        let url = answer.url.to_string();
        let has = match known_bytes(answer) {
            // `0-0` also stands for one byte, and some registries always send it.
            None => end,
            Some(0) if end == 1 || upload.mode == Mode::Whole => end,
            Some(has) => has,
        };
        if has > end {
            return Err(Error::Protocol {
                url,
                rule: "it reports more of the upload than was sent",
            });
        }
        if answer.header(&LOCATION).is_some() {
            upload.location = answer.location()?;
        }
        if has <= upload.sent {
            let rule = "it accepts a chunk and keeps nothing of it";
            return Ok(Step::Broken(Fault::Final(Error::Protocol { url, rule })));
        }
        if has < end {
            upload.mode = Mode::Chunks;
        }
        upload.sent = has;
        Ok(Step::Accepted)
    }

    /// Asks the registry to keep the upload as the blob. A lost answer may have been a success.
    fn finish(&self, upload: &Upload) -> Result<Step, Error> {
        self.refresh(upload)?;
        let digest = escaped(&self.descriptor.digest.to_string());
        let refuse = |rule| Error::Protocol {
            url: upload.location.to_string(),
            rule,
        };
        let url = upload
            .location
            .with_query("digest", &digest)
            .map_err(refuse)?;
        let ask = Ask::new(Method::PUT, url).header(CONTENT_TYPE, "application/octet-stream");
        let ask = Ask {
            answer_in: Some(self.client.wire.limits.commit),
            ..ask
        };
        let step = match self.client.wire.follow(&ask, &self.authorization()) {
            Ok(answer) if answer.status().is_success() => return Ok(Step::Stored),
            Ok(answer) => self.not_taken(answer)?,
            Err(fault @ Fault::Lost { .. }) => {
                self.client.wire.check_cancelled()?;
                Step::Broken(fault)
            }
            Err(Fault::Final(error)) => return Err(error),
        };
        let stored = matches!(step, Step::Broken(_)) && self.is_there()?;
        Ok(if stored { Step::Stored } else { step })
    }

    fn authorization(&self) -> Authorization<'_> {
        Authorization {
            origin: &self.client.origin,
            value: self.client.auth.header(&self.scope),
        }
    }

    fn is_own(&self, url: &Url) -> bool {
        url.origin() == self.client.origin
    }

    fn is_there(&self) -> Result<bool, Error> {
        self.client.has_blob_as(
            self.repository,
            &self.descriptor.digest,
            &self.scope,
            self.watch,
        )
    }

    /// The upload to continue: as far as the registry has it, or a new one if it has nothing.
    fn resumed(&self, mut upload: Upload) -> Result<Upload, Error> {
        let answer = self.client.send(
            &Ask::new(Method::GET, upload.location.clone()),
            &self.scope,
            self.watch,
        )?;
        let known = matches!(
            answer.status(),
            StatusCode::NO_CONTENT | StatusCode::OK | StatusCode::ACCEPTED
        );
        match known_bytes(&answer).filter(|has| known && *has > 0 && *has <= self.descriptor.size) {
            Some(has) => {
                upload.sent = has;
                upload.mode = Mode::Chunks;
                if answer.header(&LOCATION).is_some() {
                    upload.location = answer.location()?;
                }
                Ok(upload)
            }
            None => self.begin(upload.mode),
        }
    }

    fn what(&self) -> String {
        format!("blob {}", self.descriptor.digest)
    }
}

/// How many bytes of an upload the registry reports. `0-0` stands for no byte or for one; sending
/// one byte again is cheaper, so it counts as none.
fn known_bytes(answer: &Answer) -> Option<u64> {
    let range = answer.header(&RANGE)?;
    let (start, last) = range.trim_start_matches("bytes=").split_once('-')?;
    let last = last
        .trim()
        .parse::<u64>()
        .ok()
        .filter(|_| start.trim() == "0")?;
    if last == 0 {
        Some(0)
    } else {
        last.checked_add(1)
    }
}

/// The content of one request.
struct Body<'a> {
    push: &'a Push<'a>,
    source: Box<dyn Read + Send>,
    at: u64,
    end: u64,
    reported: &'a mut u64,
    /// Why the content could not be read, which is not the connection's fault.
    failed: Option<Error>,
}

impl Body<'_> {
    fn next(&mut self, buffer: &mut [u8]) -> Result<usize, Error> {
        let left = usize::try_from(self.end - self.at)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        if left == 0 {
            return Ok(0);
        }
        let count = self
            .source
            .read(&mut buffer[..left])
            .map_err(|source| Error::io("read", self.push.what(), source))?;
        if count == 0 {
            return Err(Error::WrongSize {
                what: self.push.what(),
                expected: self.push.descriptor.size,
                found: self.at,
            });
        }
        self.at += count as u64;
        let new = self.at.saturating_sub(*self.reported);
        *self.reported += new;
        (self.push.watch)(new)?;
        Ok(count)
    }
}

impl Read for Body<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.next(buffer).map_err(|error| {
            self.failed = Some(error);
            io::Error::other("the content cannot be read")
        })
    }
}
