//! How busy the host was during a run, and how busy its processors were during one measurement.

use sandtree::{Error, Result};
use serde::Serialize;

/// A load above this share of the processors, before the first measurement, is that of others.
const LOAD_SHARE_MAX: f64 = 0.3;
/// What the hypervisor below may take without a warning.
const STEAL_PERCENT_MAX: f64 = 2.0;

/// The processors' time since the host booted, in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticks {
    busy: u64,
    steal: u64,
    total: u64,
}

/// The state of the host at the beginning of a run.
pub struct Load {
    ticks: Ticks,
    load: f64,
    processors: usize,
}

#[derive(Debug, Clone, Serialize)]
pub struct Busy {
    /// The load average of the last minute before the run.
    pub load_before: f64,
    /// Processor time that the hypervisor gave to others during the run.
    pub steal_percent: f64,
    pub warnings: Vec<String>,
}

impl Ticks {
    pub fn now() -> Result<Self> {
        let path = "/proc/stat";
        let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
        Self::parse(&text).ok_or_else(|| Error::invalid(path, &text, "has a line \"cpu\""))
    }

    fn parse(text: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
        let fields: Vec<u64> = line
            .split_whitespace()
            .filter_map(|n| n.parse().ok())
            .collect();
        // user nice system idle iowait irq softirq steal; guest time is part of user time
        let total: u64 = fields.iter().take(8).sum();
        let idle = fields.get(3)? + fields.get(4)?;
        let steal = *fields.get(7)?;
        Some(Self {
            busy: total - idle - steal,
            steal,
            total,
        })
    }

    /// The share of all processors that was in use since `earlier`, from 0 to 1.
    pub fn busy_since(self, earlier: Self) -> f64 {
        (self.busy - earlier.busy) as f64 / (self.total - earlier.total).max(1) as f64
    }

    fn stolen_since(self, earlier: Self) -> f64 {
        (self.steal - earlier.steal) as f64 / (self.total - earlier.total).max(1) as f64
    }
}

impl Load {
    pub fn now() -> Result<Self> {
        let path = "/proc/loadavg";
        let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
        let load = text.split(' ').next().and_then(|load| load.parse().ok());
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        Ok(Self {
            ticks: Ticks::now()?,
            load: load.unwrap_or(0.0),
            processors,
        })
    }

    pub fn until_now(&self) -> Result<Busy> {
        let steal_percent = Ticks::now()?.stolen_since(self.ticks) * 100.0;
        Ok(Busy {
            load_before: self.load,
            steal_percent,
            warnings: warnings(self.load, self.processors, steal_percent),
        })
    }
}

fn warnings(load: f64, processors: usize, steal_percent: f64) -> Vec<String> {
    let mut warnings = Vec::new();
    if load > processors as f64 * LOAD_SHARE_MAX {
        warnings.push(format!(
            "the machine was busy before the run: load {load:.1} on {processors} processors. \
             Compare ratios, not times"
        ));
    }
    if steal_percent > STEAL_PERCENT_MAX {
        warnings.push(format!(
            "the hypervisor gave {steal_percent:.0} % of the processors to others during the run"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_and_stolen_shares_are_of_the_time_between() {
        let before = Ticks::parse("cpu  100 0 0 100 0 0 0 0 0 0\ncpu0 1\n").unwrap();
        let after = Ticks::parse("cpu  160 0 0 120 10 0 0 10 0 0\n").unwrap();
        assert_eq!(after.busy_since(before), 0.6);
        assert_eq!(after.stolen_since(before), 0.1);
    }

    #[test]
    fn a_quiet_machine_gives_no_warning() {
        assert!(warnings(0.5, 2, 0.1).is_empty());
        assert_eq!(warnings(0.7, 2, 0.1).len(), 1);
        assert_eq!(warnings(0.7, 2, 2.5).len(), 2);
    }
}
