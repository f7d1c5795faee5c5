//! A blob on its way out.
//!
//! ```text
//! HEAD blob ─there─► done
//!    └─► POST uploads ─► PATCH all of it ─► PUT ?digest= ─► done
//!             ▲             │                 └─lost─► HEAD blob ─there─► done
//!             │             └─lost─► GET: how much is there? ─► PATCH a chunk from there ─► … ─► PUT
//!             └── nothing, or the upload is not known any more
//! ```
//!
//! Chunks are for what broke off or was too large for one request; not every registry takes them.
//!
//! Always: a blob that is there is not sent. What the watch is told counts each byte once, however
//! often it is sent.

use std::io::{self, Read};
use std::time::Duration;

use ureq::http::header::{CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, LOCATION, RANGE};
use ureq::http::{HeaderName, Method, StatusCode};

use crate::auth::Scope;
use crate::error::Said;
use crate::patience::Patience;
use crate::url::{Url, escaped};
use crate::wire::{Answer, Ask, Authorization, Fault, asked_wait, is_asked_to_wait, is_passing};
use crate::{Client, Descriptor, Error, Watch};

const CHUNK_MIN: HeaderName = HeaderName::from_static("oci-chunk-min-length");

/// Opens the content of a blob, from a byte on.
pub type Open<'a> = &'a mut dyn FnMut(u64) -> io::Result<Box<dyn Read + Send>>;

impl Client {
    /// Stores a blob, unless it is there.
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

/// An upload that the registry knows.
struct Upload {
    location: Url,
    manner: Manner,
    chunk_bytes: u64,
    sent: u64,
}

/// How the content goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// All of it in one request, as every registry takes it.
    Whole,
    /// By and by, each part with its range. Some registries refuse large parts, some any.
    Chunks,
}

/// How one step of an upload ended, if not by an error for good.
enum Step {
    Stored,
    Accepted,
    /// What the registry has by now is not known.
    Broken(Fault),
    /// The same, and the content had better go in another manner.
    Otherwise(Manner, Error),
    /// There is a new token.
    Renewed,
    /// The registry asks for a pause.
    Asked(Option<Duration>),
}

/// How an upload has gone so far.
struct Course<'a> {
    registry: &'a str,
    patience: Patience<'a>,
    furthest: u64,
    /// There was a new token since the last progress.
    renewed: bool,
    /// Breaks before the registry had anything.
    in_vain: u32,
}

impl Course<'_> {
    fn reached(&mut self, sent: u64) {
        if sent > self.furthest {
            (self.furthest, self.renewed) = (sent, false);
            self.patience.progressed();
        }
    }

    /// In which manner to go on after a step that was no success, if at all.
    fn after(&mut self, step: Step, manner: Manner) -> Result<Manner, Error> {
        match step {
            Step::Stored | Step::Accepted => {}
            Step::Renewed if self.renewed => {
                return Err(Error::Unauthorized {
                    registry: self.registry.to_owned(),
                    said: Said::default(),
                });
            }
            Step::Renewed => self.renewed = true,
            Step::Asked(wait) => self.patience.asked(self.registry, wait)?,
            Step::Broken(fault) if !self.patience.again()? => {
                return Err(fault.after(self.patience.tries()));
            }
            Step::Broken(_) if self.furthest == 0 => {
                self.in_vain += 1;
                // Something on the way may refuse it for its size, and close before that is heard.
                return Ok(if self.in_vain > 1 {
                    Manner::Chunks
                } else {
                    manner
                });
            }
            Step::Broken(_) => {}
            Step::Otherwise(_, error) if !self.patience.again()? => return Err(error),
            Step::Otherwise(manner, _) => return Ok(manner),
        }
        Ok(manner)
    }
}

