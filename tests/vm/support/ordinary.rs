//! Runs the program as an ordinary user when root runs the tests.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Answer, World, finish, program};

pub const ORDINARY: &str = "12345";

/// A user with a program, a store and a directory for files.
pub struct Ordinary {
    dir: tempfile::TempDir,
    pub world: World,
}

impl Default for Ordinary {
    fn default() -> Self {
        Self::new()
    }
}

impl Ordinary {
    pub fn new() -> Ordinary {
        let dir = tempfile::Builder::new().prefix("st-").tempdir().unwrap();
        let set_mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap()
        };
        set_mode(dir.path(), 0o755);
        fs::copy(program(), dir.path().join("sandtree")).unwrap();
        set_mode(&dir.path().join("sandtree"), 0o755);
        let world = World::copied_to(dir.path().join("home"));
        fs::create_dir(dir.path().join("files")).unwrap();
        let owner = format!("{ORDINARY}:{ORDINARY}");
        let given = Command::new("chown")
            .args(["-R", &owner])
            .args([world.home(), &dir.path().join("files")])
            .status();
        assert!(given.unwrap().success());
        Ordinary { dir, world }
    }

    pub fn run(&self, args: &[&str]) -> Answer {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", ORDINARY, "--regid", ORDINARY, "--clear-groups"]);
        command.arg(self.dir.path().join("sandtree")).args(args);
        command
            .env("HOME", self.files())
            .env("SANDTREE_HOME", self.world.home())
            .current_dir(self.files());
        finish(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        )
    }

    pub fn ok(&self, args: &[&str]) -> Answer {
        let answer = self.run(args);
        assert_eq!(answer.code, 0, "{args:?}: {answer:?}");
        answer
    }

    pub fn files(&self) -> PathBuf {
        self.dir.path().join("files")
    }
}
