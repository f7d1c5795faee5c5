//! The room on the host's disk that the kept output of all commands of a guest shares.
//!
//! Always: a command that writes when the room is full blocks, as with any reader that stops, and
//! continues when others have made room. What was on its way is kept: at most a window for each
//! stream.

use std::sync::Arc;

use tokio::sync::watch;

/// For all commands of a guest together, in bytes.
const LIMIT: u64 = 4 << 30;

/// How much is used; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Room {
    used: Arc<watch::Sender<u64>>,
    limit: u64,
}

impl Default for Room {
    fn default() -> Self {
        Self::of(LIMIT)
    }
}

impl Room {
    pub fn of(limit: u64) -> Self {
        let used = Arc::new(watch::Sender::new(0));
        Self { used, limit }
    }

    pub fn take(&self, bytes: u64) {
        self.used
            .send_modify(|used| *used = used.saturating_add(bytes));
    }

    pub fn give(&self, bytes: u64) {
        self.used
            .send_modify(|used| *used = used.saturating_sub(bytes));
    }

    pub fn is_full(&self) -> bool {
        *self.used.borrow() >= self.limit
    }

    /// Waits until it is not full.
    pub async fn is_free(&self) {
        let mut used = self.used.subscribe();
        let free = used.wait_for(|used| *used < self.limit);
        // The sender is ours, so it does not close.
        drop(free.await);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_full_room_is_free_when_others_leave() {
        let room = Room::of(10);
        room.take(6);
        assert!(!room.is_full());
        room.is_free().await;
        room.take(6);
        assert!(room.is_full());
        let soon = tokio::time::timeout(Duration::from_millis(10), room.is_free());
        assert!(soon.await.is_err());
        let waiting = tokio::spawn({
            let room = room.clone();
            async move { room.is_free().await }
        });
        room.give(6);
        waiting.await.unwrap();
        room.give(100);
        assert!(!room.is_full());
    }
}
