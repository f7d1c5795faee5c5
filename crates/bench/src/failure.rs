//! Why a benchmark ends without figures.

use sandtree::Error;

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

pub type Outcome = Result<(), Failure>;
