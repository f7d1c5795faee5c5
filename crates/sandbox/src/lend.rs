//! A state of a sandbox, lent to a fork, a save, an export or a comparison.
//!
//! ```text
//!   borrow: from its keeper (another process) | from its driver (this process, or for a sandbox at rest)
//!     -> work with the state's files -> return: a state that was taken for this alone goes
//! ```
//!
//! Always: the files of a lent state stay until it is returned, also when its sandbox stops and
//! starts meanwhile: the next keeper does not know the loan, but finds the state held. A loan that
//! is dropped is returned, too; the keeper returns the loans of a client that is gone.

use sandtree_store::HeldState;

use crate::driver::Local;
use crate::error::{Error, Result, store_error};
use crate::inner::Inner;
use crate::keeper::Connection;
use crate::order::{GiveBack, LentState};

/// A lent state, and its lender.
#[derive(Debug)]
pub(crate) struct Loan {
    pub lent: LentState,
    /// Nothing once it is returned.
    lender: Option<Lender>,
    /// Of a keeper, which may end before the loan does.
    held: Option<HeldState>,
}

#[derive(Debug)]
enum Lender {
    /// The state is lent for as long as the connection is open.
    Keeper(Connection),
    Driver(Local),
}

impl Inner {
    /// Keeps a state that a keeper lent, also when the keeper ends.
    pub fn hold_state(&self, sandbox: &str, state: &str) -> Result<HeldState> {
        let no_state = || Error::NoState {
            name: sandbox.into(),
            state: state.into(),
        };
        let id = state.parse().map_err(|_| no_state())?;
        let held = self.find(sandbox)?.hold_state(&id);
        held.map_err(store_error("keep a state"))
    }
}

impl Loan {
    pub fn of_keeper(lent: LentState, connection: Connection, held: HeldState) -> Self {
        Self {
            lent,
            lender: Some(Lender::Keeper(connection)),
            held: Some(held),
        }
    }

    pub fn of_driver(lent: LentState, driver: Local) -> Self {
        Self {
            lent,
            lender: Some(Lender::Driver(driver)),
            held: None,
        }
    }

    /// Returns the state, and waits until it is gone if it was taken for this loan alone.
    pub async fn give_back(mut self) {
        self.held = None;
        if let Some(lender) = self.lender.take() {
            give_back(lender, self.lent.state.clone()).await;
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let Some(lender) = self.lender.take() else {
            return;
        };
        // A keeper notices by itself that the connection is closed.
        if let Lender::Driver(_) = lender
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(give_back(lender, self.lent.state.clone()));
        }
    }
}

async fn give_back(lender: Lender, state: String) {
    let given: Result<()> = match lender {
        Lender::Keeper(connection) => connection.end().await,
        Lender::Driver(driver) => driver.ask(GiveBack { state }).await,
    };
    if let Err(error) = given {
        tracing::warn!(%error, "a lent state stays until its sandbox is next opened");
    }
}
