//! An emulated processor that runs guests of its own: what a state has of it, and when a state is
//! refused.
//!
//! The nested guest is `worker inner`: some instructions, run by the `kvm_amd` of the sandbox's
//! kernel. So these tests need no outer guest, only KVM's modules.

use std::fs;
use std::ops::Range;

use sandtree::bench::devices_loaded;
use sandtree::{AccelChoice, Code, FileOwner, Replace, Sandbox, SandboxSpec};

use super::outer::{kernel_release, modules_of};
use crate::support::lab::{Lab, give_worker, sh, spec, start};

/// In the order of their dependencies.
const MODULES: [&str; 3] = ["irqbypass", "kvm", "kvm-amd"];

/// EFER of a processor in 64-bit mode whose virtualisation is on: SCE, LME, LMA, NXE and SVME.
const EFER: u64 = 0x1d01;

/// A place where a restored machine may differ from the captured one.
struct Allowed {
    section: &'static str,
    bytes: Range<usize>,
}

/// QEMU tells a restored guest of its new generation by an ACPI interrupt (`vmgenid`), which has
/// not been delivered yet. The real-time clock is the host's.
const ALLOWED: [Allowed; 8] = [
    // That an interrupt is pending.
    allowed("cpu_common", 28..32),
    // The vectors that are requested.
    allowed("apic", 95..127),
    // The general-purpose event.
    allowed("0000:00:1f.0/ICH9LPC", 334..335),
    // The level of the ACPI interrupt.
    allowed("0000:00:1f.0/ICH9LPC", 18942..18946),
    // The lines as they were last, and as they are requested.
    allowed("i8259", 19..21),
    // The requested lines, and the entry of line 9.
    allowed("ioapic", 30..34),
    allowed("ioapic", 106..114),
    // Seconds, minutes and hours, with those of the alarm.
    allowed("mc146818rtc", 25..31),
];

const fn allowed(section: &'static str, bytes: Range<usize>) -> Allowed {
    Allowed { section, bytes }
}

async fn with_kvm(lab: &Lab) -> Sandbox {
    let spec = SandboxSpec {
        nested: true,
        accel: Some(AccelChoice::Tcg),
        ..spec("x")
    };
    let sandbox = lab.host.create(spec).await.expect("it is created");
    give_worker(&sandbox).await;
    let modules = modules_of(&kernel_release(lab.world.home()));
    let files = sandbox.files().await.expect("the guest is there");
    for module in MODULES {
        let name = format!("{module}.ko");
        let bytes = fs::read(modules.join(&name)).expect("the module is there");
        files
            .write(
                &format!("/dev/shm/{name}"),
                &mut bytes.as_slice(),
                FileOwner::default(),
            )
            .await
            .expect("the guest takes it");
        sh(&sandbox, &format!("insmod /dev/shm/{name}")).await;
    }
    sandbox
}

/// Starts a nested guest, and waits until it has come to its end.
async fn run_inner(sandbox: &Sandbox, end: &str) {
    start(
        sandbox,
        &format!("exec /dev/shm/worker inner {end} /dev/shm/mark"),
    )
    .await;
    sh(
        sandbox,
        "until [ -e /dev/shm/mark ]; do usleep 10000; done; rm /dev/shm/mark",
    )
    .await;
}

/// A part of the saved devices.
#[derive(Debug, PartialEq, Eq)]
struct Section {
    name: String,
    bytes: Range<usize>,
}

/// Splits saved devices: each section begins with 4, its number and its name, and ends with 0x7e
/// and its number.
fn sections(devices: &[u8]) -> Vec<Section> {
    const HEADER_BYTES: usize = 8;
    let mut found = Vec::new();
    let mut at = HEADER_BYTES;
    while devices[at] == 4 {
        let number = &devices[at + 1..at + 5];
        let length = usize::from(devices[at + 5]);
        let name = String::from_utf8_lossy(&devices[at + 6..at + 6 + length]).into_owned();
        let footer = [&[0x7e], number].concat();
        let is_end =
            |end: &usize| devices[*end..].starts_with(&footer) && matches!(devices[end + 5], 0 | 4);
        let end = (at + 6 + length..devices.len() - 5)
            .find(is_end)
            .expect("a section has an end");
        found.push(Section {
            name,
            bytes: at..end + 5,
        });
        at = end + 5;
    }
    assert_eq!(devices[at], 0, "nothing follows the last section");
    found
}

/// The section of the processor.
fn processor(devices: &[u8]) -> &[u8] {
    let cpu = sections(devices)
        .into_iter()
        .find(|section| section.name == "cpu");
    &devices[cpu.expect("there is a processor").bytes]
}

