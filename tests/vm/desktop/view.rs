//! `sandtree view`: a port for VNC clients, for as long as the command runs.

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::net::TcpStream;
use std::time::Duration;

use serde_json::Value;

use super::{base, begin, end, start};
use crate::support::{World, finish, kill, text};

#[test]
fn a_view_serves_viewers_until_it_ends() {
    let world = World::like(base());
    start(&world, "d");
    let mut view = begin(&world, &["--json", "view", "d"]);
    let mut line = String::new();
    let mut out = BufReader::new(view.stdout.take().expect("it is piped"));
    out.read_line(&mut line).unwrap();
    let said: Value = serde_json::from_str(&line).unwrap();
    let address = text(&said["address"]);
    assert!(address.starts_with("127.0.0.1:"), "{said}");
    assert!(text(&said["password"]).len() >= 8, "{said}");
    let mut viewer = TcpStream::connect(address).unwrap();
    viewer
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    let mut greeting = [0; 12];
    viewer.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"RFB 003.008\n");
    kill(view.id(), "TERM");
    finish(view);
    let refused = TcpStream::connect(address).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    world.ok(["exec", "d", "--", "true"]);
    end(&world, &["d"]);
}
