//! Many idle copies at the same time, and what their memory consists of.

use std::time::Instant;

use sandtree::{Result, Sandbox};
use tokio::task::JoinSet;

use super::Bench;
use crate::cli;
use crate::crew::{ms, true_once};
use crate::figure::Figure;
use crate::process::{self, Memory};
use crate::samples::Samples;

/// The memory into which idle copies are to fit.
const FULL_BYTES: f64 = 8e9;
/// More than a copy takes: QEMU and keeper.
const COPY_BYTES: u64 = 100 << 20;

pub async fn density(bench: &Bench<'_>) -> Result<Vec<Figure>> {
    let source = bench.cli.sandbox(bench.crew, "density").await?;
    let room = process::available_bytes()? / COPY_BYTES;
    let count = bench.args.copies.min(room as usize).max(1);
    let (copies, forked, answered) = forked(bench, &source, count).await?;
    let mut machines = Vec::new();
    let mut keepers = Vec::new();
    for copy in &copies {
        let info = copy.info()?;
        machines.push(process::memory(info.qemu_pid.unwrap_or_default())?);
        keepers.push(process::memory(info.keeper_pid.unwrap_or_default())?);
    }
    let machine = median(&machines, Memory::total);
    let keeper = median(&keepers, Memory::total);
    let fit = FULL_BYTES / (machine.median() + keeper.median()) / 1e6;
    let note = format!("extrapolated from the PSS of {count}, QEMU and keeper");
    let mut figures = vec![
        Figure::ms(format!("fork {count}"), forked),
        Figure::ms(format!("fork {count}, all answering"), answered).at(
            "forks",
            "all answering, through the CLI",
            count as f64,
        ),
        Figure::new(format!("PSS of a copy's QEMU, of {count}"), machine, "MB"),
    ];
    figures.extend(parts(&machines));
    figures.push(Figure::new(
        format!("PSS of a copy's keeper, of {count}"),
        keeper,
        "MB",
    ));
    figures.extend(parts(&keepers));
    figures.push(Figure::new("idle copies of 512 MB that fit into 8 GB", fit, "copies").note(note));
    Ok(figures.into_iter().map(Figure::through_cli).collect())
}

/// Forks until all copies have run a command. Returns the milliseconds of the fork, and of both.
async fn forked(
    bench: &Bench<'_>,
    source: &Sandbox,
    count: usize,
) -> Result<(Vec<Sandbox>, f64, f64)> {
    let prefix = cli::name("dense");
    let number = count.to_string();
    let words = ["fork", "-n", &number, "--name", &prefix, source.name()];
    let began = Instant::now();
    let forked = bench.cli.run(&words).await?.ms;
    let names = (1..=count).map(|number| format!("{prefix}-{number}"));
    let copies = names
        .map(|name| bench.crew.adopt(&name))
        .collect::<Result<Vec<_>>>()?;
    let answers = copies
        .clone()
        .into_iter()
        .map(|copy| async move { true_once(&copy.guest().await?).await });
    let answers = answers.collect::<JoinSet<_>>().join_all().await;
    let answered = ms(began.elapsed());
    answers.into_iter().collect::<Result<()>>()?;
    Ok((copies, forked, answered))
}

fn median(all: &[Memory], of: impl Fn(&Memory) -> u64) -> Samples {
    let megabytes: Vec<f64> = all.iter().map(|memory| of(memory) as f64 / 1e6).collect();
    megabytes.into()
}

/// A part of a process's memory, and how many bytes it has.
type Part = (&'static str, fn(&Memory) -> u64);

/// What a process's memory consists of.
fn parts(all: &[Memory]) -> Vec<Figure> {
    let parts: [Part; 5] = [
        ("guest pages of its own", |memory| memory.guest_own),
        ("its share of guest pages in layers", |memory| {
            memory.guest_shared
        }),
        ("translated code", |memory| memory.code),
        ("its share of programs and libraries", |memory| memory.files),
        ("heap, stacks and others", |memory| memory.rest),
    ];
    let is_there = |figure: &Figure| figure.ours.median() > 0.0;
    parts
        .into_iter()
        .map(|(what, of)| Figure::new(format!("... of which {what}"), median(all, of), "MB"))
        .filter(is_there)
        .collect()
}