impl Push<'_> {
    fn run(&self, open: Open) -> Result<(), Error> {
        let patience = Patience::new(&self.client.wire.limits, self.watch);
        let mut course = Course {
            registry: self.client.registry(),
            patience,
            furthest: 0,
            renewed: false,
            in_vain: 0,
        };
        let mut told = 0;
        let mut upload = self.begin(Manner::Whole)?;
        loop {
            let step = match upload.sent < self.descriptor.size {
                true => self.content(&mut upload, open, &mut told)?,
                false => self.finish(&upload)?,
            };
            self.client.wire.wanted()?;
            match step {
                Step::Stored => return Ok(()),
                Step::Accepted => {}
                step => {
                    upload.manner = course.after(step, upload.manner)?;
                    upload = self.resumed(upload)?;
                }
            }
            course.reached(upload.sent);
        }
    }

    fn begin(&self, manner: Manner) -> Result<Upload, Error> {
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
            manner,
            chunk_bytes,
            sent: 0,
        })
    }

    /// Sends what is missing, or a chunk of it.
    fn content(&self, upload: &mut Upload, open: Open, told: &mut u64) -> Result<Step, Error> {
        self.refresh(upload)?;
        let (start, size) = (upload.sent, self.descriptor.size);
        let end = match upload.manner {
            Manner::Whole => size,
            Manner::Chunks => size.min(start.saturating_add(upload.chunk_bytes)),
        };
        let mut ask = Ask::new(Method::PATCH, upload.location.clone())
            .header(CONTENT_TYPE, "application/octet-stream")
            .header(CONTENT_LENGTH, (end - start).to_string());
        if upload.manner == Manner::Chunks {
            ask = ask.header(CONTENT_RANGE, format!("{start}-{}", end - 1));
        }
        let source = open(start).map_err(|source| Error::io("open", self.what(), source))?;
        let mut body = Body {
            push: self,
            source,
            at: start,
            end,
            told,
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

    /// Gets a new token for an old one with a small request, lest a large one is sent in vain.
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
        match (answer.status(), upload.manner) {
            (StatusCode::ACCEPTED | StatusCode::CREATED | StatusCode::NO_CONTENT, _) => {
                self.accepted(&answer, upload, end)
            }
            (StatusCode::PAYLOAD_TOO_LARGE, Manner::Whole) => Ok(Step::Otherwise(
                Manner::Chunks,
                answer.refusal("such upload"),
            )),
            (StatusCode::RANGE_NOT_SATISFIABLE, Manner::Chunks) if upload.sent == 0 => Ok(
                Step::Otherwise(Manner::Whole, answer.refusal("such upload")),
            ),
            _ => self.not_taken(answer),
        }
    }

    /// What an answer means that is no success.
    fn not_taken(&self, answer: Answer) -> Result<Step, Error> {
        match answer.status() {
            // Another host has no business with our name.
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
                Ok(Step::Asked(asked_wait(answer.response.headers())))
            }
            status if is_passing(status) => {
                Ok(Step::Broken(Fault::Final(answer.refusal("such upload"))))
            }
            _ => Err(answer.refusal("such upload")),
        }
    }

    fn accepted(&self, answer: &Answer, upload: &mut Upload, end: u64) -> Result<Step, Error> {
        let url = answer.url.to_string();
        let has = match known_bytes(answer) {
            // `0-0` is also what is said of one byte, and by those that do not count.
            None => end,
            Some(0) if end == 1 || upload.manner == Manner::Whole => end,
            Some(has) => has,
        };
        if has > end {
            return Err(Error::Protocol {
                url,
                rule: "it has more of the upload than was sent",
            });
        }
        if answer.header(&LOCATION).is_some() {
            upload.location = answer.location()?;
        }
        if has <= upload.sent {
            let rule = "it takes a chunk and keeps nothing of it";
            return Ok(Step::Broken(Fault::Final(Error::Protocol { url, rule })));
        }
        if has < end {
            upload.manner = Manner::Chunks;
        }
        upload.sent = has;
        Ok(Step::Accepted)
    }

    /// The registry is asked to keep the upload as the blob. An answer that is lost may have been a
    /// success.
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
                self.client.wire.wanted()?;
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

    /// The upload as the registry knows it, to be continued; or a new one, if there is nothing of
    /// it.
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
                (upload.sent, upload.manner) = (has, Manner::Chunks);
                if answer.header(&LOCATION).is_some() {
                    upload.location = answer.location()?;
                }
                Ok(upload)
            }
            None => self.begin(upload.manner),
        }
    }

    fn what(&self) -> String {
        format!("blob {}", self.descriptor.digest)
    }
}

/// How many bytes of an upload the registry says it has. `0-0` is what registries say of none, too;
/// a single byte is the cheaper one to send again.
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

/// The part of the content that one request sends.
struct Body<'a> {
    push: &'a Push<'a>,
    source: Box<dyn Read + Send>,
    at: u64,
    end: u64,
    told: &'a mut u64,
    /// Why reading failed, if it did: that is no fault of the connection.
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
            let (expected, found) = (self.push.descriptor.size, self.at);
            return Err(Error::WrongSize {
                what: self.push.what(),
                expected,
                found,
            });
        }
        self.at += count as u64;
        let new = self.at.saturating_sub(*self.told);
        *self.told += new;
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
