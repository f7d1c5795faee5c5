//! `sandtree-bench compare`: two builds of Sandtree in one run.
//!
//! Each round starts this program and the other one, each for the same groups, in the order A B and
//! then B A. Both write JSON, and the measurements of all rounds of a figure are put together. A
//! signal ends the program that measures, which removes its sandboxes first.
//!
//! A figure has regressed when its median is worse than the other's by more than the two spreads
//! together, and by more than 5 %. The spread is half the distance between the largest and the
//! smallest measurement. So one noisy round never fails a build, and a noisy figure needs more
//! rounds to show a small change.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use sandtree::{Error, Result};
use serde::Deserialize;
use tokio::process::{Child, Command};

use crate::config::{Global, own_program};
use crate::crew::signalled;
use crate::failure::Failure;
use crate::samples::Samples;
use crate::scratch::Scratch;
use crate::show;
use crate::tool;
use crate::turn::Turn;

#[derive(Debug, clap::Args)]
pub struct CompareArgs {
    /// The `sandtree-bench` of the other build; its `sandtree` is next to it
    #[arg(long, value_name = "PROGRAM")]
    other: PathBuf,
    /// How often to run each program
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Measure only these groups of `all` (repeatable)
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
}

/// How long a benchmark that is interrupted may take to remove its sandboxes.
const CLEARED_WITHIN: Duration = Duration::from_secs(60);
/// Differences below this are never a regression.
const RELEVANT: f64 = 0.05;

/// The part of the JSON that is compared.
#[derive(Debug, Deserialize)]
struct Document {
    figures: Vec<Recorded>,
}

#[derive(Debug, Deserialize)]
struct Recorded {
    what: String,
    unit: String,
    samples: Vec<f64>,
}

/// The measurements of one figure, by its name and unit.
type Figures = BTreeMap<(String, String), Vec<f64>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Better,
    Same,
    Worse,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Good {
    Small,
    Large,
}

impl Good {
    fn of(unit: &str) -> Self {
        if unit.ends_with("/s") {
            Self::Large
        } else {
            Self::Small
        }
    }
}

/// The rule of this module's documentation.
fn judge(ours: &Samples, theirs: &Samples, good: Good) -> Verdict {
    let grown = ours.median() - theirs.median();
    let noise = ours.spread() + theirs.spread();
    if grown.abs() <= noise || grown.abs() <= theirs.median().abs() * RELEVANT {
        return Verdict::Same;
    }
    match (grown > 0.0, good) {
        (true, Good::Small) | (false, Good::Large) => Verdict::Worse,
        (true, Good::Large) | (false, Good::Small) => Verdict::Better,
    }
}

/// Compares, and returns how many figures have regressed.
pub async fn run(global: &Global, args: CompareArgs) -> Result<usize, Failure> {
    // The first round of our own takes minutes.
    tool::version(&args.other)?;
    let scratch = Scratch::beside(&global.config()?.home)?;
    let own = own_program()?;
    let mut ours = Figures::new();
    let mut theirs = Figures::new();
    for round in 0..args.rounds.max(1) {
        let a = args.measure(global, &own, scratch.path("ours.json"));
        let b = args.measure(global, &args.other, scratch.path("other.json"));
        let (a, b) = Turn::of(round).both(a, b).await?;
        collect(&mut ours, a);
        collect(&mut theirs, b);
    }
    let rows = rows(&ours, &theirs);
    let regressed = rows.iter().filter(|row| row.verdict == Verdict::Worse);
    let count = regressed.count();
    let cells: Vec<_> = rows.iter().map(Row::cells).collect();
    show::table(&["FIGURE", "THIS", "OTHER", "RATIO", "NOISE", ""], &cells);
    println!("{count} of {} figures regressed beyond noise", rows.len());
    Ok(count)
}

