//! Starts a machine whose guest only halts, prints the id of its process, and waits for ever: the
//! parent that a test kills to see that no QEMU stays. Takes a directory for the machine's files.

#[path = "../tests/support/mod.rs"]
mod support;

#[tokio::main]
async fn main() {
    let dir = std::env::args_os().nth(1).expect("a directory");
    let machine = support::engine()
        .await
        .start(support::spec(dir.as_ref(), "wait"))
        .await
        .expect("the machine starts");
    println!("{}", machine.pid());
    machine.exited().await;
}
