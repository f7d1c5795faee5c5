//! One running sandbox for the tests of a file that run at the same time: a boot costs seconds, and
//! commands in one sandbox must not disturb each other.
//!
//! Always: the last test that holds it removes it, and asserts that nothing is left.

use std::ops::Deref;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::{Answer, World, processes_of, until};

/// The name of the shared sandbox.
pub const A: &str = "a";

#[derive(Default)]
pub struct Shared {
    world: World,
}

impl Shared {
    /// The sandbox that another test holds, or a new one.
    pub fn sandbox() -> Arc<Shared> {
        static HELD: Mutex<Weak<Shared>> = Mutex::new(Weak::new());
        let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
        held.upgrade().unwrap_or_else(|| {
            let shared = Arc::new(Shared::default());
            shared.start(A, &["--disk", "1G"]);
            *held = Arc::downgrade(&shared);
            shared
        })
    }

    /// Runs a shell line in it that must succeed; returns its output.
    pub fn said(&self, line: &str) -> String {
        let answer = self.sh(A, line);
        assert_eq!(answer.code, 0, "{line}: {answer:#?}");
        answer.out().to_owned()
    }

    /// Whether a shell line in it succeeds.
    pub fn holds(&self, line: &str) -> bool {
        let Answer { code, .. } = self.sh(A, line);
        assert_ne!(code, 125, "{line}");
        code == 0
    }

    pub fn until_holds(&self, line: &str) {
        until(line, || self.holds(line));
    }

    /// Starts `sandtree ARGS` with pipes on all its streams.
    pub fn spawn(&self, args: &[&str]) -> Child {
        let mut command = self.command();
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    }
}

/// Removes the sandbox, and asserts that nothing is left. Its keeper answers before it ends.
pub fn remove(world: &World) {
    world.ok(["rm", "-f", A]);
    until("the keeper has ended", || {
        processes_of(world.home()).is_empty()
    });
    world.assert_empty();
}

impl Deref for Shared {
    type Target = World;

    fn deref(&self) -> &World {
        &self.world
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            remove(self);
        }
    }
}
