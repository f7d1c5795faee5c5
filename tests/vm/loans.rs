//! States that a keeper lends: they stay until their borrower returns them.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use sandtree::keeper::PROTOCOL;
use sandtree::{Progress, Result, SaveSpec, Saved, Step};
use serde_json::{Value, json};

use crate::support::lab::Lab;
use crate::support::{World, dir_of, entries};

/// A sandbox that a keeper runs, and a host in this process that borrows from it.
async fn lab() -> Lab {
    let world = World::new();
    tokio::task::block_in_place(|| world.start("a", &[]));
    Lab::of(world).await
}

/// Saves the sandbox, and does something else once its state is lent.
async fn saved_while(lab: &Lab, meanwhile: impl FnOnce()) -> Result<Saved> {
    let sandbox = lab.host.sandbox("a").expect("it exists");
    let saving = async {
        let spec = SaveSpec::new("kept").expect("it is a name");
        let save = async move { sandbox.save(spec, Progress::silent()).await };
        tokio::spawn(save).await.expect("it ends")
    };
    let (saved, ()) = lab.held(Step::SavePublish, saving, meanwhile).await;
    saved
}

fn clean_up(world: &World) {
    world.ok(["snapshot", "verify", "kept"]);
    world.ok(["rm", "-f", "a"]);
    world.ok(["snapshot", "rm", "kept"]);
    world.assert_empty();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lent_state_stays_when_its_sandbox_stops_and_starts() {
    let lab = lab().await;
    let saved = saved_while(&lab, || {
        lab.world.ok(["stop", "a"]);
        lab.world.ok(["start", "a"]);
    });
    saved.await.expect("its state was kept");
    tokio::task::block_in_place(|| clean_up(&lab.world));
}

fn frame(message: &Value) -> Vec<u8> {
    let body = message.to_string();
    let length = u32::try_from(body.len()).expect("it is short");
    [&length.to_le_bytes()[..], body.as_bytes()].concat()
}

fn read(stream: &mut UnixStream) -> Value {
    let mut length = [0; 4];
    stream.read_exact(&mut length).expect("it answers");
    let mut body = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut body).expect("it answers");
    serde_json::from_slice(&body).expect("it is JSON")
}

/// The answer of a keeper to one call, on a connection of its own.
fn called(socket: &Path, call: &Value) -> Value {
    let hello = json!({ "protocol": PROTOCOL, "program": "0.1.0", "features": [] });
    let mut stream = UnixStream::connect(socket).expect("the keeper listens");
    let said = [frame(&hello), frame(call)].concat();
    stream.write_all(&said).expect("it is heard");
    assert_eq!(read(&mut stream)["protocol"], PROTOCOL);
    read(&mut stream)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_loan_of_another_connection_cannot_be_returned() {
    let lab = lab().await;
    let saved = saved_while(&lab, || {
        let dir = dir_of(&lab.world, "a");
        let states = entries(&dir.join("states"));
        let lent = states.first().expect("one is lent");
        let state = lent.file_name().expect("it has a name").to_string_lossy();
        let call = json!({ "order": { "give_back": { "state": state } } });
        let answer = called(&dir.join("keeper.sock"), &call);
        assert_eq!(answer["Err"]["kind"], "invalid", "{answer}");
    });
    saved.await.expect("its state was kept");
    tokio::task::block_in_place(|| clean_up(&lab.world));
}
