//! Credentials from Docker's `config.json` and the credential helpers that it names.
//!
//! Always: a helper is looked for only in the caller's directories, and runs with the caller's
//! variables and no others. It has ten seconds and may print 64 KiB; its output never appears in an
//! error.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
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

use crate::access::{Credentials, Secret};
use crate::document::or_default;
use crate::error::Error;
use crate::file::read_bounded;
use crate::text::cleaned;

const CONFIG_MAX: u64 = 1 << 20;
const HELPER_OUTPUT_MAX: u64 = 64 << 10;
const HELPER_TIME: Duration = Duration::from_secs(10);
/// How long a helper's output may take to arrive after the helper's end.
const HELPER_OUTPUT_TIME: Duration = Duration::from_secs(1);
const HELPER_POLL: Duration = Duration::from_millis(10);

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

/// Where credential helpers are, and what they run with.
#[derive(Clone, Copy, Default)]
pub struct Helpers<'a> {
    /// Directories to look for helpers in.
    pub search: &'a [PathBuf],
    /// All variables that helpers run with.
    pub env: &'a [(OsString, OsString)],
}

impl fmt::Debug for Helpers<'_> {
    /// Values of variables may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Helpers")
            .field("search", &self.search)
            .finish_non_exhaustive()
    }
}

/// The credentials for a registry. A missing configuration has none. A helper that fails is passed
/// over; its failure is returned only if the configuration has no other credentials.
pub fn credentials(
    config: &Path,
    registry: &str,
    helpers: Helpers<'_>,
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
    // The parser's message about a malformed file could repeat a password.
    let parsed: Config =
        serde_json::from_slice(&bytes).map_err(|_| unusable("it is not a Docker configuration"))?;
    let helper = find(&parsed.cred_helpers, registry).or(parsed.creds_store.as_ref());
    let answer = match helper.filter(|name| !name.is_empty()) {
        Some(name) => Helper { name, helpers }.ask(registry),
        None => Ok(None),
    };
    let helper_failure = match answer {
        Ok(Some(found)) => return Ok(Some(found)),
        Ok(None) => None,
        Err(Error::Helper { helper, rule }) => Some(Credentials::HelperFailed { helper, rule }),
        Err(error) => return Err(error),
    };
    let entry = find(&parsed.auths, registry);
    let found = entry.map_or(Ok(None), |entry| entry.credentials().map_err(unusable))?;
    Ok(found.or(helper_failure))
}

/// The entry of a registry. Its key may be an address.
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
    // A key with any other path belongs to a part of a registry.
    ["/v1/", "/v2/", "/v1", "/v2", "/"]
        .iter()
        .find_map(|end| key.strip_suffix(end))
        .unwrap_or(key)
}

impl Entry {
    fn credentials(&self) -> Result<Option<Credentials>, &'static str> {
        let value = |field: &Option<String>| field.clone().filter(|text| !text.is_empty());
        if let Some(token) = value(&self.identitytoken) {
            return Ok(Some(Credentials::Token(Secret::new(token))));
        }
        if let Some(token) = value(&self.registrytoken) {
            return Ok(Some(Credentials::Bearer(Secret::new(token))));
        }
        if let Some(auth) = value(&self.auth) {
            return decoded(&auth)
                .map(Some)
                .ok_or("an auth in it is not a name and a password in base64");
        }
        let both = value(&self.username).zip(value(&self.password));
        Ok(both.map(|(username, password)| Credentials::Basic {
            username,
            password: Secret::new(password),
        }))
    }
}

fn decoded(auth: &str) -> Option<Credentials> {
    let text = String::from_utf8(BASE64_STANDARD.decode(auth.trim()).ok()?).ok()?;
    let (username, password) = text.split_once(':')?;
    // Some old tools pad the password with NUL bytes.
    let password = Secret::new(password.trim_end_matches('\0'));
    Some(Credentials::Basic {
        username: username.to_owned(),
        password,
    })
}

struct Helper<'a> {
    name: &'a str,
    helpers: Helpers<'a>,
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
            serde_json::from_slice(&output).map_err(|_| self.failed("its answer is malformed"))?;
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
            return Err(self.failed("its name is invalid"));
        }
        let file = format!("docker-credential-{}", self.name);
        let found = self
            .helpers
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
            .env_clear()
            .envs(self.helpers.env.iter().cloned())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0);
        let mut child = command
            .spawn()
            .map_err(|_| self.failed("it cannot be started"))?;
        let output = exchange(&mut child, registry);
        let ended = self.wait_for_end(&child);
        // Also after a success: a process that the helper started may hold its output open.
        let status = end_group(&mut child);
        ended?;
        let output = output.recv_timeout(HELPER_OUTPUT_TIME);
        let output = output.map_err(|_| self.failed("its answer has no end"))?;
        if output.len() as u64 > HELPER_OUTPUT_MAX {
            return Err(self.failed("its answer is too long"));
        }
        let status = status.map_err(|_| self.failed("its end cannot be observed"))?;
        Ok((status, output))
    }

    /// Waits for the helper's end without reaping it, so that its process group keeps its number.
    fn wait_for_end(&self, child: &Child) -> Result<(), Error> {
        let end = Instant::now() + HELPER_TIME;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        while Instant::now() < end {
            let seen = waitid(WaitId::Pid(Pid::from_child(child)), options);
            if seen
                .map_err(|_| self.failed("its end cannot be observed"))?
                .is_some()
            {
                return Ok(());
            }
            thread::sleep(HELPER_POLL);
        }
        Err(self.failed("it did not end in 10 s"))
    }

    fn failed(&self, rule: &str) -> Error {
        Error::Helper {
            helper: cleaned(self.name),
            rule: rule.to_owned(),
        }
    }
}

/// Sends the registry's name to the helper and reads its answer. Both happen on a thread, because
/// both may block as long as the helper lives.
fn exchange(child: &mut Child, registry: &str) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    let stdin = child.stdin.take();
    let stdout = child.stdout.take();
    let line = format!("{registry}\n");
    thread::spawn(move || {
        let mut output = Vec::new();
        // No failure matters here: a helper that does not read may still answer, a helper that
        // breaks off is judged by its exit status, and a late answer has no receiver.
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

/// Ends a helper that is not reaped yet, and all processes it started.
fn end_group(child: &mut Child) -> io::Result<ExitStatus> {
    // It fails only if no process of the group is left.
    kill_process_group(Pid::from_child(child), Signal::KILL).ok();
    child.wait()
}

fn is_program(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(config: &str, registry: &str) -> Result<Option<Credentials>, Error> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, config).unwrap();
        credentials(&path, registry, Helpers::default())
    }

    fn basic(username: &str, password: &str) -> Option<Credentials> {
        Some(Credentials::Basic {
            username: username.into(),
            password: Secret::new(password),
        })
    }

    #[test]
    fn entries_of_all_kinds_are_read() {
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
    fn a_malformed_configuration_is_refused_without_quoting_it() {
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
            credentials(
                Path::new("/nonexistent/config.json"),
                "a",
                Helpers::default()
            )
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
                matches!(&found, Credentials::HelperFailed { helper, .. } if helper == name),
                "{found:?}"
            );
        }
    }

    #[test]
    fn a_failed_helper_or_null_hides_no_entry() {
        let entry =
            r#"{"auths":{"a":{"auth":"bWU6czpjcmV0"}},"credsStore":"absent","credHelpers":null}"#;
        assert_eq!(known(entry, "a").unwrap(), basic("me", "s:cret"));
        assert_eq!(known(r#"{"auths":null}"#, "a").unwrap(), None);
    }
}
