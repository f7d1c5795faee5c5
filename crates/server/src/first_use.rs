//! The first use of a built-in image, which takes longer than clients wait: its packages are
//! fetched and installed, and it boots once for its warm image.
//!
//! ```text
//!   create ──► made before? ── yes ──► the sandbox
//!                 └─ no: made in the background ── done within PATIENCE ──► the sandbox
//!                                     └─ otherwise: 503, try again; the next request waits on
//! ```
//!
//! Always: an image is made once, however many clients ask for it. A client that gives up does not
//! end the work. When it fails: all clients that wait get the reason, and the next one starts it
//! again.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use hyper::StatusCode;
use sandtree::image::is_built_in;
use sandtree::{Host, SandboxSpec};
use tokio::sync::watch;

use crate::error::{Fault, Result, Retry};
use crate::locked::lock;

/// Less than the minute that clients wait for an answer.
const PATIENCE: Duration = Duration::from_secs(45);
const RETRY_SECONDS: u64 = 1;

/// What came of the work; none until its end.
type Outcome = Option<Result<()>>;

/// The work for each image and network that a client has asked for.
#[derive(Debug, Default)]
pub struct FirstUses(Mutex<HashMap<String, watch::Receiver<Outcome>>>);

impl FirstUses {
    /// Waits until sandboxes like this one begin at once, if its image is a built-in one.
    pub async fn ready(&self, host: &Host, spec: &SandboxSpec) -> Result<()> {
        let Some(name) = spec.image.as_deref().filter(|name| is_built_in(name)) else {
            return Ok(());
        };
        let key = format!("{name} {:?}", spec.network);
        let host = host.clone();
        let spec = spec.clone();
        let make = async move { Ok(host.warm_image(&spec).await.map(drop)?) };
        soon(name, self.work(key, make)).await
    }

    /// The work under this key, which is begun at the first call, and again after a failure.
    fn work(
        &self,
        key: String,
        make: impl Future<Output = Result<()>> + Send + 'static,
    ) -> watch::Receiver<Outcome> {
        let mut all = lock(&self.0);
        if let Some(known) = all.get(&key).filter(|known| !has_failed(known)) {
            return known.clone();
        }
        let (done, work) = watch::channel(None);
        tokio::spawn(async move {
            let made = make.await;
            // Without a waiting client, the next one finds the outcome.
            done.send_replace(Some(made));
        });
        all.insert(key, work.clone());
        work
    }
}

/// The outcome of the work on an image, if it comes while clients wait.
async fn soon(name: &str, work: watch::Receiver<Outcome>) -> Result<()> {
    let outcome = tokio::time::timeout(PATIENCE, outcome(work));
    outcome.await.unwrap_or_else(|_| Err(unfinished(name)))
}

async fn outcome(mut work: watch::Receiver<Outcome>) -> Result<()> {
    match work.wait_for(Option::is_some).await {
        Ok(outcome) => outcome.clone().expect("it was waited for"),
        Err(_) => Err(Fault::internal("the work on an image was abandoned")),
    }
}

fn has_failed(work: &watch::Receiver<Outcome>) -> bool {
    match &*work.borrow() {
        Some(outcome) => outcome.is_err(),
        None => work.has_changed().is_err(),
    }
}

fn unfinished(name: &str) -> Fault {
    let message = format!(
        "the image \"{name}\" is made at its first use, which takes some minutes: try again"
    );
    Fault {
        retry: Some(Retry::AfterSeconds(RETRY_SECONDS)),
        ..Fault::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test]
    async fn an_image_is_made_once_and_a_client_that_gives_up_does_not_end_it() {
        let uses = FirstUses::default();
        let made = Arc::new(AtomicU32::new(0));
        let (go, mut wait) = watch::channel(false);
        let making = |made: Arc<AtomicU32>| async move {
            // The test ends with its channel.
            drop(wait.wait_for(|go| *go).await);
            made.fetch_add(1, Ordering::SeqCst);
            Ok(())
        };
        drop(uses.work("a".into(), making(made.clone())));
        let again = made.clone();
        let other = uses.work("a".into(), async move {
            again.fetch_add(100, Ordering::SeqCst);
            Ok(())
        });
        assert!(other.borrow().is_none(), "it waits for the first");
        go.send_replace(true);
        outcome(other).await.unwrap();
        assert_eq!(made.load(Ordering::SeqCst), 1);
        let later = uses.work("a".into(), async { Err(Fault::internal("again")) });
        outcome(later).await.unwrap();
    }

    #[tokio::test]
    async fn work_that_failed_or_panicked_begins_again() {
        let uses = FirstUses::default();
        let failed = uses.work("a".into(), async { Err(Fault::internal("no network")) });
        assert_eq!(outcome(failed).await.unwrap_err().message, "no network");
        let panicked = uses.work("a".into(), async { panic!("a defect") });
        assert!(outcome(panicked).await.is_err());
        outcome(uses.work("a".into(), async { Ok(()) }))
            .await
            .unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_waits_too_long_is_asked_to_try_again() {
        let uses = FirstUses::default();
        let work = || uses.work("a".into(), std::future::pending());
        let began = tokio::time::Instant::now();
        let fault = soon("debian", work()).await.unwrap_err();
        assert_eq!(began.elapsed(), PATIENCE);
        assert!(work().borrow().is_none(), "the work continues");
        assert_eq!(fault.status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(fault.retry, Some(Retry::AfterSeconds(1)));
    }
}
