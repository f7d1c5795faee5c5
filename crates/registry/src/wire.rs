//! HTTP requests and answers: the client, its limits, redirects, and what a failure means.
//!
//! Always: at most [`REDIRECTS_MAX`] redirects are followed, none from https to http, and only for
//! requests that read. An `Authorization` is sent only to the origin it was made for. Bodies are
//! read as they were sent, because no compression is requested.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use rustls::crypto::ring;
use ureq::http::header::{AUTHORIZATION, CONTENT_LENGTH, LOCATION, RETRY_AFTER};
use ureq::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, SendBody};

use crate::access::{Access, Limits};
use crate::error::{Error, Said};
use crate::file::read_bounded;
use crate::retry::{Retry, retry_after};
use crate::url::{Origin, Url};
use crate::watch::Cancelled;

const REDIRECTS_MAX: usize = 10;
const HEADERS_MAX: usize = 64 << 10;
const BUFFER: usize = 256 << 10;
/// The least that must arrive within the time after which a connection counts as stalled.
const PACE_MIN: usize = 16 << 10;
const SAID_MAX: usize = 64 << 10;
const CA_MAX: u64 = 4 << 20;

/// A request whose body, if it has one, can be sent again.
pub(crate) struct Ask {
    pub(crate) method: Method,
    pub(crate) url: Url,
    pub(crate) headers: Vec<(HeaderName, String)>,
    pub(crate) body: Vec<u8>,
    /// How long the answer may take. `None`: as long as usual.
    pub(crate) answer_in: Option<Duration>,
}

impl Ask {
    pub(crate) fn new(method: Method, url: Url) -> Self {
        Self {
            method,
            url,
            headers: Vec::new(),
            body: Vec::new(),
            answer_in: None,
        }
    }

    pub(crate) fn header(mut self, name: HeaderName, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    fn reads(&self) -> bool {
        self.method == Method::GET || self.method == Method::HEAD
    }
}

/// An answer, and the address that it came from after all redirects.
pub(crate) struct Answer {
    pub(crate) url: Url,
    pub(crate) response: Response<Body>,
    /// The time within which at least [`PACE_MIN`] bytes must arrive.
    stalled: Duration,
    /// The time within which all of a document must arrive.
    document: Duration,
}

impl Answer {
    pub(crate) fn status(&self) -> StatusCode {
        self.response.status()
    }

    pub(crate) fn header(&self, name: &HeaderName) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }

    /// The length of the body, if the headers state it.
    pub(crate) fn length(&self) -> Option<u64> {
        self.header(&CONTENT_LENGTH)?.parse().ok()
    }

    /// Where the `Location` leads.
    pub(crate) fn location(&self) -> Result<Url, Error> {
        let url = self.url.to_string();
        let Some(location) = self.header(&LOCATION) else {
            return Err(Error::Protocol {
                url,
                rule: "a Location is missing",
            });
        };
        self.url
            .join(location)
            .map_err(|rule| Error::Redirects { url, rule })
    }

    /// The body. Reading fails if it arrives too slowly.
    pub(crate) fn body(self) -> impl Read {
        self.paced(None)
    }

    fn paced(self, end: Option<Instant>) -> impl Read {
        Paced {
            stalled: self.stalled,
            since: Instant::now(),
            body: self.response.into_body().into_reader(),
            bytes: 0,
            end,
        }
    }

    /// The whole body. A body over the limit is refused.
    pub(crate) fn read(self, what: &str, limit: usize) -> Result<Vec<u8>, Fault> {
        let end = Instant::now() + self.document;
        self.read_until(end, what, limit)
    }

