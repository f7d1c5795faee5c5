//! Changes of all sandboxes of a store: one task looks for them, for all clients.
//!
//! Always: it looks only while there are clients. What was missed, because a client was slow, is
//! found again by listing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sandtree::{Host, State};
use serde::Serialize;
use tokio::sync::broadcast;
use utoipa::ToSchema;

use crate::locked::lock;

/// Other processes start and end sandboxes without a message to this one.
const POLL: Duration = Duration::from_millis(250);
/// Changes that wait for a client.
const WAITING: usize = 256;

/// The state of a sandbox, when a stream begins and whenever it changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct SandboxEvent {
    pub id: String,
    pub name: String,
    #[serde(flatten)]
    pub state: State,
}

/// The last known state of each sandbox, by id.
pub type Known = HashMap<String, SandboxEvent>;

/// Clones share the task.
#[derive(Debug, Clone, Default)]
pub struct Feed(Arc<Mutex<Option<broadcast::Sender<SandboxEvent>>>>);

impl Feed {
    /// The changes from now on.
    pub fn subscribe(&self, host: &Host) -> broadcast::Receiver<SandboxEvent> {
        let mut sender = lock(&self.0);
        if let Some(sender) = &*sender {
            return sender.subscribe();
        }
        let (new, changes) = broadcast::channel(WAITING);
        *sender = Some(new);
        tokio::spawn(self.clone().look(host.clone()));
        changes
    }

    async fn look(self, host: Host) {
        let mut known = Known::new();
        loop {
            for change in news(&host, &mut known) {
                if !self.publish(change) {
                    return;
                }
            }
            tokio::time::sleep(POLL).await;
            if !self.is_wanted() {
                return;
            }
        }
    }

    fn publish(&self, change: SandboxEvent) -> bool {
        let sender = lock(&self.0).clone();
        // Without clients, the next look finds out.
        sender.is_some_and(|sender| sender.send(change).is_ok() || self.is_wanted())
    }

    /// Ends the task when its last client is gone.
    fn is_wanted(&self) -> bool {
        let mut sender = lock(&self.0);
        let has_clients = sender.as_ref().is_some_and(|s| s.receiver_count() > 0);
        if !has_clients {
            *sender = None;
        }
        has_clients
    }
}

/// What changed since the last look. A list that cannot be read has no news.
pub fn news(host: &Host, known: &mut Known) -> Vec<SandboxEvent> {
    let Ok((all, _)) = host.list() else {
        return Vec::new();
    };
    let mut news = Vec::new();
    let mut now = Known::new();
    for info in all {
        let state = State {
            phase: Some(info.state),
            reason: info.reason,
            saved: None,
            save_failed: info.save_failed,
        };
        let event = SandboxEvent {
            id: info.id.clone(),
            name: info.name,
            state,
        };
        if known.remove(&info.id).as_ref() != Some(&event) {
            news.push(event.clone());
        }
        now.insert(info.id, event);
    }
    news.extend(known.drain().map(|(_, event)| removed(event)));
    *known = now;
    news
}

fn removed(event: SandboxEvent) -> SandboxEvent {
    let state = State {
        phase: None,
        reason: Some("it was removed".to_owned()),
        saved: None,
        save_failed: None,
    };
    SandboxEvent { state, ..event }
}
