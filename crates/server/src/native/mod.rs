//! The native API below `/api/v1`: everything that a sandbox can do, in the words of the library.
//!
//! ```text
//!   request ── key ── handler ──► sandtree ──► JSON | bytes | events
//!                        └────► Fault ── layer ──► {code, kind, message, causes, arguments}
//!   GET /openapi.json: made from the same handlers and types
//! ```
//!
//! One file for each group of verbs. Always: a setting that is not known is refused. What reaches
//! files of the host, or registries, needs a scope of the key.

mod commands;
mod create;
mod document;
mod events;
mod feed;
mod files;
mod forks;
mod images;
mod mounts;
mod problem;
mod registries;
mod request;
mod sandboxes;
mod snapshots;
mod sse;
mod states;
mod stream;
mod transfers;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::get;
use bytes::Bytes;
use hyper::header::CONTENT_TYPE;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::control;
use crate::error::Fault;
use crate::gateway::Gateway;
use request::Native;

/// The API, and its description.
pub fn router(gateway: Gateway) -> Router {
    let (guarded, document) = document::described(routes());
    let guarded = guarded
        .layer(from_fn_with_state(gateway.clone(), control::guard))
        .layer(from_fn(problem::in_native_form))
        .with_state(Native::new(gateway));
    // Made once: everyone may ask for it.
    let document = serde_json::to_vec(&document).expect("a document is JSON");
    let document = Bytes::from(document);
    let head = [(CONTENT_TYPE, "application/json")];
    guarded.route("/openapi.json", get(async move || (head, document)))
}

/// Every route. What is here is in the document: both are made from the same handlers.
fn routes() -> OpenApiRouter<Native> {
    OpenApiRouter::default()
        .merge(of_sandboxes())
        .merge(of_states())
        .merge(of_guests())
        .merge(of_store())
        .fallback(no_route)
}

fn of_sandboxes() -> OpenApiRouter<Native> {
    OpenApiRouter::default()
        .routes(routes!(sandboxes::current_key))
        .routes(routes!(sandboxes::list_sandboxes, create::create_sandbox))
        .routes(routes!(sandboxes::get_sandbox, sandboxes::remove_sandbox))
        .routes(routes!(sandboxes::start_sandbox))
        .routes(routes!(sandboxes::stop_sandbox))
        .routes(routes!(sandboxes::kill_sandbox))
        .routes(routes!(sandboxes::pause_sandbox))
        .routes(routes!(sandboxes::resume_sandbox))
        .routes(routes!(sandboxes::expire_sandbox))
        .routes(routes!(sandboxes::sandbox_stats))
        .routes(routes!(sandboxes::sandbox_logs))
        .routes(routes!(events::sandbox_events))
        .routes(routes!(events::all_events))
}

fn of_states() -> OpenApiRouter<Native> {
    OpenApiRouter::default()
        .routes(routes!(
            states::list_states,
            states::checkpoint,
            states::remove_states
        ))
        .routes(routes!(states::remove_state))
        .routes(routes!(states::revert))
        .routes(routes!(states::undo))
        .routes(routes!(states::redo))
        .routes(routes!(states::tree))
        .routes(routes!(states::diff))
        .routes(routes!(states::diff_content))
        .routes(routes!(forks::fork))
}

fn of_guests() -> OpenApiRouter<Native> {
    OpenApiRouter::default()
        .routes(routes!(commands::exec))
        .routes(routes!(commands::list_commands, commands::start_command))
        .routes(routes!(commands::discard_command))
        .routes(routes!(commands::command_output))
        .routes(routes!(commands::signal_command))
        .routes(routes!(
            files::read_file,
            files::write_file,
            files::remove_file
        ))
        .routes(routes!(files::stat_file))
        .routes(routes!(files::list_files))
        .routes(routes!(files::make_directory))
        .routes(routes!(files::rename_file))
        .routes(routes!(
            mounts::list_mounts,
            mounts::add_mount,
            mounts::remove_mount
        ))
        .routes(routes!(mounts::mount_changes))
        .routes(routes!(mounts::mount_patch))
        .routes(routes!(mounts::apply_mount))
}

fn of_store() -> OpenApiRouter<Native> {
    OpenApiRouter::default()
        .routes(routes!(snapshots::save))
        .routes(routes!(snapshots::list_snapshots))
        .routes(routes!(
            snapshots::inspect_snapshot,
            transfers::import,
            snapshots::remove_snapshot
        ))
        .routes(routes!(snapshots::verify_snapshot))
        .routes(routes!(snapshots::tag_snapshot))
        .routes(routes!(transfers::export))
        .routes(routes!(images::list_images))
        .routes(routes!(images::inspect_image, images::remove_image))
        .routes(routes!(registries::push))
        .routes(routes!(registries::pull))
}

async fn no_route(request: Request) -> Fault {
    let method = request.method();
    let path = request.uri().path();
    Fault::not_found(format!(
        "there is no {method} {path}: GET /openapi.json describes the API"
    ))
}
