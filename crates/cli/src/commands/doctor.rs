//! `sandtree doctor`: what this host can do, and what it lacks.

use std::path::PathBuf;
use std::process::ExitCode;

use sandtree::{Doctor, QemuFound, QemuReport};
use serde::Serialize;

use super::{Outcome, open, search};
use crate::args::Global;
use crate::failure;
use crate::{progress, show};

#[derive(Serialize)]
struct Found {
    #[serde(flatten)]
    host: Doctor,
    /// The program that makes Debian images.
    mmdebstrap: Option<PathBuf>,
}

pub async fn run(global: &Global) -> Outcome {
    let host = open(global).await?;
    let spinner = progress::spinner("looking");
    let found = Found {
        host: host.doctor().await,
        mmdebstrap: program("mmdebstrap"),
    };
    spinner.finish_and_clear();
    let healthy = matches!(found.host.qemu, QemuReport::Found(_));
    if global.json {
        show::json(&found)
    } else {
        describe(&found)
    }
    Ok(if healthy {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(failure::OURS)
    })
}

/// Where KVM was tested; shown where it is used.
const KVM_TESTED: &str =
    "on emulated AMD processors only; Intel VMX and physical hardware are untested";

/// Finds a program on PATH or in the directories for administrators, which PATH may lack.
fn program(name: &str) -> Option<PathBuf> {
    let dirs = search()
        .into_iter()
        .chain(["/usr/sbin".into(), "/sbin".into()]);
    dirs.map(|dir| dir.join(name)).find(|path| path.is_file())
}

fn describe(found: &Found) {
    let Found {
        host: doctor,
        mmdebstrap,
    } = found;
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "unknown".to_owned(), show::bytes);
    show::fields(&[
        ("store", doctor.home.display().to_string()),
        ("disk free", size(doctor.disk_free_bytes)),
        ("memory available", size(doctor.memory_available_bytes)),
        ("debian images", debian(mmdebstrap.as_ref())),
    ]);
    match &doctor.qemu {
        QemuReport::Found(qemu) => describe_qemu(qemu),
        QemuReport::Missing { error } => failure::show(error, false),
    }
}

fn debian(mmdebstrap: Option<&PathBuf>) -> String {
    match mmdebstrap {
        Some(path) => format!("can be built, with {}", path.display()),
        None => {
            "cannot be built: mmdebstrap is missing (Debian: apt-get install mmdebstrap)".into()
        }
    }
}

fn screens(qemu: &QemuFound) -> String {
    match &qemu.screens_refused {
        None => "work".into(),
        Some(reason) => {
            format!("{reason} (Debian: apt-get install qemu-system-common)")
        }
    }
}

fn describe_qemu(qemu: &QemuFound) {
    let because = |choice: &str, reason: &Option<String>, other: &str| match reason {
        Some(reason) => format!("{choice} ({other} cannot be used: {reason})"),
        None => choice.to_owned(),
    };
    let user = if qemu.own_uid {
        "a user id for each machine"
    } else {
        "the caller's user id"
    };
    let jail = match &qemu.landlock_refused {
        None => format!("{user}, seccomp, Landlock, no new privileges"),
        Some(reason) => format!("{user}, seccomp, no new privileges (without Landlock: {reason})"),
    };
    let refused = show::joined(&qemu.memory_modes_refused);
    let memory = if refused.is_empty() {
        qemu.memory_mode.clone()
    } else {
        format!("{} ({refused})", qemu.memory_mode)
    };
    let mut fields = vec![
        (
            "qemu",
            format!("{} at {}", qemu.version, qemu.binary.display()),
        ),
        (
            "accelerator",
            because(&qemu.accelerator, &qemu.kvm_refused, "kvm"),
        ),
        (
            "disk i/o",
            because(&qemu.disk_aio, &qemu.io_uring_refused, "io_uring"),
        ),
        ("memory", memory),
        ("jail", jail),
        ("screens", screens(qemu)),
    ];
    if qemu.accelerator == "kvm" {
        fields.push(("kvm tested", KVM_TESTED.into()));
    }
    if !qemu.miscomputed.is_empty() {
        let off = qemu.miscomputed.join(", ");
        fields.push((
            "processor",
            format!("{off} off under emulation: this QEMU computes them wrongly"),
        ));
    }
    show::fields(&fields);
    if qemu.memory_mode == "full" && qemu.own_uid {
        eprintln!(
            "hint: grant CAP_SYS_PTRACE (containers: --cap-add SYS_PTRACE), or run machines as the caller: --machine-user caller"
        );
    }
}
