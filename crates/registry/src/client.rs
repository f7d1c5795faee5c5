//! A registry, and the small requests: manifests, and whether a blob exists.

use std::fmt;
use std::time::Instant;

use ureq::http::header::{ACCEPT, CONTENT_TYPE};
use ureq::http::{HeaderName, Method, StatusCode};

use crate::access::{Access, Protocol};
use crate::auth::{Auth, Scope, authorised};
use crate::digest::Digest;
use crate::document::{DOCUMENT_MAX, media};
use crate::error::Error;
use crate::reference::{Reference, is_registry, is_repository};
use crate::retry::Retry;
use crate::text::cleaned;
use crate::url::{Origin, Url, is_loopback};
use crate::watch::{Cancelled, Watch};
use crate::wire::{Answer, Ask, Fault, Wire};

const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");

/// A registry, with our credentials for it. Many threads may share it.
#[derive(Debug)]
pub struct Client {
    registry: String,
    base: Url,
    pub(crate) origin: Origin,
    pub(crate) auth: Auth,
    pub(crate) wire: Wire,
}

/// A manifest or an index, byte for byte as the registry keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    pub digest: Digest,
    pub media_type: String,
    pub bytes: Vec<u8>,
}

/// The headers of a document.
struct Heading {
    media_type: Option<String>,
    digest: Option<Digest>,
}

impl Client {
    /// A client of the registry at `host[:port]`. It sends nothing yet.
    pub fn new(registry: &str, access: Access) -> Result<Self, Error> {
        if !is_registry(registry) {
            return Err(Error::reference(registry, "its host is invalid"));
        }
        let plain = match access.protocol {
            Protocol::ByHost => is_loopback(registry) && access.ca.is_none(),
            Protocol::Http => true,
            Protocol::Https => false,
        };
        let scheme = if plain { "http" } else { "https" };
        let base = Url::parse(&format!("{scheme}://{registry}/v2/"))
            .map_err(|rule| Error::reference(registry, rule))?;
        let wire = Wire::new(&access, base.origin().secure)?;
        Ok(Self {
            registry: registry.to_owned(),
            origin: base.origin(),
            base,
            auth: Auth::new(access.credentials),
            wire,
        })
    }

    /// `host[:port]`.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Ends the requests of all threads, including those that wait for a byte. Later requests fail
    /// at once.
    pub fn cancel(&self) {
        self.wire.cancel();
    }

    /// The watch of requests that report no progress.
    pub(crate) fn watch(&self) -> impl Fn(u64) -> Result<(), Cancelled> + Sync {
        |_| self.wire.check_cancelled()
    }

    /// Fetches the document that a reference names. Its digest must be the reference's and the one
    /// that the registry states, as far as they exist.
    pub fn manifest(&self, reference: &Reference) -> Result<Fetched, Error> {
        self.is_ours(reference)?;
        let url = self.url(
            &reference.repository,
            &format!("manifests/{}", reference.selector()?),
        )?;
        let ask = Ask::new(Method::GET, url).header(ACCEPT, media::ACCEPTED.join(", "));
        let what = format!("manifest {reference}");
        let scope = Scope::pull(&reference.repository);
        let (heading, bytes) = self.document(&ask, &scope, &what)?;
        let digest = Digest::of(&bytes);
        for expected in reference.digest.into_iter().chain(heading.digest) {
            if expected != digest {
                return Err(Error::WrongDigest {
                    what,
                    expected,
                    found: digest,
                });
            }
        }
        Ok(Fetched {
            digest,
            media_type: media_type_of(heading.media_type.as_deref(), &bytes)?,
            bytes,
        })
    }

    /// Fetches a document with its headers. A body that breaks off is requested again.
    fn document(&self, ask: &Ask, scope: &Scope, what: &str) -> Result<(Heading, Vec<u8>), Error> {
        let watch = self.watch();
        let mut retry = Retry::new(&self.wire.limits, &watch);
        let end = Instant::now() + self.wire.limits.document;
        loop {
            let answer = self.expect(ask, scope, &[StatusCode::OK], what)?;
            let media_type = answer.header(&CONTENT_TYPE).map(str::to_owned);
            let heading = Heading {
                media_type,
                digest: digest_header(&answer)?,
            };
            let fault = match answer.read_until(end, what, DOCUMENT_MAX) {
                Ok(bytes) => return Ok((heading, bytes)),
                Err(fault) => fault,
            };
            if matches!(fault, Fault::Final(_)) || Instant::now() >= end || !retry.again()? {
                return Err(fault.after(retry.tries()));
            }
        }
    }

