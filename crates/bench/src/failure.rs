//! How a benchmark ends: with figures, or without.

use sandtree::Error;

use crate::figure::Figure;

/// Why a run has no figures.
#[derive(Debug)]
pub enum Failure {
    Library(Error),
    Interrupted,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Library(error)
    }
}

/// What a benchmark has measured.
#[derive(Debug, Default)]
pub struct Measured {
    pub figures: Vec<Figure>,
    /// What was left out, and why.
    pub left_out: Vec<String>,
    /// The first failure, after which other parts were measured.
    pub failed: Option<Error>,
}

impl From<Vec<Figure>> for Measured {
    fn from(figures: Vec<Figure>) -> Self {
        Self {
            figures,
            ..Self::default()
        }
    }
}

pub type Outcome = Result<Measured, Failure>;
