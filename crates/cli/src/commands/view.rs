//! `sandtree view`: a sandbox's screen for VNC clients.

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::Duration;

use sandtree::{Display, Error, Password, Phase};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};
use crate::show;

/// Viewers at a time. Further ones wait.
const VIEWERS_MAX: usize = 16;
/// After a failed accept, so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, clap::Args)]
pub struct ViewArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Port on 127.0.0.1 [default: a free one]
    #[arg(
        long,
        value_name = "PORT",
        default_value_t = 0,
        hide_default_value = true
    )]
    pub port: u16,
}

pub async fn run(global: &Global, args: ViewArgs) -> Outcome {
    let sandbox = open(global).await?.sandbox(&args.sandbox)?;
    let display = sandbox.display()?;
    // Fails now, and not at the first viewer, if the sandbox does not run.
    display.screenshot().await?;
    let password = Password::random().map_err(|e| Error::io("make", "a password", e))?;
    let address = format!("{}:{}", Ipv4Addr::LOCALHOST, args.port);
    let listener = TcpListener::bind(&address)
        .await
        .map_err(|source| Error::Port { address, source })?;
    let address = listener
        .local_addr()
        .map_err(|e| Error::io("use", "a socket", e))?;
    if global.json {
        show::json(&json!({ "address": address, "password": password.as_str() }));
    } else {
        show::line(&format!("vnc://{address}  password {}", password.as_str()));
        show::notes(&["any VNC client can connect until Ctrl-C or the sandbox's end".into()]);
    }
    let mut watch = sandbox.watch().await?;
    let mut viewers = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if viewers.len() < VIEWERS_MAX => match accepted {
                Ok((viewer, _)) => {
                    viewers.spawn(serve(display.clone(), viewer, password.clone()));
                }
                // Most likely, the process has no free descriptors.
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = viewers.join_next() => {}
            state = watch.changed() => {
                let phase = state.and_then(|state| state.phase);
                // A paused sandbox may be resumed.
                if matches!(phase, None | Some(Phase::Stopped | Phase::Crashed)) {
                    return Ok(ExitCode::SUCCESS);
                }
            }
        }
    }
}

async fn serve(display: Display, viewer: TcpStream, password: Password) {
    if let Err(error) = display.serve_view(viewer, &password).await {
        show::notes(&[format!(
            "a viewer was refused: {}",
            error.report().one_line()
        )]);
    }
}
