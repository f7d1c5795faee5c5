//! Access to registries: from options, or from Docker's configuration.

use std::path::PathBuf;

use sandtree::{Error, RegistryAccess, Result};

use crate::stdin;

/// Options for access to a registry.
#[derive(Debug, clap::Args)]
pub struct Access {
    /// User name for the registry [default: from Docker's configuration]
    #[arg(long, value_name = "USER", requires = "password_stdin")]
    pub username: Option<String>,
    /// Read the password from standard input
    #[arg(long, requires = "username")]
    pub password_stdin: bool,
    /// Use HTTP without TLS, also for a registry on another machine
    #[arg(long)]
    pub plain_http: bool,
    /// Additional certificates to trust
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
}

/// Far above any password or token.
const PASSWORD_MAX: usize = 64 << 10;

/// Reads the options and, from the environment, the place of Docker's configuration, the
/// directories of its helpers, and the variables that they run with.
pub async fn access(args: &Access) -> Result<RegistryAccess> {
    let password = if args.password_stdin {
        Some(password().await?)
    } else {
        None
    };
    Ok(RegistryAccess {
        username: args.username.clone(),
        password,
        plain_http: args.plain_http,
        ca: args.ca.clone(),
        ..from_environment()
    })
}

/// The credentials of the user who started us.
pub fn from_environment() -> RegistryAccess {
    RegistryAccess {
        docker_config: RegistryAccess::docker_config(|name| std::env::var_os(name)),
        search: super::search(),
        helper_env: std::env::vars_os().collect(),
        ..RegistryAccess::default()
    }
}

/// Reads the password. No message contains it.
async fn password() -> Result<String> {
    let refused = |rule| Error::invalid("password", "standard input", rule);
    let mut chunks = stdin::read();
    let mut read = Vec::new();
    while let Some(chunk) = chunks.recv().await {
        read.extend(chunk.map_err(|e| Error::io("read", "standard input", e))?);
        if read.len() > PASSWORD_MAX {
            return Err(refused("it has more than 64 KiB"));
        }
    }
    let text = String::from_utf8(read).map_err(|_| refused("it is not UTF-8"))?;
    match without_newline(&text) {
        "" => Err(refused("it is empty")),
        password => Ok(password.to_owned()),
    }
}

/// `echo` and editors end a password with a newline that is not part of it.
fn without_newline(text: &str) -> &str {
    let text = text.strip_suffix('\n').unwrap_or(text);
    text.strip_suffix('\r').unwrap_or(text)
}

/// Whether the text is a reference to a registry: as in other tools, it begins with a host name.
pub fn is_reference(text: &str) -> bool {
    let is_host = |first: &str| first == "localhost" || first.contains(['.', ':']);
    text.split_once('/')
        .is_some_and(|(first, _)| !first.starts_with('.') && is_host(first))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Typed {
        #[command(flatten)]
        access: Access,
    }

    #[test]
    fn a_password_is_never_an_argument() {
        let typed = |typed: &[&str]| Typed::try_parse_from(["pull"].iter().chain(typed));
        assert!(typed(&["--username", "u"]).is_err());
        assert!(typed(&["--password", "p"]).is_err());
        assert!(typed(&["--username", "u", "--password-stdin"]).is_ok());
    }

    #[test]
    fn a_reference_begins_with_a_host() {
        for reference in [
            "localhost:5000/team/app:1.2",
            "localhost/app",
            "registry.test/app",
            "127.0.0.1:5000/a@sha256:0",
        ] {
            assert!(is_reference(reference), "{reference}");
        }
        for other in [
            "debian",
            "./a/b",
            "../a.b/c",
            "/a.b/c",
            "dir/sub",
            "app:1.2",
            ".hidden/x",
            "",
        ] {
            assert!(!is_reference(other), "{other}");
        }
    }

    #[test]
    fn a_password_ends_before_its_line() {
        for (typed, password) in [
            ("p\n", "p"),
            ("p\r\n", "p"),
            ("p", "p"),
            (" p \n\n", " p \n"),
            ("\n", ""),
        ] {
            assert_eq!(without_newline(typed), password);
        }
    }
}
