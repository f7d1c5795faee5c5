//! New random ids.

use crate::error::Error;
use crate::id::{BatchId, LayerId, SandboxId, StateId};

macro_rules! random {
    ($id:ident) => {
        impl $id {
            pub fn random() -> Result<Self, Error> {
                let mut bytes = [0; 8];
                getrandom::fill(&mut bytes).map_err(Error::Random)?;
                Ok(Self::from_bytes(bytes))
            }
        }
    };
}

random!(BatchId);
random!(LayerId);
random!(SandboxId);
random!(StateId);
