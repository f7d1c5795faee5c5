//! The screen of a sandbox: pictures, keys, pointer and clipboard. `view.rs` has the live view.

use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::{Bound, Py, PyAny, PyRef, PyResult, Python, pyclass, pymethods};
use pyo3::types::PyBytes;
use sandtree::{Button, DisplaySize, Error, Place, Result, Viewers};
use serde::Deserialize;

use crate::convert::{json, parse, seconds};
use crate::runtime::{self, Operation};
use crate::view::View;

#[pyclass(frozen)]
#[derive(Debug)]
pub struct Display {
    display: sandtree::Display,
}

/// A verb with its arguments and a JSON answer.
#[derive(Debug, Deserialize)]
#[serde(tag = "verb", rename_all = "snake_case", deny_unknown_fields)]
enum Call {
    Info,
    SetSize {
        width: u16,
        height: u16,
    },
    Type {
        text: String,
    },
    Press {
        chords: Vec<String>,
        hold_ms: Option<u64>,
    },
    Move {
        to: Place,
    },
    Click {
        at: Option<Place>,
        button: Button,
        count: u32,
    },
    Down {
        button: Button,
    },
    Up {
        button: Button,
    },
    Drag {
        from: Place,
        to: Place,
        button: Button,
    },
    Scroll {
        at: Option<Place>,
        down: i32,
        right: i32,
    },
    Clipboard,
    SetClipboard {
        text: String,
    },
}

impl Display {
    pub fn new(display: sandtree::Display) -> Self {
        Self { display }
    }
}

#[pymethods]
impl Display {
    /// Carries out a verb. Request and result are JSON.
    fn call(&self, request: &str, done: Py<PyAny>) -> PyResult<Operation> {
        let request: Result<Call> = parse("request", request);
        let display = self.display.clone();
        runtime::start(done, async move { answer(&display, request?).await })
    }

    /// What the screen shows. The result is a [`Screenshot`].
    fn screenshot(&self, done: Py<PyAny>) -> PyResult<Operation> {
        let display = self.display.clone();
        runtime::start(done, async move {
            display.screenshot().await.map(Screenshot::new)
        })
    }

    /// Waits for another picture than this one. The result is a [`Screenshot`].
    fn wait_change(
        &self,
        from: PyRef<'_, Screenshot>,
        timeout: f64,
        done: Py<PyAny>,
    ) -> PyResult<Operation> {
        let display = self.display.clone();
        let from = from.picture.clone();
        runtime::start(done, async move {
            let deadline = seconds("timeout", timeout)?;
            let changed = display.wait_change(&from, deadline).await;
            changed.map(Screenshot::new)
        })
    }

    /// Waits until the screen has not changed for some time. The result is a [`Screenshot`].
    fn wait_still(&self, still: f64, timeout: f64, done: Py<PyAny>) -> PyResult<Operation> {
        let display = self.display.clone();
        runtime::start(done, async move {
            let still = seconds("still", still)?;
            let deadline = seconds("timeout", timeout)?;
            let picture = display.wait_still(still, deadline).await;
            picture.map(Screenshot::new)
        })
    }

    /// Listens on a port of 127.0.0.1. The result is a [`View`].
    fn view(&self, port: u16, done: Py<PyAny>) -> PyResult<Operation> {
        let display = self.display.clone();
        runtime::start(done, View::open(display, port, Viewers::WithPassword))
    }

    /// The same without a password.
    fn view_without_password(&self, port: u16, done: Py<PyAny>) -> PyResult<Operation> {
        let display = self.display.clone();
        runtime::start(done, View::open(display, port, Viewers::All))
    }
}

/// What a screen showed at one moment.
#[pyclass(frozen)]
#[derive(Debug)]
pub struct Screenshot {
    picture: Arc<sandtree::Screenshot>,
}

impl Screenshot {
    fn new(picture: sandtree::Screenshot) -> Self {
        Self {
            picture: Arc::new(picture),
        }
    }
}

#[pymethods]
impl Screenshot {
    #[getter]
    fn width(&self) -> u32 {
        self.picture.width()
    }

    #[getter]
    fn height(&self) -> u32 {
        self.picture.height()
    }

    fn rgb<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.picture.rgb())
    }

    fn png<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let file = py.detach(|| self.picture.png());
        PyBytes::new(py, &file)
    }

    fn is_same(&self, other: PyRef<'_, Screenshot>) -> bool {
        self.picture == other.picture
    }
}

/// The same word for each verb as in `Call`, and the library's own answer as JSON.
async fn answer(display: &sandtree::Display, call: Call) -> Result<String> {
    match call {
        Call::Info => json(&display.info().await?),
        Call::SetSize { width, height } => json(&display.set_size(size(width, height)?).await?),
        Call::Type { text } => json(&display.type_text(&text).await?),
        Call::Press { chords, hold_ms } => {
            let hold = hold_ms.map(Duration::from_millis);
            for chord in chords {
                display.press(&chord, hold).await?;
            }
            json(&())
        }
        Call::Move { to } => json(&display.move_to(to).await?),
        Call::Click { at, button, count } => json(&display.click(at, button, count).await?),
        Call::Down { button } => json(&display.button_down(button).await?),
        Call::Up { button } => json(&display.button_up(button).await?),
        Call::Drag { from, to, button } => json(&display.drag(from, to, button).await?),
        Call::Scroll { at, down, right } => json(&display.scroll(at, down, right).await?),
        Call::Clipboard => json(&display.clipboard().await?),
        Call::SetClipboard { text } => json(&display.set_clipboard(&text).await?),
    }
}

fn size(width: u16, height: u16) -> Result<DisplaySize> {
    DisplaySize::new(width, height).map_err(|error| {
        let given = format!("{width}x{height}");
        Error::invalid("size of a screen", given, &error.to_string())
    })
}
