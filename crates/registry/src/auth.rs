//! Authentication: the `Authorization` header of a request, and the answer to a 401.
//!
//! Tokens are kept by scope until shortly before they expire. A token endpoint must use https
//! unless the registry itself uses http.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use ureq::http::header::{CONTENT_TYPE, WWW_AUTHENTICATE};
use ureq::http::{HeaderValue, Method, StatusCode};

use crate::access::{Credentials, Secret};
use crate::challenge::Challenge;
use crate::error::{Error, Said};
use crate::retry::Retry;
use crate::url::{Origin, Url, escaped};
use crate::watch::Watch;
use crate::wire::{Answer, Ask, Authorization, Fault, Wire};

const TOKEN_MAX: usize = 256 << 10;
/// The lifetime of a token without one, by the specification.
const LIFE_DEFAULT_S: u64 = 60;
const LIFE_MAX_S: u64 = 24 * 3600;
/// A token is not used in its last moments, so that it does not expire during a request.
const MARGIN: Duration = Duration::from_secs(5);

/// What a request needs to be allowed to do.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Scope {
    repository: String,
    actions: &'static str,
}

impl Scope {
    pub(crate) fn pull(repository: &str) -> Self {
        Self {
            repository: repository.to_owned(),
            actions: "pull",
        }
    }

    pub(crate) fn push(repository: &str) -> Self {
        Self {
            repository: repository.to_owned(),
            actions: "pull,push",
        }
    }

    /// Our scope in the registry's syntax, together with the scope that the registry asked for,
    /// which may allow less than later requests need.
    fn words(&self, asked: Option<&str>) -> BTreeSet<String> {
        let own = format!("repository:{}:{}", self.repository, self.actions);
        let asked = asked
            .into_iter()
            .flat_map(str::split_whitespace)
            .map(str::to_owned);
        asked.chain([own]).collect()
    }
}

/// The credentials, and the tokens received for them so far.
pub(crate) struct Auth {
    credentials: Credentials,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// The registry asks for user name and password, not for a token.
    basic: bool,
    tokens: BTreeMap<Scope, Token>,
}

struct Token {
    value: Secret,
    expires: Instant,
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Auth")
            .field("credentials", &self.credentials)
            .finish_non_exhaustive()
    }
}

impl Auth {
    pub(crate) fn new(credentials: Credentials) -> Self {
        Self {
            credentials,
            known: Mutex::default(),
        }
    }

    /// The header for a request, as far as it is known.
    pub(crate) fn header(&self, scope: &Scope) -> Option<HeaderValue> {
        if let Credentials::Bearer(token) = &self.credentials {
            return secret_header("Bearer", token.expose());
        }
        let known = self.known();
        if known.basic {
            return self.basic();
        }
        let token = known.tokens.get(scope).filter(|token| token.is_fresh())?;
        secret_header("Bearer", token.value.expose())
    }

    /// Whether there is a token, and it has expired or is about to.
    pub(crate) fn is_stale(&self, scope: &Scope) -> bool {
        self.known()
            .tokens
            .get(scope)
            .is_some_and(|token| !token.is_fresh())
    }

    /// Answers a 401: gets what it asks for, so that the next try can send it.
    pub(crate) fn answer(
        &self,
        refused: Answer,
        scope: &Scope,
        wire: &Wire,
        watch: Watch,
    ) -> Result<(), Error> {
        self.renew(refused, scope, wire, watch)
            .map_err(|error| match error {
                Error::Unauthorized { .. } => self.helper_failure().unwrap_or(error),
                error => error,
            })
    }

    /// The failure of the credential helper, if that is why there are no credentials.
    fn helper_failure(&self) -> Option<Error> {
        match &self.credentials {
            Credentials::HelperFailed { helper, rule } => Some(Error::Helper {
                helper: helper.clone(),
                rule: rule.clone(),
            }),
            _ => None,
        }
    }

