//! Real KVM, also where the host has none: in an emulated guest, whose processor has AMD's
//! virtualisation.
//!
//! ```text
//!   this host, TCG --> outer: a sandbox whose kernel loads kvm_amd --> inner: sandboxes of the outer one's `sandtree`, KVM
//! ```
//!
//! - `outer` makes the outer guest once for each build and saves it with its memory: KVM is loaded,
//!   and `tiny` is warm. Each test starts from that snapshot.
//! - `direct` has the checks that need nothing but KVM. They are ignored tests: this tier runs them
//!   inside the outer guest, and `scripts/try-kvm` runs them on a host with KVM.
//! - `access` and `moved` work on the outer guest from here: they change its `/dev/kvm`, and copy
//!   states in and out.
//!
//! Always: every byte the outer guest executes is emulated, so durations say nothing about KVM on a
//! processor.

mod access;
mod direct;
pub mod keyed;
mod moved;
mod outer;
mod processor;

use std::path::Path;
use std::process::Command;

use crate::support::{bench_program, program};
use outer::{Outer, STORE, settings};

/// One test for each check, so that each has a name and a time. The checks are in `direct`.
macro_rules! inside {
    ($($name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                Outer::check(stringify!($name));
            }
        )*
    };
}

inside!(
    doctor_reports_kvm,
    every_verb_keeps_files_memory_and_processes,
    two_processors_and_a_busy_guest,
    guests_have_no_nested_virtualisation,
    write_protect_is_exact_with_two_processors,
    soft_dirty_is_exact,
    anonymous_is_exact,
    full_is_exact,
);

/// The script runs the checks and the benchmark. This test looks at its report only; other tests
/// run the checks.
#[test]
fn try_kvm_reports_without_names() {
    let outer = Outer::start();
    let tests = outer.send_tests();
    outer.send_program(&bench_program());
    let mut tar = Command::new("tar");
    tar.args(["--create", "-C"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts"))
        .arg("try-kvm");
    outer.send(tar, "/srv");
    let run = format!(
        "env {} SANDTREE_HOME={STORE} TRY_KVM_CHECKS='doctor_reports_kvm guests_have_no_nested_virtualisation' \
         sh /srv/try-kvm {} {} {tests} --quick --only pause",
        settings().join(" "),
        program().display(),
        bench_program().display()
    );
    let answer = outer.sh(&run);
    let report = String::from_utf8_lossy(&answer.stdout);
    assert_eq!(answer.code, 0, "{report}\n{}", answer.err());
    for line in [
        "kernel        Linux 6.",
        "accelerator  kvm",
        "ok  doctor_reports_kvm",
        "2 passed; 0 failed",
        "## Figures",
    ] {
        assert!(report.contains(line), "{line:?} is not in: {report}");
    }
    let figures = report.split("## Figures").nth(1).unwrap_or_default();
    assert!(figures.contains("pause"), "{report}");
    for name in [
        outer.say("hostname").as_str(),
        STORE,
        env!("CARGO_TARGET_TMPDIR"),
        "/srv",
        "/usr/bin",
    ] {
        assert!(!report.contains(name), "{name:?} is in: {report}");
    }

    outer.say("chmod 0600 /dev/kvm");
    let answer = outer.sh(&run);
    let report = String::from_utf8_lossy(&answer.stdout);
    assert_eq!(answer.code, 1, "{report}\n{}", answer.err());
    assert!(
        report.contains("KVM cannot be used here") && report.contains("mode 0600"),
        "{report}"
    );
    outer.end();
}
