//! The names of routes: a few, whatever clients send.

use hyper::Method;

/// Of a request that no route matches.
pub const NONE: &str = "none";
/// Of a request for a port of a guest.
pub const PORT: &str = "port";
/// Its body is a stream.
pub const STREAM_INPUT: &str = "/process.Process/StreamInput";

/// The paths of the data plane.
const ENVD: [&str; 22] = [
    "/health",
    "/files",
    "/metrics",
    "/envs",
    "/init",
    "/process.Process/List",
    "/process.Process/Start",
    "/process.Process/Connect",
    "/process.Process/Update",
    "/process.Process/SendInput",
    STREAM_INPUT,
    "/process.Process/SendSignal",
    "/process.Process/CloseStdin",
    "/filesystem.Filesystem/Stat",
    "/filesystem.Filesystem/MakeDir",
    "/filesystem.Filesystem/Move",
    "/filesystem.Filesystem/ListDir",
    "/filesystem.Filesystem/Remove",
    "/filesystem.Filesystem/WatchDir",
    "/filesystem.Filesystem/CreateWatcher",
    "/filesystem.Filesystem/GetWatcherEvents",
    "/filesystem.Filesystem/RemoveWatcher",
];

pub fn envd(path: &str) -> &'static str {
    let known = ENVD.iter().find(|known| **known == path);
    known.copied().unwrap_or(NONE)
}

pub fn method(method: &Method) -> &'static str {
    let known = [
        "GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "CONNECT", "TRACE",
    ];
    let found = known.into_iter().find(|name| *name == method.as_str());
    found.unwrap_or("other")
}

/// The sandbox in a path, where its route has one: `/v2/sandboxes/{id}/connect`.
pub fn sandbox<'a>(route: &str, path: &'a str) -> Option<&'a str> {
    let before = route.split_once("/sandboxes/{")?.0;
    let rest = path.strip_prefix(before)?.strip_prefix("/sandboxes/")?;
    let id = rest.split('/').next()?;
    is_plain_id(id).then_some(id)
}

/// Whether a text may stand in a log as the id of a sandbox.
pub fn is_plain_id(id: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=64).contains(&id.len()) && id.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_do_not_choose_names_of_routes() {
        assert_eq!(envd("/files"), "/files");
        assert_eq!(envd("/files/"), NONE);
        assert_eq!(envd("/process.Process/Start"), "/process.Process/Start");
        assert_eq!(envd("/anything"), NONE);
        assert_eq!(method(&Method::GET), "GET");
        assert_eq!(method(&Method::from_bytes(b"BREW").unwrap()), "other");
    }

    #[test]
    fn the_sandbox_is_the_part_of_the_path_that_the_route_names() {
        let of = |path| sandbox("/v2/sandboxes/{id}/connect", path);
        assert_eq!(of("/v2/sandboxes/0a1b/connect"), Some("0a1b"));
        assert_eq!(of("/v2/sandboxes/0a%0a/connect"), None);
        assert_eq!(sandbox("/sandboxes", "/sandboxes"), None);
        assert_eq!(sandbox("/sandboxes/{id}", "/sandboxes/x"), Some("x"));
        assert_eq!(sandbox("/templates/{id}", "/templates/x"), None);
    }
}
