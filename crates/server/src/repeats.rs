//! Requests of one name, such as one that a client may send again: of two at a time, the second
//! waits for the first.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::OwnedMutexGuard;

use crate::locked::lock;

/// The requests that are being answered, by name.
#[derive(Debug, Default)]
pub struct Repeats(Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>);

impl Repeats {
    /// Waits until no other request of this name is being answered.
    pub async fn enter(&self, name: &str) -> OwnedMutexGuard<()> {
        let turn = {
            let mut all = lock(&self.0);
            all.retain(|_, turn| turn.strong_count() > 0);
            let known = all.get(name).and_then(Weak::upgrade);
            let turn = known.unwrap_or_default();
            all.insert(name.to_owned(), Arc::downgrade(&turn));
            turn
        };
        turn.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_at_a_time_and_nothing_stays() {
        let repeats = Repeats::default();
        let first = repeats.enter("a").await;
        let other = repeats.enter("b").await;
        let second = tokio::time::timeout(std::time::Duration::from_millis(20), repeats.enter("a"));
        assert!(second.await.is_err());
        drop(first);
        drop(repeats.enter("a").await);
        drop(other);
        drop(repeats.enter("c").await);
        assert_eq!(lock(&repeats.0).len(), 1);
    }
}
