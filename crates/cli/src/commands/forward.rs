//! `sandtree forward`: ports of the host that lead into a sandbox.

use sandtree::{Error, Forward, Guest, PUBLISH_ADDRESS, PublishedPort, Result};
use serde_json::json;
use tokio::net::TcpListener;

use super::{Outcome, open};
use crate::args::{Global, port, sandbox_ref};
use crate::show;

#[derive(Debug, clap::Args)]
pub struct ForwardArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Forward 127.0.0.1:HOST to port GUEST; HOST 0 chooses a free port
    #[arg(required = true, value_name = "HOST:GUEST", value_parser = port)]
    pub ports: Vec<PublishedPort>,
}

pub async fn run(global: &Global, args: ForwardArgs) -> Outcome {
    let guest = open(global).await?.sandbox(&args.sandbox)?.guest().await?;
    let mut forwards = Vec::new();
    for port in &args.ports {
        forwards.push(listen(&guest, *port).await?);
    }
    for (forward, port) in forwards.iter().zip(&args.ports) {
        let host = forward.address();
        if global.json {
            show::json(&json!({ "host": host.port(), "guest": port.guest }));
        } else {
            show::line(&format!("{host} -> {}:{}", args.sandbox, port.guest));
        }
    }
    // Until Ctrl-C, or until the sandbox ends.
    let mut ended = tokio::task::JoinSet::new();
    for mut forward in forwards {
        ended.spawn(async move { forward.ended().await });
    }
    ended.join_next().await;
    let report = Error::Guest {
        operation: "continue forwarding".into(),
        source: sandtree::LinkError::ended(),
    };
    Err(report.into())
}

async fn listen(guest: &Guest, port: PublishedPort) -> Result<Forward> {
    let address = format!("{PUBLISH_ADDRESS}:{}", port.host);
    let listener = TcpListener::bind(&address)
        .await
        .map_err(|source| Error::Port { address, source })?;
    guest.forward(listener, port.guest)
}
