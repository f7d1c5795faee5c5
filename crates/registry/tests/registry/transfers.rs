//! Blobs and manifests from servers that break off, lie or never end.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use sandtree_registry::{Access, Client, Descriptor, Digest, Error, Limits, media};

use crate::scripted::{Peer, Request, Server, head, reply};
use crate::{Count, client, impatient, noise, reference};

const SIZE: usize = 300_000;

fn content() -> (Vec<u8>, Descriptor) {
    let bytes = noise(SIZE, 1);
    let descriptor = Descriptor::of(media::OCI_LAYER, &bytes);
    (bytes, descriptor)
}

fn pull(client: &Client, descriptor: &Descriptor, count: &Count) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    client.blob("a", descriptor, &mut bytes, &count.watch())?;
    Ok(bytes)
}

fn pulled_from(
    script: impl Fn(&Request, &mut Peer) + Send + Sync + 'static,
) -> Result<Vec<u8>, Error> {
    let server = Server::start(script);
    pull(
        &client(&server.host, impatient()),
        &content().1,
        &Count::default(),
    )
}

fn send(peer: &mut Peer, bytes: &[u8]) -> bool {
    peer.get_mut().write_all(bytes).is_ok()
}

fn chunk(peer: &mut Peer, bytes: &[u8]) -> bool {
    let head = format!("{:x}\r\n", bytes.len());
    send(peer, head.as_bytes()) && send(peer, bytes) && send(peer, b"\r\n")
}

#[test]
fn wrong_content_is_refused() {
    let error =
        pulled_from(|request, peer| reply(peer, request, 200, &[], &noise(SIZE, 2))).unwrap_err();
    assert!(
        matches!(error, Error::WrongDigest { expected, .. } if expected == content().1.digest),
        "{error}"
    );
}

/// Promises everything and sends half, once.
fn break_off(peer: &mut Peer, bytes: &[u8]) {
    head(peer, 200, &[("Content-Length", &bytes.len().to_string())]);
    send(peer, &bytes[..bytes.len() / 2]);
}

#[test]
fn a_lost_connection_continues_where_it_broke() {
    let (bytes, descriptor) = content();
    let sent = bytes.clone();
    let server = Server::start(move |request, peer| match request.header("range") {
        None => break_off(peer, &sent),
        Some(range) => {
            let from: usize = range
                .strip_prefix("bytes=")
                .unwrap()
                .strip_suffix('-')
                .unwrap()
                .parse()
                .unwrap();
            let range = format!("bytes {from}-{}/{}", sent.len() - 1, sent.len());
            reply(
                peer,
                request,
                206,
                &[("Content-Range", &range)],
                &sent[from..],
            );
        }
    });
    let count = Count::default();
    assert!(pull(&client(&server.host, impatient()), &descriptor, &count).unwrap() == bytes);
    assert_eq!(count.bytes(), SIZE as u64);
    assert_eq!(server.requests().len(), 2);
    assert_eq!(
        server.requests()[1].header("range"),
        Some(format!("bytes={}-", SIZE / 2).as_str())
    );
}

#[test]
fn a_registry_without_ranges_sends_it_all_again() {
    let (bytes, descriptor) = content();
    let sent = bytes.clone();
    let server = Server::start(move |request, peer| match request.number {
        0 => break_off(peer, &sent),
        _ => reply(peer, request, 200, &[], &sent),
    });
    let count = Count::default();
    assert!(pull(&client(&server.host, impatient()), &descriptor, &count).unwrap() == bytes);
    assert_eq!(count.bytes(), SIZE as u64, "no byte is reported twice");
}

#[test]
fn a_refused_range_begins_anew_and_a_wrong_one_is_an_error() {
    let (bytes, _) = content();
    let refused =
        pulled_from(
            move |request, peer| match (request.number, request.header("range")) {
                (0, _) => break_off(peer, &bytes),
                (_, Some(_)) => reply(peer, request, 416, &[], b""),
                (_, None) => reply(peer, request, 200, &[], &bytes),
            },
        );
    assert!(refused.unwrap() == content().0);
    let (bytes, _) = content();
    let wrong = pulled_from(move |request, peer| match request.number {
        0 => break_off(peer, &bytes),
        _ => reply(
            peer,
            request,
            206,
            &[("Content-Range", "bytes 0-9/300000")],
            &bytes[..10],
        ),
    });
    assert!(matches!(wrong, Err(Error::Protocol { .. })), "{wrong:?}");
}

#[test]
fn a_connection_that_is_always_lost_fails_after_some_tries() {
    let server = Server::start(|_, _| {});
    let error = pull(
        &client(&server.host, impatient()),
        &content().1,
        &Count::default(),
    )
    .unwrap_err();
    assert!(
        matches!(error, Error::ConnectionLost { tries: 4, .. }),
        "{error}"
    );
    assert_eq!(server.requests().len(), 4);
}

