//! The tree of everything in a store: images, the snapshots and sandboxes made from them, and the
//! states of those.
//!
//! Always: a sandbox or snapshot whose parent is gone is below its image, or at the top if its
//! image cannot be read.

use std::collections::{BTreeMap, HashSet};

use sandtree_store::Named;
use serde::Serialize;

use crate::blocking::blocking;
use crate::boxed::Boxed;
use crate::error::{Error, Result, store_error};
use crate::host::Host;
use crate::info::rfc3339;
use crate::snapshots::SnapshotInfo;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TreeKind {
    Image,
    Snapshot,
    Sandbox,
    State,
}

/// One node of the tree. Parents come before their children.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct TreeNode {
    pub kind: TreeKind,
    /// A digest, or the id of a sandbox or a state.
    pub id: String,
    pub names: Vec<String>,
    /// The id of its parent, if that exists.
    pub parent: Option<String>,
    /// RFC 3339, in UTC; unknown for images.
    pub created_at: Option<String>,
    /// More information: the phase of a sandbox, or whether a snapshot has memory.
    pub note: Option<String>,
    /// Whether its sandbox continues from this state.
    pub current: bool,
}

/// The whole tree, and the parts that could not be read.
#[derive(Debug, Default)]
pub struct Tree {
    pub nodes: Vec<TreeNode>,
    pub broken: Vec<Error>,
}

impl Host {
    pub fn tree(&self) -> Boxed<'_, Result<Tree>> {
        Box::pin(async move {
            let (sandboxes, broken) = self.list()?;
            let snapshots = self.snapshots().await?.snapshots;
            let mut tree = Tree {
                nodes: Vec::new(),
                broken,
            };
            let readable = snapshots
                .iter()
                .filter(|snapshot| snapshot.unreadable.is_none());
            let needed = readable.map(|snapshot| (&snapshot.image_digest, &snapshot.image));
            let needed = needed.chain(
                sandboxes
                    .iter()
                    .map(|sandbox| (&sandbox.image_digest, &sandbox.image)),
            );
            tree.add_images(self.named_images().await?, needed);
            tree.add_snapshots(snapshots);
            for sandbox in sandboxes {
                let above = sandbox.snapshot.filter(|snapshot| tree.has(snapshot));
                tree.nodes.push(TreeNode {
                    kind: TreeKind::Sandbox,
                    id: sandbox.id.clone(),
                    names: vec![sandbox.name],
                    parent: Some(above.unwrap_or(sandbox.image_digest)),
                    created_at: Some(sandbox.created_at),
                    note: Some(sandbox.state.to_string()),
                    current: false,
                });
                let states = self.states(&sandbox.id);
                match states {
                    Ok((states, broken)) => {
                        tree.broken.extend(broken);
                        tree.add_states(&sandbox.id, states);
                    }
                    // A sandbox that was removed meanwhile is no error.
                    Err(Error::NoSandbox { .. }) => {}
                    Err(error) => tree.broken.push(error),
                }
            }
            Ok(tree)
        })
    }

    /// Digest and names of every image that has a name.
    async fn named_images(&self) -> Result<BTreeMap<String, Vec<String>>> {
        let host = self.inner.clone();
        let names = blocking(move || host.store.names())
            .await
            .map_err(store_error("list names"))?;
        let mut images: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, named) in names {
            if let Ok(Named::Image(digest)) = named {
                images
                    .entry(digest.to_string())
                    .or_default()
                    .push(name.to_string());
            }
        }
        Ok(images)
    }
}

impl Tree {
    fn has(&self, id: &str) -> bool {
        self.nodes.iter().any(|node| node.id == id)
    }

    /// Images with a name, and images that something was made from.
    fn add_images<'a>(
        &mut self,
        mut named: BTreeMap<String, Vec<String>>,
        needed: impl Iterator<Item = (&'a String, &'a String)>,
    ) {
        let mut note = BTreeMap::new();
        for (digest, name) in needed {
            if !named.contains_key(digest) {
                note.insert(digest.clone(), format!("was {name}"));
                named.insert(digest.clone(), Vec::new());
            }
        }
        self.nodes
            .extend(named.into_iter().map(|(id, names)| TreeNode {
                kind: TreeKind::Image,
                note: note.remove(&id),
                id,
                names,
                parent: None,
                created_at: None,
                current: false,
            }));
    }

    /// Each below its parent, or below its image if the parent is gone.
    fn add_snapshots(&mut self, snapshots: Vec<SnapshotInfo>) {
        let there: HashSet<String> = snapshots
            .iter()
            .map(|snapshot| snapshot.digest.clone())
            .collect();
        for snapshot in snapshots {
            let parent = snapshot
                .parent
                .filter(|parent| there.contains(parent) && *parent != snapshot.digest);
            let image = Some(snapshot.image_digest).filter(|_| snapshot.unreadable.is_none());
            let memory = snapshot.memory.then(|| "with memory".to_owned());
            self.nodes.push(TreeNode {
                kind: TreeKind::Snapshot,
                id: snapshot.digest,
                names: snapshot.names,
                parent: parent.or(image),
                created_at: Some(snapshot.created_at),
                note: snapshot.unreadable.or(memory),
                current: false,
            });
        }
    }

    fn add_states(&mut self, sandbox: &str, states: Vec<crate::states::StateInfo>) {
        let there: HashSet<String> = states.iter().map(|state| state.id.clone()).collect();
        for state in states {
            let parent = state.parent.filter(|parent| there.contains(parent));
            self.nodes.push(TreeNode {
                kind: TreeKind::State,
                id: state.id,
                names: state.tag.into_iter().collect(),
                parent: Some(parent.unwrap_or_else(|| sandbox.to_owned())),
                created_at: Some(rfc3339(state.created_at_unix_ms)),
                note: Some(format!("{:?}", state.kind).to_lowercase()),
                current: state.current,
            });
        }
    }
}
