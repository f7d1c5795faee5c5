//! A nested cargo, for what is embedded: it builds into a target directory of its own, because the
//! outer cargo holds the lock of the usual one. Build scripts take this file in as a module.

use std::env;
use std::path::PathBuf;
use std::process::Command;

/// A package of this workspace that another one embeds.
pub struct Nested<'a> {
    pub package: &'a str,
    /// Of the target directory, beside those of the profiles: one build serves them all.
    pub dir: &'a str,
    pub inputs: &'a [&'a str],
    pub rustflags: &'a str,
    pub env: &'a [(&'a str, &'a str)],
    /// What is built, below the directory of the release profile.
    pub file: &'a str,
}

impl Nested<'_> {
    /// Builds it, and gives the path of what was built.
    pub fn build(&self) -> PathBuf {
        let manifest_dir = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
        let workspace = manifest_dir
            .ancestors()
            .nth(2)
            .expect("a crate is two levels down")
            .to_owned();
        for input in self
            .inputs
            .iter()
            .chain(&["scripts/nested_build.rs", "Cargo.lock"])
        {
            println!("cargo:rerun-if-changed={}", workspace.join(input).display());
        }
        let target = format!(
            "{}-unknown-linux-gnu",
            env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it")
        );
        let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
        let target_dir = out
            .ancestors()
            .nth(4)
            .expect("OUT_DIR is target/PROFILE/build/NAME/out")
            .join(self.dir);
        let status = cargo()
            .current_dir(workspace)
            .env("RUSTFLAGS", self.rustflags)
            .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "none")
            // They are small, and the agent is emulated.
            .env("CARGO_PROFILE_RELEASE_LTO", "thin")
            .envs(self.env.iter().copied())
            .args([
                "build",
                "--release",
                "--locked",
                "--package",
                self.package,
                "--target",
                &target,
            ])
            .arg("--target-dir")
            .arg(&target_dir)
            .status()
            .expect("cargo runs");
        assert!(
            status.success(),
            "{} does not build: see the messages above",
            self.package
        );
        target_dir.join(target).join("release").join(self.file)
    }
}

/// The outer build's flags, wrappers and profile must not leak in: clippy would check instead of
/// build.
fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets it"));
    for (key, _) in env::vars_os() {
        let name = key.to_string_lossy();
        if name.starts_with("CARGO_ENCODED")
            || name.starts_with("CARGO_PROFILE")
            || name.contains("WRAPPER")
        {
            cargo.env_remove(&key);
        }
    }
    cargo.env_remove("CLIPPY_ARGS");
    cargo
}
