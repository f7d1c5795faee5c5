//! Builds the library that is loaded into QEMU, to be embedded: one file is the whole install.
//!
//! It is built by a nested cargo into a target directory of its own, because the outer cargo holds the lock of the
//! usual one.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let manifest_dir = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let workspace = manifest_dir.ancestors().nth(2).expect("crates/engine is two levels down").to_owned();
    for input in ["crates/preload/src", "crates/preload/Cargo.toml", "Cargo.lock"] {
        println!("cargo:rerun-if-changed={}", workspace.join(input).display());
    }
    let target = format!("{}-unknown-linux-gnu", env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets it"));
    let target_dir = shared_target_dir();
    build_preload(&workspace, &target, &target_dir);
    let library = target_dir.join(&target).join("release/libsandtree_preload.so");
    println!("cargo:rustc-env=SANDTREE_PRELOAD={}", library.display());
}

/// `target/preload`, beside the profile directories: one build serves them all.
fn shared_target_dir() -> PathBuf {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let target = out.ancestors().nth(4).expect("OUT_DIR is target/PROFILE/build/NAME/out");
    target.join("preload")
}

fn build_preload(workspace: &Path, target: &str, target_dir: &Path) {
    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets it"));
    // The outer build's flags, wrappers and profile must not leak in: clippy would check instead of build.
    for (key, _) in env::vars_os() {
        let name = key.to_string_lossy();
        if name.starts_with("CARGO_ENCODED") || name.starts_with("CARGO_PROFILE") || name.contains("WRAPPER") {
            cargo.env_remove(&key);
        }
    }
    let status = cargo
        .current_dir(workspace)
        .env("RUSTFLAGS", "-C panic=abort")
        .env("CARGO_PROFILE_RELEASE_LTO", "fat")
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "none")
        .env_remove("CLIPPY_ARGS")
        .args(["build", "--release", "--locked", "--package", "sandtree-preload", "--target", target])
        .arg("--target-dir")
        .arg(target_dir)
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the library for QEMU does not build: see the messages above");
}
