//! Machines whose kernel is up and whose agent waits for a root.
//!
//! ```text
//!   power-on -> kernel -> agent waits --captured--> kernel state
//!   kernel state -> loaded on a sandbox's own disk -> (Waiting) -> root, init, identity -> running
//! ```
//!
//! Always: a guest gets randomness and the time before it looks at its disk. When it fails: the
//! machine is gone. Until the root is asked for, the disk is as it was.

use std::time::Duration;

use sandtree_engine::{self as engine, Machine};
use sandtree_proto::{self as proto, Identity};
use sandtree_store::{LayerId, SandboxDir};

use super::boot::{Arriving, Patience, Started, power_on, unreachable_agent};
use super::identity::random_bytes;
use super::restore::{ACKNOWLEDGE, Loaded, leave_tsc};
use super::running::Running;
use super::spec::Kernel;
use crate::error::{Error, Result, engine_error};
use crate::fault::Step;
use crate::guest::Guest;
use crate::inner::Inner;
use crate::link::LinkError;
use crate::moment::now_unix_ns;

/// The random bytes that a guest gets with its boot.
const ENTROPY_BYTES: usize = 64;
/// How much longer a request waits than the boot that it is a part of.
const SLACK: Duration = Duration::from_secs(1);

/// Boots a kernel until its agent waits for a root.
pub(crate) async fn boot_kernel(
    host: &Inner,
    dir: &SandboxDir,
    disk: &[LayerId],
    timeout: Option<Duration>,
) -> Result<Running> {
    let mut arriving = power_on(host, dir, disk, Kernel::Waits).await?;
    let patience = Patience::new(timeout);
    let Arriving {
        machine,
        hub,
        watch,
        ..
    } = &mut arriving;
    let up = async {
        host.reach(Step::Machine, Some(machine))?;
        patience.greeted(hub).await?;
        let link = hub.connect().await.map_err(unreachable_agent)?;
        Ok(Guest::new(link))
    };
    let up = watch.during(host, machine, up).await;
    let guest = up.map_err(|error| unless_killed(machine, error))?;
    arriving.into_running(host, guest).await
}

/// If something killed the machine, as `kill` or a host without memory does, the error must not
/// look like one of the guest: another machine would be tried.
fn unless_killed(machine: &Machine, error: Error) -> Error {
    match (error, machine.exit().now()) {
        (Error::BootEnded { .. }, Some(exit)) if exit.is_kill() => {
            engine_error("boot a kernel")(engine::Error::Died { exit })
        }
        (error, _) => error,
    }
}

/// A guest that has continued from a kernel state and waits for its root.
pub(crate) struct Waiting {
    arriving: Arriving,
    /// Why the guest needs another clock.
    other_tsc: Option<String>,
}

/// What a guest that waits gets.
pub(crate) struct Root {
    /// The agent's options.
    pub options: String,
    pub identity: Identity,
    /// How long the boot may take; `None` for the default.
    pub timeout: Option<Duration>,
}

impl Waiting {
    /// Continues a machine that has loaded a kernel state, and waits for its agent.
    pub async fn wake(host: &Inner, dir: &SandboxDir, loaded: Loaded) -> Result<Waiting> {
        let other_tsc = loaded.other_tsc;
        let started = Started {
            machine: loaded.machine,
            port: loaded.port,
            console: loaded.console,
            events: loaded.events,
            ground: loaded.ground,
            record: loaded.record,
            degraded: loaded.degraded,
        };
        let mut arriving = Arriving::new(dir, started)?;
        let Arriving {
            machine,
            hub,
            watch,
            ..
        } = &mut arriving;
        let awake = async {
            host.reach(Step::Machine, Some(machine))?;
            let continued = machine.cont().await;
            continued.map_err(engine_error("continue from a kernel state"))?;
            let patience = host.faults.acknowledge_within(ACKNOWLEDGE);
            hub.ready(patience).await.map_err(|source| match source {
                LinkError::Timeout { .. } => Error::Unacknowledged { after: patience },
                source => unreachable_agent(source),
            })
        };
        let awake = watch.during(host, machine, awake).await;
        awake.map_err(|error| unless_killed(machine, error))?;
        Ok(Waiting {
            arriving,
            other_tsc,
        })
    }

    /// Gives the guest its root, and waits until it has taken its identity.
    pub async fn boot(self, host: &Inner, root: Root) -> Result<Running> {
        let Waiting {
            mut arriving,
            other_tsc,
        } = self;
        let patience = Patience::new(root.timeout);
        let Arriving {
            machine,
            hub,
            watch,
            ..
        } = &mut arriving;
        let up = async {
            host.reach(Step::Hello, None)?;
            let asked = async {
                let guest = Guest::new(hub.connect().await.map_err(unreachable_agent)?);
                let boot = proto::Boot {
                    unix_time_ns: now_unix_ns(),
                    entropy: random_bytes(ENTROPY_BYTES),
                    options: root.options,
                };
                // The patience ends first, with what the console says.
                guest
                    .boot(boot, patience.whole().saturating_add(SLACK))
                    .await
            };
            patience.within(asked).await?;
            patience.configured(host, hub, root.identity).await
        };
        let guest = watch.during(host, machine, up).await?;
        if let Some(reason) = other_tsc {
            let degraded = leave_tsc(&guest, reason).await;
            arriving.degraded.push(degraded);
        }
        arriving.into_running(host, guest).await
    }
}
