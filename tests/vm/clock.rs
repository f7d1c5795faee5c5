//! The guest's clock is the host's, within a second, after every kind of start, however late the
//! agent receives the time.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sandtree::{Faults, ForkSpec, Replace, Sandbox, SandboxSpec};

use crate::support::lab::{Lab, sh, spec};

/// Longer than the promised second, and than the time these tests take to read a clock.
const UNDER_WAY: Duration = Duration::from_secs(4);

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("it is after 1970")
        .as_secs()
}

#[track_caller]
fn assert_now(before: u64, shown: &str) {
    let shown: u64 = shown.parse().expect("it is a number");
    assert!(
        (before - 1..=now() + 1).contains(&shown),
        "{shown} is not between {before} and {}",
        now()
    );
}

async fn is_right(sandbox: &Sandbox) {
    let before = now();
    assert_now(before, &sh(sandbox, "date +%s").await);
}

/// A busy host delivers messages late.
#[tokio::test(flavor = "multi_thread")]
async fn a_restored_guest_has_the_right_time_however_long_the_message_takes() {
    let lab = Lab::open().await;
    let sandbox = lab.host.create(spec("a")).await.expect("it is created");
    is_right(&sandbox).await;
    let state = sandbox
        .checkpoint(None, Replace::No)
        .await
        .expect("it is taken")
        .id;
    lab.host.set_faults(Faults {
        message_delay: Some(UNDER_WAY),
        ..Faults::default()
    });
    let reverted = sandbox.revert(&state).await.expect("it is gone to");
    assert_eq!(reverted.restore.degraded, []);
    is_right(&sandbox).await;
    let (copies, _) = sandbox.fork(ForkSpec::new(2)).await.expect("it is forked");
    for copy in copies {
        is_right(&copy).await;
        copy.remove().await.expect("the copy is removed");
    }
    sandbox.remove().await.expect("it is removed");
    lab.world.assert_empty();
}

/// A boot takes seconds. The time that the agent receives must not lag by them.
#[tokio::test(flavor = "multi_thread")]
async fn a_booted_guest_has_the_right_time_however_long_the_message_takes() {
    let lab = Lab::open().await;
    for delay in [None, Some(UNDER_WAY)] {
        lab.host.set_faults(Faults {
            message_delay: delay,
            ..Faults::default()
        });
        let spec = SandboxSpec {
            cold: true,
            ..spec("a")
        };
        let sandbox = lab.host.create(spec).await.expect("it is created");
        is_right(&sandbox).await;
        sandbox.remove().await.expect("it is removed");
    }
    lab.world.assert_empty();
}
