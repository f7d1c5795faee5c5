//! A spinner on stderr while a benchmark runs, on a terminal only.

use std::time::Duration;

use indicatif::ProgressBar;
use sandtree::image::Progress;

const TICK: Duration = Duration::from_millis(100);

/// indicatif draws nothing where stderr is not a terminal.
pub fn spinner(message: String) -> ProgressBar {
    let bar = ProgressBar::new_spinner().with_message(message);
    bar.enable_steady_tick(TICK);
    bar
}

/// Shows the stages of an image that is being made.
pub fn image(name: &str) -> impl FnMut(Progress) + Send + use<> {
    let bar = spinner(format!("image {name}"));
    let label = format!("image {name}");
    move |progress| bar.set_message(format!("{label}: {}", progress.stage.as_str()))
}
