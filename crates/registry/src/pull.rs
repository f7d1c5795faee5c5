//! Downloads of blobs.
//!
//! Every byte is hashed when it arrives. After a lost connection the transfer continues at the next
//! byte if the registry honours `Range`, and otherwise restarts. One byte too many ends it at once.

use std::fs::File;
use std::io::{self, Read, Seek, Write};

use sha2::{Digest as _, Sha256};
use ureq::http::header::{CONTENT_RANGE, RANGE, TRANSFER_ENCODING};
use ureq::http::{Method, StatusCode};

use crate::auth::Scope;
use crate::client::Client;
use crate::digest::Digest;
use crate::document::Descriptor;
use crate::error::Error;
use crate::retry::Retry;
use crate::url::Url;
use crate::watch::Watch;
use crate::wire::{Answer, Ask, Fault};

const BUFFER: usize = 256 << 10;

/// The destination of a blob. Its content is valid only after `complete`.
pub trait BlobTarget {
    /// Takes all of the next bytes.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Discards all bytes so far.
    fn restart(&mut self) -> io::Result<()>;
    /// Called when the blob is complete and has the right digest.
    fn complete(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl BlobTarget for File {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn restart(&mut self) -> io::Result<()> {
        self.set_len(0)?;
        self.rewind()
    }
}

impl BlobTarget for Vec<u8> {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.extend_from_slice(bytes);
        Ok(())
    }

    fn restart(&mut self) -> io::Result<()> {
        self.clear();
        Ok(())
    }
}

impl Client {
    /// Fetches a blob. Fails unless it has exactly the size and the digest of its descriptor.
    pub fn blob(
        &self,
        repository: &str,
        descriptor: &Descriptor,
        to: &mut dyn BlobTarget,
        watch: Watch,
    ) -> Result<(), Error> {
        let url = self.url(repository, &format!("blobs/{}", descriptor.digest))?;
        let transfer = Transfer {
            client: self,
            url,
            scope: Scope::pull(repository),
            descriptor,
            watch,
        };
        let mut received = Received {
            to,
            hasher: Sha256::new(),
            have: 0,
            reported: 0,
        };
        transfer.run(&mut received)?;
        let found = Digest::finish(received.hasher);
        if found != descriptor.digest {
            return Err(Error::WrongDigest {
                what: transfer.what(),
                expected: descriptor.digest,
                found,
            });
        }
        received
            .to
            .complete()
            .map_err(|source| transfer.target_failed(source))
    }
}

struct Transfer<'a> {
    client: &'a Client,
    url: Url,
    scope: Scope,
    descriptor: &'a Descriptor,
    watch: Watch<'a>,
}

struct Received<'a> {
    to: &'a mut dyn BlobTarget,
    hasher: Sha256,
    have: u64,
    /// How many bytes the watch has received. After a restart, only new ones are reported.
    reported: u64,
}

impl Transfer<'_> {
    fn run(&self, received: &mut Received) -> Result<(), Error> {
        let mut retry = Retry::new(&self.client.wire.limits, self.watch);
        loop {
            let before = received.reported;
            let Err(fault) = self.attempt(received) else {
                return Ok(());
            };
            self.client.wire.check_cancelled()?;
            if received.reported > before {
                retry.progressed();
            }
            if matches!(fault, Fault::Final(_)) || !retry.again()? {
                return Err(fault.after(retry.tries()));
            }
        }
    }

    /// One request, and as much of its body as arrives.
    fn attempt(&self, received: &mut Received) -> Result<(), Fault> {
        let mut ask = Ask::new(Method::GET, self.url.clone());
        if received.have > 0 {
            ask = ask.header(RANGE, format!("bytes={}-", received.have));
        }
        let answer = self.client.send(&ask, &self.scope, self.watch)?;
        match answer.status() {
            StatusCode::OK => self.restart(received)?,
            StatusCode::PARTIAL_CONTENT if received.have > 0 => {
                self.check_range(&answer, received.have)?
            }
            StatusCode::RANGE_NOT_SATISFIABLE if received.have > 0 => {
                self.restart(received)?;
                return Err(Fault::Lost {
                    url: answer.url,
                    source: io::Error::other("the range was refused"),
                });
            }
            _ => return Err(answer.refusal(&self.what()).into()),
        }
        self.receive(answer, received)
    }

    fn restart(&self, received: &mut Received) -> Result<(), Error> {
        if received.have > 0 {
            received
                .to
                .restart()
                .map_err(|source| self.target_failed(source))?;
            received.hasher = Sha256::new();
            received.have = 0;
        }
        Ok(())
    }

    /// Refuses another part of the blob than the requested one.
    fn check_range(&self, answer: &Answer, have: u64) -> Result<(), Error> {
        let range = answer
            .header(&CONTENT_RANGE)
            .and_then(|text| text.strip_prefix("bytes "));
        let start = range
            .and_then(|text| text.split_once('-'))
            .and_then(|(start, _)| start.trim().parse::<u64>().ok());
        if start == Some(have) {
            return Ok(());
        }
        Err(Error::Protocol {
            url: answer.url.to_string(),
            rule: "it sends another range than the requested one",
        })
    }

    fn receive(&self, answer: Answer, received: &mut Received) -> Result<(), Fault> {
        let size = self.descriptor.size;
        if let Some(length) = answer
            .length()
            .and_then(|length| length.checked_add(received.have))
        {
            self.check_size(length)?;
        }
        let url = answer.url.clone();
        // Such a body ends with its connection, so its end may be a lost connection.
        let endless = answer.length().is_none() && answer.header(&TRANSFER_ENCODING).is_none();
        let mut body = answer.body();
        let mut buffer = vec![0; BUFFER];
        loop {
            let count = body.read(&mut buffer).map_err(|source| Fault::Lost {
                url: url.clone(),
                source,
            })?;
            if count == 0 && endless && received.have < size {
                return Err(Fault::Lost {
                    url,
                    source: io::ErrorKind::UnexpectedEof.into(),
                });
            }
            if count == 0 {
                return Ok(self.check_size(received.have)?);
            }
            let bytes = &buffer[..count];
            if bytes.len() as u64 > size - received.have {
                return Err(self.wrong_size(received.have + bytes.len() as u64).into());
            }
            self.keep(bytes, received)?;
        }
    }

    fn keep(&self, bytes: &[u8], received: &mut Received) -> Result<(), Error> {
        received.hasher.update(bytes);
        received
            .to
            .append(bytes)
            .map_err(|source| self.target_failed(source))?;
        received.have += bytes.len() as u64;
        let new = received.have.saturating_sub(received.reported);
        received.reported += new;
        Ok((self.watch)(new)?)
    }

    fn check_size(&self, found: u64) -> Result<(), Error> {
        if found == self.descriptor.size {
            Ok(())
        } else {
            Err(self.wrong_size(found))
        }
    }

    fn wrong_size(&self, found: u64) -> Error {
        Error::WrongSize {
            what: self.what(),
            expected: self.descriptor.size,
            found,
        }
    }

    fn target_failed(&self, source: io::Error) -> Error {
        Error::io("write", self.what(), source)
    }

    fn what(&self) -> String {
        format!("blob {}", self.descriptor.digest)
    }
}
