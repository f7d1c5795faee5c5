//! What sandboxes have used, on the control plane: the samples of their keepers.

use std::time::{Duration, UNIX_EPOCH};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use sandtree::keeper::Sample;
use sandtree::{Metrics, Phase, Sandbox};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Asked, Id};
use crate::error::{Fault, Result};
use crate::gateway::Gateway;
use crate::usage;

/// E2B's limit on sandboxes in one request.
const SANDBOXES_MAX: usize = 100;
/// An answer has at most so many samples, evenly chosen.
const SHOWN_MAX: usize = 500;

#[derive(Debug, Default, Deserialize)]
pub(super) struct Times {
    start: Option<f64>,
    end: Option<f64>,
}

impl Times {
    /// Clients name whole seconds: a sample of the last one belongs to it.
    fn has(&self, sample: &Sample) -> bool {
        let at = sample.at_unix_ms as f64 / 1000.0;
        let has_begun = self.start.is_none_or(|start| start <= at);
        has_begun && self.end.is_none_or(|end| at < end + 1.0)
    }
}

/// What a sandbox has used between two moments, and uses now.
pub(super) async fn of_one(
    State(gateway): State<Gateway>,
    Id(id): Id,
    Asked(times): Asked<Times>,
) -> Result<Response> {
    let (sandbox, info) = gateway.sandbox(&id)?;
    if info.state != Phase::Running {
        return Ok(axum::Json(json!([])).into_response());
    }
    let samples = samples(&sandbox).await?;
    let all = shown(&samples, info.cpus);
    let asked: Vec<Value> = samples
        .iter()
        .zip(all)
        .filter(|(sample, _)| times.has(sample))
        .map(|(_, shown)| shown)
        .collect();
    Ok(axum::Json(thinned(asked, SHOWN_MAX)).into_response())
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Several {
    /// Ids, separated by commas.
    sandbox_ids: Option<String>,
}

/// What each of several sandboxes uses now. Those that do not run are left out.
pub(super) async fn of_several(
    State(gateway): State<Gateway>,
    Asked(several): Asked<Several>,
) -> Result<Response> {
    let ids = several.sandbox_ids.unwrap_or_default();
    let ids: Vec<&str> = ids.split(',').filter(|id| !id.is_empty()).collect();
    if ids.is_empty() || ids.len() > SANDBOXES_MAX {
        let message = format!("sandbox_ids has 1 to {SANDBOXES_MAX} ids, separated by commas");
        return Err(Fault::bad_request(message));
    }
    let mut found = Map::new();
    for id in ids {
        let Ok((sandbox, info)) = gateway.sandbox(id) else {
            continue;
        };
        if info.state != Phase::Running {
            continue;
        }
        // One that stops meanwhile must not hide the others.
        if let Ok(samples) = samples(&sandbox).await {
            let last = shown(&samples, info.cpus).pop();
            found.extend(last.map(|last| (info.id, last)));
        }
    }
    Ok(axum::Json(json!({ "sandboxes": found })).into_response())
}

/// A keeper that is older than this server has none; then there is only that of now.
async fn samples(sandbox: &Sandbox) -> Result<Vec<Sample>> {
    if let Ok(samples) = sandbox.samples().await {
        return Ok(samples);
    }
    let guest = sandbox.stats().await?.guest;
    let at_unix_ms = crate::clock::now_unix_ms();
    Ok(vec![Sample { at_unix_ms, guest }])
}

/// Samples as clients read them. The load of processors is that since the sample before.
fn shown(samples: &[Sample], cpus: u32) -> Vec<Value> {
    // The guest's kernel counts its time in ticks, which may be more than what has passed.
    let most = 100.0 * f64::from(cpus);
    let mut before: Option<&Metrics> = None;
    let mut all = Vec::with_capacity(samples.len());
    for sample in samples {
        let used = &sample.guest;
        let at = UNIX_EPOCH + Duration::from_millis(sample.at_unix_ms);
        all.push(json!({
            "timestamp": humantime::format_rfc3339_millis(at).to_string(),
            "timestampUnix": sample.at_unix_ms / 1000,
            "cpuCount": cpus,
            "cpuUsedPct": usage::cpu_percent_since(before, used).min(most),
            "memUsed": usage::memory_bytes(used),
            "memTotal": used.memory_total_bytes,
            "memCache": 0,
            "diskUsed": usage::disk_bytes(used),
            "diskTotal": used.disk_total_bytes,
        }));
        before = Some(used);
    }
    all
}

/// Every n-th one, and always the last.
fn thinned(mut all: Vec<Value>, most: usize) -> Vec<Value> {
    let step = all.len().div_ceil(most).max(1);
    let mut left = all.len();
    all.retain(|_| {
        left -= 1;
        left.is_multiple_of(step)
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_s: u64, busy_ms: u64) -> Sample {
        let guest = Metrics {
            uptime_ms: at_s * 1000,
            memory_total_bytes: 100,
            memory_available_bytes: 40,
            disk_total_bytes: 10,
            disk_available_bytes: 3,
            cpu_busy_ms: busy_ms,
            processes: 1,
        };
        Sample {
            at_unix_ms: at_s * 1000,
            guest,
        }
    }

    #[test]
    fn the_load_is_that_since_the_sample_before() {
        let busy = [sample(1, 1000), sample(2, 3100)];
        assert_eq!(shown(&busy, 1)[1]["cpuUsedPct"], 100.0);
        let all = shown(&[sample(10, 1000), sample(20, 6000), sample(5, 100)], 2);
        assert_eq!(all[0]["cpuUsedPct"], 10.0);
        assert_eq!(all[1]["cpuUsedPct"], 50.0);
        assert_eq!(all[2]["cpuUsedPct"], 2.0, "the guest went to another state");
        assert_eq!(all[1]["memUsed"], 60);
        assert_eq!(all[1]["diskUsed"], 7);
        assert_eq!(all[1]["timestampUnix"], 20);
    }

    #[test]
    fn the_range_includes_its_last_second() {
        let times = Times {
            start: Some(10.0),
            end: Some(20.0),
        };
        let has = |at_ms| {
            let mut sample = sample(0, 0);
            sample.at_unix_ms = at_ms;
            times.has(&sample)
        };
        assert!(!has(9_999) && has(10_000) && has(20_999) && !has(21_000));
        assert!(Times::default().has(&sample(1, 0)));
    }

    #[test]
    fn long_histories_are_thinned_and_keep_their_end() {
        let all: Vec<Value> = (0..1000).map(Value::from).collect();
        let few = thinned(all, 300);
        assert_eq!(few.len(), 250);
        assert_eq!(few.last(), Some(&Value::from(999)));
        assert_eq!(thinned(vec![json!(1)], 300), [json!(1)]);
        assert!(thinned(Vec::new(), 300).is_empty());
    }
}
