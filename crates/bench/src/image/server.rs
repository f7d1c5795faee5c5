//! Debian's `docker-registry` on a free port of this machine, for one run.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use sandtree::{Error, Result};

use crate::scratch::Scratch;
use crate::tool::Running;

const ATTEMPTS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(20);

/// A running registry. Dropping it ends the process.
pub struct Registry {
    process: Running,
    pub host: String,
}

impl Registry {
    pub async fn start(scratch: &Scratch) -> Result<Self> {
        // Another process may take the port before the registry listens.
        for _ in 0..ATTEMPTS {
            let mut registry = Self::try_start(scratch)?;
            if registry.answers().await? {
                return Ok(registry);
            }
        }
        Err(Error::invalid(
            "registry",
            "docker-registry",
            "one that listens on 127.0.0.1",
        ))
    }

    fn try_start(scratch: &Scratch) -> Result<Self> {
        let failed = |e| Error::io("find a free port of", "127.0.0.1", e);
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|port| port.local_addr())
            .map_err(failed)?;
        let host = port.to_string();
        let config = scratch.path("registry.yml");
        let text = configuration(&scratch.path("registry"), &host);
        std::fs::write(&config, text).map_err(|e| Error::io("write", &config, e))?;
        let args = ["serve".as_ref(), config.as_os_str()];
        Ok(Self {
            process: Running::start("docker-registry", &args, &scratch.path("registry.said"))?,
            host,
        })
    }

    async fn answers(&mut self) -> Result<bool> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE && self.process.ended()?.is_none() {
            if TcpStream::connect(&self.host).is_ok() {
                return Ok(true);
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(false)
    }

    pub fn reference(&self, repository: &str) -> String {
        format!("{}/bench/{repository}:1", self.host)
    }
}

fn configuration(storage: &Path, host: &str) -> String {
    let storage = serde_json::to_string(&storage.to_string_lossy()).expect("a text is JSON");
    format!(
        "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {storage}\nhttp:\n  addr: {host}\n"
    )
}
