//! Every state is exact: a restored machine has, byte for byte, the memory and the disk of the
//! moment of capture.

use std::collections::BTreeSet;

use sandtree::{Checkpoint, Degradation, ForkSpec, MemoryMode, Replace, Sandbox, SandboxSpec};

use crate::support::exactness::Exactness;
use crate::support::lab::{Lab, give_worker, sh, spec, start, until_async};

/// A guest that writes, frees, remaps and swaps memory, and writes and removes files.
async fn busy(sandbox: &Sandbox) {
    give_worker(sandbox).await;
    sh(
        sandbox,
        "mkdir /churn && dd if=/dev/zero of=/swap bs=1M count=16 && mkswap /swap && swapon /swap",
    )
    .await;
    sh(
        sandbox,
        "echo +memory > /sys/fs/cgroup/cgroup.subtree_control && mkdir /sys/fs/cgroup/churn",
    )
    .await;
    start(
        sandbox,
        "echo $$ > /sys/fs/cgroup/churn/cgroup.procs; exec /dev/shm/worker churn 7",
    )
    .await;
    let reclaim =
        "while :; do echo 1M > /sys/fs/cgroup/churn/memory.reclaim; sleep 0.2; done 2> /dev/null";
    start(sandbox, reclaim).await;
    sh(
        sandbox,
        "until [ $(cat /sys/fs/cgroup/churn/memory.swap.current) -gt 0 ]; do usleep 20000; done",
    )
    .await;
}

/// A busy guest whose memory is captured in one way.
async fn busy_guest(mode: MemoryMode) -> (Exactness, Sandbox) {
    busy_guest_of(Lab::open().await, in_mode(mode)).await
}

fn in_mode(mode: MemoryMode) -> SandboxSpec {
    SandboxSpec {
        memory_mode: Some(mode),
        ..spec("x")
    }
}

async fn busy_guest_of(lab: Lab, spec: SandboxSpec) -> (Exactness, Sandbox) {
    let sandbox = lab.host.create(spec.clone()).await.expect("it is created");
    busy(&sandbox).await;
    (Exactness::of(lab, &spec), sandbox)
}

/// Waits until the guest's worker has done some work: a loaded host may give a guest no processor
/// time for a while.
async fn worked(sandbox: &Sandbox) {
    // The worker's user and system time, in ticks.
    let line = "t() { cut -d' ' -f14,15 /proc/$(pidof worker)/stat; }; a=$(t); while [ \"$(t)\" = \"$a\" ]; do usleep 5000; done";
    sh(sandbox, line).await;
}

/// Takes checkpoints, reverts to each, takes more from there, and uses every other verb that
/// restores a state.
async fn is_exact_in_every_way(mode: MemoryMode) -> Vec<Checkpoint> {
    of_every_way(Lab::open().await, in_mode(mode)).await
}

/// As `is_exact_in_every_way`, for a guest of any shape.
pub async fn of_every_way(lab: Lab, spec: SandboxSpec) -> Vec<Checkpoint> {
    let (mut exactness, sandbox) = busy_guest_of(lab, spec).await;
    let mut taken = Vec::new();
    for _ in 0..3 {
        worked(&sandbox).await;
        taken.push(exactness.checkpoint(&sandbox).await);
    }
    for pair in exactness.known.windows(2) {
        assert!(pair[0].1.changed_pages(&pair[1].1) > 0, "the guest is busy");
    }
    exactness.verify(&sandbox, 0).await;
    taken.push(exactness.checkpoint(&sandbox).await);
    taken.push(exactness.checkpoint(&sandbox).await);
    exactness.leave(&sandbox, 1).await;
    for index in [5, 4, 3, 2] {
        exactness.verify(&sandbox, index).await;
    }
    exactness.pause_and_resume(&sandbox).await;
    taken.push(exactness.checkpoint(&sandbox).await);
    exactness.verify(&sandbox, exactness.known.len() - 1).await;
    exactness.fork(&sandbox).await;
    sandbox.remove().await.expect("it is removed");
    exactness.lab.world.assert_empty();
    taken
}

