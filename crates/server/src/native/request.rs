//! What requests of the native API consist of.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRef, FromRequestParts, Path};
use axum::http::request::Parts;
use futures_util::{Stream, StreamExt};
use sandtree::{Guest, KeyInfo, Sandbox, SandboxInfo, Scope};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use utoipa::openapi::schema::{ObjectBuilder, Schema, SchemaFormat, Type};
use utoipa::openapi::{KnownFormat, RefOr};
use utoipa::{IntoParams, PartialSchema, ToSchema};

use super::feed::Feed;
use crate::auth;
use crate::error::{Fault, Result};
use crate::gateway::{Admission, Gateway, New};

/// Uploads, downloads and work for registries at a time: each has a thread.
const TRANSFERS_MAX: usize = 32;
/// How long the other end of a transfer may take for its next bytes.
pub const IDLE: Duration = Duration::from_secs(60);

/// What the handlers of the native API share.
#[derive(Debug, Clone)]
pub struct Native {
    pub gateway: Gateway,
    pub feed: Feed,
    transfers: Arc<Semaphore>,
}

impl Native {
    pub fn new(gateway: Gateway) -> Self {
        Self {
            gateway,
            feed: Feed::default(),
            transfers: Arc::new(Semaphore::new(TRANSFERS_MAX)),
        }
    }

    /// A sandbox by its name or id.
    pub fn sandbox(&self, reference: &str) -> Result<Sandbox> {
        Ok(self.gateway.host().sandbox(reference)?)
    }

    /// The guest of a sandbox that runs.
    pub async fn guest(&self, reference: &str) -> Result<Guest> {
        let sandbox = self.sandbox(reference)?;
        let info = sandbox.info()?;
        if !info.is_running() {
            return Ok(sandbox.guest().await?);
        }
        let connection = self.gateway.connect(sandbox, &info).await?;
        Ok(connection.guest)
    }

    /// Refuses what is over the limits of a key: so many more sandboxes like this one.
    pub async fn admit(
        &self,
        key: &KeyInfo,
        info: &SandboxInfo,
        sandboxes: u32,
    ) -> Result<Admission> {
        let needed = New {
            sandboxes,
            memory_bytes: info.memory_bytes.saturating_mul(sandboxes.into()),
        };
        self.gateway.admit(key, needed).await
    }

    /// A place for a transfer, until it is dropped.
    pub fn transfer(&self) -> Result<OwnedSemaphorePermit> {
        self.transfers.clone().try_acquire_owned().map_err(|_| {
            let message = format!("{TRANSFERS_MAX} transfers are under way: try again later");
            Fault::new(hyper::StatusCode::SERVICE_UNAVAILABLE, message)
        })
    }
}

impl FromRef<Native> for Gateway {
    fn from_ref(native: &Native) -> Self {
        native.gateway.clone()
    }
}

/// The parts of the path that name something.
#[derive(Debug)]
pub struct At<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for At<T> {
    type Rejection = Fault;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let path = Path::<T>::from_request_parts(parts, state).await;
        path.map(|Path(named)| Self(named))
            .map_err(|error| Fault::bad_request(error.body_text()))
    }
}

/// A sandbox.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub struct OfSandbox {
    /// Name or id of a sandbox.
    pub sandbox: String,
}

/// A snapshot.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Path)]
pub struct OfSnapshot {
    /// Name or digest of a snapshot.
    pub snapshot: String,
}

/// Bytes, in the document.
#[derive(Debug)]
pub enum Binary {}

impl PartialSchema for Binary {
    fn schema() -> RefOr<Schema> {
        let format = SchemaFormat::KnownFormat(KnownFormat::Binary);
        let bytes = ObjectBuilder::new().schema_type(Type::String);
        bytes.format(Some(format)).into()
    }
}

impl ToSchema for Binary {}

/// Refuses a path of the host where its holder may use names only.
pub fn check_reference(key: &KeyInfo, reference: &str) -> Result<()> {
    if sandtree::is_path(reference) {
        auth::need(key, Scope::HostFiles, "a path of the host")?;
    }
    Ok(())
}

/// A duration of a request.
pub fn duration(ms: Option<u64>) -> Option<Duration> {
    ms.map(Duration::from_millis)
}

/// The body of a request, in pieces. A client that sends nothing for some time is given up.
pub fn pieces(
    body: axum::body::Body,
) -> impl Stream<Item = std::io::Result<bytes::Bytes>> + Send + Unpin + 'static {
    let body = body.into_data_stream();
    let next = |mut body: axum::body::BodyDataStream| async move {
        let piece = match tokio::time::timeout(IDLE, body.next()).await {
            Ok(piece) => piece?.map_err(std::io::Error::other),
            Err(_) => Err(std::io::ErrorKind::TimedOut.into()),
        };
        Some((piece, body))
    };
    Box::pin(futures_util::stream::unfold(body, next))
}
