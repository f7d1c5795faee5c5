//! Ports of the host that lead into a guest.

use std::sync::Arc;

use sandtree_store::PublishedPort;
use tokio::net::TcpListener;

use crate::degradation::Degradation;
use crate::error::{Error, Result};
use crate::guest::{Forward, Guest};
use crate::spec::PUBLISH_ADDRESS;

/// A port of the host that is ours, and the guest's port it leads to.
#[derive(Debug, Clone)]
pub(crate) struct Listener {
    pub socket: Arc<TcpListener>,
    pub port: PublishedPort,
}

/// Binds the host's ports and keeps them: another process could take a port that is released.
pub(crate) async fn listen(ports: &[PublishedPort]) -> Result<Vec<Listener>> {
    let mut listeners = Vec::new();
    for port in ports {
        let bound = TcpListener::bind((PUBLISH_ADDRESS, port.host)).await;
        let address = format!("{PUBLISH_ADDRESS}:{}", port.host);
        let socket = bound.map_err(|source| Error::Port {
            address: address.clone(),
            source,
        })?;
        let host = socket
            .local_addr()
            .map_err(|source| Error::Port { address, source })?
            .port();
        listeners.push(Listener {
            socket: Arc::new(socket),
            port: PublishedPort {
                host,
                guest: port.guest,
            },
        });
    }
    Ok(listeners)
}

/// As [`listen`], but binds a free port where another process has the wanted one, and reports that.
pub(crate) async fn listen_if_free(
    ports: &[PublishedPort],
) -> Result<(Vec<Listener>, Vec<Degradation>)> {
    let mut listeners = Vec::new();
    let mut notes = Vec::new();
    for port in ports {
        let taken = match listen(std::slice::from_ref(port)).await {
            Ok(listening) => {
                listeners.extend(listening);
                continue;
            }
            Err(error) => error,
        };
        let other = listen(&[PublishedPort { host: 0, ..*port }]).await?;
        notes.extend(other.iter().map(|other| Degradation::PortMoved {
            guest: port.guest,
            wanted: port.host,
            published: other.port.host,
            reason: taken.to_string(),
        }));
        listeners.extend(other);
    }
    Ok((listeners, notes))
}

pub(crate) fn forward(guest: &Guest, ports: &[Listener]) -> Result<Vec<Forward>> {
    ports
        .iter()
        .map(|listener| guest.forward(listener.socket.clone(), listener.port.guest))
        .collect()
}
