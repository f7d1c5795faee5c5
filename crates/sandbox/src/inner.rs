//! The parts that all sandboxes of a host share: the store, the QEMU and the configuration.

use std::sync::atomic::AtomicBool;

use sandtree_engine::{self as engine, Engine, EngineConfig, Jail, Machine, Verdicts};
use sandtree_store::{self as store, Name, SandboxDir, SandboxId, Store};
use tokio::sync::OnceCell;

use crate::boxed::Boxed;
use crate::config::{HostConfig, MachineUser};
use crate::error::{Error, Result};
use crate::fault::{self, Step};
use crate::names::parse_name;

#[derive(Debug)]
pub(crate) struct Inner {
    pub config: HostConfig,
    pub store: Store,
    pub faults: fault::Plan,
    pub engine: OnceCell<Engine>,
    /// Whether this process is a keeper whose sandbox has an owner: it serves its socket while the
    /// sandbox rests, too.
    pub serves_at_rest: AtomicBool,
}

impl Inner {
    /// Marks that a verb has reached a step. A test may make the step fail or wait.
    pub fn reach(&self, step: Step, machine: Option<&Machine>) -> Result<()> {
        Ok(self.faults.reach(step, machine)?)
    }

    /// Where we may switch users, each sandbox's machine runs as a user of its own: a guest that
    /// breaks out of its machine cannot reach another machine.
    pub fn jail(&self, id: Option<&SandboxId>) -> Jail {
        let number = id
            .and_then(|id| u32::from_str_radix(id.as_str().get(..6)?, 16).ok())
            .unwrap_or(0);
        let own = self.config.machine_user == MachineUser::Auto && can_switch_user();
        Jail {
            uid: own.then_some(MACHINE_UIDS + number),
        }
    }

    /// The QEMU of this host. The store's cache keeps the results of probing it, because probing
    /// takes time.
    pub fn engine(&self) -> Boxed<'_, Result<&Engine>> {
        Box::pin(async move { self.engine.get_or_try_init(|| self.open_engine()).await })
    }

    async fn open_engine(&self) -> Result<Engine> {
        let cached: Option<Verdicts> = self.store.cached(&engine_key()).unwrap_or_else(|error| {
            tracing::warn!(%error, "the cached findings about QEMU cannot be read");
            None
        });
        let config = EngineConfig {
            binary: self.config.qemu.clone(),
            search: self.config.search.clone(),
            arch: engine::Arch::HOST,
            jail: self.jail(None),
        };
        let engine = Engine::open(&config, cached)
            .await
            .map_err(|source| Error::Engine {
                operation: "be used",
                source,
            })?;
        self.keep(engine.verdicts());
        Ok(engine)
    }

    /// Keeps what was found out about processors since the engine was opened.
    pub fn keep_news(&self, engine: &Engine) {
        if let Some(verdicts) = engine.take_news() {
            self.keep(&verdicts);
        }
    }

    fn keep(&self, verdicts: &Verdicts) {
        if let Err(error) = self.store.cache(&engine_key(), verdicts) {
            tracing::warn!(%error, "the findings about QEMU cannot be cached; they are found anew each time");
        }
    }

    pub fn find(&self, reference: &str) -> Result<SandboxDir> {
        let name = parse_name("sandbox name or id", reference)?;
        self.store.find_sandbox(&name).map_err(|error| match error {
            store::Error::UnknownSandbox { .. } => Error::NoSandbox {
                name: reference.into(),
            },
            source => Error::Store {
                operation: "read a sandbox",
                source,
            },
        })
    }
}

fn engine_key() -> Name {
    // The number counts the probes: verdicts of earlier ones are not used.
    "engine-2".parse().expect("it is a name")
}

/// Whether this process can start others under the user ids of machines. Inside a user namespace,
/// root may have no ids but its own, and may not be allowed to drop groups.
fn can_switch_user() -> bool {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let is_root = rustix::process::geteuid().is_root();
    is_root
        && maps_machines(&read("/proc/self/uid_map"))
        && read("/proc/self/setgroups").trim() != "deny"
        && may_change_ids(&read("/proc/self/status"))
}

/// Whether a process has CAP_SETGID and CAP_SETUID, which the root of a container may lack.
fn may_change_ids(status: &str) -> bool {
    const IDS: u64 = 1 << 6 | 1 << 7;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
        .is_some_and(|caps| caps & IDS == IDS)
}

/// Whether a user namespace has all the ids that machines may get. Each line: first id inside,
/// first outside, count.
fn maps_machines(uid_map: &str) -> bool {
    let ranges = uid_map.lines().filter_map(|line| {
        let mut numbers = line
            .split_ascii_whitespace()
            .map(|word| word.parse::<u64>().ok());
        let first_inside = numbers.next()??;
        let _first_outside = numbers.next()??;
        let count = numbers.next()??;
        Some(first_inside..first_inside + count)
    });
    let first = u64::from(MACHINE_UIDS);
    let last = first + MACHINES - 1;
    ranges
        .into_iter()
        .any(|range| range.contains(&first) && range.contains(&last))
}

/// The first of the user ids that machines run as when we are root. Above every range that
/// distributions and container engines hand out.
const MACHINE_UIDS: u32 = 0x7000_0000;

/// The number of those user ids: one for each value of six hexadecimal digits of a sandbox's id.
const MACHINES: u64 = 1 << 24;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changing_ids_takes_both_capabilities() {
        assert!(may_change_ids(
            "Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n"
        ));
        assert!(may_change_ids("CapEff:\t00000000000000c0\n"));
        assert!(!may_change_ids("CapEff:\t0000000000000080\n"));
        assert!(!may_change_ids(
            "CapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n"
        ));
        assert!(!may_change_ids(""));
    }

    #[test]
    fn a_user_namespace_has_ids_for_machines_or_not() {
        assert!(maps_machines("         0          0 4294967295\n"));
        assert!(!maps_machines("         0       1000          1\n"));
        // As rootless containers have it.
        assert!(!maps_machines(
            "         0       1000          1\n         1     100000      65536\n"
        ));
        assert!(!maps_machines("0 0 1879048193\n"), "only the first of them");
        assert!(!maps_machines(""));
    }
}
