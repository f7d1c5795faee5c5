//! Uploads that are interrupted, forgotten or slowed down.

use std::io::{self, Cursor, Read};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sandtree_registry::{Access, Cancelled, Credentials, Descriptor, Error, Limits, Secret, media};

use crate::scripted::{Peer, Request, Server, reply, take};
use crate::{Count, client, impatient, noise};

const SIZE: usize = 100_000;
const CHUNK: u64 = 40_000;
const UPLOAD: &str = "/v2/a/blobs/uploads/1";

/// What the registry has of an upload, and whether it is finished.
#[derive(Default)]
struct Stored {
    bytes: Vec<u8>,
    finished: bool,
}

/// A registry of one upload that does as a good one, unless the test's script has already answered.
fn registry(
    stored: Arc<Mutex<Stored>>,
    unless: impl Fn(&Request, &mut Peer, &mut Stored) -> bool + Send + Sync + 'static,
) -> Server {
    Server::start(move |request, peer| {
        let mut stored = stored.lock().unwrap();
        if !unless(request, peer, &mut stored) {
            serve(request, peer, &mut stored);
        }
    })
}

fn serve(request: &Request, peer: &mut Peer, stored: &mut Stored) {
    let location = ("Location", UPLOAD);
    let range = format!("0-{}", stored.bytes.len().saturating_sub(1));
    match request.method.as_str() {
        "HEAD" => reply(
            peer,
            request,
            if stored.finished { 200 } else { 404 },
            &[],
            b"",
        ),
        "POST" => {
            stored.bytes.clear();
            reply(peer, request, 202, &[location], b"");
        }
        "GET" => reply(peer, request, 204, &[location, ("Range", &range)], b""),
        "PATCH" => {
            let range = request.header("content-range").unwrap_or("0-");
            let start = range.split('-').next().unwrap().to_owned();
            assert_eq!(
                start,
                stored.bytes.len().to_string(),
                "a chunk begins where the last one ended"
            );
            append(request, peer, stored, request.length());
            let range = format!("0-{}", stored.bytes.len() - 1);
            let answered = Request {
                headers: Vec::new(),
                ..request.clone()
            };
            reply(peer, &answered, 202, &[location, ("Range", &range)], b"");
        }
        "PUT" => {
            assert!(
                request
                    .path
                    .starts_with(&format!("{UPLOAD}?digest=sha256%3A")),
                "{}",
                request.path
            );
            stored.finished = true;
            reply(peer, request, 201, &[], b"");
        }
        other => panic!("{other}"),
    }
}

fn append(_: &Request, peer: &mut Peer, stored: &mut Stored, length: usize) {
    stored.bytes.extend(take(peer, length));
}

fn access() -> Access {
    Access {
        limits: Limits {
            chunk_bytes: CHUNK,
            ..impatient().limits
        },
        ..impatient()
    }
}

fn push(server: &Server, count: &Count) -> Result<(), Error> {
    push_with(server, access(), &noise(SIZE, 1), count)
}

fn push_with(server: &Server, access: Access, bytes: &[u8], count: &Count) -> Result<(), Error> {
    let descriptor = Descriptor::of(media::OCI_LAYER, bytes);
    let mut open = |from: u64| -> io::Result<Box<dyn Read + Send>> {
        let mut content = Cursor::new(bytes.to_vec());
        content.set_position(from);
        Ok(Box::new(content))
    };
    client(&server.host, access).push_blob("a", &descriptor, &mut open, &count.watch())
}

fn pushed(
    unless: impl Fn(&Request, &mut Peer, &mut Stored) -> bool + Send + Sync + 'static,
) -> Vec<Request> {
    let stored = Arc::new(Mutex::new(Stored::default()));
    let count = Count::default();
    let server = registry(stored.clone(), unless);
    push(&server, &count).unwrap();
    let stored = stored.lock().unwrap();
    assert!(stored.finished && stored.bytes == noise(SIZE, 1));
    assert_eq!(count.bytes(), SIZE as u64, "each byte counts once");
    server.requests()
}

