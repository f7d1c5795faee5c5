//! Why something is done: the name of the request that asked for it, which the logs of all
//! processes that take part have in common.
//!
//! ```text
//!   a request ── Cause::of(work) ──► verbs of this process ── hello ──► keeper.log
//! ```
//!
//! Always: a cause is plain text that can neither end a line of a log nor begin another one.

use std::fmt;
use std::sync::Arc;

/// The longest name of a request.
const LENGTH_MAX: usize = 128;

tokio::task_local! {
    static CURRENT: Cause;
}

/// The name of a request; clones share it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause(Arc<str>);

impl Cause {
    /// `None`: the text is not 1 to 128 letters, digits or `-_.:=+/@`.
    pub fn parse(text: &str) -> Option<Self> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:=+/@".contains(&byte);
        let fits = (1..=LENGTH_MAX).contains(&text.len());
        (fits && text.bytes().all(is_plain)).then(|| Self(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Does work that this request asked for.
    pub async fn of<W: Future>(self, work: W) -> W::Output {
        CURRENT.scope(self, work).await
    }

    /// The request that the running task works for.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(Self::clone).ok()
    }

    /// Work for another task, with the cause of this one.
    pub fn carried<W: Future>(work: W) -> impl Future<Output = W::Output> {
        let cause = Self::current();
        async move {
            match cause {
                Some(cause) => cause.of(work).await,
                None => work.await,
            }
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_text_names_a_request() {
        for plain in ["a", "1-5759e988-bd86", "x_Y.z:=+/@", &"a".repeat(128)] {
            assert_eq!(Cause::parse(plain).unwrap().as_str(), plain);
        }
        for other in ["", "a b", "a\nb", "ä", "a\"", "\u{1b}[0m", &"a".repeat(129)] {
            assert_eq!(Cause::parse(other), None, "{other:?}");
        }
    }

    #[tokio::test]
    async fn tasks_carry_the_cause_on() {
        assert_eq!(Cause::current(), None);
        let cause = Cause::parse("here").unwrap();
        let carried = cause.clone().of(async {
            tokio::spawn(Cause::carried(async { Cause::current() }))
                .await
                .unwrap()
        });
        assert_eq!(carried.await, Some(cause));
    }
}
