//! A state of a sandbox, lent to whoever makes copies or a snapshot of it.
//!
//! ```text
//!   borrow: its keeper's (another process) | its driver's (this process) | its own, at rest
//!     -> work with the state's files -> give back: a state that was taken for this alone goes
//! ```
//!
//! Always: the files of a lent state are there until it is given back. Dropped instead, or when the
//! borrower dies, it is given back by the keeper, or when the sandbox is next taken up.

use sandtree_store::Consistency;
use serde::{Deserialize, Serialize};

use crate::driver::{Phase, Verb};
use crate::error::Result;
use crate::host::Host;
use crate::keeper::Borrowing;
use crate::sandbox::Sandbox;

/// What a state is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wanted {
    /// Copies that go on.
    Copies,
    /// The disk alone; a guest that runs is not stopped.
    Disk,
    /// Memory, too.
    Memory,
}

impl Wanted {
    pub(crate) fn verb(self) -> Verb {
        match self {
            Self::Copies => Verb::Fork,
            Self::Disk | Self::Memory => Verb::Save,
        }
    }
}

/// A state that is lent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LentState {
    pub state: String,
    /// How long the source stood still.
    pub pause_ms: f64,
    pub degraded: Vec<String>,
    pub consistency: Consistency,
    /// The state has memory, which is not wanted.
    pub disk_only: bool,
}

/// A lent state, and whom to give it back to.
#[derive(Debug)]
pub struct Loan {
    pub lent: LentState,
    lender: Lender,
}

#[derive(Debug)]
enum Lender {
    Keeper(Box<Borrowing>),
    Driver(Sandbox),
    /// A state that is there anyway.
    Nobody,
}

impl Host {
    /// Borrows a state of a sandbox, by its name or id, whichever process runs it, if any does.
    pub async fn borrow(&self, reference: &str, wanted: Wanted) -> Result<Loan> {
        if let Some(keeper) = self.keeper_of(reference).await? {
            let borrowing = keeper.borrow(wanted).await?;
            return Ok(Loan {
                lent: borrowing.lent.clone(),
                lender: Lender::Keeper(Box::new(borrowing)),
            });
        }
        if wanted != Wanted::Disk && self.find(reference)?.state == Phase::Paused {
            return Ok(Loan {
                lent: self.paused_state(reference)?,
                lender: Lender::Nobody,
            });
        }
        Self::borrow_of(&self.adopt(reference, wanted.verb()).await?, wanted).await
    }

    /// Borrows a state of a sandbox of this process.
    pub(crate) async fn borrow_of(sandbox: &Sandbox, wanted: Wanted) -> Result<Loan> {
        let lent = sandbox.lend(wanted).await?;
        Ok(Loan {
            lent,
            lender: Lender::Driver(sandbox.clone()),
        })
    }
}

impl Loan {
    pub async fn give_back(self) {
        let given = match &self.lender {
            Lender::Keeper(borrowing) => borrowing.give_back().await,
            Lender::Driver(sandbox) => sandbox.take_back(&self.lent.state).await,
            Lender::Nobody => Ok(()),
        };
        if let Err(error) = given {
            tracing::warn!(%error, "a state that was lent stays until its sandbox is next taken up");
        }
    }
}
