//! Against the QEMU that is installed.

use super::*;
use crate::accel::round_trip;
use crate::jail::Jail;

fn config() -> EngineConfig {
    let search = vec!["/usr/local/bin".into(), "/usr/bin".into()];
    EngineConfig { binary: None, search, arch: Arch::HOST, jail: own_user() }
}

fn own_user() -> Jail {
    Jail { uid: rustix::process::geteuid().is_root().then_some(64_321) }
}

/// So that a "no" from KVM is about KVM and not about the test guest.
#[tokio::test]
async fn the_test_guest_of_the_kvm_probe_runs_under_the_emulator() {
    let binary = install::find(&config()).unwrap();
    let probe = Probe { binary: &binary, arch: Arch::HOST, jail: own_user() };
    assert_eq!(round_trip(&probe, Accel::Tcg).await, Ok(()));
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
    let third = Engine::open(&config(), Some(serde_json::from_str(&stale).unwrap())).await.unwrap();
    assert_eq!(third.verdicts(), first.verdicts());
}

#[tokio::test]
async fn a_choice_becomes_an_accelerator_or_a_reason() {
    let engine = Engine::open(&config(), None).await.unwrap();
    assert_eq!(engine.accel(AccelChoice::Only(Accel::Tcg)).unwrap(), Accel::Tcg);
    assert!(matches!(engine.accel(AccelChoice::Only(Accel::Hvf)), Err(Error::AccelUnusable { .. })));
    match &engine.verdicts().kvm {
        KvmVerdict::Usable => assert_eq!(engine.accel(AccelChoice::Auto).unwrap(), Accel::Kvm),
        KvmVerdict::Unusable { reason } => {
            assert_eq!(engine.accel(AccelChoice::Auto).unwrap(), Accel::Tcg);
            let error = engine.accel(AccelChoice::Only(Accel::Kvm)).unwrap_err();
            assert_eq!(error.to_string(), format!("accelerator kvm cannot be used: {reason}"));
        }
    }
}

#[tokio::test]
async fn a_program_that_is_not_qemu_is_refused() {
    let config = EngineConfig { binary: Some("/bin/true".into()), ..config() };
    assert!(matches!(Engine::open(&config, None).await, Err(Error::VersionUnknown { .. })));
}

#[tokio::test]
async fn a_processor_has_the_features_that_qemu_gives_it() {
    let engine = Engine::open(&config(), None).await.unwrap();
    let asked = Asked::start(&engine.probe(), Accel::Tcg).await.unwrap();
    for model in [None, Some("max")] {
        let cpu = engine.cpu(Accel::Tcg, model).await.unwrap();
        let expansion = asked.expand(&cpu.argument.parse().unwrap()).await.unwrap();
        assert_eq!(cpu.features, expansion.0.into_iter().collect::<Vec<_>>(), "{}", cpu.argument);
        assert!(!cpu.features.is_empty());
        assert_eq!(engine.same_cpu(Accel::Tcg, &cpu).await.unwrap(), cpu);
    }
}

#[tokio::test]
async fn a_state_that_needs_more_than_there_is_names_it() {
    let engine = Engine::open(&config(), None).await.unwrap();
    let cpu = engine.cpu(Accel::Tcg, None).await.unwrap();
    let features = [&cpu.features[..], &["telepathy".to_owned()]].concat();
    let error = engine.same_cpu(Accel::Tcg, &Cpu { features, ..cpu }).await.unwrap_err();
    assert_eq!(error.to_string(), "the processor lacks telepathy");
}

#[tokio::test]
async fn what_is_learned_about_a_model_is_told_once_and_kept() {
    let engine = Engine::open(&config(), None).await.unwrap();
    engine.cpu(Accel::Tcg, None).await.unwrap();
    assert_eq!(engine.take_news(), None, "the usual processor is known from the start");
    let cpu = engine.cpu(Accel::Tcg, Some("max")).await.unwrap();
    let kept = engine.take_news().unwrap();
    assert_eq!(engine.take_news(), None);

    let next = Engine::open(&config(), Some(kept)).await.unwrap();
    assert_eq!(next.cpu(Accel::Tcg, Some("max")).await.unwrap(), cpu);
    assert_eq!(next.take_news(), None);
}

#[tokio::test]
async fn models_and_machine_types_that_are_not_there_are_refused() {
    let engine = Engine::open(&config(), None).await.unwrap();
    let error = engine.cpu(Accel::Tcg, Some("Z80")).await.unwrap_err();
    assert!(matches!(&error, Error::UnknownCpu { model, known, .. } if model == "Z80" && known.len() > 1), "{error}");
    assert!(engine.has_machine_type(Arch::HOST.machine_type()));
    for name in ["none", "microvm", "pc-q35-99.9", "pc-q35-7.2,kernel=/etc/passwd", ""] {
        assert!(!engine.has_machine_type(name), "{name:?}");
    }
}
