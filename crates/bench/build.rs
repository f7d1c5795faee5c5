//! Builds the init of the bare guest as a static program, to embed it.

#[path = "../../scripts/nested_build.rs"]
mod nested_build;

use nested_build::Nested;

fn main() {
    let guest = Nested {
        package: "sandtree-bench-guest",
        dir: "bench-guest",
        inputs: &[
            "crates/bench-guest/src",
            "crates/bench-guest/Cargo.toml",
            "crates/proto/src",
        ],
        rustflags: "-C target-feature=+crt-static -C panic=abort",
        env: &[],
        file: "sandtree-bench-guest",
    };
    let path = guest.build();
    println!("cargo:rustc-env=SANDTREE_BENCH_GUEST={}", path.display());
}
