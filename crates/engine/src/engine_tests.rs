//! Against the QEMU that is installed.

use std::time::Duration;

use serde_json::json;

use super::*;
use crate::jail::Jail;
use crate::probe::Verdict;
use crate::probe::{Refusal, round_trip};

fn config() -> EngineConfig {
    let search = vec!["/usr/local/bin".into(), "/usr/bin".into()];
    EngineConfig {
        binary: None,
        search,
        arch: Arch::HOST,
        jail: own_user(),
    }
}

fn own_user() -> Jail {
    Jail {
        uid: rustix::process::geteuid().is_root().then_some(64_321),
    }
}

fn of(model: Option<&str>) -> CpuChoice<'_> {
    CpuChoice {
        model,
        ..CpuChoice::default()
    }
}

/// So that a "no" from KVM is about KVM and not about the test guest.
#[tokio::test]
async fn the_test_guest_of_the_kvm_probe_runs_under_the_emulator() {
    let binary = install::find(&config()).unwrap();
    let probe = Probe {
        binary: &binary,
        arch: Arch::HOST,
        jail: own_user(),
        seeing: None,
    };
    assert_eq!(
        round_trip(&probe, Accel::Tcg, Duration::from_secs(60)).await,
        Ok(())
    );
}

/// `kvm_pvm` runs kernels that cooperate with it, and interprets all others: they take minutes to
/// boot.
#[tokio::test]
async fn a_kvm_that_interprets_instructions_is_not_used() {
    let interprets = std::path::Path::new("/sys/module/kvm_pvm").exists();
    if !interprets || std::fs::File::open("/dev/kvm").is_err() {
        eprintln!("not checked: this host has no such KVM, or this user cannot open it");
        return;
    }
    let binary = install::find(&config()).unwrap();
    let probe = Probe {
        binary: &binary,
        arch: Arch::HOST,
        jail: Jail::default(),
        seeing: None,
    };
    let found = round_trip(&probe, Accel::Kvm, Duration::from_secs(60)).await;
    let Err(Refusal::Failed(reason)) = &found else {
        panic!("{found:?}");
    };
    // On some processors QEMU ends before its guest runs.
    let is_plain = reason.contains("interprets") || reason.contains("did not run");
    assert!(is_plain, "{reason}");
}

#[tokio::test]
async fn verdicts_hold_until_something_changes() {
    let first = Engine::open(&config(), None).await.unwrap();
    assert!(first.version() >= Version::OLDEST);
    let stored = serde_json::to_string(first.verdicts()).unwrap();

    // A mark that a new probe would not set tells whether the cached verdicts were used.
    let mut cached: Verdicts = serde_json::from_str(&stored).unwrap();
    assert_eq!(&cached, first.verdicts());
    cached.aio_reason = Some("cached".into());
    let second = Engine::open(&config(), Some(cached.clone())).await.unwrap();
    assert_eq!(second.verdicts(), &cached);

    let stale = stored.replace("\"boot_id\":\"", "\"boot_id\":\"an older boot, ");
    let third = Engine::open(&config(), Some(serde_json::from_str(&stale).unwrap()))
        .await
        .unwrap();
    // A rate is measured, and a little different each time.
    let tsc_khz = first.verdicts().tsc_khz;
    assert_eq!(
        &Verdicts {
            tsc_khz,
            ..third.verdicts().clone()
        },
        first.verdicts()
    );
}

/// The permissions of `/dev/kvm` and the caller's groups decide, and both change while the host
/// runs.
#[tokio::test]
async fn verdicts_about_kvm_hold_while_its_device_is_the_same() {
    let first = Engine::open(&config(), None).await.unwrap();
    let mut cached = first.verdicts().clone();
    cached.kvm.verdict = Verdict::Unusable {
        reason: "cached".into(),
    };
    let second = Engine::open(&config(), Some(cached.clone())).await.unwrap();
    assert_eq!(second.verdicts().kvm, cached.kvm);

    let stored = serde_json::to_value(&cached).unwrap();
    let opens = stored["key"]["kvm"]["opens"].as_bool().unwrap();
    let node = json!({"device": 1, "mode": 0o020_640, "uid": 0, "gid": 104});
    for other in [
        json!({"opens": !opens, "node": node}),
        json!({"opens": opens, "node": node}),
    ] {
        let mut changed = stored.clone();
        changed["key"]["kvm"] = other.clone();
        let third = Engine::open(&config(), Some(serde_json::from_value(changed).unwrap()))
            .await
            .unwrap();
        assert_eq!(third.verdicts().kvm, first.verdicts().kvm, "{other}");
    }
}

/// A host that was busy for a moment gets another chance, without finding out everything else
/// again.
#[tokio::test]
async fn a_verdict_that_came_from_a_timeout_expires() {
    let first = Engine::open(&config(), None).await.unwrap();
    let mut cached = first.verdicts().clone();
    cached.kvm.verdict = Verdict::Unusable {
        reason: "no sign of life".into(),
    };
    cached.aio_reason = Some("cached".into());
    let now_unix_s = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();

    cached.kvm.expires_at_unix_s = Some(now_unix_s + 200);
    let fresh = Engine::open(&config(), Some(cached.clone())).await.unwrap();
    assert_eq!(fresh.verdicts(), &cached);
    for expired in [now_unix_s - 1, now_unix_s + 100_000] {
        cached.kvm.expires_at_unix_s = Some(expired);
        let expired = Engine::open(&config(), Some(cached.clone())).await.unwrap();
        assert_eq!(expired.verdicts().kvm, first.verdicts().kvm);
        assert_eq!(expired.verdicts().aio_reason, cached.aio_reason);
    }
}

