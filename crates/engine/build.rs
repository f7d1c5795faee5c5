//! Builds the library that is loaded into QEMU, to be embedded: one file is the whole install.

#[path = "../../scripts/nested_build.rs"]
mod nested_build;

use nested_build::Nested;

fn main() {
    let preload = Nested {
        package: "sandtree-preload",
        dir: "preload",
        inputs: &["crates/preload/src", "crates/preload/Cargo.toml"],
        rustflags: "-C panic=abort",
        env: &[("CARGO_PROFILE_RELEASE_LTO", "fat")],
        file: "libsandtree_preload.so",
    };
    println!(
        "cargo:rustc-env=SANDTREE_PRELOAD={}",
        preload.build().display()
    );
}