    pub(crate) fn read_until(
        self,
        end: Instant,
        what: &str,
        limit: usize,
    ) -> Result<Vec<u8>, Fault> {
        let too_large = || Error::TooLarge {
            what: what.to_owned(),
            limit_bytes: limit as u64,
        };
        if self.length().is_some_and(|length| length > limit as u64) {
            return Err(Fault::Final(too_large()));
        }
        let mut bytes = Vec::new();
        let url = self.url.clone();
        let mut body = self.paced(Some(end)).take(limit as u64 + 1);
        body.read_to_end(&mut bytes)
            .map_err(|source| Fault::Lost { url, source })?;
        if bytes.len() > limit {
            Err(Fault::Final(too_large()))
        } else {
            Ok(bytes)
        }
    }

    /// The error for an answer with this status.
    pub(crate) fn refusal(self, what: &str) -> Error {
        let status = self.status();
        let url = self.url.to_string();
        let registry = self.url.host();
        let said = self
            .read("an error", SAID_MAX)
            .map(|body| Said::read(&body))
            .unwrap_or_default();
        match status {
            StatusCode::UNAUTHORIZED => Error::Unauthorized { registry, said },
            StatusCode::FORBIDDEN => Error::Denied { registry, said },
            StatusCode::NOT_FOUND => Error::NotFound {
                what: what.to_owned(),
                said,
            },
            StatusCode::TOO_MANY_REQUESTS => Error::TooManyRequests {
                registry,
                waited_s: 0,
            },
            status => Error::Registry {
                url,
                status: status.as_u16(),
                said,
            },
        }
    }
}

/// A body that must arrive at a minimum speed. Each read has a limit in time as well, but single
/// bytes now and then would satisfy that.
struct Paced<R> {
    body: R,
    stalled: Duration,
    since: Instant,
    bytes: usize,
    /// When all of it must have arrived.
    end: Option<Instant>,
}

impl<R: Read> Read for Paced<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.body.read(buffer)?;
        self.bytes += count;
        if count > 0 && self.end.is_some_and(|end| Instant::now() >= end) {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the content takes too long",
            ));
        }
        if self.since.elapsed() >= self.stalled {
            if count > 0 && self.bytes < PACE_MIN {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the content arrives too slowly",
                ));
            }
            self.since = Instant::now();
            self.bytes = 0;
        }
        Ok(count)
    }
}

/// Why a request has no answer.
#[derive(Debug)]
pub(crate) enum Fault {
    /// Another try may help.
    Lost {
        url: Url,
        source: io::Error,
    },
    Final(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

impl Fault {
    /// The error after so many tries.
    pub(crate) fn after(self, tries: u32) -> Error {
        match self {
            Self::Lost { url, source } => Error::ConnectionLost {
                url: url.to_string(),
                tries,
                source,
            },
            Self::Final(error) => error,
        }
    }

    fn of(url: &Url, error: ureq::Error) -> Self {
        let shown = url.to_string();
        match error {
            ureq::Error::LargeResponseHeader(..) => Error::TooLarge {
                what: format!("the header from {shown}"),
                limit_bytes: HEADERS_MAX as u64,
            }
            .into(),
            ureq::Error::Protocol(_) | ureq::Error::Http(_) | ureq::Error::BadUri(_) => {
                Error::Protocol {
                    url: shown,
                    rule: "its answer is not HTTP",
                }
                .into()
            }
            ureq::Error::HostNotFound => {
                let source = io::Error::new(io::ErrorKind::NotFound, "the host is unknown");
                Error::ConnectionLost {
                    url: shown,
                    tries: 1,
                    source,
                }
                .into()
            }
            error if is_tls(&error) => Error::Tls {
                url: shown,
                source: error.into_io(),
            }
            .into(),
            error => Self::Lost {
                url: url.clone(),
                source: error.into_io(),
            },
        }
    }
}

fn is_tls(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::TlsRequired => true,
        ureq::Error::Io(error) => error
            .get_ref()
            .is_some_and(|inner| inner.is::<rustls::Error>()),
        _ => false,
    }
}

/// The HTTP client.
#[derive(Debug)]
pub(crate) struct Wire {
    plain: Agent,
    /// Made when it is needed, because it reads certificates.
    secure: OnceLock<Agent>,
    ca: Option<PathBuf>,
    user_agent: String,
    cancelled: AtomicBool,
    pub(crate) limits: Limits,
}

/// A header that is sent to one origin only.
pub(crate) struct Authorization<'a> {
    pub(crate) origin: &'a Origin,
    pub(crate) value: Option<HeaderValue>,
}

