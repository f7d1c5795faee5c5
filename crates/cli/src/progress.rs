//! Progress on stderr, on a terminal only, removed when the work ends. The steps of a build and
//! their output stay.

mod lines;

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sandtree::image::{Progress, Stage};
use sandtree::{Advance, BuildEvent, BuildWatch, Progress as Telling};

use crate::show;
use lines::Lines;

const TICK: Duration = Duration::from_millis(100);
/// The length limit of a step in the spinner: a wrapped line could not be removed.
const STEP_CHARS: usize = 60;

const WAITING: &str = "{spinner} {msg} {elapsed}";
const MEASURED: &str = "{spinner} {msg} {bar:24} {bytes} of {total_bytes} {bytes_per_sec} {eta}";

/// Shows a message and the elapsed time.
pub fn spinner(message: impl Into<String>) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    bar.set_style(style(WAITING));
    bar.set_message(message.into());
    shown(bar)
}

/// Counts bytes without a known total.
pub fn bytes(message: impl Into<String>) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    bar.set_style(style("{spinner} {msg} {bytes} {bytes_per_sec}"));
    bar.set_message(message.into());
    shown(bar)
}

/// Counts bytes, with the total once it is known.
pub fn transfer(message: impl Into<String>) -> (ProgressBar, Telling) {
    let bar = spinner(message);
    let followed = bar.clone();
    (bar, Telling::new(move |advance| follow(&followed, advance)))
}

fn follow(bar: &ProgressBar, advance: Advance) {
    match advance {
        Advance::Begin { total_bytes } => {
            bar.set_style(style(MEASURED));
            bar.reset();
            bar.set_length(total_bytes);
        }
        Advance::Bytes(bytes) => bar.inc(bytes),
    }
}

/// Follows the build of an image.
pub fn image(name: &str) -> impl FnMut(Progress) + Send + use<> {
    stages(format!("image {name}"))
}

/// Follows work in stages, each with a bar if its total is known. Dropping it removes the bar.
pub fn stages(label: String) -> impl FnMut(Progress) + Send {
    let mut stages = Stages {
        bar: spinner(label.clone()),
        label,
        at: None,
    };
    move |progress| stages.follow(progress)
}

struct Stages {
    bar: ProgressBar,
    label: String,
    /// The current stage, and whether its total is known.
    at: Option<(Stage, bool)>,
}

impl Stages {
    fn follow(&mut self, progress: Progress) {
        let total_bytes = progress.total_bytes.filter(|total| *total > 0);
        let at = (progress.stage, total_bytes.is_some());
        if self.at != Some(at) {
            self.bar
                .set_style(style(if at.1 { MEASURED } else { WAITING }));
            self.bar
                .set_message(format!("{}: {}", self.label, progress.stage.as_str()));
            self.bar.reset();
            self.at = Some(at);
        }
        if let Some(total_bytes) = total_bytes {
            self.bar.set_length(total_bytes);
            self.bar.set_position(progress.done_bytes);
        }
    }
}

/// Follows a build from a recipe. Prints the steps and their output on a terminal, or if `verbose`.
pub fn build(name: &str, verbose: bool) -> (ProgressBar, BuildWatch) {
    let label = format!("building {name}");
    let bar = spinner(label.clone());
    let written = verbose || io::stderr().is_terminal();
    let building = Building {
        stages: Stages {
            bar: bar.clone(),
            label,
            at: None,
        },
        bar: bar.clone(),
        lines: written.then(Lines::default),
    };
    let building = Mutex::new(building);
    (
        bar,
        BuildWatch::new(move |event| {
            building
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .follow(event)
        }),
    )
}

struct Building {
    bar: ProgressBar,
    stages: Stages,
    /// The output of steps, if it is printed.
    lines: Option<Lines>,
}

impl Building {
    fn follow(&mut self, event: BuildEvent) {
        match event {
            BuildEvent::Image(progress) => self.stages.follow(progress),
            BuildEvent::Step {
                number,
                of,
                what,
                cached,
            } => {
                let step = format!("[{number}/{of}] {what}");
                self.finish_line();
                self.write(&[if cached {
                    format!("{step}: cached")
                } else {
                    step.clone()
                }]);
                self.waiting(step.chars().take(STEP_CHARS).collect());
            }
            BuildEvent::Output(bytes) => {
                let lines = self
                    .lines
                    .as_mut()
                    .map(|lines| lines.take(&bytes))
                    .unwrap_or_default();
                self.write(&lines);
            }
            BuildEvent::Writing(advance) => {
                if let Advance::Begin { .. } = advance {
                    self.finish_line();
                    self.waiting("writing the image".into());
                }
                follow(&self.bar, advance);
            }
        }
    }

    fn waiting(&self, message: String) {
        self.bar.set_style(style(WAITING));
        self.bar.set_message(show::plain(&message));
        self.bar.reset();
    }

    /// Ends the line of a step whose output has no newline at its end.
    fn finish_line(&mut self) {
        let rest = self.lines.as_mut().and_then(Lines::rest);
        self.write(&rest.into_iter().collect::<Vec<_>>());
    }

    /// Prints lines above the bar.
    fn write(&self, lines: &[String]) {
        if self.lines.is_some() && !lines.is_empty() {
            let text: String = lines
                .iter()
                .map(|line| format!("{}\n", show::plain(line)))
                .collect();
            self.bar.suspend(|| {
                // If that fails, there is no other place to report it.
                drop(io::stderr().write_all(text.as_bytes()));
            });
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is well formed")
}

fn shown(bar: ProgressBar) -> ProgressBar {
    if std::io::stderr().is_terminal() {
        bar.enable_steady_tick(TICK);
    } else {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    bar
}
