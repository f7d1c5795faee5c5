//! A state of a sandbox, lent to a fork, a save, an export or a comparison.
//!
//! ```text
//!   borrow: from its keeper (another process) | from its driver (this process, or for a sandbox at rest)
//!     -> work with the state's files -> return: a state that was taken for this alone goes
//! ```
//!
//! Always: the files of a lent state stay until it is returned. A loan that is dropped is returned,
//! too; the keeper returns the loans of a client that is gone.

use crate::order::LentState;

use crate::driver::Local;
use crate::error::Result;
use crate::keeper::Connection;
use crate::order::GiveBack;

/// A lent state, and its lender.
#[derive(Debug)]
pub(crate) struct Loan {
    pub lent: LentState,
    /// Nothing once it is returned.
    lender: Option<Lender>,
}

#[derive(Debug)]
enum Lender {
    /// The state is lent for as long as the connection is open.
    Keeper(Connection),
    Driver(Local),
}

impl Loan {
    pub fn of_keeper(lent: LentState, connection: Connection) -> Self {
        Self {
            lent,
            lender: Some(Lender::Keeper(connection)),
        }
    }

    pub fn of_driver(lent: LentState, driver: Local) -> Self {
        Self {
            lent,
            lender: Some(Lender::Driver(driver)),
        }
    }

    /// Returns the state, and waits until it is gone if it was taken for this loan alone.
    pub async fn give_back(mut self) {
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
