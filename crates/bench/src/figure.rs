//! A figure with its comparison and its target.

use serde::Serialize;
use serde_json::json;

use crate::config::Global;
use crate::show;

#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    pub what: String,
    pub value: f64,
    pub unit: &'static str,
    /// What it is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against: Option<Against>,
    /// `value` divided by the compared value, or the inverse where `value` should be much smaller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aim: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub met: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
pub struct Against {
    pub what: String,
    pub value: f64,
}

impl Figure {
    pub fn new(what: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self {
            what: what.into(),
            value,
            unit,
            against: None,
            ratio: None,
            aim: None,
            met: None,
            note: None,
        }
    }

    pub fn ms(what: impl Into<String>, value: f64) -> Self {
        Self::new(what, value, "ms")
    }

    pub fn at_most(self, limit: f64) -> Self {
        let aim = format!("<= {limit} {}", self.unit);
        let met = self.value <= limit;
        Self {
            aim: Some(aim),
            met: Some(met),
            ..self
        }
    }

    /// Compares: the ratio is `self` divided by `value`.
    pub fn times(self, what: &str, value: f64) -> Self {
        let ratio = self.value / value;
        self.beside(what, value, ratio)
    }

    /// Compares: the ratio is `value` divided by `self`.
    pub fn shorter_than(self, what: &str, value: f64) -> Self {
        let ratio = value / self.value;
        self.beside(what, value, ratio)
    }

    fn beside(self, what: &str, value: f64, ratio: f64) -> Self {
        Self {
            against: Some(Against {
                what: what.into(),
                value,
            }),
            ratio: Some(ratio),
            ..self
        }
    }

    pub fn ratio_at_most(self, limit: f64) -> Self {
        let aim = format!("<= {limit:.1}x");
        let met = self.ratio.is_some_and(|ratio| ratio <= limit);
        Self {
            aim: Some(aim),
            met: Some(met),
            ..self
        }
    }

    pub fn ratio_at_least(self, limit: f64) -> Self {
        let aim = format!(">= {limit:.1}x");
        let met = self.ratio.is_some_and(|ratio| ratio >= limit);
        Self {
            aim: Some(aim),
            met: Some(met),
            ..self
        }
    }

    pub fn note(self, note: impl Into<String>) -> Self {
        Self {
            note: Some(note.into()),
            ..self
        }
    }

    /// Prints figures as the caller asked for them.
    pub fn report(global: &Global, figures: &[Figure], rounds: usize) {
        if global.json {
            show::json(&json!({ "rounds": rounds, "figures": figures }));
        } else {
            Self::show(figures, rounds);
        }
    }

    /// Prints a table of figures, and how many targets were met.
    pub fn show(figures: &[Self], rounds: usize) {
        show::table(
            &Self::HEADER,
            &figures.iter().map(Self::row).collect::<Vec<_>>(),
        );
        let missed = figures
            .iter()
            .filter(|figure| figure.met == Some(false))
            .count();
        let aims = figures.iter().filter(|figure| figure.met.is_some()).count();
        println!(
            "medians of {rounds} rounds; {} of {aims} aims met",
            aims - missed
        );
    }

    const HEADER: [&'static str; 7] = [
        "MEASURED", "SANDTREE", "AGAINST", "RATIO", "AIM", "", "NOTE",
    ];

    fn row(&self) -> Vec<String> {
        let against =
            |against: &Against| format!("{:.2} {} {}", against.value, self.unit, against.what);
        let met = |met| if met { "met" } else { "not met" };
        vec![
            self.what.clone(),
            format!("{:.2} {}", self.value, self.unit),
            self.against.as_ref().map(against).unwrap_or_default(),
            self.ratio
                .map(|ratio| format!("{ratio:.2}x"))
                .unwrap_or_default(),
            self.aim.clone().unwrap_or_default(),
            self.met.map(met).unwrap_or_default().into(),
            self.note.clone().unwrap_or_default(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aim_is_met_or_not() {
        assert_eq!(Figure::ms("pause", 10.0).at_most(10.0).met, Some(true));
        assert_eq!(Figure::ms("pause", 10.1).at_most(10.0).met, Some(false));
        assert_eq!(
            Figure::ms("restore", 90.0)
                .times("bare", 60.0)
                .ratio_at_most(1.5)
                .met,
            Some(true)
        );
        assert_eq!(
            Figure::ms("stop", 10.0)
                .shorter_than("QEMU", 149.0)
                .ratio_at_least(15.0)
                .met,
            Some(false)
        );
        assert_eq!(
            Figure::ms("stop", 10.0)
                .shorter_than("QEMU", 150.0)
                .ratio_at_least(15.0)
                .met,
            Some(true)
        );
    }
}
