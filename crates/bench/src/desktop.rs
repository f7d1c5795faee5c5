//! `sandtree-bench desktop`: pictures, keys and states of a sandbox with a screen.

use std::time::{Duration, Instant};

use sandtree::{Button, Display, Place, Replace, Result, Sandbox, SandboxSpec, Screenshot};

use crate::config::Global;
use crate::crew::{Crew, measured, ms, shell};
use crate::failure::Outcome;
use crate::figure::Figure;
use crate::process;
use crate::turn::Turn;

#[derive(Debug, clap::Args)]
pub struct DesktopArgs {
    /// How often to measure each figure; the median counts
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
}

const IMAGE: &str = "desktop";
const FORKS: usize = 3;
/// How long a change of the screen may take.
const PATIENCE: Duration = Duration::from_secs(60);
const STILL: Duration = Duration::from_secs(1);

pub async fn run(global: &Global, args: DesktopArgs) -> Outcome {
    let rounds = args.rounds.max(1);
    let figures = measured(global, async |crew| measure(crew, rounds).await).await?;
    Ok(figures.into())
}

async fn measure(crew: &Crew, rounds: usize) -> Result<Vec<Figure>> {
    // The first one makes the image and its warm state, and is the model of the others.
    let sandbox = crew.create(SandboxSpec::new(IMAGE)).await?;
    let display = sandbox.display()?;
    let model = display.wait_still(STILL, PATIENCE).await?;
    let plain = crew.create(without_screen()).await?;
    let mut starts = Vec::new();
    let mut is_right = true;
    let mut pictures = Vec::new();
    let mut files = Vec::new();
    let mut moves = Vec::new();
    let mut pauses = (Vec::new(), Vec::new());
    let writer = crew.create(SandboxSpec::new(IMAGE)).await?;
    open_terminal(&writer).await?;
    let mut keys = Vec::new();
    for _ in 0..rounds {
        keys.push(ms(typed(&writer.display()?).await?));
    }
    crew.remove(writer).await?;
    for round in 0..rounds {
        let began = Instant::now();
        let started = crew.create(SandboxSpec::new(IMAGE)).await?;
        let shown = started.display()?.screenshot().await?;
        starts.push(ms(began.elapsed()));
        is_right &= scene(&shown) == scene(&model);
        crew.remove(started).await?;

        let began = Instant::now();
        let picture = display.screenshot().await?;
        pictures.push(ms(began.elapsed()));
        picture.png();
        files.push(ms(began.elapsed()));
        moves.push(ms(moved(&display, round).await?));

        let pair = Turn::of(round)
            .both(paused(&sandbox), paused(&plain))
            .await?;
        pauses.0.push(pair.0);
        pauses.1.push(pair.1);
    }
    let copies = crew.fork(&sandbox, FORKS).await?;
    let mut memory = Vec::new();
    for copy in &copies {
        copy.display()?.screenshot().await?;
        let pid = copy.info()?.qemu_pid.expect("it runs");
        memory.push(process::pss_bytes(pid)? as f64 / 1e6);
    }
    let right = if is_right {
        "each picture is a desktop"
    } else {
        "a picture was black"
    };
    Ok(vec![
        Figure::ms("screenshot, 1280x800", pictures),
        Figure::ms("screenshot as PNG, 1280x800", files).at_most(40.0),
        Figure::ms("pointer moved, until the picture shows it", moves),
        Figure::ms("key pressed, until a terminal shows it", keys),
        Figure::ms("warm start to the picture of a desktop", starts)
            .at_most(1000.0)
            .note(right),
        Figure::ms("checkpoint stop, idle desktop", pauses.0)
            .times("without a screen", pauses.1)
            .ratio_at_most(1.5),
        Figure::new("PSS of a desktop's fork", memory, "MB"),
    ])
}

/// The same machine without a screen.
fn without_screen() -> SandboxSpec {
    SandboxSpec {
        memory_bytes: Some(2 << 30),
        cpus: Some(2),
        ..SandboxSpec::new("debian")
    }
}

/// How long it takes until the screen shows a move of the pointer.
async fn moved(display: &Display, round: usize) -> Result<Duration> {
    let before = display.wait_still(STILL, PATIENCE).await?;
    let place = Place {
        x: 200 + 40 * (round % 20) as u16,
        y: 300,
    };
    let began = Instant::now();
    display.move_to(place).await?;
    display.wait_change(&before, PATIENCE).await?;
    Ok(began.elapsed())
}

/// A picture without the panel at its top, whose clock changes.
fn scene(picture: &Screenshot) -> &[u8] {
    const PANEL_ROWS: usize = 40;
    let row_bytes = picture.width() as usize * 3;
    picture.rgb().get(PANEL_ROWS * row_bytes..).unwrap_or(&[])
}

/// How long it takes until a terminal shows a key.
async fn typed(display: &Display) -> Result<Duration> {
    let before = display.wait_still(STILL, PATIENCE).await?;
    let began = Instant::now();
    display.type_text("x").await?;
    display.wait_change(&before, PATIENCE).await?;
    Ok(began.elapsed())
}

/// Opens a terminal that has shown its first key: that one loads the input method.
async fn open_terminal(sandbox: &Sandbox) -> Result<()> {
    let display = sandbox.display()?;
    let before = display.screenshot().await?;
    let line = "setsid xfce4-terminal --maximize -x cat > /dev/null 2>&1 &";
    shell(sandbox, line).await?;
    display.wait_change(&before, PATIENCE).await?;
    let centre = Place { x: 640, y: 400 };
    for _ in 0..2 {
        display.wait_still(STILL, PATIENCE).await?;
        display.click(Some(centre), Button::Left, 1).await?;
        typed(&display).await?;
    }
    Ok(())
}

async fn paused(sandbox: &Sandbox) -> Result<f64> {
    Ok(sandbox.checkpoint(None, Replace::No).await?.pause_ms)
}