#[test]
fn wrong_sizes_are_refused() {
    let short = pulled_from(|request, peer| reply(peer, request, 200, &[], &noise(SIZE - 1, 1)));
    assert!(
        matches!(short, Err(Error::WrongSize { found: 299_999, .. })),
        "{short:?}"
    );
    let long = pulled_from(|request, peer| reply(peer, request, 200, &[], &noise(SIZE + 1, 1)));
    assert!(
        matches!(long, Err(Error::WrongSize { found: 300_001, .. })),
        "{long:?}"
    );
    let ended = pulled_from(|_, peer| {
        head(peer, 200, &[("Transfer-Encoding", "chunked")]);
        chunk(peer, &content().0[..1000]);
        chunk(peer, b"");
    });
    assert!(
        matches!(ended, Err(Error::WrongSize { found: 1000, .. })),
        "{ended:?}"
    );
}

#[test]
fn an_endless_blob_is_refused_at_its_first_byte_too_many() {
    let error = pulled_from(|_, peer| {
        head(peer, 200, &[("Transfer-Encoding", "chunked")]);
        while chunk(peer, &[7; 10_000]) {}
    });
    assert!(
        matches!(error, Err(Error::WrongSize { found, .. }) if found < 1 << 20),
        "{error:?}"
    );
}

