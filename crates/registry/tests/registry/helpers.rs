//! Credential helpers as programs.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sandtree_registry::docker::{self, Helpers};
use sandtree_registry::{Access, Credentials, Digest, Error, Secret};

use crate::scripted::{Server, reply};
use crate::server::run;
use crate::{client, impatient};

/// A directory with a helper of this script, and a configuration that names it.
struct Setup {
    dir: tempfile::TempDir,
}

impl Setup {
    fn new(script: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("docker-credential-test");
        // Written by another process: a program that is open for writing anywhere cannot be
        // started, and a child of this process may have inherited the descriptor.
        let write = r#"printf '#!/bin/sh\n%s\n' "$1" > "$2" && chmod 755 "$2""#;
        run(
            "sh",
            &["-c", write, "sh", script, program.to_str().unwrap()],
        );
        let config = r#"{"credHelpers":{"r.example:5000":"test"},"auths":{"s.example":{"auth":"bWU6czNjcmV0"}}}"#;
        fs::write(dir.path().join("config.json"), config).unwrap();
        Self { dir }
    }

    fn ask(&self, registry: &str) -> Result<Option<Credentials>, Error> {
        let path = std::env::var_os("PATH").unwrap();
        self.ask_with(registry, &[("PATH".into(), path)])
    }

    fn ask_with(
        &self,
        registry: &str,
        env: &[(OsString, OsString)],
    ) -> Result<Option<Credentials>, Error> {
        let search = [PathBuf::from("/nonexistent"), self.dir.path().to_owned()];
        let helpers = Helpers {
            search: &search,
            env,
        };
        docker::credentials(&self.config(), registry, helpers)
    }

    fn config(&self) -> PathBuf {
        Path::new(self.dir.path()).join("config.json")
    }
}

fn basic(username: &str, password: &str) -> Option<Credentials> {
    Some(Credentials::Basic {
        username: username.into(),
        password: Secret::new(password),
    })
}

#[test]
fn a_helper_gets_the_registrys_name_and_answers() {
    let setup = Setup::new(
        r#"read r; echo "{\"ServerURL\":\"$r\",\"Username\":\"$1\",\"Secret\":\"for $r\"}""#,
    );
    assert_eq!(
        setup.ask("r.example:5000").unwrap(),
        basic("get", "for r.example:5000")
    );
    assert_eq!(
        setup.ask("s.example").unwrap(),
        basic("me", "s3cret"),
        "it is asked only for its own registry"
    );
}

#[test]
fn a_helper_may_hold_a_refresh_token_or_nothing() {
    let setup = Setup::new(r#"echo '{"Username":"<token>","Secret":"t"}'"#);
    assert_eq!(
        setup.ask("r.example:5000").unwrap(),
        Some(Credentials::Token(Secret::new("t")))
    );
    let setup = Setup::new("echo 'credentials not found in native keychain'; exit 1");
    assert_eq!(setup.ask("r.example:5000").unwrap(), None);
}

#[test]
fn a_helper_that_fails_is_named_without_its_output() {
    let endless = "while :; do echo s3cret; done";
    for script in [
        "echo s3cret; exit 1",
        "echo s3cret",
        "exit 0",
        "kill -9 $$",
        endless,
    ] {
        let found = Setup::new(script).ask("r.example:5000").unwrap();
        assert!(
            matches!(&found, Some(Credentials::HelperFailed { helper, .. }) if helper == "test"),
            "{script}: {found:?}"
        );
        assert!(
            !format!("{found:?}").contains("s3cret"),
            "{script}: {found:?}"
        );
    }
}

/// Cargo's variables are in this process's environment; a helper sees none of them.
#[test]
fn a_helper_gets_the_variables_passed_in_and_no_others() {
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    let setup =
        Setup::new(r#"echo "{\"Username\":\"$OURS$CARGO_MANIFEST_DIR\",\"Secret\":\"in $PWD\"}""#);
    let found = setup.ask_with("r.example:5000", &[("OURS".into(), "me".into())]);
    assert_eq!(found.unwrap(), basic("me", "in /"));
}

#[test]
fn a_helper_has_ten_seconds() {
    let begin = Instant::now();
    let found = Setup::new("sleep 60 & sleep 60")
        .ask("r.example:5000")
        .unwrap();
    assert!(
        matches!(found, Some(Credentials::HelperFailed { .. })),
        "{found:?}"
    );
    assert!(
        (9..30).contains(&begin.elapsed().as_secs()),
        "{:?}",
        begin.elapsed()
    );
    assert!(begin.elapsed() > Duration::from_secs(9));
}

#[test]
fn a_helper_may_leave_a_process_running() {
    let begin = Instant::now();
    let setup = Setup::new(r#"sleep 60 & echo '{"Username":"me","Secret":"s"}'"#);
    assert_eq!(setup.ask("r.example:5000").unwrap(), basic("me", "s"));
    assert!(
        begin.elapsed() < Duration::from_secs(8),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn a_failed_helper_matters_only_if_the_registry_wants_credentials() {
    let with_name = |wanted: bool| {
        let challenge = [("WWW-Authenticate", "Basic realm=\"x\"")];
        let server = Server::start(move |request, peer| {
            if wanted {
                reply(peer, request, 401, &challenge, b"");
            } else {
                reply(peer, request, 200, &[], b"");
            }
        });
        let credentials = Setup::new("exit 1").ask("r.example:5000").unwrap().unwrap();
        client(
            &server.host,
            Access {
                credentials,
                ..impatient()
            },
        )
        .has_blob("a", &Digest::of(b""))
    };
    assert!(with_name(false).unwrap());
    assert!(matches!(with_name(true), Err(Error::Helper { helper, .. }) if helper == "test"));
}
