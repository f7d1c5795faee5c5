//! Statuses and redirects: what is tried again, what is followed, and what is not.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use sandtree_registry::{Access, Credentials, Error, Fetched, Secret, media};

use crate::scripted::{Peer, Request, Server, reply};
use crate::server::certificate;
use crate::{client, impatient, reference};

const MANIFEST: &[(&str, &str)] = &[("Content-Type", media::OCI_MANIFEST)];

fn manifest_from(server: &Server, access: Access) -> Result<Fetched, Error> {
    client(&server.host, access).manifest(&reference(&server.host, "a/b:1"))
}

fn answered(
    script: impl Fn(&Request, &mut Peer) + Send + Sync + 'static,
) -> (Result<Fetched, Error>, usize) {
    let server = Server::start(script);
    let answer = manifest_from(&server, impatient());
    (answer, server.requests().len())
}

#[test]
fn a_missing_manifest_is_requested_once_and_named() {
    let words = br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"no\u001b[31m such"}]}"#;
    let (answer, requests) = answered(|request, peer| reply(peer, request, 404, &[], words));
    let error = answer.unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }) && requests == 1);
    let text = error.to_string();
    assert!(
        text.contains("a/b:1") && text.contains("MANIFEST_UNKNOWN") && !text.contains('\u{1b}'),
        "{text}"
    );
}

#[test]
fn status_403_means_denied() {
    let (answer, requests) = answered(|request, peer| reply(peer, request, 403, &[], b""));
    assert!(matches!(answer, Err(Error::Denied { .. })) && requests == 1);
}

#[test]
fn transient_failures_are_retried_and_lasting_ones_reported() {
    let (answer, requests) = answered(|request, peer| match request.number {
        0 => reply(peer, request, 503, &[], b""),
        1 => reply(peer, request, 500, &[], b""),
        _ => reply(peer, request, 200, MANIFEST, b"{}"),
    });
    assert!(answer.is_ok() && requests == 3);
    let (answer, requests) = answered(|request, peer| reply(peer, request, 502, &[], b""));
    assert!(matches!(answer, Err(Error::Registry { status: 502, .. })) && requests == 4);
}

#[test]
fn a_registry_that_asks_to_wait_is_obeyed() {
    let begin = Instant::now();
    let (answer, requests) = answered(|request, peer| {
        // A date has only whole seconds, so one a second away may be anywhere up to that.
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(1));
        match request.number {
            0 => reply(peer, request, 429, &[("Retry-After", "1")], b""),
            1 => reply(peer, request, 429, &[("Retry-After", &date)], b""),
            _ => reply(peer, request, 200, MANIFEST, b"{}"),
        }
    });
    assert!(answer.is_ok() && requests == 3, "{answer:?}");
    assert!(begin.elapsed() >= Duration::from_secs(1));
}

#[test]
fn a_registry_that_asks_for_too_long_a_wait_is_not_obeyed() {
    for wait in ["1", "0", "86400", "99999999999999999999"] {
        let begin = Instant::now();
        let (answer, _) =
            answered(move |request, peer| reply(peer, request, 429, &[("Retry-After", wait)], b""));
        assert!(
            matches!(answer, Err(Error::TooManyRequests { .. })),
            "{wait}: {answer:?}"
        );
        assert!(begin.elapsed() < Duration::from_secs(15), "{wait}");
    }
}

#[test]
fn endless_redirects_are_refused() {
    let (answer, requests) = answered(|request, peer| {
        let next = format!("/v2/round/{}", request.number);
        reply(peer, request, 307, &[("Location", &next)], b"");
    });
    assert!(matches!(answer, Err(Error::Redirects { .. })), "{answer:?}");
    assert_eq!(requests, 11);
    let (answer, _) = answered(|request, peer| {
        reply(
            peer,
            request,
            302,
            &[("Location", "file:///etc/passwd")],
            b"",
        )
    });
    assert!(matches!(answer, Err(Error::Redirects { .. })), "{answer:?}");
    let (answer, _) = answered(|request, peer| reply(peer, request, 302, &[], b""));
    assert!(matches!(answer, Err(Error::Protocol { .. })), "{answer:?}");
}