impl CompareArgs {
    async fn measure(
        &self,
        global: &Global,
        program: &Path,
        to: PathBuf,
    ) -> Result<Document, Failure> {
        let mut words: Vec<&str> = vec!["all", "--quick"];
        for group in &self.only {
            words.extend(["--only", group]);
        }
        // starts: our own program
        let mut measuring = Command::new(program)
            .args(&words)
            .args(global.repeated()?)
            .arg("--json")
            .arg(&to)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| Error::io("run", program, e))?;
        let status = tokio::select! {
            status = measuring.wait() => status.map_err(|e| Error::io("wait for", program, e))?,
            signal = signalled() => {
                signal?;
                clear_up(&mut measuring).await;
                return Err(Failure::Interrupted);
            }
        };
        if !status.success() {
            let rule = "must succeed: run it alone to see why it fails";
            return Err(Error::invalid("benchmark", program.display(), rule).into());
        }
        let text = std::fs::read(&to).map_err(|e| Error::io("read", &to, e))?;
        let wrong =
            |e: serde_json::Error| Error::invalid("figures", program.display(), &e.to_string());
        Ok(serde_json::from_slice(&text).map_err(wrong)?)
    }
}

/// Makes a benchmark remove its sandboxes and end.
async fn clear_up(measuring: &mut Child) {
    let pid = measuring.id().and_then(|pid| i32::try_from(pid).ok());
    if let Some(pid) = pid.and_then(Pid::from_raw)
        && let Err(errno) = kill_process(pid, Signal::TERM)
    {
        tracing::debug!(%errno, "a benchmark that a terminal has signalled has ended");
    }
    // One that does not end in time is killed.
    drop(tokio::time::timeout(CLEARED_WITHIN, measuring.wait()).await);
}

fn collect(figures: &mut Figures, document: Document) {
    for figure in document.figures {
        let key = (figure.what, figure.unit);
        figures.entry(key).or_default().extend(figure.samples);
    }
}

struct Row {
    what: String,
    unit: String,
    ours: Samples,
    theirs: Samples,
    verdict: Verdict,
}

/// The figures that both builds have.
fn rows(ours: &Figures, theirs: &Figures) -> Vec<Row> {
    let both = ours.iter().filter_map(|(key, ours)| {
        let theirs = theirs.get(key)?;
        Some((
            key,
            Samples::from(ours.clone()),
            Samples::from(theirs.clone()),
        ))
    });
    both.map(|((what, unit), ours, theirs)| Row {
        what: what.clone(),
        unit: unit.clone(),
        verdict: judge(&ours, &theirs, Good::of(unit)),
        ours,
        theirs,
    })
    .collect()
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let value = |value: f64| format!("{} {}", show::number(value), self.unit);
        let verdict = match self.verdict {
            Verdict::Better => "better",
            Verdict::Same => "",
            Verdict::Worse => "REGRESSED",
        };
        vec![
            self.what.clone(),
            value(self.ours.median()),
            value(self.theirs.median()),
            format!("{:.2}x", self.ours.median() / self.theirs.median()),
            value(self.ours.spread() + self.theirs.spread()),
            verdict.into(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(ours: &[f64], theirs: &[f64], unit: &str) -> Verdict {
        let samples = |values: &[f64]| Samples::from(values.to_vec());
        judge(&samples(ours), &samples(theirs), Good::of(unit))
    }

    #[test]
    fn a_difference_beyond_both_spreads_is_judged_by_its_direction() {
        let low = [10.0, 10.5, 11.0];
        let high = [13.0, 13.5, 14.0];
        assert_eq!(verdict(&high, &low, "ms"), Verdict::Worse);
        assert_eq!(verdict(&low, &high, "ms"), Verdict::Better);
        assert_eq!(verdict(&high, &low, "MB/s"), Verdict::Better);
        assert_eq!(verdict(&low, &high, "MB/s"), Verdict::Worse);
    }

    #[test]
    fn a_difference_within_the_spreads_is_noise() {
        assert_eq!(
            verdict(&[12.0, 13.0, 16.0], &[10.0, 11.0, 12.0], "ms"),
            Verdict::Same
        );
    }

    #[test]
    fn a_difference_below_five_percent_is_not_relevant() {
        assert_eq!(verdict(&[10.4], &[10.0], "ms"), Verdict::Same);
        assert_eq!(verdict(&[10.6], &[10.0], "ms"), Verdict::Worse);
    }

    #[test]
    fn only_figures_of_both_builds_are_compared() {
        let figures = |names: &[&str]| -> Figures {
            let key = |name: &&str| (((*name).to_owned(), "ms".to_owned()), vec![1.0]);
            names.iter().map(key).collect()
        };
        let rows = rows(&figures(&["a", "b"]), &figures(&["b", "c"]));
        let names: Vec<_> = rows.iter().map(|row| row.what.as_str()).collect();
        assert_eq!(names, ["b"]);
    }
}
