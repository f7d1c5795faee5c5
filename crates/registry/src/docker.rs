//! Credentials as Docker and its kin keep them: `config.json`, and the helpers it names.
//!
//! Always: a helper is a plain name and is looked for only where the caller says. It has ten
//! seconds and may say a little; what it says never appears in an error.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use serde::Deserialize;

use crate::document::or_default;
use crate::{Credentials, Error, Secret};

const CONFIG_MAX: u64 = 1 << 20;
const HELPER_OUTPUT_MAX: u64 = 64 << 10;
const HELPER_TIME: Duration = Duration::from_secs(10);
/// How long what a helper has said may take to come after its end.
const HELPER_LAST_WORDS: Duration = Duration::from_secs(1);
const HELPER_GLANCE: Duration = Duration::from_millis(10);

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Config {
    #[serde(deserialize_with = "or_default")]
    auths: BTreeMap<String, Entry>,
    #[serde(deserialize_with = "or_default")]
    cred_helpers: BTreeMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

/// What this configuration knows for a registry. A configuration that is not there knows nothing. A
/// helper that fails is passed over; only if nothing else is known, what failed is kept for a
/// registry that wants a name.
pub fn credentials(
    config: &Path,
    registry: &str,
    search: &[PathBuf],
) -> Result<Option<Credentials>, Error> {
    let unusable = |rule| Error::File {
        path: config.to_owned(),
        rule,
    };
    let bytes = match read_bounded(config, CONFIG_MAX) {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(None);
        }
        read => read?,
    };
    // What the parser says of a malformed file could repeat a password.
    let parsed: Config =
        serde_json::from_slice(&bytes).map_err(|_| unusable("it is not a Docker configuration"))?;
    let helper = find(&parsed.cred_helpers, registry).or(parsed.creds_store.as_ref());
    let told = helper
        .filter(|name| !name.is_empty())
        .map(|name| Helper { name, search }.ask(registry))
        .transpose();
    let untold = match told {
        Ok(Some(Some(found))) => return Ok(Some(found)),
        Ok(_) => None,
        Err(Error::Helper { helper, rule }) => Some(Credentials::Untold { helper, rule }),
        Err(error) => return Err(error),
    };
    let entry = find(&parsed.auths, registry);
    let found = entry.map_or(Ok(None), |entry| entry.credentials().map_err(unusable))?;
    Ok(found.or(untold))
}

/// The entry of a registry, whose key may be written as an address.
fn find<'a, T>(entries: &'a BTreeMap<String, T>, registry: &str) -> Option<&'a T> {
    entries.get(registry).or_else(|| {
        entries
            .iter()
            .find(|(key, _)| host_of(key) == registry)
            .map(|(_, entry)| entry)
    })
}

fn host_of(key: &str) -> &str {
    let key = key
        .strip_prefix("https://")
        .or_else(|| key.strip_prefix("http://"))
        .unwrap_or(key);
    // A key with more of a path belongs to a part of a registry.
    ["/v1/", "/v2/", "/v1", "/v2", "/"]
        .iter()
        .find_map(|end| key.strip_suffix(end))
        .unwrap_or(key)
}

impl Entry {
    fn credentials(&self) -> Result<Option<Credentials>, &'static str> {
        let said = |field: &Option<String>| field.clone().filter(|text| !text.is_empty());
        if let Some(token) = said(&self.identitytoken) {
            return Ok(Some(Credentials::Token(Secret::new(token))));
        }
        if let Some(token) = said(&self.registrytoken) {
            return Ok(Some(Credentials::Bearer(Secret::new(token))));
        }
        if let Some(auth) = said(&self.auth) {
            return decoded(&auth)
                .map(Some)
                .ok_or("an auth in it is not a name and a password in base64");
        }
        let both = said(&self.username).zip(said(&self.password));
        Ok(both.map(|(username, password)| Credentials::Basic {
            username,
            password: Secret::new(password),
        }))
    }
}

fn decoded(auth: &str) -> Option<Credentials> {
    let text = String::from_utf8(BASE64_STANDARD.decode(auth.trim()).ok()?).ok()?;
    let (username, password) = text.split_once(':')?;
    // Some old tools pad the password with zeros.
    let password = Secret::new(password.trim_end_matches('\0'));
    Some(Credentials::Basic {
        username: username.to_owned(),
        password,
    })
}

struct Helper<'a> {
    name: &'a str,
    search: &'a [PathBuf],
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Reply {
    username: String,
    secret: String,
}

