//! `sandtree serve`: the HTTP server, in the foreground.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sandtree::{Error, Host, KeyLimits, Scope};
use sandtree_server::{Bound, Config, FileConfig, Gateway, Options, TlsFiles};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::{Outcome, open, registry};
use crate::args::Global;
use crate::failure::Failure;
use crate::{progress, show};

#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// Address to listen on [default: 127.0.0.1:3000]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Certificate chain, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Listen without TLS on an address that other hosts reach
    #[arg(long)]
    pub insecure_listen: bool,
    /// Settings: listen, tls, templates
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Do not make the image of the template `base` if it is missing
    #[arg(long)]
    pub no_base: bool,
}

pub async fn run(global: &Global, args: ServeArgs) -> Outcome {
    let config = config(&args)?;
    let mut stopping = std::pin::pin!(stop_signal()?);
    let bound = tokio::select! {
        bound = ready(global, &args, config) => bound?,
        () = &mut stopping => return Err(Failure::Interrupted),
    };
    bound.serve(stopping).await;
    Ok(ExitCode::SUCCESS)
}

fn config(args: &ServeArgs) -> Result<Config, Failure> {
    let file = match &args.config {
        None => FileConfig::default(),
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
            FileConfig::parse(path.clone(), &text).map_err(invalid)?
        }
    };
    let tls = args.tls_cert.clone().zip(args.tls_key.clone());
    let tls = tls.map(|(cert, key)| TlsFiles { cert, key });
    let options = Options {
        listen: args.listen,
        tls,
        insecure: args.insecure_listen,
        registry: registry::from_environment(),
        descriptors: Some(raise_descriptors()),
    };
    file.with(options).map_err(invalid)
}

/// Raises the soft limit on descriptors to the hard one, and returns it: each connection needs one.
fn raise_descriptors() -> u64 {
    let limits = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: limits.maximum,
        maximum: limits.maximum,
    };
    let raised = setrlimit(Resource::Nofile, wanted).map(|()| limits.maximum);
    let most = raised.unwrap_or(limits.current);
    most.unwrap_or(u64::MAX)
}

fn invalid(error: impl std::fmt::Display) -> Failure {
    let rule = error.to_string();
    Failure::from(Error::invalid("configuration", "of the server", &rule))
}

/// Completes at Ctrl-C, or when a service manager ends the server.
fn stop_signal() -> Result<impl Future<Output = ()>, Failure> {
    let failed = |e| Error::io("listen for", "signals", e);
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// A server that clients can use.
async fn ready(global: &Global, args: &ServeArgs, config: Config) -> Result<Bound, Failure> {
    let host = open(global).await?;
    let gateway = Gateway::new(host.clone(), config.clone());
    // Before the long part: an address that is taken is reported at once.
    let bound = Bound::new(gateway).await.map_err(invalid)?;
    if !args.no_base {
        prepare(&host, &config).await?;
    }
    announce(global, &host, &bound)?;
    Ok(bound)
}

/// Makes the template that clients use without a choice.
async fn prepare(host: &Host, config: &Config) -> Result<(), Failure> {
    let prepared = sandtree_server::prepare(host, config, progress::image("debian")).await;
    prepared.map_err(invalid)
}

/// Prints what a client needs. The first key is made here, and shown once.
fn announce(global: &Global, host: &Host, bound: &Bound) -> Result<(), Failure> {
    let address = bound.address();
    let first = if host.keys()?.is_empty() {
        let scopes = [Scope::Sandboxes];
        Some(host.create_key("first", &scopes, KeyLimits::default())?.key)
    } else {
        None
    };
    let url = format!("{}://{address}", bound.scheme());
    if global.json {
        show::json(&json!({ "url": url, "key": first }));
        return Ok(());
    }
    show::line(&format!("listening on {url}"));
    show::line(&format!(
        "export E2B_API_URL={url} E2B_SANDBOX_URL={url} E2B_VOLUME_API_URL={url}"
    ));
    match first {
        Some(key) => show::line(&format!("export E2B_API_KEY={key}")),
        None => {
            show::line("E2B_API_KEY: one of `sandtree key ls`; `sandtree key create` makes another")
        }
    }
    Ok(())
}
