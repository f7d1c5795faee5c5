//! Images: listed, inspected and removed.

use axum::Json;
use axum::extract::State;
use sandtree::{ImageInfo, RemovedImage};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::request::{At, Native};
use crate::error::Result;

/// Every image of the store; those without a name come last.
#[derive(Debug, Serialize, ToSchema)]
pub struct Images {
    pub images: Vec<ImageInfo>,
}

/// Lists images.
#[utoipa::path(
    get, path = "/images", tag = "images",
    responses((status = 200, body = Images)),
)]
pub async fn list_images(State(native): State<Native>) -> Result<Json<Images>> {
    let images = native.gateway.host().images().await?;
    Ok(Json(Images { images }))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub struct OfImage {
    /// Name or digest of an image.
    image: String,
}

/// An image.
#[utoipa::path(
    get, path = "/images/{image}", tag = "images",
    params(OfImage),
    responses((status = 200, body = ImageInfo)),
)]
pub async fn inspect_image(
    State(native): State<Native>,
    At(of): At<OfImage>,
) -> Result<Json<ImageInfo>> {
    Ok(Json(native.gateway.host().inspect_image(&of.image)?))
}

/// Removes the name of an image or, by its digest, all of its names.
///
/// Its content stays as long as anything uses it.
#[utoipa::path(
    delete, path = "/images/{image}", tag = "images",
    params(OfImage),
    responses((status = 200, body = RemovedImage)),
)]
pub async fn remove_image(
    State(native): State<Native>,
    At(of): At<OfImage>,
) -> Result<Json<RemovedImage>> {
    Ok(Json(native.gateway.host().remove_image(&of.image).await?))
}
