//! `sandtree type` and `sandtree mouse`: keyboard and mouse of a sandbox with a screen. `sandtree
//! key` is in `key.rs`.

use std::io::Read;
use std::process::ExitCode;

use sandtree::{Button, Display, Error, Place, Result};

use super::{Outcome, open};
use crate::args::{Global, sandbox_ref};

/// The longest text of standard input.
const TEXT_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug, clap::Args)]
pub struct TypeArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    /// Text to type, in any script; - reads standard input
    #[arg(allow_hyphen_values = true)]
    pub text: String,
}

#[derive(Debug, clap::Args)]
pub struct MouseArgs {
    /// Name or id of the sandbox
    #[arg(value_parser = sandbox_ref)]
    pub sandbox: String,
    #[command(subcommand)]
    pub action: Action,
}

/// Places are in pixels from the upper left corner.
#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// Move the pointer
    Move { x: u16, y: u16 },
    /// Click at a place, or where the pointer is
    Click {
        #[arg(requires = "y")]
        x: Option<u16>,
        y: Option<u16>,
        #[arg(long, value_name = BUTTONS, value_parser = button, default_value = "left")]
        button: Button,
        /// Number of clicks: 2 for a double click
        #[arg(long, value_name = "N", default_value_t = 1)]
        count: u32,
    },
    /// Press a button and hold it
    Down {
        #[arg(value_name = BUTTONS, value_parser = button, default_value = "left")]
        button: Button,
    },
    /// Release a button
    Up {
        #[arg(value_name = BUTTONS, value_parser = button, default_value = "left")]
        button: Button,
    },
    /// Drag from one place to another
    Drag {
        x: u16,
        y: u16,
        to_x: u16,
        to_y: u16,
        #[arg(long, value_name = BUTTONS, value_parser = button, default_value = "left")]
        button: Button,
    },
    /// Turn the wheel, at a place or where the pointer is
    Scroll {
        /// Steps; negative: up
        #[arg(allow_negative_numbers = true)]
        steps: i32,
        #[arg(requires = "y")]
        x: Option<u16>,
        y: Option<u16>,
        /// Turn it sideways; negative: left
        #[arg(long)]
        sideways: bool,
    },
}

const BUTTONS: &str = "left|middle|right|back|forward";

fn button(text: &str) -> Result<Button, String> {
    match text {
        "left" => Ok(Button::Left),
        "middle" => Ok(Button::Middle),
        "right" => Ok(Button::Right),
        "back" => Ok(Button::Back),
        "forward" => Ok(Button::Forward),
        _ => Err("use left, middle, right, back or forward".into()),
    }
}

pub async fn type_text(global: &Global, args: TypeArgs) -> Outcome {
    let display = open(global).await?.sandbox(&args.sandbox)?.display()?;
    let text = if args.text == "-" {
        read_stdin()?
    } else {
        args.text
    };
    display.type_text(&text).await?;
    Ok(ExitCode::SUCCESS)
}

/// The text on standard input.
pub fn read_stdin() -> Result<String> {
    let failed = |e| Error::io("read", "standard input", e);
    let mut text = String::new();
    let mut stdin = std::io::stdin().lock().take(TEXT_BYTES_MAX + 1);
    stdin.read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > TEXT_BYTES_MAX {
        let rule = "1 MiB is the longest";
        return Err(Error::invalid("text", "standard input", rule));
    }
    Ok(text)
}

pub async fn mouse(global: &Global, args: MouseArgs) -> Outcome {
    let display = open(global).await?.sandbox(&args.sandbox)?.display()?;
    act(&display, args.action).await?;
    Ok(ExitCode::SUCCESS)
}

async fn act(display: &Display, action: Action) -> Result<()> {
    let place = |x: Option<u16>, y: Option<u16>| x.zip(y).map(|(x, y)| Place { x, y });
    match action {
        Action::Move { x, y } => display.move_to(Place { x, y }).await,
        Action::Click {
            x,
            y,
            button,
            count,
        } => display.click(place(x, y), button, count).await,
        Action::Down { button } => display.button_down(button).await,
        Action::Up { button } => display.button_up(button).await,
        Action::Drag {
            x,
            y,
            to_x,
            to_y,
            button,
        } => {
            let to = Place { x: to_x, y: to_y };
            display.drag(Place { x, y }, to, button).await
        }
        Action::Scroll {
            steps,
            x,
            y,
            sideways,
        } => {
            let (down, right) = if sideways { (0, steps) } else { (steps, 0) };
            display.scroll(place(x, y), down, right).await
        }
    }
}