#[test]
fn credentials_stay_with_their_host() {
    let other = Server::start(|request, peer| reply(peer, request, 200, MANIFEST, b"{}"));
    let there = format!("http://{}/elsewhere?signature=s3cret", other.host);
    let server = Server::start(move |request, peer| {
        match (request.header("authorization"), request.path.as_str()) {
            (None, _) => reply(
                peer,
                request,
                401,
                &[("WWW-Authenticate", "Basic realm=\"x\"")],
                b"",
            ),
            (_, "/here") => reply(peer, request, 302, &[("Location", &there)], b""),
            _ => reply(peer, request, 302, &[("Location", "/here")], b""),
        }
    });
    let credentials = Credentials::Basic {
        username: "me".into(),
        password: Secret::new("s3cret"),
    };
    manifest_from(
        &server,
        Access {
            credentials,
            ..impatient()
        },
    )
    .unwrap();
    let here = server
        .requests()
        .into_iter()
        .find(|request| request.path == "/here")
        .unwrap();
    assert!(
        here.header("authorization").is_some(),
        "the same host may know"
    );
    assert_eq!(other.requests().len(), 1);
    assert_eq!(other.requests()[0].header("authorization"), None);
}

#[test]
fn a_foreign_401_is_not_answered() {
    let other = Server::start(|request, peer| {
        reply(
            peer,
            request,
            401,
            &[("WWW-Authenticate", "Basic realm=\"x\"")],
            b"",
        );
    });
    let there = format!("http://{}/elsewhere?signature=s3cret", other.host);
    let server =
        Server::start(move |request, peer| reply(peer, request, 302, &[("Location", &there)], b""));
    let credentials = Credentials::Basic {
        username: "me".into(),
        password: Secret::new("s3cret"),
    };
    let error = manifest_from(
        &server,
        Access {
            credentials,
            ..impatient()
        },
    )
    .unwrap_err();
    assert_eq!(other.requests().len(), 1);
    assert!(!format!("{error} {error:?}").contains("s3cret"));
}

/// A server that speaks TLS, with the certificate file to trust.
fn tls_server(
    script: impl Fn(&Request, &mut Peer) + Send + Sync + 'static,
) -> (Server, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    certificate(dir.path());
    let chain = CertificateDer::pem_file_iter(dir.path().join("cert.pem"))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    let key = PrivateKeyDer::from_pem_file(dir.path().join("key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    let config = Arc::new(
        config
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap(),
    );
    let server = Server::wrapped(script, move |stream, serve| {
        let mut tls =
            StreamOwned::new(ServerConnection::new(config.clone()).unwrap(), &mut *stream);
        serve(&mut tls);
        tls.conn.send_close_notify();
        tls.conn.complete_io(&mut tls.sock).ok();
    });
    (server, dir)
}

#[test]
fn a_redirect_from_https_to_http_is_refused() {
    let plain = Server::start(|request, peer| reply(peer, request, 200, MANIFEST, b"{}"));
    let there = format!("http://{}/x", plain.host);
    let (server, dir) =
        tls_server(move |request, peer| reply(peer, request, 302, &[("Location", &there)], b""));
    let error = manifest_from(
        &server,
        Access {
            ca: Some(dir.path().join("cert.pem")),
            ..impatient()
        },
    )
    .unwrap_err();
    assert!(matches!(error, Error::Redirects { .. }), "{error:?}");
    assert!(plain.requests().is_empty());
}

#[test]
fn a_token_endpoint_without_tls_is_refused_if_the_registry_has_tls() {
    let plain = Server::start(|request, peer| reply(peer, request, 200, &[], br#"{"token":"t"}"#));
    let challenge = format!("Bearer realm=\"http://{}/token\"", plain.host);
    let (server, dir) = tls_server(move |request, peer| {
        reply(peer, request, 401, &[("WWW-Authenticate", &challenge)], b"")
    });
    let error = manifest_from(
        &server,
        Access {
            ca: Some(dir.path().join("cert.pem")),
            ..impatient()
        },
    )
    .unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
    assert!(plain.requests().is_empty());
}

#[test]
fn a_ca_file_without_certificates_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("ca.pem");
    fs::write(&ca, "nothing").unwrap();
    let error = sandtree_registry::Client::new(
        "h.example",
        Access {
            ca: Some(ca),
            ..impatient()
        },
    )
    .unwrap_err();
    assert!(matches!(error, Error::File { .. }), "{error:?}");
}