impl Wire {
    /// Fails at once if certificates will be needed and cannot be used.
    pub(crate) fn new(access: &Access, secure: bool) -> Result<Self, Error> {
        let user_agent = printable(&access.user_agent);
        let wire = Self {
            plain: agent(&access.limits, &user_agent, TlsConfig::default()),
            secure: OnceLock::new(),
            ca: access.ca.clone(),
            user_agent,
            cancelled: AtomicBool::new(false),
            limits: access.limits.clone(),
        };
        if secure {
            wire.agent(true)?;
        }
        Ok(wire)
    }

    fn agent(&self, secure: bool) -> Result<&Agent, Error> {
        if !secure {
            return Ok(&self.plain);
        }
        if let Some(agent) = self.secure.get() {
            return Ok(agent);
        }
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::Specific(Arc::new(roots(self.ca.as_deref())?)))
            .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()))
            .build();
        Ok(self
            .secure
            .get_or_init(|| agent(&self.limits, &self.user_agent, tls)))
    }

    /// Ends every request, and makes later ones fail.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        self.plain.clone().shutdown();
        if let Some(agent) = self.secure.get() {
            agent.clone().shutdown();
        }
    }

    pub(crate) fn check_cancelled(&self) -> Result<(), Cancelled> {
        if self.cancelled.load(Ordering::SeqCst) {
            Err(Cancelled)
        } else {
            Ok(())
        }
    }

    /// Sends a request and follows redirects.
    pub(crate) fn follow(&self, ask: &Ask, authorization: &Authorization) -> Result<Answer, Fault> {
        let mut url = ask.url.clone();
        for _ in 0..=REDIRECTS_MAX {
            let body = if ask.reads() {
                SendBody::none()
            } else {
                SendBody::from_owned_reader(io::Cursor::new(ask.body.clone()))
            };
            let answer = self.exchange(ask, &url, authorization, body)?;
            if !answer.status().is_redirection() {
                return Ok(answer);
            }
            if !ask.reads() {
                return Err(Error::Redirects {
                    url: url.to_string(),
                    rule: "the request writes",
                }
                .into());
            }
            url = answer.location()?;
        }
        Err(Error::Redirects {
            url: ask.url.to_string(),
            rule: "more than 10 times",
        }
        .into())
    }

    /// Sends one request with a body of the length that its headers state.
    pub(crate) fn stream(
        &self,
        ask: &Ask,
        authorization: &Authorization,
        body: &mut dyn Read,
    ) -> Result<Answer, Fault> {
        self.exchange(ask, &ask.url, authorization, SendBody::from_reader(body))
    }

    fn exchange(
        &self,
        ask: &Ask,
        url: &Url,
        authorization: &Authorization,
        body: SendBody,
    ) -> Result<Answer, Fault> {
        let mut request = Request::builder().method(&ask.method).uri(url.uri());
        for (name, value) in &ask.headers {
            request = request.header(name, value);
        }
        if !ask.reads() && !ask.headers.iter().any(|(name, _)| *name == CONTENT_LENGTH) {
            request = request.header(CONTENT_LENGTH, ask.body.len());
        }
        if let Some(value) = authorization
            .value
            .as_ref()
            .filter(|_| *authorization.origin == url.origin())
        {
            request = request.header(AUTHORIZATION, value);
        }
        let request = request
            .body(body)
            .map_err(|error| Fault::of(url, error.into()))?;
        let agent = self.agent(url.origin().secure)?;
        let stalled = self.limits.stalled;
        let answer_in = Some(ask.answer_in.unwrap_or(stalled));
        let request = agent
            .configure_request(request)
            .timeout_recv_response(answer_in)
            .timeout_per_read(answer_in)
            .build();
        self.check_cancelled().map_err(Error::from)?;
        let response = agent.run(request).map_err(|error| Fault::of(url, error))?;
        Ok(Answer {
            url: url.clone(),
            response,
            stalled,
            document: self.limits.document,
        })
    }

    /// Retries until there is an answer that another try would not change.
    pub(crate) fn with_retries(
        &self,
        retry: &mut Retry,
        mut attempt: impl FnMut() -> Result<Answer, Fault>,
    ) -> Result<Answer, Error> {
        loop {
            match attempt() {
                Ok(answer) if is_asked_to_wait(&answer) => {
                    retry.asked(&answer.url.host(), asked_wait(answer.response.headers()))?;
                }
                Ok(answer) if is_transient(answer.status()) => {
                    if !retry.again()? {
                        return Err(answer.refusal("answer"));
                    }
                }
                Ok(answer) => return Ok(answer),
                Err(_) if self.check_cancelled().is_err() => return Err(Error::Cancelled),
                Err(fault @ Fault::Lost { .. }) => {
                    if !retry.again()? {
                        return Err(fault.after(retry.tries()));
                    }
                }
                Err(Fault::Final(error)) => return Err(error),
            }
        }
    }
}

