//! Rules about the repository itself that no compiler checks. Each module is one rule; a failure
//! names file and line.

mod features;
mod programs;
mod sources;
