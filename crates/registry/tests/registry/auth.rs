//! Tokens: asked for, kept, renewed once, and refused when they are none.

use std::io::Write;

use sandtree_registry::{Access, Credentials, Digest, Error, Secret, media};

use crate::scripted::{Peer, Request, Server, head, reply, take};
use crate::{client, impatient, reference};

/// A registry whose manifests want one of these tokens, in this order.
fn registry(token_endpoint: &str, accepted: fn(usize) -> &'static str) -> Server {
    let challenge = format!(
        "Bearer realm=\"http://{token_endpoint}/token\",service=\"s\",scope=\"repository:a:pull\""
    );
    Server::start(move |request, peer| {
        let expected = format!("Bearer {}", accepted(request.number));
        match request.header("authorization") {
            Some(given) if given == expected => reply(
                peer,
                request,
                200,
                &[("Content-Type", media::OCI_MANIFEST)],
                b"{}",
            ),
            _ => reply(peer, request, 401, &[("WWW-Authenticate", &challenge)], b""),
        }
    })
}

fn endpoint(script: impl Fn(&Request, &mut Peer) + Send + Sync + 'static) -> Server {
    Server::start(script)
}

fn with(credentials: Credentials) -> Access {
    Access {
        credentials,
        ..impatient()
    }
}

fn basic() -> Credentials {
    Credentials::Basic {
        username: "me".into(),
        password: Secret::new("s3cret"),
    }
}

#[test]
fn a_token_is_requested_with_the_password_and_kept() {
    let tokens = endpoint(|request, peer| {
        reply(
            peer,
            request,
            200,
            &[],
            br#"{"token":"t1","expires_in":300}"#,
        )
    });
    let server = registry(&tokens.host, |_| "t1");
    let client = client(&server.host, with(basic()));
    for _ in 0..3 {
        client.manifest(&reference(&server.host, "a:1")).unwrap();
    }
    let asked = tokens.requests();
    assert_eq!(asked.len(), 1);
    assert_eq!(
        asked[0].path,
        "/token?service=s&scope=repository%3Aa%3Apull"
    );
    assert_eq!(asked[0].header("authorization"), Some("Basic bWU6czNjcmV0"));
    assert_eq!(server.requests().len(), 4);
    assert!(
        server
            .requests()
            .iter()
            .all(|request| request.header("authorization") != Some("Basic bWU6czNjcmV0"))
    );
}

#[test]
fn a_token_that_is_no_longer_accepted_is_renewed_once() {
    let tokens = endpoint(|request, peer| {
        let body = format!(r#"{{"token":"t{}","expires_in":300}}"#, request.number);
        reply(peer, request, 200, &[], body.as_bytes());
    });
    // 401, t0 is taken; then t0 is refused, t1 is taken.
    let server = registry(&tokens.host, |number| if number < 2 { "t0" } else { "t1" });
    let client = client(&server.host, with(Credentials::Anonymous));
    client.manifest(&reference(&server.host, "a:1")).unwrap();
    client.manifest(&reference(&server.host, "a:1")).unwrap();
    assert_eq!(tokens.requests().len(), 2);
    assert_eq!(tokens.requests()[0].header("authorization"), None);
}

#[test]
fn a_registry_that_accepts_no_token_is_asked_twice() {
    let tokens = endpoint(|request, peer| reply(peer, request, 200, &[], br#"{"token":"t1"}"#));
    let server = registry(&tokens.host, |_| "another");
    let error = client(&server.host, with(basic()))
        .manifest(&reference(&server.host, "a:1"))
        .unwrap_err();
    assert!(matches!(error, Error::Unauthorized { .. }), "{error:?}");
    assert_eq!((server.requests().len(), tokens.requests().len()), (2, 1));
}

#[test]
fn a_wrong_password_is_tried_once() {
    let server = Server::start(|request, peer| {
        reply(
            peer,
            request,
            401,
            &[("WWW-Authenticate", "Basic realm=\"x\"")],
            b"",
        );
    });
    let error = client(&server.host, with(basic()))
        .manifest(&reference(&server.host, "a:1"))
        .unwrap_err();
    assert!(matches!(error, Error::Unauthorized { .. }), "{error:?}");
    assert_eq!(server.requests().len(), 2);
    assert!(!format!("{error} {error:?}").contains("s3cret"));
    let anonymous = client(&server.host, with(Credentials::Anonymous));
    assert!(matches!(
        anonymous.has_blob("a", &Digest::of(b"")),
        Err(Error::Unauthorized { .. })
    ));
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn a_refresh_token_goes_in_the_body_only() {
    let tokens = endpoint(|request, peer| {
        let form = String::from_utf8(take(peer, request.length())).unwrap();
        let wanted = [
            "grant_type=refresh_token",
            "refresh_token=r%2Ft",
            "service=s",
            "scope=repository%3Aa%3Apull",
        ];
        let right = request.method == "POST"
            && wanted
                .iter()
                .all(|field| form.split('&').any(|part| part == *field));
        let bodiless = Request {
            headers: Vec::new(),
            ..request.clone()
        };
        if right {
            reply(peer, &bodiless, 200, &[], br#"{"access_token":"t1"}"#);
        } else {
            reply(peer, &bodiless, 400, &[], b"");
        }
    });
    let server = registry(&tokens.host, |_| "t1");
    let client = client(&server.host, with(Credentials::Token(Secret::new("r/t"))));
    client.manifest(&reference(&server.host, "a:1")).unwrap();
    assert!(!tokens.requests()[0].path.contains("r%2Ft"));
}

#[test]
fn a_token_endpoint_that_lies_is_refused() {
    for body in [
        "",
        "{}",
        "[1]",
        r#"{"token":"a\r\nX-Evil: 1"}"#,
        r#"{"token":17}"#,
        r#"{"token":""}"#,
    ] {
        let tokens = endpoint(move |request, peer| reply(peer, request, 200, &[], body.as_bytes()));
        let server = registry(&tokens.host, |_| "t1");
        let error = client(&server.host, with(basic()))
            .manifest(&reference(&server.host, "a:1"))
            .unwrap_err();
        assert!(matches!(error, Error::Protocol { .. }), "{body}: {error:?}");
    }
    let tokens = endpoint(|_, peer| {
        head(peer, 200, &[]);
        while peer.get_mut().write_all(&[b' '; 10_000]).is_ok() {}
    });
    let server = registry(&tokens.host, |_| "t1");
    let error = client(&server.host, with(basic()))
        .manifest(&reference(&server.host, "a:1"))
        .unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error:?}");
}

#[test]
fn a_token_endpoint_that_refuses_means_unauthorized() {
    let tokens = endpoint(|request, peer| reply(peer, request, 401, &[], b""));
    let server = registry(&tokens.host, |_| "t1");
    let error = client(&server.host, with(basic()))
        .manifest(&reference(&server.host, "a:1"))
        .unwrap_err();
    assert!(matches!(error, Error::Unauthorized { .. }), "{error:?}");
    assert_eq!(tokens.requests().len(), 1);
}