/// The emulator of 7.2 lets a user of the guest set I/O privilege by `adcx`. The probe finds out by
/// the instruction.
#[tokio::test]
async fn instructions_that_the_emulator_gets_wrong_are_off() {
    let engine = Engine::open(&config(), None).await.unwrap();
    let cpu = engine.cpu(Accel::Tcg, of(None)).await.unwrap();
    let known_wrong = engine.version()
        < Version {
            major: 8,
            minor: 0,
            micro: 0,
        }
        && engine.arch() == Arch::X86_64;
    for feature in ["adx", "bmi1", "bmi2"] {
        let wrong = engine
            .verdicts()
            .miscomputed
            .iter()
            .any(|found| found == feature);
        assert!(wrong || !known_wrong, "{feature}");
        assert_eq!(
            cpu.features.iter().any(|on| on == feature),
            !wrong,
            "{feature}"
        );
    }
}

#[tokio::test]
async fn a_choice_becomes_an_accelerator_or_a_reason() {
    let engine = Engine::open(&config(), None).await.unwrap();
    assert_eq!(
        engine.accel(AccelChoice::Only(Accel::Tcg)).unwrap(),
        Accel::Tcg
    );
    assert!(matches!(
        engine.accel(AccelChoice::Only(Accel::Hvf)),
        Err(Error::AccelUnusable { .. })
    ));
    match engine.verdicts().kvm() {
        KvmVerdict::Usable => assert_eq!(engine.accel(AccelChoice::Auto).unwrap(), Accel::Kvm),
        KvmVerdict::Unusable { reason } => {
            assert_eq!(engine.accel(AccelChoice::Auto).unwrap(), Accel::Tcg);
            let error = engine.accel(AccelChoice::Only(Accel::Kvm)).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("accelerator kvm cannot be used: {reason}")
            );
        }
    }
}

#[tokio::test]
async fn a_program_that_is_not_qemu_is_refused() {
    let config = EngineConfig {
        binary: Some("/bin/true".into()),
        ..config()
    };
    assert!(matches!(
        Engine::open(&config, None).await,
        Err(Error::VersionUnknown { .. })
    ));
}

#[tokio::test]
async fn a_processor_has_the_features_that_qemu_gives_it() {
    let engine = Engine::open(&config(), None).await.unwrap();
    let asked = Asked::start(&engine.probe(), Accel::Tcg).await.unwrap();
    for model in [None, Some("max")] {
        let cpu = engine.cpu(Accel::Tcg, of(model)).await.unwrap();
        let expansion = asked.expand(&cpu.argument.parse().unwrap()).await.unwrap();
        assert_eq!(
            cpu.features,
            expansion.0.into_iter().collect::<Vec<_>>(),
            "{}",
            cpu.argument
        );
        assert!(!cpu.features.is_empty());
        assert_eq!(engine.same_cpu(Accel::Tcg, &cpu).await.unwrap(), cpu);
    }
}

#[tokio::test]
async fn a_state_that_needs_more_than_there_is_names_it() {
    let engine = Engine::open(&config(), None).await.unwrap();
    let cpu = engine.cpu(Accel::Tcg, of(None)).await.unwrap();
    let features = [&cpu.features[..], &["telepathy".to_owned()]].concat();
    let error = engine
        .same_cpu(Accel::Tcg, &Cpu { features, ..cpu })
        .await
        .unwrap_err();
    assert_eq!(error.to_string(), "the processor lacks telepathy");
}

#[tokio::test]
async fn what_qemu_makes_of_a_model_is_asked_once_and_kept() {
    let engine = Engine::open(&config(), None).await.unwrap();
    engine.cpu(Accel::Tcg, of(None)).await.unwrap();
    assert_eq!(
        engine.take_news(),
        None,
        "the usual processor is known from the start"
    );
    let cpu = engine.cpu(Accel::Tcg, of(Some("max"))).await.unwrap();
    let kept = engine.take_news().unwrap();
    assert_eq!(engine.take_news(), None);

    let next = Engine::open(&config(), Some(kept)).await.unwrap();
    assert_eq!(next.cpu(Accel::Tcg, of(Some("max"))).await.unwrap(), cpu);
    assert_eq!(next.take_news(), None);
}

#[tokio::test]
async fn models_and_machine_types_that_are_not_there_are_refused() {
    let engine = Engine::open(&config(), None).await.unwrap();
    let error = engine.cpu(Accel::Tcg, of(Some("Z80"))).await.unwrap_err();
    assert!(
        matches!(&error, Error::UnknownCpu { model, known, .. } if model == "Z80" && known.len() > 1),
        "{error}"
    );
    assert!(engine.has_machine_type(Arch::HOST.machine_type()));
    for name in [
        "none",
        "microvm",
        "pc-q35-99.9",
        "pc-q35-7.2,kernel=/etc/passwd",
        "",
    ] {
        assert!(!engine.has_machine_type(name), "{name:?}");
    }
}
