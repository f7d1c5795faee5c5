//! Accepts connections, with or without TLS, and serves each until it closes or the server stops.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::config::TlsFiles;
use crate::gateway::Gateway;
use crate::observe::Figures;
use crate::plane;
use crate::records;
use crate::turn::Turn;
use crate::wire::Wire;

/// Connections at a time, if the process may have so many descriptors. Further ones wait in the
/// listener's queue.
const CONNECTIONS_MAX: usize = 16 * 1024;
/// Descriptors that are not for clients: files of the store, sockets of keepers.
const DESCRIPTORS_OWN: usize = 512;
const CONNECTIONS_LEAST: usize = 64;
/// How long a connection may be idle between two requests: clients keep theirs for five minutes.
/// A head that has begun has to come sooner, see `wire`.
const IDLE_WITHIN: Duration = Duration::from_secs(660);
const HEADERS_MAX: usize = 100;
const HEAD_BYTES_MAX: usize = 64 * 1024;
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// The wait after a failed accept; most likely, the process has no free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const SWEEP_EVERY: Duration = Duration::from_secs(3600);
/// How long streams may take to end when the server stops.
const DRAIN: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("cannot listen on {address}")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("cannot use the certificate and key of {}: {message}", path.display())]
    Tls { path: PathBuf, message: String },
}

/// A server that listens and does not accept yet.
#[derive(Debug)]
pub struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<Arc<ServerConfig>>,
    gateway: Gateway,
}

impl Bound {
    pub async fn new(gateway: Gateway) -> Result<Self, ServeError> {
        let config = gateway.config();
        let tls = config.tls.as_ref().map(tls_config).transpose()?;
        let failed = |source| ServeError::Listen {
            address: config.listen,
            source,
        };
        let listener = TcpListener::bind(config.listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self {
            listener,
            address,
            tls,
            gateway,
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn scheme(&self) -> &'static str {
        match self.tls {
            Some(_) => "https",
            None => "http",
        }
    }

    /// Serves until `stop` completes; then streams get some time to end.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let service = TowerToHyperService::new(plane::router(self.gateway.clone()));
        let room = room(self.gateway.config().descriptors);
        let room = Arc::new(Semaphore::new(room));
        let figures = self.gateway.figures().clone();
        let (stopping, stopped) = watch::channel(());
        let sweeping = tokio::spawn(sweep(self.gateway.clone()));
        let mut connections = JoinSet::new();
        tokio::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                Some(_) = connections.join_next() => continue,
                accepted = accept(&self.listener, &room) => accepted,
            };
            let Some((stream, place)) = accepted else {
                continue;
            };
            let tls = self.tls.clone().map(TlsAcceptor::from);
            let service = service.clone();
            let stopped = stopped.clone();
            let figures = figures.clone();
            connections.spawn(async move {
                let _place = place;
                match tls {
                    None => converse(stream, figures, service, stopped).await,
                    Some(tls) => {
                        let greeted = tokio::time::timeout(HANDSHAKE_WITHIN, tls.accept(stream));
                        if let Ok(Ok(stream)) = greeted.await {
                            converse(stream, figures, service, stopped).await;
                        }
                    }
                }
            });
        }
        drop(self.listener);
        sweeping.abort();
        // Their machines are of this process.
        self.gateway.builds().cancel_all();
        drop(stopping);
        let drained = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(DRAIN, drained).await.is_err() {
            tracing::info!("streams are cut: the server stops");
        }
    }
}

/// Removes what clients uploaded and never used, and records of snapshots that are gone: now and
/// every hour.
async fn sweep(gateway: Gateway) {
    loop {
        if let Err(error) = gateway.host().sweep_archives() {
            tracing::warn!(error = %error.report().one_line(), "uploads are not removed");
        }
        if let Err(fault) = records::sweep_snapshots(gateway.host()).await {
            tracing::warn!(error = %fault, "records of snapshots are not removed");
        }
        tokio::time::sleep(SWEEP_EVERY).await;
    }
}

type Place = tokio::sync::OwnedSemaphorePermit;

async fn accept(listener: &TcpListener, room: &Arc<Semaphore>) -> Option<(TcpStream, Place)> {
    let place = room.clone().acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            // Answers are small and wait for nothing.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "a connection has no options");
            }
            Some((stream, place))
        }
        Err(error) => {
            tracing::warn!(%error, "cannot accept a connection");
            tokio::time::sleep(ACCEPT_PAUSE).await;
            None
        }
    }
}

/// How many connections there may be at a time.
fn room(descriptors: Option<u64>) -> usize {
    let most = descriptors.and_then(|most| usize::try_from(most).ok());
    let ours = most.map_or(CONNECTIONS_MAX, |most| most.saturating_sub(DESCRIPTORS_OWN));
    ours.clamp(CONNECTIONS_LEAST, CONNECTIONS_MAX)
}

/// Serves one connection. When the server stops, the request that is being answered is the last.
async fn converse<S>(
    stream: S,
    figures: Figures,
    service: TowerToHyperService<axum::Router>,
    mut stopped: watch::Receiver<()>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let turn = Turn::default();
    let stream = Wire::new(stream, turn.clone(), figures);
    let service = service_fn(move |mut request: Request<Incoming>| {
        turn.answers();
        request.extensions_mut().insert(turn.clone());
        service.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_WITHIN)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    tokio::pin!(connection);
    let served = tokio::select! {
        served = connection.as_mut() => served,
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        tracing::debug!(%error, "a connection ended early");
    }
}

fn tls_config(files: &TlsFiles) -> Result<Arc<ServerConfig>, ServeError> {
    let refused = |path: &PathBuf, message: String| ServeError::Tls {
        path: path.clone(),
        message,
    };
    let chain = CertificateDer::pem_file_iter(&files.cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| refused(&files.cert, error.to_string()))?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .map_err(|error| refused(&files.key, error.to_string()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| refused(&files.cert, error.to_string()))?;
    Ok(Arc::new(config))
}
