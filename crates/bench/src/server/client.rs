//! A server that a benchmark starts, and a client with one connection to it.

use std::net::SocketAddr;
use std::process::Stdio;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use sandtree::{Error, Result};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::cli::Cli;

/// `sandtree serve`, which ends with this.
pub struct Server {
    process: Child,
    address: SocketAddr,
    key: String,
}

impl Server {
    pub async fn start(cli: &Cli, key: &str) -> Result<Self> {
        let words = ["serve", "--listen", "127.0.0.1:0", "--no-base"];
        let mut command: Command = cli.command(&words);
        let started = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // To write one line for each request is part of what is measured.
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn();
        let failed = |e| Error::io("start", "sandtree serve", e);
        let mut process = started.map_err(failed)?;
        let stdout = process.stdout.take().expect("it is piped");
        let line = BufReader::new(stdout).lines().next_line().await;
        let line = line.map_err(failed)?.unwrap_or_default();
        let printed: Value = serde_json::from_str(&line).unwrap_or_default();
        let url = printed["url"].as_str().unwrap_or_default();
        let address = url.trim_start_matches("http://").parse();
        let silent = |_| Error::invalid("answer of sandtree serve", &line, "has its address");
        Ok(Self {
            process,
            address: address.map_err(silent)?,
            key: key.to_owned(),
        })
    }

    pub fn pid(&self) -> Result<u32> {
        let ended = || Error::invalid("server", self.address, "must run");
        self.process.id().ok_or_else(ended)
    }

    pub async fn client(&self) -> Result<Client> {
        let failed = |e| Error::io("connect to", self.address.to_string(), e);
        let stream = TcpStream::connect(self.address).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(broken)?;
        tokio::spawn(connection);
        let headers = vec![
            ("host".to_owned(), self.address.to_string()),
            ("x-api-key".to_owned(), self.key.clone()),
        ];
        Ok(Client { sender, headers })
    }
}

/// A connection that is kept, as clients keep theirs.
pub struct Client {
    sender: SendRequest<Full<Bytes>>,
    headers: Vec<(String, String)>,
}

impl Client {
    /// From here on, requests are for the commands and files of a sandbox.
    pub fn for_sandbox(mut self, created: &Value) -> Self {
        let text = |name: &str| created[name].as_str().unwrap_or_default().to_owned();
        let own = [
            ("e2b-sandbox-id", text("sandboxID")),
            ("x-access-token", text("envdAccessToken")),
            // `root:`, in base64: small images have no other user.
            ("authorization", "Basic cm9vdDo=".to_owned()),
        ];
        let own = own.map(|(name, value)| (name.to_owned(), value));
        self.headers.extend(own);
        self
    }

    pub async fn get(&mut self, path: &str) -> Result<Bytes> {
        self.send(Method::GET, path, "text/plain", Bytes::new())
            .await
    }

    pub async fn post(&mut self, path: &str, message: &Value) -> Result<Value> {
        let body = Bytes::from(message.to_string());
        let answer = self
            .send(Method::POST, path, "application/json", body)
            .await?;
        Ok(serde_json::from_slice(&answer).unwrap_or_default())
    }

    pub async fn put(&mut self, path: &str, bytes: Bytes) -> Result<Bytes> {
        let kind = "application/octet-stream";
        self.send(Method::POST, path, kind, bytes).await
    }

    /// Runs a command to its end, and returns everything that the server sent.
    pub async fn run(&mut self, argv: &[&str]) -> Result<Bytes> {
        let [cmd, args @ ..] = argv else {
            return Err(Error::invalid("command", "", "at least one word"));
        };
        let process = serde_json::json!({ "cmd": cmd, "args": args });
        let message = serde_json::json!({ "process": process, "stdin": false }).to_string();
        let mut frame = vec![0];
        frame.extend((message.len() as u32).to_be_bytes());
        frame.extend(message.into_bytes());
        let kind = "application/connect+json";
        let path = "/process.Process/Start";
        let told = self.send(Method::POST, path, kind, frame.into()).await?;
        let end = b"exit status 0";
        if told.windows(end.len()).any(|window| window == end) {
            return Ok(told);
        }
        let tail = told.len().saturating_sub(300);
        let tail = String::from_utf8_lossy(&told[tail..]).into_owned();
        Err(Error::invalid("command over HTTP", cmd, &tail))
    }

    async fn send(&mut self, method: Method, path: &str, kind: &str, body: Bytes) -> Result<Bytes> {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.header("content-type", kind).body(Full::new(body));
        let request = request.map_err(|e| Error::invalid("request", path, &e.to_string()))?;
        self.sender.ready().await.map_err(broken)?;
        let answer = self.sender.send_request(request).await.map_err(broken)?;
        let status = answer.status();
        let body = answer
            .into_body()
            .collect()
            .await
            .map_err(broken)?
            .to_bytes();
        if status.is_success() || status == StatusCode::NO_CONTENT {
            return Ok(body);
        }
        let said = String::from_utf8_lossy(&body).into_owned();
        Err(Error::invalid(
            "request",
            format!("{path}: {status}"),
            &said,
        ))
    }
}

fn broken(error: hyper::Error) -> Error {
    Error::io("talk to", "the server", std::io::Error::other(error))
}
