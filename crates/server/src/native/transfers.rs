//! Snapshots as streams: export and import.

use axum::Json;
use axum::extract::{Request, State};
use axum::response::Response;
use hyper::StatusCode;
use sandtree::{ExportOptions, Imported, Progress};
use serde::Deserialize;
use utoipa::IntoParams;

use super::request::{At, Binary, Native, check_reference, pieces};
use super::stream::{self, Intake, Work};
use crate::control::{Asked, Client};
use crate::error::Result;

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct ExportQuery {
    /// A snapshot, or a sandbox: `a` or `a@` for its present, `a@TAG` for a state.
    reference: String,
    /// With memory and processes, of the present of a sandbox.
    #[serde(default)]
    memory: bool,
    /// Without compression.
    #[serde(default)]
    plain: bool,
    #[serde(default)]
    without_image: bool,
    /// Only content that this snapshot lacks.
    since: Option<String>,
}

/// Exports a snapshot, a sandbox or a state as one stream.
///
/// The connection is cut when the export fails after its first byte, so a complete answer is a
/// complete export. A client that leaves ends the work.
#[utoipa::path(
    get, path = "/export", tag = "snapshots",
    params(ExportQuery),
    responses((
        status = 200, description = "The artifact.",
        body = inline(Binary), content_type = "application/octet-stream",
    )),
)]
pub async fn export(
    State(native): State<Native>,
    client: Client,
    Asked(query): Asked<ExportQuery>,
) -> Result<Response> {
    check_reference(&client.key, &query.reference)?;
    if let Some(base) = &query.since {
        check_reference(&client.key, base)?;
    }
    let place = native.transfer()?;
    let (pipe, out) = stream::pipe();
    let host = native.gateway.host().clone();
    let work = Work::start(async move {
        let options = ExportOptions {
            plain: query.plain,
            without_image: query.without_image,
            since: query.since,
        };
        let silent = Progress::silent();
        let exporting = host.export(&query.reference, query.memory, options, pipe, silent);
        Ok(exporting.await?)
    });
    stream::answer(work, out, Some(place)).await
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub struct OfImport {
    /// The name that the snapshot gets.
    snapshot: String,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct ImportQuery {
    /// Whether it replaces the snapshot that has the name, once it is complete.
    #[serde(default)]
    replace: bool,
}

/// Imports a snapshot from a stream that `/export` made.
///
/// Every byte is checked before the name points at it. An upload that breaks off leaves nothing
/// behind.
#[utoipa::path(
    put, path = "/snapshots/{snapshot}", tag = "snapshots",
    params(OfImport, ImportQuery),
    request_body(content = inline(Binary), content_type = "application/octet-stream"),
    responses((status = 201, description = "It is complete.", body = Imported)),
)]
pub async fn import(
    State(native): State<Native>,
    At(of): At<OfImport>,
    Asked(query): Asked<ImportQuery>,
    request: Request,
) -> Result<(StatusCode, Json<Imported>)> {
    let _place = native.transfer()?;
    let input = Intake::new(pieces(request.into_body()));
    let host = native.gateway.host();
    let silent = Progress::silent();
    let importing = host.import(input, &of.snapshot, query.replace.into(), silent);
    Ok((StatusCode::CREATED, Json(importing.await?)))
}
