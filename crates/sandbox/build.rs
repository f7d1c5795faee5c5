//! Builds the agent as a static program, to be embedded: one file is the whole install. The agent
//! runs in guests of any distribution, so it links nothing dynamically.

#[path = "../../scripts/nested_build.rs"]
mod nested_build;

use nested_build::Nested;

fn main() {
    let agent = Nested {
        package: "sandtree-agent",
        dir: "agent",
        inputs: &[
            "crates/agent/src",
            "crates/agent/Cargo.toml",
            "crates/proto/src",
        ],
        rustflags: "-C target-feature=+crt-static -C panic=abort",
        env: &[],
        file: "sandtree-agent",
    };
    println!("cargo:rustc-env=SANDTREE_AGENT={}", agent.build().display());
}