    fn renew(
        &self,
        refused: Answer,
        scope: &Scope,
        wire: &Wire,
        watch: Watch,
    ) -> Result<(), Error> {
        let headers = refused.response.headers().get_all(WWW_AUTHENTICATE);
        let challenge = Challenge::best(headers.iter().filter_map(|value| value.to_str().ok()));
        match (challenge, &self.credentials) {
            (Some(Challenge::Basic), Credentials::Basic { .. }) => {
                self.known().basic = true;
                Ok(())
            }
            (
                Some(Challenge::Bearer {
                    realm,
                    service,
                    scope: asked,
                }),
                _,
            ) if !matches!(self.credentials, Credentials::Bearer(_)) => {
                let request = TokenRequest {
                    realm: realm_url(&refused.url, &realm)?,
                    service,
                    scope: scope.words(asked.as_deref()),
                };
                let token = self.fetch(&request, &refused.url, wire, watch)?;
                self.known().tokens.insert(scope.clone(), token);
                Ok(())
            }
            _ => Err(refused.refusal("answer")),
        }
    }

    fn fetch(
        &self,
        request: &TokenRequest,
        registry: &Url,
        wire: &Wire,
        watch: Watch,
    ) -> Result<Token, Error> {
        let ask = request.ask(&self.credentials)?;
        let origin = ask.url.origin();
        let authorization = Authorization {
            origin: &origin,
            value: self.basic(),
        };
        let mut retry = Retry::new(&wire.limits, watch);
        let answer = wire.with_retries(&mut retry, || wire.follow(&ask, &authorization))?;
        let refused = [
            StatusCode::BAD_REQUEST,
            StatusCode::UNAUTHORIZED,
            StatusCode::FORBIDDEN,
        ];
        if refused.contains(&answer.status()) {
            return Err(Error::Unauthorized {
                registry: registry.host(),
                said: Said::default(),
            });
        }
        if answer.status() != StatusCode::OK {
            return Err(answer.refusal("token"));
        }
        let body = answer
            .read("a token", TOKEN_MAX)
            .map_err(|fault| fault.after(1))?;
        Token::read(&body).ok_or_else(|| Error::Protocol {
            url: ask.url.to_string(),
            rule: "its answer is not a token",
        })
    }