/// The sections in which two machines differ where they may not, with the offsets in them.
fn differences(taken: &[u8], restored: &[u8]) -> Vec<(String, Vec<usize>)> {
    let parts = sections(taken);
    assert_eq!(parts, sections(restored), "they have the same sections");
    let differing = |section: &Section| {
        let start = section.bytes.start;
        let is_allowed = |offset: &usize| {
            ALLOWED
                .iter()
                .any(|place| place.section == section.name && place.bytes.contains(offset))
        };
        let offsets: Vec<usize> = section
            .bytes
            .clone()
            .filter(|at| taken[*at] != restored[*at])
            .map(|at| at - start)
            .filter(|offset| !is_allowed(offset))
            .collect();
        (!offsets.is_empty()).then(|| (section.name.clone(), offsets))
    };
    parts.iter().filter_map(differing).collect()
}

/// The same devices with another byte at an offset of a section.
fn changed(devices: &[u8], section: &str, offset: usize) -> Vec<u8> {
    let sections = sections(devices);
    let found = sections.iter().find(|found| found.name == section);
    let mut changed = devices.to_vec();
    changed[found.expect("there is such a section").bytes.start + offset] ^= 1;
    changed
}

#[tokio::test(flavor = "multi_thread")]
async fn a_processor_that_has_run_a_guest_is_restored_exactly() {
    let lab = Lab::open().await;
    let sandbox = with_kvm(&lab).await;
    run_inner(&sandbox, "halt").await;
    let state = sandbox
        .checkpoint(None, Replace::No)
        .await
        .expect("it is taken")
        .id;
    let path = lab.dir(&sandbox).join(format!("states/{state}/devices"));
    let taken = fs::read(path).expect("the state has devices");
    let restored = devices_loaded(&lab.host, &sandbox, &state)
        .await
        .expect("they are loaded and saved");
    assert_eq!(processor(&taken), processor(&restored));
    assert_eq!(differences(&taken, &restored), []);
    let efer = EFER.to_be_bytes();
    let has_efer = processor(&taken).windows(efer.len()).any(|at| at == efer);
    assert!(has_efer, "the processor's virtualisation is on");
    // The comparison can fail.
    let other = changed(&restored, "cpu", 100);
    assert_eq!(differences(&taken, &other), [("cpu".to_owned(), vec![100])]);

    // The restored guest runs nested guests as before.
    sandbox.revert(&state).await.expect("it is gone to");
    sh(&sandbox, "kill -9 $(pidof worker)").await;
    run_inner(&sandbox, "halt").await;
    sandbox.remove().await.expect("it is removed");
    lab.world.assert_empty();
}

/// Between two entries into the nested guest, when the processor handles an interrupt, a capture
/// succeeds.
#[tokio::test(flavor = "multi_thread")]
async fn a_capture_is_refused_while_a_nested_guest_executes() {
    const ATTEMPTS_MAX: usize = 50;
    let lab = Lab::open().await;
    let sandbox = with_kvm(&lab).await;
    run_inner(&sandbox, "spin").await;
    let mut refused = None;
    for number in 0..ATTEMPTS_MAX {
        // The pages that a refused capture has read are part of the next one.
        sh(&sandbox, &format!("echo {number} > /dev/shm/{number}")).await;
        refused = sandbox.checkpoint(None, Replace::No).await.err();
        if refused.is_some() {
            break;
        }
    }
    let refused = refused.expect("the nested guest executes for most of the time");
    assert_eq!(refused.code(), Some(Code::NestedGuestRuns), "{refused:?}");
    match sandbox.pause().await {
        Ok(_) => drop(sandbox.resume().await.expect("it is resumed")),
        Err(error) => assert_eq!(error.code(), Some(Code::NestedGuestRuns), "{error:?}"),
    }
    sh(&sandbox, "pidof worker").await;

    let sums = "md5sum /dev/shm/* > /root/sums";
    sh(&sandbox, &format!("kill -9 $(pidof worker); {sums}")).await;
    let state = sandbox
        .checkpoint(None, Replace::No)
        .await
        .expect("no nested guest executes")
        .id;
    sh(&sandbox, "echo other > /dev/shm/0").await;
    sandbox.revert(&state).await.expect("it is gone to");
    sh(&sandbox, "md5sum -c /root/sums").await;
    run_inner(&sandbox, "halt").await;
    sandbox.remove().await.expect("it is removed");
    lab.world.assert_empty();
}
