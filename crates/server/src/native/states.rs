//! States of a sandbox: taken, listed, compared, gone back to and removed.

use axum::Json;
use axum::extract::State;
use hyper::StatusCode;
use sandtree::{
    Change, Checkpoint, ContentDiff, DiffOptions, Error, Forget, Forgotten, Report, Reverted,
    StateInfo, TreeNode,
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::problem::Problem;
use super::request::{At, Native, OfSandbox, check_reference};
use crate::control::{Asked, Body, Client};
use crate::error::{Fault, Result};

const CHANGES: usize = 1000;
const CHANGES_MAX: usize = 10_000;
/// How far into a comparison pages reach. Each page compares anew, up to its end.
const OFFSET_MAX: usize = 1_000_000;

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointOptions {
    /// `c1`, `c2` and so on unless given.
    tag: Option<String>,
    /// Whether it replaces the checkpoint that has the tag, once it is complete.
    replace: bool,
}

/// Takes a checkpoint of memory, disk and processes; the guest continues.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/states", tag = "states",
    params(OfSandbox), request_body = CheckpointOptions,
    responses((status = 201, description = "It is taken.", body = Checkpoint)),
)]
pub async fn checkpoint(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Body(options): Body<CheckpointOptions>,
) -> Result<(StatusCode, Json<Checkpoint>)> {
    let sandbox = native.sandbox(&of.sandbox)?;
    let tag = options.tag.as_deref();
    let taken = sandbox.checkpoint(tag, options.replace.into()).await?;
    Ok((StatusCode::CREATED, Json(taken)))
}

/// The states of a sandbox, oldest first. `parent` makes them a tree.
#[derive(Debug, Serialize, ToSchema)]
pub struct States {
    pub states: Vec<StateInfo>,
    /// Why states are missing that could not be read.
    #[schema(value_type = Vec<Problem>)]
    pub unreadable: Vec<Report>,
}

/// Lists the states of a sandbox, which are a tree.
#[utoipa::path(
    get, path = "/sandboxes/{sandbox}/states", tag = "states",
    params(OfSandbox),
    responses((status = 200, body = States)),
)]
pub async fn list_states(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
) -> Result<Json<States>> {
    let (states, broken) = native.sandbox(&of.sandbox)?.states()?;
    let unreadable = broken.iter().map(Error::report).collect();
    Ok(Json(States { states, unreadable }))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub struct OfState {
    /// Name or id of a sandbox.
    sandbox: String,
    /// Tag or id of a state.
    state: String,
}

/// Removes a state. No other state is touched.
#[utoipa::path(
    delete, path = "/sandboxes/{sandbox}/states/{state}", tag = "states",
    params(OfState),
    responses((status = 200, body = Forgotten)),
)]
pub async fn remove_state(
    State(native): State<Native>,
    At(of): At<OfState>,
) -> Result<Json<Forgotten>> {
    let sandbox = native.sandbox(&of.sandbox)?;
    let removed = sandbox.forget(Forget::These(vec![of.state])).await?;
    Ok(Json(removed))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct ForgetQuery {
    /// How many of the newest stay; 0 unless given.
    keep: Option<usize>,
}

/// Removes all states of a sandbox, but for some of the newest.
#[utoipa::path(
    delete, path = "/sandboxes/{sandbox}/states", tag = "states",
    params(OfSandbox, ForgetQuery),
    responses((status = 200, body = Forgotten)),
)]
pub async fn remove_states(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Asked(query): Asked<ForgetQuery>,
) -> Result<Json<Forgotten>> {
    let which = match query.keep {
        None | Some(0) => Forget::All,
        Some(keep) => Forget::AllBut(keep),
    };
    Ok(Json(native.sandbox(&of.sandbox)?.forget(which).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RevertOptions {
    /// Tag or id of a state.
    state: String,
}

/// Goes to a state. The present is kept, so that this can be undone.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/revert", tag = "states",
    params(OfSandbox), request_body = RevertOptions,
    responses((status = 200, body = Reverted)),
)]
pub async fn revert(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Body(options): Body<RevertOptions>,
) -> Result<Json<Reverted>> {
    let sandbox = native.sandbox(&of.sandbox)?;
    Ok(Json(sandbox.revert(&options.state).await?))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UndoOptions {
    #[schema(default = 1, minimum = 1)]
    steps: usize,
}

impl Default for UndoOptions {
    fn default() -> Self {
        Self { steps: 1 }
    }
}

/// Goes back by some states.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/undo", tag = "states",
    params(OfSandbox), request_body = UndoOptions,
    responses((status = 200, body = Reverted)),
)]
pub async fn undo(
    State(native): State<Native>,
    At(of): At<OfSandbox>,
    Body(options): Body<UndoOptions>,
) -> Result<Json<Reverted>> {
    let sandbox = native.sandbox(&of.sandbox)?;
    Ok(Json(sandbox.undo(options.steps).await?))
}

