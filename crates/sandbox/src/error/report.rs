//! An error as data: what crosses a process boundary, and what edges print and map.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::code::{Code, ErrorKind};

/// The values of an error by name. The names belong to its code.
pub type Arguments = BTreeMap<String, Value>;

/// An error as it crosses a process boundary, and as `--json` shows it.
///
/// Decisions depend on `code`, `kind` and `arguments`. `message` and `causes` are for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The name of a [`Code`]. A text, because that of a newer program is passed on as it is.
    pub code: String,
    pub kind: ErrorKind,
    pub message: String,
    pub causes: Vec<String>,
    pub arguments: Arguments,
}

impl Report {
    /// Of an edge's own error, with a code of the library.
    pub fn new(code: Code, message: String, arguments: Arguments) -> Self {
        Self {
            code: code.as_str().to_owned(),
            kind: code.kind(),
            message,
            causes: Vec::new(),
            arguments,
        }
    }

    /// None for a code of a newer program.
    pub fn code(&self) -> Option<Code> {
        Code::parse(&self.code)
    }

    /// An argument that is a text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.arguments.get(name)?.as_str()
    }

    /// The message with its causes, for a place that has one line.
    pub fn one_line(&self) -> String {
        let parts: Vec<&str> = std::iter::once(&self.message)
            .chain(&self.causes)
            .map(String::as_str)
            .collect();
        parts.join(": ")
    }
}

/// What an error says to programs: its code, and the values that belong to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    pub code: Code,
    pub arguments: Arguments,
}

impl Facts {
    pub fn of(code: Code) -> Self {
        Self {
            code,
            arguments: Arguments::new(),
        }
    }

    pub fn with(mut self, name: &str, value: impl Serialize) -> Self {
        let value = serde_json::to_value(value).expect("an argument is plain data");
        self.arguments.insert(name.to_owned(), value);
        self
    }
}

/// An error whose code and arguments are known. Implemented by the tables in `facts` and `sources`.
pub(crate) trait Known {
    fn facts(&self) -> Facts;
}
