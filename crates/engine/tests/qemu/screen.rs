//! Machines with a screen.

use std::path::Path;

use sandtree_engine::{Error, Machine, MachineSpec, Memory, Screen, Start};
use tokio::io::AsyncReadExt;

use crate::devices::{capture, saved};
use crate::support::{engine, file, spec};
use crate::{start, within};

const SCREEN: Screen = Screen {
    width: 1024,
    height: 768,
};

fn with_screen(dir: &Path, cmdline: &str) -> MachineSpec {
    MachineSpec {
        display: Some(SCREEN),
        ..spec(dir, cmdline)
    }
}

async fn started(spec: MachineSpec) -> Machine {
    within(engine().await.start(spec)).await.unwrap()
}

/// Captures store the guest's main memory only, so a device of a screen must not have other memory.
#[tokio::test]
async fn a_screen_has_no_memory_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let plain = start(dir.path(), "stay").await;
    let dir = tempfile::tempdir().unwrap();
    let with_screen = started(with_screen(dir.path(), "stay")).await;
    assert_eq!(with_screen.uncaptured_memory(), plain.uncaptured_memory());
}

#[tokio::test]
async fn a_picture_is_taken_of_a_running_and_of_a_stopped_machine() {
    let dir = tempfile::tempdir().unwrap();
    let machine = started(with_screen(dir.path(), "stay")).await;
    let running = within(machine.picture()).await.unwrap();
    assert!(running.width > 0 && running.height > 0);
    let pixels = running.width as usize * running.height as usize;
    assert_eq!(running.rgb.len(), pixels * 3);
    machine.stop().await.unwrap();
    assert_eq!(within(machine.picture()).await.unwrap(), running);
}

#[tokio::test]
async fn viewers_connect_without_a_port_and_more_than_one_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let machine = started(with_screen(dir.path(), "stay")).await;
    let mut viewers = Vec::new();
    for _ in 0..3 {
        let mut viewer = within(machine.view()).await.unwrap();
        let mut version = [0; 12];
        within(viewer.read_exact(&mut version)).await.unwrap();
        assert_eq!(&version, b"RFB 003.008\n");
        viewers.push(viewer);
    }
}

#[tokio::test]
async fn a_state_with_a_screen_is_loaded_into_a_machine_with_the_same_screen() {
    let dir = tempfile::tempdir().unwrap();
    let source = started(with_screen(dir.path(), "stay")).await;
    source.stop().await.unwrap();
    let picture = within(source.picture()).await.unwrap();
    let state = file(&dir.path().join("devices"), &within(saved(&source)).await);
    let place = tempfile::tempdir().unwrap();
    let memory = capture(&source, &place.path().join("memory"));
    let waiting = MachineSpec {
        memory,
        start: Start::Incoming,
        ..with_screen(place.path(), "wait")
    };
    let copy = started(waiting).await;
    within(copy.load(state.try_clone().unwrap().into()))
        .await
        .unwrap();
    assert_eq!(within(copy.picture()).await.unwrap(), picture);

    // The state of a screen has no place in a machine without one.
    let place = tempfile::tempdir().unwrap();
    let plain = MachineSpec {
        memory: Memory::Empty,
        start: Start::Incoming,
        ..spec(place.path(), "wait")
    };
    let plain = started(plain).await;
    let refused = within(plain.load(state.into())).await;
    assert!(
        matches!(refused, Err(Error::NotLoaded { .. })),
        "{refused:?}"
    );
}
