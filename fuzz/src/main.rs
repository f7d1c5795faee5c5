//! Fuzzing on the installed toolchain: mutated inputs into every parser that faces the other side.
//!
//!     cargo run --release -p sandtree-fuzz -- [--seconds N] [--seed S] [TARGET…]
//!
//! There is no coverage feedback. Instead, each target starts from well-formed inputs that reach
//! deep code, and mutates them. A target panics when a promise is broken, and the run prints the
//! seed and the input to repeat it.

mod disk_image;
mod ext4;
mod mounts;
mod mutate;
mod tar;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use mutate::Random;
use targets::{TARGETS, Target};

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(problem) => {
            eprintln!("{problem}\nusage: sandtree-fuzz [--seconds N] [--seed S] [TARGET…]");
            return ExitCode::from(2);
        }
    };
    println!("seed {}", options.seed);
    let wanted = |target: &&Target| {
        options.names.is_empty() || options.names.iter().any(|name| name == target.name)
    };
    let failures = TARGETS
        .iter()
        .filter(wanted)
        .filter(|target| !fuzz(target, &options))
        .count();
    targets::clean_up();
    if failures == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

struct Options {
    time: Duration,
    seed: u64,
    names: Vec<String>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let since_epoch = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let mut options = Self {
            time: Duration::from_secs(10),
            seed: since_epoch.as_nanos() as u64,
            names: Vec::new(),
        };
        while let Some(arg) = args.next() {
            let mut number = || {
                args.next()
                    .and_then(|n| n.parse().ok())
                    .ok_or(format!("{arg} needs a number"))
            };
            match arg.as_str() {
                "--seconds" => options.time = Duration::from_secs(number()?),
                "--seed" => options.seed = number()?,
                name if TARGETS.iter().any(|target| target.name == name) => options.names.push(arg),
                unknown => return Err(format!("there is no target {unknown}")),
            }
        }
        Ok(options)
    }
}

/// Runs one target for its time. Returns whether all promises held.
fn fuzz(target: &Target, options: &Options) -> bool {
    let mut random = Random::new(options.seed);
    let seeds = (target.seeds)();
    let end = Instant::now() + options.time;
    let mut runs = 0u64;
    while Instant::now() < end {
        for _ in 0..64 {
            let input = random.mutated(&seeds);
            runs += 1;
            if catch_unwind(AssertUnwindSafe(|| (target.check)(&input))).is_err() {
                let hex: String = input.iter().map(|b| format!("{b:02x}")).collect();
                println!(
                    "{}: broken after {runs} runs of seed {}: {hex}",
                    target.name, options.seed
                );
                return false;
            }
        }
    }
    println!("{}: {runs} runs held", target.name);
    true
}
