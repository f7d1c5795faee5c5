//! `sandtree bench`: measurements, each beside what it is compared with.

use super::Outcome;
use crate::args::{Bench, Benchmark, Global};

pub async fn run(_global: &Global, args: Bench) -> Outcome {
    match args.what {
        Benchmark::Exec { .. } => Err(crate::failure::Failure::Interrupted),
    }
}
