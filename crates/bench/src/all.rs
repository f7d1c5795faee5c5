//! `sandtree-bench all`: every group of benchmarks, in one table.
//!
//! When it fails: a group that fails is listed as left out, and the others are still measured. The
//! program then ends with the first failure.

use crate::config::Global;
use crate::exec::{self, ExecArgs};
use crate::failure::{Failure, Measured, Outcome};
use crate::image::{self, ImageArgs};
use crate::long::{self, LongArgs};
use crate::mounts::{self, MountsArgs};
use crate::processes::{self, ProcessesArgs};
use crate::server::{self, ServerArgs};
use crate::show;
use crate::side::{self, SideArgs};
use crate::states::{self, StatesArgs};
use crate::store::{self, StoreArgs};

#[derive(Debug, clap::Args)]
pub struct AllArgs {
    /// Measure only these groups (repeatable)
    #[arg(long, value_name = "NAME")]
    only: Vec<Group>,
    /// Measure fewer rounds, without 4 GB guests, without 50 forks and without what takes minutes
    #[arg(long)]
    quick: bool,
}

/// The groups of benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Group {
    Side,
    Processes,
    Exec,
    Mounts,
    States,
    Store,
    Server,
    Image,
    /// Minutes for each part; with `--only`, only what plots need
    Long,
}

const ROUNDS: usize = 5;
const QUICK_ROUNDS: usize = 3;

const ALL: [Group; 8] = [
    Group::Side,
    Group::Processes,
    Group::Exec,
    Group::Mounts,
    Group::States,
    Group::Store,
    Group::Server,
    Group::Image,
];

pub async fn run(global: &Global, args: AllArgs) -> Outcome {
    let mut all = Measured::default();
    let only = |group: &Group| args.only.is_empty() || args.only.contains(group);
    let is_whole = args.only.is_empty() && !args.quick;
    let long = is_whole || args.only.contains(&Group::Long);
    let long = long.then_some(Group::Long);
    for group in ALL.into_iter().filter(only).chain(long) {
        match args.measure(global, group).await {
            Ok(measured) => {
                all.figures.extend(measured.figures);
                all.left_out.extend(measured.left_out);
            }
            Err(Failure::Interrupted) => return Err(Failure::Interrupted),
            Err(Failure::Library(error)) => {
                let name = format!("{group:?}").to_lowercase();
                let why = show::one_line(&error);
                all.left_out.push(format!("{name} was left out: {why}"));
                all.failed.get_or_insert(error);
            }
        }
    }
    Ok(all)
}

impl AllArgs {
    async fn measure(&self, global: &Global, group: Group) -> Outcome {
        let rounds = if self.quick { QUICK_ROUNDS } else { ROUNDS };
        match group {
            Group::Side => {
                let boots = if self.quick { 1 } else { 2 };
                side::run(global, SideArgs { rounds, boots }).await
            }
            Group::Processes => {
                let forks = if self.quick { 20 } else { 50 };
                processes::run(global, ProcessesArgs { rounds, forks }).await
            }
            Group::Long if self.only.is_empty() => long::run(global, LongArgs::whole()).await,
            Group::Long => long::run(global, LongArgs::for_plots()).await,
            Group::Mounts => mounts::run(global, MountsArgs { rounds }).await,
            Group::Exec => exec::run(global, ExecArgs { rounds }).await,
            Group::States => {
                let quick = self.quick;
                let args = StatesArgs {
                    rounds,
                    only: Vec::new(),
                    quick,
                };
                states::run(global, args).await
            }
            Group::Store => {
                let quick = self.quick;
                let args = StoreArgs {
                    rounds,
                    only: Vec::new(),
                    quick,
                };
                store::run(global, args).await
            }
            Group::Server => server::run(global, ServerArgs { rounds }).await,
            Group::Image => {
                let args = ImageArgs {
                    rounds: if self.quick { 1 } else { rounds },
                    only: Vec::new(),
                };
                image::run(global, args).await
            }
        }
    }
}
