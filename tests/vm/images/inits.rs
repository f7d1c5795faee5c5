//! Images with their own init: it boots, it is stopped cleanly, and copies have their own identity.

use super::{end, say};
use crate::support::World;

#[test]
fn systemd_boots_with_the_agent() {
    let world = World::debian();
    world.ok(["run", "-d", "--name", "s", "--memory", "1G", "with-inits"]);
    assert_eq!(say(&world, "s", "cat /proc/1/comm"), "systemd");
    let running = world.sh(
        "s",
        "systemctl is-system-running --wait; systemctl --failed --plain --no-legend",
    );
    assert_eq!(running.out(), "running\n", "{running:?}");
    assert_eq!(say(&world, "s", "hello"), "Hello, world!");
    // A copy has its own machine id.
    world.ok(["fork", "s", "--name", "t"]);
    let ids = ["s", "t-1"].map(|name| say(&world, name, "cat /etc/machine-id"));
    assert!(
        ids[0] != ids[1] && ids.iter().all(|id| id.len() == 32),
        "{ids:?}"
    );
    assert_eq!(say(&world, "t-1", "systemctl is-system-running"), "running");
    world.ok(["rm", "-f", "t-1"]);
    stop(&world, "s", 1);
    world.ok(["rm", "s"]);
    end(&world, &["debian", "with-inits"]);
}

/// A service that records its start and stop, and nothing else: Debian's other services take a
/// minute.
const OPENRC: &str = r#"set -e
rm /etc/runlevels/*/*
cat > /etc/init.d/notes <<'S'
#!/sbin/openrc-run
start() { echo "start $(basename "$(readlink /proc/1/exe)")" >> /var/notes; }
stop() { echo stop >> /var/notes; }
S
chmod +x /etc/init.d/notes
ln -s /etc/init.d/notes /etc/runlevels/default/notes
ln -sf openrc-init /sbin/init"#;
/// As in distributions with OpenRC and busybox.
const BUSYBOX: &str = r#"set -e
cat > /etc/inittab <<'S'
::sysinit:/sbin/openrc sysinit
::sysinit:/sbin/openrc boot
::wait:/sbin/openrc default
::shutdown:/sbin/openrc shutdown
S
ln -sf /bin/busybox /sbin/init"#;

#[test]
fn openrc_boots_with_the_agent_from_its_own_init_and_from_busybox() {
    let world = World::debian();
    world.ok(["run", "-d", "--name", "o", "--cold", "with-inits"]);
    say(&world, "o", OPENRC);
    stop(&world, "o", 1);
    world.ok(["start", "o"]);
    assert_eq!(
        say(&world, "o", "cat /var/notes; rc-service notes status"),
        "start openrc-init\n * status: started"
    );
    say(&world, "o", BUSYBOX);
    stop(&world, "o", 2);
    world.ok(["start", "o"]);
    assert_eq!(
        say(&world, "o", "cat /var/notes"),
        "start openrc-init\nstop\nstart busybox"
    );
    stop(&world, "o", 3);
    world.ok(["rm", "o"]);
    end(&world, &["debian", "with-inits"]);
}

/// Stops a sandbox, and asserts how often its init has ended its machine by then.
fn stop(world: &World, name: &str, times: usize) {
    world.ok(["stop", name]);
    let console = String::from_utf8_lossy(&world.ok(["logs", name]).stdout).into_owned();
    assert_eq!(
        console.matches("Power down").count(),
        times,
        "it did not power off by itself: {console}"
    );
    assert!(
        !console.contains("sandtree-agent: cannot"),
        "the agent had to end it: {console}"
    );
}