    fn basic(&self) -> Option<HeaderValue> {
        let Credentials::Basic { username, password } = &self.credentials else {
            return None;
        };
        secret_header(
            "Basic",
            &BASE64_STANDARD.encode(format!("{username}:{}", password.expose())),
        )
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Nothing panics while it holds the lock, and what is behind it is only a cache.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request to a token endpoint.
struct TokenRequest {
    realm: Url,
    service: Option<String>,
    scope: BTreeSet<String>,
}

impl TokenRequest {
    fn ask(&self, credentials: &Credentials) -> Result<Ask, Error> {
        let mut fields = Vec::new();
        fields.extend(
            self.service
                .iter()
                .map(|service| ("service", service.as_str())),
        );
        let Credentials::Token(refresh) = credentials else {
            fields.extend(self.scope.iter().map(|scope| ("scope", scope.as_str())));
            return Ok(Ask::new(Method::GET, self.with_query(&fields)?));
        };
        let scope = self
            .scope
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join(" ");
        fields.extend([
            ("grant_type", "refresh_token"),
            ("client_id", "sandtree"),
            ("scope", &scope),
        ]);
        fields.push(("refresh_token", refresh.expose()));
        let form = fields
            .iter()
            .map(|(name, value)| format!("{name}={}", escaped(value)))
            .collect::<Vec<_>>()
            .join("&");
        let ask = Ask::new(Method::POST, self.realm.clone())
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        Ok(Ask {
            body: form.into_bytes(),
            ..ask
        })
    }

    fn with_query(&self, fields: &[(&str, &str)]) -> Result<Url, Error> {
        let add = |url: Url, (name, value): &(&str, &str)| url.with_query(name, &escaped(value));
        let url = fields.iter().try_fold(self.realm.clone(), add);
        url.map_err(|rule| Error::Protocol {
            url: self.realm.to_string(),
            rule,
        })
    }
}

fn realm_url(registry: &Url, realm: &str) -> Result<Url, Error> {
    let refuse = |rule| Error::Protocol {
        url: registry.to_string(),
        rule,
    };
    let url =
        Url::parse(realm).map_err(|_| refuse("the token endpoint it names is not an address"))?;
    if registry.origin().secure && !url.origin().secure {
        return Err(refuse("the token endpoint it names does not use https"));
    }
    Ok(url)
}

impl Token {
    fn is_fresh(&self) -> bool {
        Instant::now() + MARGIN < self.expires
    }

    fn read(body: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Wire {
            token: Option<String>,
            access_token: Option<String>,
            expires_in: Option<u64>,
        }
        let wire: Wire = serde_json::from_slice(body).ok()?;
        let value = wire
            .token
            .filter(|token| !token.is_empty())
            .or(wire.access_token)?;
        let visible = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_graphic());
        let life_s = wire
            .expires_in
            .unwrap_or(LIFE_DEFAULT_S)
            .clamp(LIFE_DEFAULT_S, LIFE_MAX_S);
        let expires = Instant::now() + Duration::from_secs(life_s);
        visible.then(|| Self {
            value: Secret::new(value),
            expires,
        })
    }
}

/// A header whose value the HTTP client does not show in `Debug`.
fn secret_header(scheme: &str, value: &str) -> Option<HeaderValue> {
    let mut header = HeaderValue::from_str(&format!("{scheme} {value}")).ok()?;
    header.set_sensitive(true);
    Some(header)
}

/// Runs one request. A 401 is answered once, with a new token; a second one is returned.
pub(crate) fn authorised(
    auth: &Auth,
    wire: &Wire,
    (origin, scope): (&Origin, &Scope),
    watch: Watch,
    mut attempt: impl FnMut(&Authorization) -> Result<Answer, Fault>,
) -> Result<Answer, Error> {
    let mut retry = Retry::new(&wire.limits, watch);
    let mut answered = false;
    loop {
        let authorization = Authorization {
            origin,
            value: auth.header(scope),
        };
        let answer = wire.with_retries(&mut retry, || attempt(&authorization))?;
        let from_registry = answer.url.origin() == *origin;
        if answer.status() != StatusCode::UNAUTHORIZED || !from_registry {
            return Ok(answer);
        }
        if answered {
            return auth.helper_failure().map_or(Ok(answer), Err);
        }
        auth.answer(answer, scope, wire, watch)?;
        answered = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_strictly() {
        assert!(Token::read(br#"{"token":"abc","expires_in":300}"#).is_some());
        assert!(Token::read(br#"{"access_token":"abc"}"#).is_some());
        for body in [
            &b""[..],
            b"{}",
            br#"{"token":""}"#,
            br#"{"token":"a b"}"#,
            br#"{"token":"a\r\nX: y"}"#,
            b"[]",
        ] {
            assert!(Token::read(body).is_none());
        }
    }

    #[test]
    fn a_token_is_requested_for_all_later_requests() {
        let words = Scope::push("a").words(Some("repository:a:pull other"));
        assert_eq!(
            Vec::from_iter(words),
            ["other", "repository:a:pull", "repository:a:pull,push"]
        );
    }

    #[test]
    fn a_token_in_its_last_moments_is_stale() {
        let auth = Auth::new(Credentials::Anonymous);
        let scope = Scope::push("a");
        assert!(!auth.is_stale(&scope), "none was needed yet");
        for (left_s, stale) in [(60, false), (1, true)] {
            let expires = Instant::now() + Duration::from_secs(left_s);
            auth.known().tokens.insert(
                scope.clone(),
                Token {
                    value: Secret::new("t"),
                    expires,
                },
            );
            assert_eq!(
                (auth.is_stale(&scope), auth.header(&scope).is_none()),
                (stale, stale)
            );
        }
    }

    #[test]
    fn a_token_endpoint_uses_https_if_its_registry_does() {
        let https = Url::parse("https://r.example/v2/").unwrap();
        let http = Url::parse("http://r.example/v2/").unwrap();
        assert!(realm_url(&https, "http://a.example/token").is_err());
        assert!(realm_url(&https, "https://a.example/token").is_ok());
        assert!(realm_url(&http, "http://a.example/token").is_ok());
        assert!(realm_url(&http, "/token").is_err());
    }

    #[test]
    fn secrets_are_never_shown() {
        let credentials = Credentials::Basic {
            username: "me".into(),
            password: Secret::new("s3cret"),
        };
        let auth = Auth::new(credentials);
        auth.known().basic = true;
        let header = auth.header(&Scope::pull("a")).unwrap();
        let shown = format!("{auth:?} {header:?}");
        assert!(
            !shown.contains("s3cret") && !shown.contains("bWU6"),
            "{shown}"
        );
    }
}
