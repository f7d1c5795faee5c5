//! The order in which a figure and its peer are measured: A B in one round, B A in the next, so
//! that neither always has the caches that the other has warmed.

/// Who comes first in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    OursFirst,
    TheirsFirst,
}

impl Turn {
    pub fn of(round: usize) -> Self {
        if round.is_multiple_of(2) {
            Self::OursFirst
        } else {
            Self::TheirsFirst
        }
    }

    /// Runs both, one after the other. The first error ends it.
    pub async fn both<A, B, E>(
        self,
        ours: impl Future<Output = Result<A, E>>,
        theirs: impl Future<Output = Result<B, E>>,
    ) -> Result<(A, B), E> {
        match self {
            Self::OursFirst => {
                let ours = ours.await?;
                Ok((ours, theirs.await?))
            }
            Self::TheirsFirst => {
                let theirs = theirs.await?;
                Ok((ours.await?, theirs))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_order_alternates() {
        for (round, expected) in [(0, "AB"), (1, "BA"), (2, "AB")] {
            let order = std::sync::Mutex::new(String::new());
            let mark = async |name: char| {
                order.lock().unwrap().push(name);
                Ok::<(), ()>(())
            };
            Turn::of(round).both(mark('A'), mark('B')).await.unwrap();
            assert_eq!(*order.lock().unwrap(), expected);
        }
    }
}