/// Returns to the state that the last undo left.
#[utoipa::path(
    post, path = "/sandboxes/{sandbox}/redo", tag = "states",
    params(OfSandbox),
    responses((status = 200, body = Reverted)),
)]
pub async fn redo(State(native): State<Native>, At(of): At<OfSandbox>) -> Result<Json<Reverted>> {
    Ok(Json(native.sandbox(&of.sandbox)?.redo().await?))
}

/// Images, the snapshots and sandboxes made from them, and the states of those. Parents come before
/// their children.
#[derive(Debug, Serialize, ToSchema)]
pub struct Tree {
    pub nodes: Vec<TreeNode>,
    /// Why nodes are missing that could not be read.
    #[schema(value_type = Vec<Problem>)]
    pub unreadable: Vec<Report>,
}

/// The tree of everything in the store.
#[utoipa::path(
    get, path = "/tree", tag = "states",
    responses((status = 200, body = Tree)),
)]
pub async fn tree(State(native): State<Native>) -> Result<Json<Tree>> {
    let found = native.gateway.host().tree().await?;
    Ok(Json(Tree {
        nodes: found.nodes,
        unreadable: found.broken.iter().map(Error::report).collect(),
    }))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct DiffQuery {
    /// A snapshot, or a sandbox: `a` or `a@` for its present, `a@TAG` for a state.
    before: String,
    after: String,
    /// Whether a new modification time alone is a change.
    #[serde(default)]
    times: bool,
    /// How many changes precede the page.
    #[serde(default)]
    #[param(maximum = 1000000)]
    offset: usize,
    /// How many changes the page has: 1 to 10000, 1000 unless given.
    #[param(minimum = 1, maximum = 10000)]
    limit: Option<usize>,
}

/// A page of the files that differ.
#[derive(Debug, Serialize, ToSchema)]
pub struct DiffPage {
    pub changes: Vec<Change>,
    /// What could not be compared: changes there may be missing or wrong.
    pub incomplete: Option<String>,
    /// The offset of the next page; null on the last page.
    pub next_offset: Option<usize>,
}

/// Lists which files differ between two snapshots, sandboxes or states.
///
/// The disks are read from their layers; nothing is mounted. Each page compares anew.
#[utoipa::path(
    get, path = "/diff", tag = "states",
    params(DiffQuery),
    responses((status = 200, body = DiffPage)),
)]
pub async fn diff(
    State(native): State<Native>,
    client: Client,
    Asked(query): Asked<DiffQuery>,
) -> Result<Json<DiffPage>> {
    check_reference(&client.key, &query.before)?;
    check_reference(&client.key, &query.after)?;
    let limit = query.limit.unwrap_or(CHANGES);
    if !(1..=CHANGES_MAX).contains(&limit) || query.offset > OFFSET_MAX {
        let message = "invalid page: limit is 1 to 10000, and offset at most 1000000";
        return Err(Fault::bad_request(message));
    }
    let end = query.offset + limit;
    let options = DiffOptions {
        times: query.times,
        // One more shows that there is another page.
        max_changes: Some(end + 1),
    };
    let _place = native.transfer()?;
    let host = native.gateway.host();
    let found = host.diff(&query.before, &query.after, options).await?;
    let is_cut = found.changes.len() > end;
    let changes = found.changes.into_iter();
    Ok(Json(DiffPage {
        changes: changes.skip(query.offset).take(limit).collect(),
        // The comparison stopped at the end of the page, which is no fault of it.
        incomplete: found.incomplete.filter(|_| !is_cut),
        next_offset: is_cut.then_some(end),
    }))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct ContentQuery {
    /// As for `/diff`.
    before: String,
    after: String,
    /// The path of a file in the guest.
    path: String,
}

#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ContentKind {
    Same,
    /// At least one version is not a text.
    Binary,
    /// At least one version is larger than 4 MiB.
    TooLarge,
    Text,
}

/// How two versions of a file differ.
#[derive(Debug, Serialize, ToSchema)]
pub struct FileDiff {
    pub kind: ContentKind,
    /// As `diff -u` shows it, for texts.
    pub diff: String,
}

/// The differences in the text of one file.
#[utoipa::path(
    get, path = "/diff/content", tag = "states",
    params(ContentQuery),
    responses((status = 200, body = FileDiff)),
)]
pub async fn diff_content(
    State(native): State<Native>,
    client: Client,
    Asked(query): Asked<ContentQuery>,
) -> Result<Json<FileDiff>> {
    check_reference(&client.key, &query.before)?;
    check_reference(&client.key, &query.after)?;
    let _place = native.transfer()?;
    let host = native.gateway.host();
    let path = query.path.as_bytes();
    let found = host.content_diff(&query.before, &query.after, path).await?;
    let (kind, diff) = match found {
        ContentDiff::Same => (ContentKind::Same, String::new()),
        ContentDiff::Binary => (ContentKind::Binary, String::new()),
        ContentDiff::TooLarge { .. } => (ContentKind::TooLarge, String::new()),
        ContentDiff::Text(text) => (ContentKind::Text, text),
    };
    Ok(Json(FileDiff { kind, diff }))
}