fn methods(requests: &[Request]) -> String {
    requests
        .iter()
        .map(|request| request.method.as_str())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Answers a request whose body is read to its end first.
fn refuse(peer: &mut Peer, request: &Request, status: u16, headers: &[(&str, &str)]) {
    take(peer, request.length());
    let answered = Request {
        headers: Vec::new(),
        ..request.clone()
    };
    reply(peer, &answered, status, headers, b"");
}

#[test]
fn a_blob_is_sent_in_one_piece() {
    let requests = pushed(|_, _, _| false);
    assert_eq!(methods(&requests), "HEAD POST PATCH PUT");
    assert_eq!(
        (requests[2].length(), requests[2].header("content-range")),
        (SIZE, None)
    );
}

#[test]
fn a_blob_too_large_for_one_request_is_sent_in_chunks() {
    let too_large = |request: &Request, peer: &mut Peer| {
        let is = request.length() > 60_000;
        if is {
            refuse(peer, request, 413, &[]);
        }
        is
    };
    let requests = pushed(move |request, peer, _| too_large(request, peer));
    assert_eq!(
        methods(&requests),
        "HEAD POST PATCH GET POST PATCH PATCH PATCH PUT"
    );
    assert_eq!(requests[5].header("content-range"), Some("0-39999"));
    let requests = pushed(move |request, peer, _| {
        let post = request.method == "POST";
        if post {
            reply(
                peer,
                request,
                202,
                &[("Location", UPLOAD), ("OCI-Chunk-Min-Length", "60000")],
                b"",
            );
        }
        post || too_large(request, peer)
    });
    assert_eq!(
        methods(&requests),
        "HEAD POST PATCH GET POST PATCH PATCH PUT"
    );
    assert_eq!(requests[5].header("content-range"), Some("0-59999"));
}

#[test]
fn connections_that_close_at_once_lead_to_chunks() {
    let requests = pushed(|request, _, _| request.length() > 60_000);
    assert_eq!(
        methods(&requests),
        "HEAD POST PATCH GET POST PATCH GET POST PATCH PATCH PATCH PUT"
    );
}

#[test]
fn a_registry_that_refuses_chunks_gets_the_whole_again() {
    // Two breaks without a byte, and then it wants no ranges.
    let requests = pushed(|request, peer, _| {
        let ranged = request.header("content-range").is_some();
        if ranged {
            refuse(peer, request, 416, &[]);
        }
        ranged || [2, 5].contains(&request.number)
    });
    assert_eq!(
        methods(&requests),
        "HEAD POST PATCH GET POST PATCH GET POST PATCH GET POST PATCH PUT"
    );
    assert!(requests[8].header("content-range").is_some() && requests[11].length() == SIZE);
}

#[test]
fn an_interrupted_upload_continues_from_what_the_registry_has() {
    let requests = pushed(|request, peer, stored| {
        let first = request.number == 2;
        if first {
            append(request, peer, stored, 50_000);
        }
        first
    });
    assert_eq!(methods(&requests), "HEAD POST PATCH GET PATCH PATCH PUT");
    assert_eq!(requests[4].header("content-range"), Some("50000-89999"));
}

#[test]
fn a_forgotten_upload_restarts() {
    let requests = pushed(|request, peer, stored| {
        match request.number {
            2 => append(request, peer, stored, 50_000),
            4 | 5 => refuse(peer, request, 404, &[]),
            _ => return false,
        }
        true
    });
    assert_eq!(
        methods(&requests),
        "HEAD POST PATCH GET PATCH GET POST PATCH PATCH PATCH PUT"
    );
}

#[test]
fn a_busy_registry_is_waited_for() {
    let requests = pushed(|request, peer, _| {
        let busy = request.number == 2;
        if busy {
            refuse(peer, request, 429, &[("Retry-After", "1")]);
        }
        busy
    });
    assert_eq!(methods(&requests), "HEAD POST PATCH GET POST PATCH PUT");
}

#[test]
fn a_lost_answer_to_the_last_request_may_have_been_a_success() {
    let requests = pushed(|request, _, stored| {
        let put = request.method == "PUT";
        stored.finished |= put;
        put
    });
    assert_eq!(methods(&requests), "HEAD POST PATCH PUT HEAD");
}

#[test]
fn a_lost_last_request_is_repeated() {
    let requests = pushed(|request, _, _| request.number == 3);
    assert_eq!(methods(&requests), "HEAD POST PATCH PUT HEAD GET PUT");
}

#[test]
fn the_last_request_may_take_longer_than_others() {
    let stalled = Duration::from_millis(700);
    let limits = Limits {
        stalled,
        tries: 1,
        ..access().limits
    };
    let server = registry(Arc::default(), move |request, _, _| {
        if request.method == "PUT" {
            std::thread::sleep(stalled * 2);
        }
        false
    });
    push_with(
        &server,
        Access { limits, ..access() },
        &noise(SIZE, 1),
        &Count::default(),
    )
    .unwrap();
}

#[test]
fn blobs_of_one_byte_and_empty_blobs_are_sent() {
    for length in [0, 1] {
        let stored = Arc::new(Mutex::new(Stored::default()));
        let server = registry(stored.clone(), |_, _, _| false);
        push_with(&server, access(), &noise(length, 1), &Count::default()).unwrap();
        assert!(
            stored.lock().unwrap().finished && stored.lock().unwrap().bytes == noise(length, 1)
        );
    }
}

#[test]
fn a_new_token_does_not_interrupt_an_upload() {
    let tokens = Server::start(|request, peer| {
        let body = format!(r#"{{"token":"t{}"}}"#, request.number);
        reply(peer, request, 200, &[], body.as_bytes());
    });
    let challenge = format!(
        "Bearer realm=\"http://{}/token\",scope=\"repository:a:pull\"",
        tokens.host
    );
    let server = registry(Arc::default(), move |request, peer, _| {
        let wanted = if request.number < 3 {
            "Bearer t0"
        } else {
            "Bearer t1"
        };
        let refused = request.header("authorization") != Some(wanted);
        if refused {
            refuse(peer, request, 401, &[("WWW-Authenticate", &challenge)]);
        }
        refused
    });
    let limits = Limits {
        tries: 1,
        ..access().limits
    };
    push_with(
        &server,
        Access { limits, ..access() },
        &noise(SIZE, 1),
        &Count::default(),
    )
    .unwrap();
    assert_eq!(
        methods(&server.requests()),
        "HEAD HEAD POST PATCH GET POST PATCH PUT"
    );
    let asked = tokens.requests();
    assert_eq!(asked.len(), 2);
    assert!(
        asked
            .iter()
            .all(|request| request.path.contains("pull%2Cpush")),
        "{asked:?}"
    );
}

#[test]
fn credentials_are_given_to_no_other_host() {
    let thief = Server::start(|request, peer| {
        let realm = format!(
            "Bearer realm=\"http://{}/token\"",
            request.header("host").unwrap()
        );
        refuse(peer, request, 401, &[("WWW-Authenticate", &realm)]);
    });
    let location = format!("http://{}/upload", thief.host);
    let server = registry(Arc::default(), move |request, peer, _| {
        let post = request.method == "POST";
        if post {
            reply(peer, request, 202, &[("Location", &location)], b"");
        }
        post
    });
    let credentials = Credentials::Basic {
        username: "me".into(),
        password: Secret::new("s3cret"),
    };
    let error = push_with(
        &server,
        Access {
            credentials,
            ..access()
        },
        &noise(SIZE, 1),
        &Count::default(),
    );
    assert!(
        matches!(error, Err(Error::Unauthorized { .. })),
        "{error:?}"
    );
    assert_eq!(methods(&thief.requests()), "PATCH");
    assert!(thief.requests()[0].header("authorization").is_none());
}

#[test]
fn an_upload_without_progress_fails_after_some_tries() {
    let server = registry(Arc::default(), |request, _, _| request.method == "PATCH");
    let error = push(&server, &Count::default()).unwrap_err();
    assert!(matches!(error, Error::ConnectionLost { .. }), "{error:?}");
    assert_eq!(
        server
            .requests()
            .iter()
            .filter(|request| request.method == "PATCH")
            .count(),
        4
    );
}

#[test]
fn a_registry_that_forgets_every_upload_fails_after_some_tries() {
    let server = registry(Arc::default(), |request, peer, _| {
        let forgotten = ["PATCH", "GET"].contains(&request.method.as_str());
        if forgotten {
            refuse(peer, request, 404, &[]);
        }
        forgotten
    });
    assert!(matches!(
        push(&server, &Count::default()),
        Err(Error::NotFound { .. })
    ));
    assert!(server.requests().len() < 40);
}

#[test]
fn content_that_is_too_short_is_reported_as_ours() {
    let server = registry(Arc::default(), |_, _, _| false);
    let descriptor = Descriptor::of(media::OCI_LAYER, &noise(1000, 1));
    let mut open =
        |_| -> io::Result<Box<dyn Read + Send>> { Ok(Box::new(Cursor::new(noise(999, 1)))) };
    let error = client(&server.host, access()).push_blob("a", &descriptor, &mut open, &|_| Ok(()));
    assert!(
        matches!(error, Err(Error::WrongSize { found: 999, .. })),
        "{error:?}"
    );
}

#[test]
fn a_push_can_be_cancelled() {
    let server = registry(Arc::default(), |_, _, _| false);
    let bytes = noise(SIZE, 1);
    let descriptor = Descriptor::of(media::OCI_LAYER, &bytes);
    let mut open =
        |_| -> io::Result<Box<dyn Read + Send>> { Ok(Box::new(Cursor::new(bytes.clone()))) };
    let cancel = |bytes| if bytes > 0 { Err(Cancelled) } else { Ok(()) };
    let error = client(&server.host, access()).push_blob("a", &descriptor, &mut open, &cancel);
    assert!(matches!(error, Err(Error::Cancelled)), "{error:?}");
}