impl Helper<'_> {
    fn ask(&self, registry: &str) -> Result<Option<Credentials>, Error> {
        let program = self.program()?;
        let (status, output) = self.run(&program, registry)?;
        if !status.success() {
            let text = String::from_utf8_lossy(&output);
            let unknown = text.to_ascii_lowercase().contains("credentials not found");
            return if unknown {
                Ok(None)
            } else {
                Err(self.failed("it ended with an error"))
            };
        }
        let reply: Reply =
            serde_json::from_slice(&output).map_err(|_| self.failed("its answer is not one"))?;
        let secret = Secret::new(reply.secret);
        Ok(Some(match reply.username.as_str() {
            "<token>" => Credentials::Token(secret),
            _ => Credentials::Basic {
                username: reply.username,
                password: secret,
            },
        }))
    }

    fn program(&self) -> Result<PathBuf, Error> {
        let plain = self
            .name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        if !plain {
            return Err(self.failed("its name is not one"));
        }
        let file = format!("docker-credential-{}", self.name);
        let found = self
            .search
            .iter()
            .map(|dir| dir.join(&file))
            .find(|path| is_program(path));
        found.ok_or_else(|| self.failed("there is no such program"))
    }

    fn run(&self, program: &Path, registry: &str) -> Result<(ExitStatus, Vec<u8>), Error> {
        // starts: our own program (a credential helper of the user; tests write their own)
        let mut command = Command::new(program);
        command
            .arg("get")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0);
        let mut child = command
            .spawn()
            .map_err(|_| self.failed("it cannot be started"))?;
        let conversation = converse(&mut child, registry);
        let ended = self.awaited(&child);
        // Also after a success: what it started may hold its output open.
        let status = end_group(&mut child);
        ended?;
        let output = conversation.recv_timeout(HELPER_LAST_WORDS);
        let output = output.map_err(|_| self.failed("its answer has no end"))?;
        if output.len() as u64 > HELPER_OUTPUT_MAX {
            return Err(self.failed("it says too much"));
        }
        Ok((
            status.map_err(|_| self.failed("its end cannot be seen"))?,
            output,
        ))
    }

    /// Waits for its end and leaves it to be reaped, so that its group keeps its number.
    fn awaited(&self, child: &Child) -> Result<(), Error> {
        let end = Instant::now() + HELPER_TIME;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        while Instant::now() < end {
            let seen = waitid(WaitId::Pid(Pid::from_child(child)), options);
            if seen
                .map_err(|_| self.failed("its end cannot be seen"))?
                .is_some()
            {
                return Ok(());
            }
            thread::sleep(HELPER_GLANCE);
        }
        Err(self.failed("it did not end in 10 s"))
    }

    fn failed(&self, rule: &str) -> Error {
        Error::Helper {
            helper: crate::error::cleaned(self.name),
            rule: rule.to_owned(),
        }
    }
}

/// Tells the helper the registry and listens, on a thread, since either may block for as long as
/// the helper lives.
fn converse(child: &mut Child, registry: &str) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let line = format!("{registry}\n");
    thread::spawn(move || {
        let mut output = Vec::new();
        // A helper that does not listen may still answer, and one that breaks off is judged by its
        // status; and nobody waits for an answer that comes too late.
        stdin.map(|mut stdin| stdin.write_all(line.as_bytes()).ok());
        stdout.map(|stdout| {
            stdout
                .take(HELPER_OUTPUT_MAX + 1)
                .read_to_end(&mut output)
                .ok()
        });
        sender.send(output).ok();
    });
    receiver
}

/// Ends a helper that was not reaped yet, and whatever it started.
fn end_group(child: &mut Child) -> io::Result<ExitStatus> {
    // It may fail only because there is nobody left to end.
    kill_process_group(Pid::from_child(child), Signal::KILL).ok();
    child.wait()
}

fn is_program(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// A whole file that is not too long.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::io("read", path.display(), source);
    let mut bytes = Vec::new();
    File::open(path)
        .map_err(failed)?
        .take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > limit {
        return Err(Error::TooLarge {
            what: path.display().to_string(),
            limit_bytes: limit,
        });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(config: &str, registry: &str) -> Result<Option<Credentials>, Error> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, config).unwrap();
        credentials(&path, registry, &[])
    }

    fn basic(username: &str, password: &str) -> Option<Credentials> {
        Some(Credentials::Basic {
            username: username.into(),
            password: Secret::new(password),
        })
    }

    #[test]
    fn entries_of_all_kinds() {
        let config = r#"{"auths":{"a.example":{"auth":"bWU6czpjcmV0"},"https://b.example/v1/":{"username":"u","password":"p"},
            "c.example:5000":{"identitytoken":"i"},"d.example":{},"e.example/team":{"auth":"bWU6czpjcmV0"}},"x":1}"#;
        assert_eq!(known(config, "a.example").unwrap(), basic("me", "s:cret"));
        assert_eq!(known(config, "b.example").unwrap(), basic("u", "p"));
        assert_eq!(
            known(config, "c.example:5000").unwrap(),
            Some(Credentials::Token(Secret::new("i")))
        );
        for registry in ["c.example", "d.example", "e.example", "f.example"] {
            assert_eq!(known(config, registry).unwrap(), None, "{registry}");
        }
    }

    #[test]
    fn what_is_malformed_is_refused_without_its_words() {
        for config in [
            r#"{"auths":{"a":{"auth":"s3cret!"}}}"#,
            r#"{"auths":{"a":{"auth":["s3cret"]}}}"#,
            "s3cret",
        ] {
            let error = known(config, "a").unwrap_err();
            assert!(
                !format!("{error} {error:?}").contains("s3cret"),
                "{error:?}"
            );
        }
        assert!(
            credentials(Path::new("/nonexistent/config.json"), "a", &[])
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn a_helper_is_a_plain_name_in_the_search_path() {
        for name in ["../x", "a/b", "a b", "absent"] {
            let found = known(&format!(r#"{{"credsStore":"{name}"}}"#), "a")
                .unwrap()
                .unwrap();
            assert!(
                matches!(&found, Credentials::Untold { helper, .. } if helper == name),
                "{found:?}"
            );
        }
    }

    #[test]
    fn what_fails_or_is_null_hides_no_entry() {
        let entry =
            r#"{"auths":{"a":{"auth":"bWU6czpjcmV0"}},"credsStore":"absent","credHelpers":null}"#;
        assert_eq!(known(entry, "a").unwrap(), basic("me", "s:cret"));
        assert_eq!(known(r#"{"auths":null}"#, "a").unwrap(), None);
    }
}