/// Takes two checkpoints, reverts to each, and pauses: where all verbs would take too long.
pub async fn of_a_few_ways(lab: Lab, spec: SandboxSpec) -> Vec<Checkpoint> {
    let (mut exactness, sandbox) = busy_guest_of(lab, spec).await;
    let taken = vec![
        exactness.checkpoint(&sandbox).await,
        exactness.checkpoint(&sandbox).await,
    ];
    for index in [0, 1] {
        exactness.verify(&sandbox, index).await;
    }
    exactness.pause_and_resume(&sandbox).await;
    sandbox.remove().await.expect("it is removed");
    exactness.lab.world.assert_empty();
    taken
}

#[tokio::test(flavor = "multi_thread")]
async fn write_protect_is_exact() {
    for taken in is_exact_in_every_way(MemoryMode::WriteProtect).await {
        assert_eq!(
            (taken.mode.as_str(), taken.degraded),
            ("write-protect", Vec::new())
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn anonymous_is_exact() {
    for taken in is_exact_in_every_way(MemoryMode::Anonymous).await {
        assert_eq!(
            (taken.mode.as_str(), taken.degraded),
            ("anonymous", Vec::new())
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn full_is_exact() {
    for taken in is_exact_in_every_way(MemoryMode::Full).await {
        assert_eq!((taken.mode.as_str(), taken.degraded), ("full", Vec::new()));
    }
}

/// If the kernel lacks the soft-dirty bit, the probe finds that out, and the next best mode is
/// exact as well.
#[tokio::test(flavor = "multi_thread")]
async fn soft_dirty_is_exact_or_reported_as_unavailable() {
    let (mut exactness, sandbox) = busy_guest(MemoryMode::SoftDirty).await;
    for _ in 0..2 {
        let taken = exactness.checkpoint(&sandbox).await;
        match taken.mode.as_str() {
            "soft-dirty" => assert_eq!(taken.degraded, []),
            mode => {
                assert_eq!(mode, "anonymous");
                assert!(taken.degraded.iter().any(|degradation| matches!(
                    degradation,
                    Degradation::MemoryModeUnusable {
                        mode: MemoryMode::SoftDirty,
                        ..
                    }
                )));
            }
        }
    }
    for index in [0, 1] {
        exactness.verify(&sandbox, index).await;
    }
    sandbox.remove().await.expect("it is removed");
}

/// Layers are folded in the background. Neither earlier nor later states change by that.
#[tokio::test(flavor = "multi_thread")]
async fn folded_layers_are_exact() {
    const FOLDED_BY: usize = 48;
    let (mut exactness, sandbox) = busy_guest(MemoryMode::WriteProtect).await;
    let mut deepest = [0, 0];
    let mut folded = [None, None];
    for index in 0..FOLDED_BY {
        let state = exactness.checkpoint(&sandbox).await.id;
        let depth = exactness.depth(&sandbox, &state);
        for kind in 0..2 {
            if depth[kind] < deepest[kind] {
                folded[kind].get_or_insert(index);
            }
            deepest[kind] = deepest[kind].max(depth[kind]);
        }
        if folded.iter().all(Option::is_some) {
            break;
        }
    }
    let [Some(memory), Some(disk)] = folded else {
        panic!("nothing was folded: {deepest:?}, {folded:?}")
    };
    // The last state before each fold, the first after it, and one that follows.
    for index in BTreeSet::from([
        disk - 1,
        disk,
        memory - 1,
        memory,
        exactness.known.len() - 1,
    ]) {
        exactness.verify(&sandbox, index).await;
        sh(&sandbox, "pidof worker").await;
    }
    exactness.checkpoint(&sandbox).await;
    exactness.verify(&sandbox, exactness.known.len() - 1).await;
    sandbox.remove().await.expect("it is removed");
}

/// What the guest reads from its disk, not from its cache: every file, and the whole device.
async fn disk(sandbox: &Sandbox) -> String {
    sh(
        sandbox,
        "sync; mount -o remount,ro / && echo 3 > /proc/sys/vm/drop_caches",
    )
    .await;
    let files = "cd /; find bin/busybox srv -type f | sort | xargs sha256sum; md5sum /dev/vda";
    sh(sandbox, files).await
}

/// The guest's file system does not change here. Only the disk decides what the guest must read.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_is_exact_in_every_state() {
    let lab = Lab::open().await;
    let sandbox = lab.host.create(spec("x")).await.expect("it is created");
    let mut known = Vec::new();
    // More than the depth at which overlays are folded; only some of them are checked.
    for number in 0..20 {
        let change = format!(
            "mount -o remount,rw / && dd if=/dev/urandom of=/srv/{number} bs=64k count=4 && dd if=/dev/zero \
             of=/srv/0 bs=64k seek={} count=1 conv=notrunc && rm -f /srv/{} && truncate -s 100000 /srv/{}",
            number % 3,
            number - 2,
            number - 1
        );
        sh(&sandbox, &change).await;
        let looked = if [0, 19].contains(&number) {
            Some(disk(&sandbox).await)
        } else {
            None
        };
        let state = sandbox
            .checkpoint(None, Replace::No)
            .await
            .expect("it is taken")
            .id;
        known.extend(looked.map(|looked| (state, looked)));
    }
    let depth = || lab.head(&sandbox)["disk"].as_array().map_or(0, Vec::len);
    until_async("the overlays are folded", || depth() < 16).await;
    assert_eq!(
        disk(&sandbox).await,
        known[1].1,
        "folded under a running guest"
    );
    for index in [0, 1] {
        sandbox
            .revert(&known[index].0)
            .await
            .expect("it is gone to");
        assert_eq!(disk(&sandbox).await, known[index].1, "state {index}");
    }
    let copies = sandbox
        .fork(ForkSpec::new(1))
        .await
        .expect("it is forked")
        .0;
    assert_eq!(disk(&copies[0]).await, known[1].1, "in a copy");
    copies[0].remove().await.expect("the copy is removed");
    sandbox.pause().await.expect("it is paused");
    sandbox.resume().await.expect("it is resumed");
    assert_eq!(disk(&sandbox).await, known[1].1, "after a pause");
    sandbox.remove().await.expect("it is removed");
}

/// A process writes a number to its disk and reads it back. It notices at once if disk and memory
/// are of different moments.
#[tokio::test(flavor = "multi_thread")]
async fn memory_and_disk_are_of_one_moment() {
    let lab = Lab::open().await;
    let sandbox = lab.host.create(spec("x")).await.expect("it is created");
    give_worker(&sandbox).await;
    start(
        &sandbox,
        "exec /dev/shm/worker count /dev/shm/number /number /dev/shm/torn",
    )
    .await;
    sh(
        &sandbox,
        "until [ -s /dev/shm/number ]; do usleep 10000; done",
    )
    .await;
    let mut states = Vec::new();
    for _ in 0..10 {
        states.push(
            sandbox
                .checkpoint(None, Replace::No)
                .await
                .expect("it is taken")
                .id,
        );
    }
    for state in states.iter().rev() {
        sandbox.revert(state).await.expect("it is gone to");
        counts_on(&sandbox, state).await;
    }
    for copy in sandbox
        .fork(ForkSpec::new(2))
        .await
        .expect("it is forked")
        .0
    {
        counts_on(&copy, "a copy").await;
        copy.remove().await.expect("the copy is removed");
    }
    sandbox.pause().await.expect("it is paused");
    sandbox.resume().await.expect("it is resumed");
    counts_on(&sandbox, "a pause").await;
    // The check works: the process notices a disk of another moment, unless the change falls
    // between its read and its next write.
    let other = "dd if=/dev/zero of=/number bs=4096 count=1 conv=notrunc oflag=direct 2> /dev/null";
    sh(
        &sandbox,
        &format!("until [ -e /dev/shm/torn ]; do {other}; usleep 10000; done"),
    )
    .await;
    sandbox.remove().await.expect("it is removed");
}

/// Asserts that the process has continued, has read its disk since, and found its number.
async fn counts_on(sandbox: &Sandbox, state: &str) {
    let line = "n=$(cat /dev/shm/number); until [ -e /dev/shm/torn ] || [ $(cat /dev/shm/number) -gt $((n + 4)) ]; do \
                usleep 10000; done; cat /dev/shm/torn 2> /dev/null || true";
    assert_eq!(sh(sandbox, line).await, "", "{state}");
}
