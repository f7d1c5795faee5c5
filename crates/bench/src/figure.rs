//! A figure with its peers and its target.
//!
//! Always: a figure and its peers are measured alternately in one run, so noise affects all of
//! them. A peer that this host does not have is listed with the reason, and never with a value.

use serde::Serialize;

use crate::samples::Samples;
use crate::show;

#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    pub what: String,
    pub unit: &'static str,
    /// How it was measured: through the library in this process unless it says otherwise.
    pub via: Via,
    #[serde(flatten)]
    pub ours: Samples,
    /// What it is compared with.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<Peer>,
    /// The target. Targets on a ratio concern the peer that was added before them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<Target>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The place of this figure in a series of others, for plots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub point: Option<Point>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Via {
    /// The library in this process.
    Library,
    /// The program `sandtree` and its keepers, as users run it.
    Cli,
    /// A server, on the host's loopback.
    Http,
}

#[derive(Debug, Clone, Serialize)]
pub struct Peer {
    pub what: String,
    #[serde(flatten)]
    pub theirs: Theirs,
}

#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum Theirs {
    Measured {
        #[serde(flatten)]
        samples: Samples,
        ratio: f64,
        /// How to read the ratio.
        reads: Reads,
    },
    Missing {
        missing: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reads {
    /// Ours divided by theirs.
    OfTheirs,
    /// Theirs divided by ours: how many times less ours is.
    TimesLess,
}

#[derive(Debug, Clone, Serialize)]
pub struct Target {
    pub aim: String,
    /// `None` if the peer is missing.
    pub met: Option<bool>,
    /// The measured value divided by the target, or the inverse: 1.0 or less meets it.
    pub share: Option<f64>,
}

/// `y` of a plot is the median of its figure.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    pub plot: &'static str,
    pub line: String,
    pub x: f64,
}

impl Figure {
    pub fn new(what: impl Into<String>, ours: impl Into<Samples>, unit: &'static str) -> Self {
        Self {
            what: what.into(),
            unit,
            via: Via::Library,
            ours: ours.into(),
            peers: Vec::new(),
            target: None,
            note: None,
            point: None,
        }
    }

    pub fn ms(what: impl Into<String>, ours: impl Into<Samples>) -> Self {
        Self::new(what, ours, "ms")
    }

    pub fn through_cli(self) -> Self {
        Self {
            via: Via::Cli,
            ..self
        }
    }

    pub fn through_http(self) -> Self {
        Self {
            via: Via::Http,
            ..self
        }
    }

    pub fn at_most(self, limit: f64) -> Self {
        let aim = format!("<= {limit} {}", self.unit);
        let share = self.ours.median() / limit;
        self.target(aim, Some(share))
    }

    pub fn at_least(self, limit: f64) -> Self {
        let aim = format!(">= {limit} {}", self.unit);
        let share = limit / self.ours.median();
        self.target(aim, Some(share))
    }

    fn target(self, aim: String, share: Option<f64>) -> Self {
        Self {
            target: Some(Target {
                aim,
                met: share.map(|share| share <= 1.0),
                share,
            }),
            ..self
        }
    }

    /// Compares: the ratio is `self` divided by the peer.
    pub fn times(self, what: &str, theirs: impl Into<Samples>) -> Self {
        let theirs = theirs.into();
        let ratio = self.ours.median() / theirs.median();
        self.peer(what, theirs, ratio, Reads::OfTheirs)
    }

    /// Compares: the ratio is the peer divided by `self`.
    pub fn shorter_than(self, what: &str, theirs: impl Into<Samples>) -> Self {
        let theirs = theirs.into();
        let ratio = theirs.median() / self.ours.median();
        self.peer(what, theirs, ratio, Reads::TimesLess)
    }

    fn peer(mut self, what: &str, samples: Samples, ratio: f64, reads: Reads) -> Self {
        self.peers.push(Peer {
            what: what.into(),
            theirs: Theirs::Measured {
                samples,
                ratio,
                reads,
            },
        });
        self
    }

    /// Lists a peer that could not be measured.
    pub fn without(mut self, what: &str, why: &str) -> Self {
        self.peers.push(Peer {
            what: what.into(),
            theirs: Theirs::Missing {
                missing: why.into(),
            },
        });
        self
    }

    fn last_ratio(&self) -> Option<f64> {
        match self.peers.last()?.theirs {
            Theirs::Measured { ratio, .. } => Some(ratio),
            Theirs::Missing { .. } => None,
        }
    }

