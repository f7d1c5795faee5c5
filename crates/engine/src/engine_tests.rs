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
