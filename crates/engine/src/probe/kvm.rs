//! The probe that finds whether KVM can run a guest on this host.
//!
//! `/dev/kvm` may exist, open and even create a machine on hosts where no normal kernel runs. So
//! the probe is a real round trip: a guest of a few hundred bytes goes through the processor modes
//! a kernel goes through, measures how fast it runs, and reports.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::testguest::{Body, Report, TestGuest};
use super::{Probe, Verdict, describe};
use crate::accel::Accel;
use crate::arch::Arch;
use crate::error::Error;

/// A guest that works reports within a tenth of a second. On a busy host it may take seconds, so a
/// first timeout is followed by a second, more patient try.
const PROBE_DEADLINES: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(20)];

/// How long a verdict that came from a timeout holds: it says as much about the moment as about the
/// host.
const TIMEOUT_HOLDS: Duration = Duration::from_secs(300);

const KVM_DEVICE: &str = "/dev/kvm";

pub type KvmVerdict = Verdict;

/// `/dev/kvm` as it is now. A verdict about KVM holds while all of this stays the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KvmDevice {
    /// Whether this process can open it: its own groups are part of that.
    opens: bool,
    /// `None`: there is none.
    node: Option<KvmNode>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct KvmNode {
    device: u64,
    mode: u32,
    uid: u32,
    gid: u32,
}

impl KvmDevice {
    pub(crate) fn now() -> Self {
        let node = std::fs::metadata(KVM_DEVICE).ok().map(|status| KvmNode {
            device: status.rdev(),
            mode: status.mode(),
            uid: status.uid(),
            gid: status.gid(),
        });
        Self {
            opens: open_device().is_ok(),
            node,
        }
    }
}

fn open_device() -> io::Result<File> {
    File::options().read(true).write(true).open(KVM_DEVICE)
}

/// What the probe of KVM found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KvmFinding {
    pub verdict: KvmVerdict,
    /// When the verdict must be found anew, in seconds since the epoch. `None`: it holds.
    pub expires_at_unix_s: Option<u64>,
}

impl KvmFinding {
    /// A clock that was set back makes a verdict expire, too: it holds for minutes at most.
    pub(crate) fn holds(&self, now_unix_s: u64) -> bool {
        let holds_s = TIMEOUT_HOLDS.as_secs();
        self.expires_at_unix_s
            .is_none_or(|end| now_unix_s < end && end - now_unix_s <= holds_s)
    }

    fn until(verdict: Result<(), String>, expires_at_unix_s: Option<u64>) -> Self {
        Self {
            verdict: verdict.into(),
            expires_at_unix_s,
        }
    }
}

/// Probes KVM. An engine failure other than a verdict is a reason, too: the emulator works all the
/// same.
pub(crate) async fn probe_kvm(probe: &Probe<'_>, now_unix_s: u64) -> KvmFinding {
    if let Err(reason) = openable(probe) {
        return KvmFinding::until(Err(reason), None);
    }
    for deadline in PROBE_DEADLINES {
        match round_trip(probe, Accel::Kvm, deadline).await {
            Ok(()) => return KvmFinding::until(Ok(()), None),
            Err(Refusal::Failed(reason)) => return KvmFinding::until(Err(reason), None),
            Err(Refusal::Silent) => {}
        }
    }
    let waited_s: u64 = PROBE_DEADLINES.iter().map(Duration::as_secs).sum();
    let reason = format!("a test guest did not run: no sign of life within {waited_s} s");
    KvmFinding::until(Err(reason), Some(now_unix_s + TIMEOUT_HOLDS.as_secs()))
}

fn openable(probe: &Probe<'_>) -> Result<(), String> {
    if probe.arch != Arch::HOST {
        return Err(format!("it runs {} guests only on this host", Arch::HOST));
    }
    let device = open_device().map_err(|error| unopened(&error))?;
    let status = device
        .metadata()
        .map_err(|error| format!("{KVM_DEVICE} cannot be examined: {error}"))?;
    match probe.jail.uid {
        Some(uid) if !reachable(status.mode()) => Err(format!(
            "{KVM_DEVICE} has mode {:04o}: neither its group nor others can open it, and machines run as user {uid}. \
             Give it the group `kvm` and mode 0660, as distributions do (chgrp kvm {KVM_DEVICE} && chmod 0660 {KVM_DEVICE})",
            status.mode() & 0o7777
        )),
        _ => Ok(()),
    }
}

/// The reason, with what to do about it.
fn unopened(error: &io::Error) -> String {
    let remedy = match error.kind() {
        io::ErrorKind::NotFound => {
            "load the module (modprobe kvm_intel or kvm_amd), enable virtualisation in the firmware, or pass the device \
             to the container (--device /dev/kvm)"
        }
        io::ErrorKind::PermissionDenied => {
            "join the group that owns it (usermod -aG kvm USER, then log in again), or ask an administrator"
        }
        _ => return format!("{KVM_DEVICE} cannot be opened: {error}"),
    };
    format!("{KVM_DEVICE} cannot be opened: {error}; {remedy}")
}

/// Whether a user other than the owner can open the device; the jail lends the group.
fn reachable(mode: u32) -> bool {
    mode & 0o060 == 0o060 || mode & 0o006 == 0o006
}

/// Why a test guest did not report.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It neither reported nor ended in time.
    Silent,
    Failed(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Silent => f.write_str("a test guest gave no sign of life"),
            Refusal::Failed(reason) => f.write_str(reason),
        }
    }
}

/// Runs the guest.
pub(crate) async fn round_trip(
    probe: &Probe<'_>,
    accel: Accel,
    deadline: Duration,
) -> Result<(), Refusal> {
    let failed = |error: Error| Refusal::Failed(describe(&error));
    let guest = TestGuest::start(probe, accel, Body::Modes)
        .await
        .map_err(failed)?;
    match guest.report(deadline).await {
        Some(Ok(Report::Modes)) => Ok(()),
        Some(Ok(Report::Interpreted)) => Err(Refusal::Failed(
            "it interprets the guest's instructions one by one, as KVM without hardware \
             virtualisation does: emulation is faster"
                .into(),
        )),
        Some(Ok(other)) => Err(Refusal::Failed(format!("a test guest reported {other:?}"))),
        Some(Err(exit)) => Err(Refusal::Failed(format!("a test guest did not run: {exit}"))),
        None => Err(Refusal::Silent),
    }
}
