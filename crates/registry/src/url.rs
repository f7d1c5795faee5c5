//! Addresses of http and https, and where a `Location` header leads from them.

use std::fmt;
use std::net::IpAddr;

use ureq::http::Uri;
use ureq::http::uri::Scheme;

/// An address without user information. Display leaves out the query, which may hold secrets.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Url(Uri);

/// Scheme, host and port, which credentials belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) secure: bool,
    host: String,
    port: u16,
}

impl Url {
    pub(crate) fn parse(text: &str) -> Result<Self, &'static str> {
        let uri = text.parse::<Uri>().map_err(|_| "it is not an address")?;
        if uri.scheme() != Some(&Scheme::HTTP) && uri.scheme() != Some(&Scheme::HTTPS) {
            return Err("it is neither http nor https");
        }
        let authority = uri.authority().ok_or("it has no host")?;
        if authority.as_str().contains('@') || authority.host().is_empty() {
            return Err("its host is invalid");
        }
        Ok(Self(uri))
    }

    pub(crate) fn origin(&self) -> Origin {
        let secure = self.0.scheme() == Some(&Scheme::HTTPS);
        let host = self.0.host().unwrap_or_default().to_ascii_lowercase();
        Origin {
            secure,
            host,
            port: self.0.port_u16().unwrap_or(if secure { 443 } else { 80 }),
        }
    }

    /// Where a `Location` leads from here. A step from https to http is refused.
    pub(crate) fn join(&self, location: &str) -> Result<Self, &'static str> {
        let joined = Self::parse(&self.absolute(location))?;
        if self.origin().secure && !joined.origin().secure {
            return Err("from https to http");
        }
        Ok(joined)
    }

    fn absolute(&self, location: &str) -> String {
        let scheme = self.0.scheme_str().unwrap_or("https");
        let authority = self
            .0
            .authority()
            .map_or("", |authority| authority.as_str());
        let path = self.0.path();
        if location.contains("://") && !location.starts_with(['/', '?']) {
            location.to_owned()
        } else if location.starts_with("//") {
            format!("{scheme}:{location}")
        } else if location.starts_with('/') {
            format!("{scheme}://{authority}{location}")
        } else if location.starts_with('?') {
            format!("{scheme}://{authority}{path}{location}")
        } else {
            let directory = path.rfind('/').map_or("/", |end| &path[..=end]);
            format!("{scheme}://{authority}{directory}{location}")
        }
    }

    /// The same address with one more parameter, of which no part may need escaping.
    pub(crate) fn with_query(&self, name: &str, value: &str) -> Result<Self, &'static str> {
        let text = self.0.to_string();
        let joint = if self.0.query().is_some() { '&' } else { '?' };
        Self::parse(&format!("{text}{joint}{name}={value}"))
    }

    /// `host[:port]`, as written.
    pub(crate) fn host(&self) -> String {
        self.0
            .authority()
            .map_or_else(String::new, |authority| authority.to_string())
    }

    pub(crate) fn uri(&self) -> Uri {
        self.0.clone()
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = self.0.scheme_str().unwrap_or_default();
        let authority = self
            .0
            .authority()
            .map_or("", |authority| authority.as_str());
        write!(f, "{scheme}://{authority}{}", self.0.path())
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Whether `host[:port]` is a loopback address.
pub(crate) fn is_loopback(registry: &str) -> bool {
    let host = match registry.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => host,
        _ => registry,
    };
    let address = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// Escapes a value for a query or a form.
pub(crate) fn escaped(value: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    value
        .bytes()
        .map(|byte| {
            if plain(byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn locations_of_all_kinds_are_resolved() {
        let base = url("https://h.example:5000/v2/a/uploads/1?x=1");
        for (location, expected) in [
            ("https://o.example/p?q=2", "https://o.example/p?q=2"),
            ("//o.example/p", "https://o.example/p"),
            ("/p?u=http://x/", "https://h.example:5000/p?u=http://x/"),
            ("?y=2", "https://h.example:5000/v2/a/uploads/1?y=2"),
            ("2", "https://h.example:5000/v2/a/uploads/2"),
        ] {
            assert_eq!(base.join(location).unwrap(), url(expected), "{location}");
        }
    }

    #[test]
    fn unsafe_locations_are_refused() {
        let base = url("https://h.example/v2/");
        for location in [
            "http://h.example/",
            "file:///etc/passwd",
            "https://u:p@h.example/",
            "https:///x",
            "ftp://h/",
        ] {
            assert!(base.join(location).is_err(), "{location}");
        }
        assert!(url("http://h.example/").join("https://h.example/").is_ok());
    }

    #[test]
    fn a_query_is_never_shown() {
        assert_eq!(
            url("https://h.example/p?token=s3cret").to_string(),
            "https://h.example/p"
        );
    }

    #[test]
    fn an_origin_has_the_default_port_of_its_scheme() {
        assert_eq!(
            url("https://H.example/").origin(),
            url("https://h.example:443/x").origin()
        );
        assert_ne!(
            url("http://h.example:5000/").origin(),
            url("http://h.example:5001/").origin()
        );
    }

    #[test]
    fn loopback_addresses_are_recognized() {
        for host in [
            "localhost",
            "localhost:5000",
            "127.0.0.1",
            "127.3.2.1:80",
            "[::1]:5000",
            "[::1]",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example", "10.0.0.1", "127.0.0.1.example:5000"] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
