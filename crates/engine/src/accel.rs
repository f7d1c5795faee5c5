//! Accelerators, and what a caller asks for.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    Kvm,
    Tcg,
    Hvf,
    Whpx,
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
            Accel::Hvf => "hvf",
            Accel::Whpx => "whpx",
        })
    }
}

/// What a caller asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccelChoice {
    /// KVM where it works, else the emulator.
    #[default]
    Auto,
    Only(Accel),
}

impl FromStr for AccelChoice {
    type Err = UnknownAccel;

    fn from_str(text: &str) -> Result<Self, UnknownAccel> {
        match text {
            "auto" => Ok(AccelChoice::Auto),
            "kvm" => Ok(AccelChoice::Only(Accel::Kvm)),
            "tcg" => Ok(AccelChoice::Only(Accel::Tcg)),
            "hvf" => Ok(AccelChoice::Only(Accel::Hvf)),
            "whpx" => Ok(AccelChoice::Only(Accel::Whpx)),
            other => Err(UnknownAccel(other.to_owned())),
        }
    }
}

/// A name that is not the name of an accelerator.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("unknown accelerator {0:?}: use auto, kvm or tcg")]
pub struct UnknownAccel(String);
