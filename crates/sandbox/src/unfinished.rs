//! A sandbox on disk whose creation is not finished.

use std::sync::Arc;

use sandtree_store::{Origin, Owned, SandboxDir, SandboxRecord, Snapshot, StateSource};

use crate::blocking::in_place;
use crate::error::{Error, Result};
use crate::inner::Inner;
use crate::publish;

/// A sandbox on disk whose creation is not finished. Dropped, it is removed with its name.
#[derive(Debug)]
pub(crate) struct Unfinished {
    host: Arc<Inner>,
    owned: Option<Owned>,
}

impl Unfinished {
    pub async fn make(host: Arc<Inner>, record: SandboxRecord) -> Result<Unfinished> {
        Self::create(host, record, |store, record| {
            store.create_sandbox(record, Origin::Image)
        })
        .await
    }

    pub async fn from_state(
        host: Arc<Inner>,
        record: SandboxRecord,
        state: StateSource,
    ) -> Result<Unfinished> {
        Self::create(host, record, move |store, record| {
            store.create_sandbox(record, Origin::State(&state))
        })
        .await
    }

    pub async fn from_snapshot(
        host: Arc<Inner>,
        record: SandboxRecord,
        snapshot: Snapshot,
        memory: bool,
    ) -> Result<Unfinished> {
        Self::create(host, record, move |store, record| {
            store.create_sandbox(
                record,
                Origin::Snapshot {
                    snapshot: &snapshot,
                    memory,
                },
            )
        })
        .await
    }

    async fn create(
        host: Arc<Inner>,
        record: SandboxRecord,
        create: impl FnOnce(
            &sandtree_store::Store,
            SandboxRecord,
        ) -> Result<Owned, sandtree_store::Error>
        + Send
        + 'static,
    ) -> Result<Unfinished> {
        // The task makes the guard itself: a caller that stops waiting gets the sandbox removed,
        // not left.
        let made = tokio::task::spawn_blocking(move || {
            let owned = create(&host.store, record).map_err(|error| match error {
                sandtree_store::Error::NameTaken { name, holder } => Error::NameTaken {
                    name: name.to_string(),
                    holder: holder.to_string(),
                },
                source => Error::Store {
                    operation: "create a sandbox",
                    source,
                },
            })?;
            let unfinished = Unfinished {
                host,
                owned: Some(owned),
            };
            publish::settle_target(&unfinished.host, unfinished.dir(), None)?;
            Ok(unfinished)
        });
        made.await.expect("creating does not panic")
    }

    pub fn dir(&self) -> &SandboxDir {
        self.owned()
    }

    pub fn owned(&self) -> &Owned {
        self.owned
            .as_ref()
            .expect("it is there until it is finished")
    }

    pub fn owned_mut(&mut self) -> &mut Owned {
        self.owned
            .as_mut()
            .expect("it is there until it is finished")
    }

    pub fn finish(mut self) -> Owned {
        self.owned.take().expect("it is there until it is finished")
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let Some(owned) = self.owned.take() else {
            return;
        };
        let id = owned.id().clone();
        let removed = in_place(|| {
            publish::release_target(&owned);
            self.host.store.remove_sandbox(owned)
        });
        if let Err(error) = removed {
            tracing::error!(%id, %error, "a sandbox that was not finished cannot be removed; the next open tries again");
        }
    }
}