    pub fn ratio_at_most(self, limit: f64) -> Self {
        let share = self.last_ratio().map(|ratio| ratio / limit);
        self.target(format!("<= {limit:.1}x"), share)
    }

    pub fn ratio_at_least(self, limit: f64) -> Self {
        let share = self.last_ratio().map(|ratio| limit / ratio);
        self.target(format!(">= {limit:.1}x"), share)
    }

    pub fn note(self, note: impl Into<String>) -> Self {
        Self {
            note: Some(note.into()),
            ..self
        }
    }

    pub fn at(self, plot: &'static str, line: impl Into<String>, x: f64) -> Self {
        let line = line.into();
        Self {
            point: Some(Point { plot, line, x }),
            ..self
        }
    }

    /// Prints a table of figures, and how many targets were met.
    pub fn show(figures: &[Self]) {
        show::table(
            &Self::HEADER,
            &figures.iter().flat_map(Self::rows).collect::<Vec<_>>(),
        );
        let verdicts = figures.iter().filter_map(|figure| figure.target.as_ref());
        let judged: Vec<bool> = verdicts.filter_map(|target| target.met).collect();
        let met = judged.iter().filter(|met| **met).count();
        println!("medians; {met} of {} targets met", judged.len());
    }

    const HEADER: [&'static str; 8] = [
        "OPERATION",
        "VIA",
        "SANDTREE",
        "P95",
        "PEER",
        "RATIO",
        "TARGET",
        "NOTE",
    ];

    /// A row for the figure, which has its first peer, and one for each further peer.
    fn rows(&self) -> Vec<Vec<String>> {
        let number = |value: f64| format!("{} {}", show::number(value), self.unit);
        let spread = if self.ours.len() > 1 {
            format!(" ±{}", show::number(self.ours.spread()))
        } else {
            String::new()
        };
        let (peer, ratio) = self.peer_cells(0);
        let first = vec![
            self.what.clone(),
            match self.via {
                Via::Library => "library".into(),
                Via::Cli => "cli".into(),
                Via::Http => "http".into(),
            },
            format!("{}{spread}", number(self.ours.median())),
            number(self.ours.p95()),
            peer,
            ratio,
            self.target.as_ref().map(Target::cell).unwrap_or_default(),
            self.note.clone().unwrap_or_default(),
        ];
        let further = (1..self.peers.len()).map(|index| {
            let (peer, ratio) = self.peer_cells(index);
            let mut row = vec![String::new(); Self::HEADER.len()];
            row[4] = peer;
            row[5] = ratio;
            row
        });
        [first].into_iter().chain(further).collect()
    }

    fn peer_cells(&self, index: usize) -> (String, String) {
        let Some(peer) = self.peers.get(index) else {
            return Default::default();
        };
        match &peer.theirs {
            Theirs::Missing { missing } => (format!("{}: none, {missing}", peer.what), "".into()),
            Theirs::Measured {
                samples,
                ratio,
                reads,
            } => {
                let value = show::number(samples.median());
                let ratio = match reads {
                    Reads::OfTheirs => format!("{ratio:.2}x"),
                    Reads::TimesLess => format!("{ratio:.1}x less"),
                };
                (format!("{}: {value} {}", peer.what, self.unit), ratio)
            }
        }
    }
}

impl Target {
    fn cell(&self) -> String {
        let verdict = match self.met {
            Some(true) => "met",
            Some(false) => "missed",
            None => "not measured",
        };
        format!("{}: {verdict}", self.aim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn met(figure: Figure) -> Option<bool> {
        figure.target.and_then(|target| target.met)
    }

    #[test]
    fn a_target_is_met_or_not() {
        assert_eq!(met(Figure::ms("pause", 10.0).at_most(10.0)), Some(true));
        assert_eq!(met(Figure::ms("pause", 10.1).at_most(10.0)), Some(false));
        let restore = Figure::ms("restore", 90.0).times("bare", 60.0);
        assert_eq!(met(restore.ratio_at_most(1.5)), Some(true));
        let stop = Figure::ms("stop", 10.0);
        let behind = stop.clone().shorter_than("QEMU", 149.0);
        assert_eq!(met(behind.ratio_at_least(15.0)), Some(false));
        let ahead = stop.shorter_than("QEMU", 150.0);
        assert_eq!(met(ahead.ratio_at_least(15.0)), Some(true));
    }

    #[test]
    fn a_target_against_a_missing_peer_is_neither_met_nor_missed() {
        let figure = Figure::ms("create", 10.0).without("Quicksand", "no network");
        assert_eq!(met(figure.ratio_at_least(120.0)), None);
    }
}
