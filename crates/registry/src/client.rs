//! A registry, and the small requests: manifests, and whether a blob is there.

use std::fmt;
use std::time::Instant;

use ureq::http::header::{ACCEPT, CONTENT_TYPE};
use ureq::http::{HeaderName, Method, StatusCode};

use crate::auth::{Auth, Scope, authorised};
use crate::document::{DOCUMENT_MAX, media};
use crate::patience::Patience;
use crate::reference::{is_registry, is_repository};
use crate::url::{Origin, Url, is_loopback};
use crate::wire::{Answer, Ask, Fault, Wire};
use crate::{Access, Digest, Error, GivenUp, Protocol, Reference, Watch};

const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");

/// One registry and our standing with it. It may be shared by many threads.
#[derive(Debug)]
pub struct Client {
    registry: String,
    base: Url,
    pub(crate) origin: Origin,
    pub(crate) auth: Auth,
    pub(crate) wire: Wire,
}

/// A manifest or an index as the registry keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    pub digest: Digest,
    pub media_type: String,
    pub bytes: Vec<u8>,
}

/// What the headers say of a document.
struct Heading {
    media_type: Option<String>,
    digest: Option<Digest>,
}

impl Client {
    /// Prepares to talk to `host[:port]`. Nothing is sent yet.
    pub fn new(registry: &str, access: Access) -> Result<Self, Error> {
        if !is_registry(registry) {
            return Err(Error::reference(registry, "its host is not one"));
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
        let (origin, registry) = (base.origin(), registry.to_owned());
        Ok(Self {
            registry,
            base,
            origin,
            auth: Auth::new(access.credentials),
            wire,
        })
    }

    /// `host[:port]`.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Ends what other threads have under way, also where they wait for a byte that does not come.
    /// No request is made after this one.
    pub fn give_up(&self) {
        self.wire.give_up();
    }

    /// What requests without progress of their own are watched by.
    pub(crate) fn wanted(&self) -> impl Fn(u64) -> Result<(), GivenUp> + Sync {
        |_| self.wire.wanted()
    }

    /// Fetches the document a reference names. Its digest is the reference's, or the one the
    /// registry says, or what the bytes have.
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

    /// A document and what is said of it. A body that breaks off is asked for again.
    fn document(&self, ask: &Ask, scope: &Scope, what: &str) -> Result<(Heading, Vec<u8>), Error> {
        let watch = self.wanted();
        let mut patience = Patience::new(&self.wire.limits, &watch);
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
            if matches!(fault, Fault::Final(_)) || Instant::now() >= end || !patience.again()? {
                return Err(fault.after(patience.tries()));
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
        self.has_blob_as(repository, digest, &Scope::pull(repository), &self.wanted())
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
            "it is of another registry than the one asked",
        ))
    }

    /// An address below a repository.
    pub(crate) fn url(&self, repository: &str, rest: &str) -> Result<Url, Error> {
        if !is_repository(repository) {
            return Err(Error::reference(repository, "this is no repository"));
        }
        self.base
            .join(&format!("/v2/{repository}/{rest}"))
            .map_err(|rule| Error::reference(repository, rule))
    }

    /// Asks with credentials and patience.
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
        let answer = self.send(ask, scope, &self.wanted())?;
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

/// The digest that the registry says the content has. Another algorithm than ours proves nothing
/// here.
fn digest_header(answer: &Answer) -> Result<Option<Digest>, Error> {
    match answer.header(&CONTENT_DIGEST) {
        Some(text) if text.starts_with("sha256:") => text.parse().map(Some),
        _ => Ok(None),
    }
}

/// The media type of a document: what the header says, or, if that is no kind of ours, what the
/// document says.
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
            media_type: crate::error::cleaned(header),
        }),
    }
}
