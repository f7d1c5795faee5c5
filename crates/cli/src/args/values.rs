//! Parsers of values: names, sizes, times and ports.

use std::time::Duration;

use sandtree::{Error, ExpiryAction, MountAccess, MountSpec, PublishedPort};

/// The value cannot be the name or id of a sandbox. The library's error gives the reason.
#[derive(Debug)]
pub struct BadSandboxRef(pub Error);

impl std::fmt::Display for BadSandboxRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for BadSandboxRef {}

/// Parses the name or id of a sandbox. An invalid one is refused before the command opens the
/// store.
pub fn sandbox_ref(text: &str) -> Result<String, BadSandboxRef> {
    sandtree::check_reference(text).map_err(BadSandboxRef)?;
    Ok(text.to_owned())
}

/// A size such as 512M or 2G; the units are powers of 1024.
pub fn size(text: &str) -> Result<u64, String> {
    let rule = || "use a number, with K, M, G or T for units of 1024".to_owned();
    let (digits, unit) = text.split_at(
        text.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len()),
    );
    let shift = match unit
        .to_ascii_uppercase()
        .trim_end_matches('B')
        .trim_end_matches('I')
    {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(rule()),
    };
    let number: u64 = digits.parse().map_err(|_| rule())?;
    number.checked_mul(1 << shift).ok_or_else(rule)
}

pub fn duration(text: &str) -> Result<Duration, String> {
    let seconds = text
        .parse::<f64>()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let parsed = seconds.or_else(|| humantime::parse_duration(text).ok());
    let rule = || "use a time above zero, as in 5s, 200ms or 1m30s".to_owned();
    parsed.filter(|time| !time.is_zero()).ok_or_else(rule)
}

pub fn port(text: &str) -> Result<PublishedPort, String> {
    let rule = || "use HOST:GUEST, each up to 65535".to_owned();
    let (host, guest) = text.split_once(':').ok_or_else(rule)?;
    let port = PublishedPort {
        host: host.parse().map_err(|_| rule())?,
        guest: guest.parse().map_err(|_| rule())?,
    };
    if port.guest == 0 {
        Err(rule())
    } else {
        Ok(port)
    }
}

/// A mount: the host's directory, the path in the guest, and perhaps how it is used. The first may
/// contain colons.
pub fn mount(text: &str) -> Result<MountSpec, String> {
    let rule =
        || "use HOST:GUEST, HOST:GUEST:ro or HOST:GUEST:cow, with an absolute GUEST".to_owned();
    let (paths, access) = match text.rsplit_once(':') {
        Some((paths, "ro")) => (paths, MountAccess::ReadOnly),
        Some((paths, "rw")) => (paths, MountAccess::ReadWrite),
        Some((paths, "cow")) => (paths, MountAccess::CopyOnWrite),
        _ => (text, MountAccess::ReadWrite),
    };
    let (host, guest) = paths.rsplit_once(':').ok_or_else(rule)?;
    if host.is_empty() || !guest.starts_with('/') {
        return Err(rule());
    }
    let host = std::path::absolute(host).map_err(|error| error.to_string())?;
    let guest = guest.trim_end_matches('/').to_owned();
    Ok(MountSpec {
        host,
        guest,
        access,
        owner: None,
    })
}

/// What happens to a sandbox that expires.
pub fn expiry_action(text: &str) -> Result<ExpiryAction, String> {
    match text {
        "remove" => Ok(ExpiryAction::Remove),
        "pause" => Ok(ExpiryAction::Pause),
        "stop" => Ok(ExpiryAction::Stop),
        _ => Err("use remove, pause or stop".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts() {
        let parsed = mount("/a:b:/work/:ro").unwrap();
        assert_eq!(parsed.host, std::path::Path::new("/a:b"));
        assert_eq!(parsed.guest, "/work");
        assert_eq!(parsed.access, MountAccess::ReadOnly);
        let here = mount("x:/w").unwrap();
        assert_eq!(here.host, std::env::current_dir().unwrap().join("x"));
        assert_eq!(here.access, MountAccess::ReadWrite);
        for wrong in ["", "x", "x:", ":/w", "x:w", "/w:ro"] {
            assert!(mount(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_and_times() {
        assert_eq!(size("512M"), Ok(512 << 20));
        assert_eq!(size("2GiB"), Ok(2 << 30));
        assert_eq!(size("4096"), Ok(4096));
        for bad in ["", "M", "-1M", "1.5G", "9999999999T", "2X", "1 G"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!(duration("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(duration("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "0", "0s", "-3s", "soon", "nan"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ports() {
        assert_eq!(
            port("8080:80"),
            Ok(PublishedPort {
                host: 8080,
                guest: 80
            })
        );
        for bad in ["80", ":80", "80:", "70000:80", "80:0", "a:b"] {
            assert!(port(bad).is_err(), "{bad}");
        }
    }
}