fn agent(limits: &Limits, user_agent: &str, tls: TlsConfig) -> Agent {
    let config = Agent::config_builder()
        .tls_config(tls)
        .proxy(None)
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent(user_agent)
        .max_response_header_size(HEADERS_MAX)
        .input_buffer_size(BUFFER)
        .output_buffer_size(BUFFER)
        .timeout_resolve(Some(limits.connect))
        .timeout_connect(Some(limits.connect))
        .timeout_recv_response(Some(limits.stalled))
        .timeout_per_read(Some(limits.stalled))
        .timeout_per_write(Some(limits.stalled))
        .build();
    config.new_agent()
}

pub(crate) fn is_asked_to_wait(answer: &Answer) -> bool {
    let unavailable = answer.status() == StatusCode::SERVICE_UNAVAILABLE;
    answer.status() == StatusCode::TOO_MANY_REQUESTS
        || unavailable && answer.header(&RETRY_AFTER).is_some()
}

pub(crate) fn asked_wait(headers: &HeaderMap) -> Option<Duration> {
    retry_after(headers.get(RETRY_AFTER)?.to_str().ok()?, SystemTime::now())
}

/// Whether a status means a failure that may pass.
pub(crate) fn is_transient(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 500 | 502 | 503 | 504)
}

/// Only the characters that a header may have; the HTTP client panics at others.
fn printable(text: &str) -> String {
    text.chars()
        .filter(|c| c.is_ascii_graphic() || *c == ' ')
        .collect()
}

/// The host's certificates and those in the caller's file.
fn roots(ca: Option<&Path>) -> Result<Vec<Certificate<'static>>, Error> {
    let native = rustls_native_certs::load_native_certs();
    let mut roots: Vec<_> = native
        .certs
        .iter()
        .map(|found| Certificate::from_der(found).to_owned())
        .collect();
    if let Some(path) = ca {
        roots.extend(certificates(path)?);
    }
    if roots.is_empty() {
        let source = native.errors.into_iter().next().map(io::Error::other);
        let source =
            source.unwrap_or_else(|| io::Error::new(io::ErrorKind::NotFound, "there are none"));
        return Err(Error::io("read", "the host's certificates", source));
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<Certificate<'static>>, Error> {
    let pem = read_bounded(path, CA_MAX)?;
    let certificate = |item| {
        if let Ok(PemItem::Certificate(found)) = item {
            Some(found)
        } else {
            None
        }
    };
    let found: Vec<_> = parse_pem(&pem).filter_map(certificate).collect();
    if found.is_empty() {
        return Err(Error::File {
            path: path.to_owned(),
            rule: "it holds no certificate",
        });
    }
    Ok(found)
}
