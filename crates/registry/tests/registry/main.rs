//! The client against a real registry and the tools people use with it, and against servers that
//! misbehave.

mod auth;
mod helpers;
mod hostile;
mod layouts;
mod real;
mod scripted;
mod server;
mod transfers;
mod upload;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sandtree_registry::{Access, Cancelled, Client, Limits, Reference};

/// Access for tests of failures, which need not wait long.
fn impatient() -> Access {
    let limits = Limits {
        connect: Duration::from_secs(5),
        stalled: Duration::from_secs(5),
        asked_to_wait: Duration::from_millis(2500),
        backoff: Duration::from_millis(10),
        tries: 4,
        ..Limits::default()
    };
    Access {
        limits,
        ..Access::default()
    }
}

fn client(registry: &str, access: Access) -> Client {
    Client::new(registry, access).unwrap()
}

fn reference(registry: &str, rest: &str) -> Reference {
    format!("{registry}/{rest}").parse().unwrap()
}

/// Bytes that do not repeat within a chunk.
fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2) | 1;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Counts the bytes that a watch receives.
#[derive(Default)]
struct Count(AtomicU64);

impl Count {
    fn watch(&self) -> impl Fn(u64) -> Result<(), Cancelled> + Sync {
        |bytes| {
            self.0.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        }
    }

    fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
