//! Rules about the repository itself that no compiler checks. Each module is one rule; a failure
//! names file and line.
//!
//! Without `--test`, the same files are a program that prints the numbers of the code, for
//! `scripts/numbers`.
#![cfg_attr(
    not(test),
    allow(dead_code, reason = "the program needs a part of what the tests need")
)]

mod code;
#[cfg(test)]
mod crates;
#[cfg(test)]
mod durable;
#[cfg(test)]
mod environment;
#[cfg(test)]
mod features;
mod modules;
mod numbers;
#[cfg(test)]
mod programs;
mod rules;
mod sources;
#[cfg(test)]
mod specification;

#[cfg(not(test))]
fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("counts") => print!("{}", rules::rows()),
        Some("places") => print!("{}", rules::places()),
        _ => print!("{}", numbers::table()),
    }
}