#[test]
fn a_blob_that_arrives_too_slowly_is_refused() {
    let server = Server::start(|_, peer| {
        head(peer, 200, &[("Content-Length", "300000")]);
        while send(peer, b"x") {
            peer.get_mut().flush().ok();
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let limits = Limits {
        stalled: Duration::from_millis(300),
        tries: 2,
        ..impatient().limits
    };
    let begin = Instant::now();
    let error = pull(
        &client(
            &server.host,
            Access {
                limits,
                ..impatient()
            },
        ),
        &content().1,
        &Count::default(),
    );
    assert!(
        matches!(error, Err(Error::ConnectionLost { .. })),
        "{error:?}"
    );
    assert!(begin.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_cancelled_request_ends_while_it_waits_for_a_byte() {
    let server = Server::start(|_, peer| drop(peer.read(&mut [0])));
    let client = client(&server.host, impatient());
    let begin = Instant::now();
    let (blob, manifest) = std::thread::scope(|scope| {
        let blob = scope.spawn(|| pull(&client, &content().1, &Count::default()));
        let manifest = scope.spawn(|| client.manifest(&reference(&server.host, "a:1")));
        while server.requests().len() < 2 {
            std::thread::yield_now();
        }
        client.cancel();
        (blob.join().unwrap(), manifest.join().unwrap())
    });
    assert!(matches!(blob, Err(Error::Cancelled)), "{blob:?}");
    assert!(matches!(manifest, Err(Error::Cancelled)), "{manifest:?}");
    assert!(begin.elapsed() < Duration::from_secs(2));
    assert!(matches!(
        client.has_blob("a", &content().1.digest),
        Err(Error::Cancelled)
    ));
    assert_eq!(server.requests().len(), 2, "nothing is asked after that");
}

#[test]
fn a_silent_server_times_out() {
    let server = Server::start(|_, _| std::thread::sleep(Duration::from_secs(3)));
    let limits = Limits {
        stalled: Duration::from_millis(200),
        tries: 2,
        ..impatient().limits
    };
    let begin = Instant::now();
    let error = client(
        &server.host,
        Access {
            limits,
            ..impatient()
        },
    )
    .manifest(&reference(&server.host, "a:1"));
    assert!(
        matches!(error, Err(Error::ConnectionLost { .. })),
        "{error:?}"
    );
    assert!(begin.elapsed() < Duration::from_secs(3));
}

/// Promises 1 GiB and sends without end.
fn huge(peer: &mut Peer) {
    let headers = [
        ("Content-Length", "1073741824"),
        ("Content-Type", media::OCI_MANIFEST),
    ];
    head(peer, 200, &headers);
    while send(peer, &[b' '; 10_000]) {}
}

/// Sends chunks without end.
fn endless(peer: &mut Peer) {
    let headers = [
        ("Transfer-Encoding", "chunked"),
        ("Content-Type", media::OCI_MANIFEST),
    ];
    head(peer, 200, &headers);
    while chunk(peer, &[b' '; 10_000]) {}
}

#[test]
fn a_huge_manifest_is_refused() {
    for answer in [huge, endless] {
        let server = Server::start(move |_, peer| answer(peer));
        let error = client(&server.host, impatient()).manifest(&reference(&server.host, "a:1"));
        assert!(
            matches!(
                error,
                Err(Error::TooLarge {
                    limit_bytes: 4_194_304,
                    ..
                })
            ),
            "{error:?}"
        );
    }
}

#[test]
fn headers_without_end_are_refused() {
    let server = Server::start(|_, peer| {
        send(peer, b"HTTP/1.1 200 OK\r\n");
        while send(peer, b"X-Filler: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n") {}
    });
    let error = client(&server.host, impatient())
        .manifest(&reference(&server.host, "a:1"))
        .unwrap_err();
    assert!(
        matches!(error, Error::TooLarge { .. } | Error::Protocol { .. }),
        "{error:?}"
    );
}

#[test]
fn an_answer_that_is_not_http_is_reported() {
    let server = Server::start(|_, peer| {
        send(peer, b"SSH-2.0-OpenSSH_9.2\r\n\r\n");
    });
    let error = client(&server.host, impatient())
        .manifest(&reference(&server.host, "a:1"))
        .unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
}

#[test]
fn a_manifest_must_have_its_stated_digest() {
    let server = Server::start(|request, peer| {
        let said = Digest::of(b"another").to_string();
        reply(
            peer,
            request,
            200,
            &[
                ("Content-Type", media::OCI_MANIFEST),
                ("Docker-Content-Digest", &said),
            ],
            b"{}",
        );
    });
    let error = client(&server.host, impatient()).manifest(&reference(&server.host, "a:1"));
    assert!(matches!(error, Err(Error::WrongDigest { .. })), "{error:?}");
    let server = Server::start(|request, peer| {
        reply(
            peer,
            request,
            200,
            &[("Content-Type", media::OCI_MANIFEST)],
            b"{}",
        )
    });
    let asked = reference(&server.host, &format!("a@{}", Digest::of(b"another")));
    let error = client(&server.host, impatient()).manifest(&asked);
    assert!(matches!(error, Err(Error::WrongDigest { .. })), "{error:?}");
}

#[test]
fn a_manifest_that_breaks_off_is_requested_again() {
    let server = Server::start(|request, peer| match request.number {
        0 => {
            head(
                peer,
                200,
                &[
                    ("Content-Length", "50"),
                    ("Content-Type", media::OCI_MANIFEST),
                ],
            );
            send(peer, b"{");
        }
        _ => reply(
            peer,
            request,
            200,
            &[("Content-Type", media::OCI_MANIFEST)],
            b"{}",
        ),
    });
    let fetched = client(&server.host, impatient())
        .manifest(&reference(&server.host, "a:1"))
        .unwrap();
    assert_eq!(fetched.bytes, b"{}");
}

#[test]
fn a_page_instead_of_a_manifest_is_refused_by_name() {
    let server = Server::start(|request, peer| {
        reply(
            peer,
            request,
            200,
            &[("Content-Type", "text/html")],
            b"<html>",
        )
    });
    let error = client(&server.host, impatient())
        .manifest(&reference(&server.host, "a:1"))
        .unwrap_err();
    assert!(error.to_string().contains("text/html"), "{error}");
}

#[test]
fn a_body_without_a_length_that_ends_early_is_continued() {
    let (bytes, descriptor) = content();
    let sent = bytes.clone();
    let server = Server::start(move |request, peer| match request.header("range") {
        None => {
            head(peer, 200, &[("Connection", "close")]);
            send(peer, &sent[..SIZE / 2]);
        }
        Some(range) => {
            assert_eq!(range, format!("bytes={}-", SIZE / 2));
            let range = format!("bytes {}-{}/{SIZE}", SIZE / 2, SIZE - 1);
            reply(
                peer,
                request,
                206,
                &[("Content-Range", &range)],
                &sent[SIZE / 2..],
            );
        }
    });
    let count = Count::default();
    assert!(pull(&client(&server.host, impatient()), &descriptor, &count).unwrap() == bytes);
    assert_eq!((count.bytes(), server.requests().len()), (SIZE as u64, 2));
}

#[test]
fn a_document_must_arrive_in_time() {
    let server = Server::start(|_, peer| {
        head(peer, 200, &[("Content-Type", media::OCI_MANIFEST)]);
        while send(peer, &[b' '; 100]) {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let limits = Limits {
        document: Duration::from_millis(500),
        ..impatient().limits
    };
    let begin = Instant::now();
    let error = client(
        &server.host,
        Access {
            limits,
            ..impatient()
        },
    )
    .manifest(&reference(&server.host, "a:1"));
    assert!(
        matches!(error, Err(Error::ConnectionLost { .. })),
        "{error:?}"
    );
    assert!(
        begin.elapsed() < Duration::from_secs(4),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!(server.requests().len(), 1);
}
