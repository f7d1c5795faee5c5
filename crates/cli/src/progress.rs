//! What people see while they wait: on stderr, on a terminal only, and gone when it is over.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sandtree::image::Progress;
use sandtree::{Advance, Progress as Telling};

const TICK: Duration = Duration::from_millis(100);

/// Something is under way, and how long already.
pub fn spinner(message: impl Into<String>) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    bar.set_style(style("{spinner} {msg} {elapsed}"));
    bar.set_message(message.into());
    shown(bar)
}

/// Bytes on their way, without a known end.
pub fn bytes(message: impl Into<String>) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    bar.set_style(style("{spinner} {msg} {bytes} {bytes_per_sec}"));
    bar.set_message(message.into());
    shown(bar)
}

/// Bytes on their way, and how many there are in all once that is known.
pub fn transfer(message: impl Into<String>) -> (ProgressBar, Telling) {
    let bar = spinner(message);
    let followed = bar.clone();
    let telling = Telling::new(move |advance| match advance {
        Advance::Begin { total_bytes } => {
            followed.set_style(style("{spinner} {msg} {bar:24} {bytes} of {total_bytes} {bytes_per_sec} {eta}"));
            followed.reset();
            followed.set_length(total_bytes);
        }
        Advance::Bytes(bytes) => followed.inc(bytes),
    });
    (bar, telling)
}

/// Follows the building of an image.
pub fn image(name: &str) -> impl FnMut(Progress) + Send + use<> {
    let bar = spinner(format!("image {name}"));
    let name = name.to_owned();
    move |progress| {
        let measured = progress.total_bytes.filter(|total| *total > 0);
        let part = measured.map(|total| format!(" {}%", progress.done_bytes * 100 / total)).unwrap_or_default();
        bar.set_message(format!("image {name}: {}{part}", progress.stage.as_str()));
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
