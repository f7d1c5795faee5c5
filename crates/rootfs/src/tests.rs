//! Imports as a user sees them: complete root file systems, and hostile archives.

mod archive;
mod costs;
mod hostile;
mod layers;
mod listing;
mod many;
mod torture;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::{Added, Builder, Error, Limits, Made, Options, TarRules};

/// A builder in its own directory, in which only the image may appear.
struct Bench {
    dir: TempDir,
    builder: Builder,
}

impl Bench {
    fn new() -> Self {
        Self::with(Limits::default())
    }

    fn with(limits: Limits) -> Self {
        let dir = tempfile::tempdir().expect("a directory can be made");
        let builder =
            Builder::create(&dir.path().join("image"), limits).expect("an image can be made");
        Self { dir, builder }
    }

    fn plain(&mut self, bytes: &[u8]) -> Result<Added, Error> {
        self.builder
            .add_tar(&mut &*bytes, TarRules::Plain, &mut |_| Ok(()))
    }

    fn layer(&mut self, bytes: &[u8]) -> Result<Added, Error> {
        self.builder
            .add_tar(&mut &*bytes, TarRules::Layer, &mut |_| Ok(()))
    }

    fn from(&mut self, mut input: impl Read + Send) -> Result<Added, Error> {
        self.builder
            .add_tar(&mut input, TarRules::Plain, &mut |_| Ok(()))
    }

    fn text(&self, path: &str) -> Option<String> {
        let bytes = self
            .builder
            .read(path.as_bytes(), 1 << 20)
            .expect("it can be read");
        bytes.map(|bytes| String::from_utf8(bytes).expect("it is text"))
    }

    /// Writes the image and checks it with `e2fsck`.
    fn finish(self) -> (TempDir, PathBuf, Made) {
        let image = self.dir.path().join("image");
        let made = self
            .builder
            .finish(&Options {
                free_bytes: 1 << 20,
            })
            .expect("the image can be written");
        check(&image);
        (self.dir, image, made)
    }

    fn finished_bytes(self) -> Vec<u8> {
        let (_dir, image, _) = self.finish();
        std::fs::read(image).expect("the image can be read")
    }
}

/// `e2fsck` finds nothing to repair.
fn check(image: &Path) {
    let output = tool("e2fsck")
        .args(["-fn"])
        .arg(image)
        .output()
        .expect("e2fsck is installed; it is in e2fsprogs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
}

fn tool(name: &str) -> Command {
    // starts: the program of tool(…)
    let mut command = Command::new(name);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

/// Runs a command. Returns its output.
fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().expect("it is installed");
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}
