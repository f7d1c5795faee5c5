//! Debian's `docker-registry` for one test, on a free port of this machine, with its storage in a
//! temporary directory.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

pub const USER: &str = "tester";
pub const PASSWORD: &str = "correct-horse";

/// A registry that ends with the value, also if the test panics.
pub struct Registry {
    process: Child,
    pub host: String,
    pub dir: TempDir,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Open,
    Password,
    Tls,
}

impl Registry {
    pub fn start(kind: Kind) -> Self {
        // Another process may take the port between its choice and its use.
        (0..5)
            .find_map(|_| Self::try_start(kind))
            .expect("docker-registry starts")
    }

    fn try_start(kind: Kind) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let host = format!("127.0.0.1:{port}");
        let config = dir.path().join("config.yml");
        fs::write(&config, configuration(dir.path(), &host, kind)).unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let mut command = Command::new("docker-registry");
        command
            .arg("serve")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let process = command.spawn().expect("docker-registry is installed");
        let mut registry = Self { process, host, dir };
        registry.answers().then_some(registry)
    }

    fn answers(&mut self) -> bool {
        let end = Instant::now() + Duration::from_secs(20);
        while Instant::now() < end {
            if self.process.try_wait().unwrap().is_some() {
                return false;
            }
            if TcpStream::connect(&self.host).is_ok() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    pub fn ca(&self) -> PathBuf {
        self.dir.path().join("cert.pem")
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

fn configuration(dir: &Path, host: &str, kind: Kind) -> String {
    let storage = dir.join("storage");
    let mut text = format!(
        "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\n  delete:\n    enabled: true\n\
         http:\n  addr: {host}\n",
        storage.display()
    );
    if kind == Kind::Tls {
        certificate(dir);
        let dir = dir.display();
        text += &format!("  tls:\n    certificate: {dir}/cert.pem\n    key: {dir}/key.pem\n");
    }
    if kind == Kind::Password {
        let path = dir.join("htpasswd");
        fs::write(&path, run("htpasswd", &["-Bbn", USER, PASSWORD])).unwrap();
        text += &format!(
            "auth:\n  htpasswd:\n    realm: test\n    path: {}\n",
            path.display()
        );
    }
    text
}

/// Makes `cert.pem`, for this machine and signed by itself, and its `key.pem`.
pub fn certificate(dir: &Path) {
    let key = dir.join("key.pem");
    let cert = dir.join("cert.pem");
    run(
        "openssl",
        &[
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=127.0.0.1",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-keyout",
            key.to_str().unwrap(),
            "-out",
            cert.to_str().unwrap(),
        ],
    );
}

/// Runs a tool to its successful end; what it printed.
pub fn run(program: &str, arguments: &[&str]) -> String {
    // starts: the program of run(…)
    // starts: the program of run(…) in tests/vm/registries
    let output = Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}