    /// Stores a document under the reference's digest or tag.
    pub fn push_manifest(
        &self,
        reference: &Reference,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Digest, Error> {
        self.is_ours(reference)?;
        let what = format!("manifest {reference}");
        let digest = Digest::of(bytes);
        if let Some(expected) = reference.digest.filter(|expected| *expected != digest) {
            return Err(Error::WrongDigest {
                what,
                expected,
                found: digest,
            });
        }
        let url = self.url(
            &reference.repository,
            &format!("manifests/{}", reference.selector()?),
        )?;
        let ask = Ask {
            body: bytes.to_vec(),
            ..Ask::new(Method::PUT, url).header(CONTENT_TYPE, media_type)
        };
        let taken = [
            StatusCode::CREATED,
            StatusCode::OK,
            StatusCode::ACCEPTED,
            StatusCode::NO_CONTENT,
        ];
        let answer = self.expect(&ask, &Scope::push(&reference.repository), &taken, &what)?;
        match digest_header(&answer)?.filter(|found| *found != digest) {
            Some(found) => Err(Error::WrongDigest {
                what,
                expected: digest,
                found,
            }),
            None => Ok(digest),
        }
    }

    /// Whether the repository holds this blob.
    pub fn has_blob(&self, repository: &str, digest: &Digest) -> Result<bool, Error> {
        self.has_blob_as(repository, digest, &Scope::pull(repository), &self.watch())
    }

    pub(crate) fn has_blob_as(
        &self,
        repository: &str,
        digest: &Digest,
        scope: &Scope,
        watch: Watch,
    ) -> Result<bool, Error> {
        let ask = Ask::new(
            Method::HEAD,
            self.url(repository, &format!("blobs/{digest}"))?,
        );
        let answer = self.send(&ask, scope, watch)?;
        match answer.status() {
            StatusCode::OK => Ok(true),
            StatusCode::NOT_FOUND => Ok(false),
            _ => Err(answer.refusal(&format!("blob {digest}"))),
        }
    }

    fn is_ours(&self, reference: &Reference) -> Result<(), Error> {
        if reference.registry == self.registry {
            return Ok(());
        }
        Err(Error::reference(
            &reference.to_string(),
            "it belongs to another registry",
        ))
    }

    /// An address below a repository.
    pub(crate) fn url(&self, repository: &str, rest: &str) -> Result<Url, Error> {
        if !is_repository(repository) {
            return Err(Error::reference(repository, "it is not a repository"));
        }
        self.base
            .join(&format!("/v2/{repository}/{rest}"))
            .map_err(|rule| Error::reference(repository, rule))
    }

    /// Sends a request with credentials and retries.
    pub(crate) fn send(&self, ask: &Ask, scope: &Scope, watch: Watch) -> Result<Answer, Error> {
        authorised(
            &self.auth,
            &self.wire,
            (&self.origin, scope),
            watch,
            |header| self.wire.follow(ask, header),
        )
    }

    fn expect(
        &self,
        ask: &Ask,
        scope: &Scope,
        statuses: &[StatusCode],
        what: &str,
    ) -> Result<Answer, Error> {
        let answer = self.send(ask, scope, &self.watch())?;
        if statuses.contains(&answer.status()) {
            Ok(answer)
        } else {
            Err(answer.refusal(what))
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.registry)
    }
}

/// The digest that the registry states. Digests of other algorithms than ours are ignored.
fn digest_header(answer: &Answer) -> Result<Option<Digest>, Error> {
    match answer.header(&CONTENT_DIGEST) {
        Some(text) if text.starts_with("sha256:") => Ok(Some(text.parse()?)),
        _ => Ok(None),
    }
}

/// The media type of a document: the header's, or, if we do not know that one, the document's
/// own.
fn media_type_of(header: Option<&str>, bytes: &[u8]) -> Result<String, Error> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Own {
        media_type: Option<String>,
    }
    let header = header.map(media::essence).unwrap_or_default();
    if media::ACCEPTED.contains(&header) {
        return Ok(header.to_owned());
    }
    let own = serde_json::from_slice::<Own>(bytes)
        .ok()
        .and_then(|own| own.media_type);
    match own {
        Some(own)
            if media::ACCEPTED.contains(&own.as_str())
                && !header.starts_with("application/vnd.") =>
        {
            Ok(own)
        }
        _ => Err(Error::UnknownMediaType {
            media_type: cleaned(header),
        }),
    }
}
