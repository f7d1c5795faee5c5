//! The repeated measurements of one figure, and what is reported of them.

use serde::Serialize;

/// All measurements of one figure, in the order they were made.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(into = "Summary")]
pub struct Samples(Vec<f64>);

/// What the JSON has of them.
#[derive(Debug, Clone, Serialize)]
struct Summary {
    median: f64,
    p95: f64,
    least: f64,
    most: f64,
    samples: Vec<f64>,
}

impl From<Vec<f64>> for Samples {
    fn from(values: Vec<f64>) -> Self {
        assert!(!values.is_empty(), "a figure has at least one measurement");
        Self(values)
    }
}

impl From<f64> for Samples {
    fn from(value: f64) -> Self {
        Self(vec![value])
    }
}

impl From<Samples> for Summary {
    fn from(samples: Samples) -> Self {
        Self {
            median: samples.median(),
            p95: samples.p95(),
            least: samples.least(),
            most: samples.most(),
            samples: samples.0,
        }
    }
}

impl Samples {
    pub fn median(&self) -> f64 {
        let sorted = self.sorted();
        sorted[sorted.len() / 2]
    }

    /// The smallest value that 95 % of the measurements do not exceed. With fewer than 20
    /// measurements it is the largest.
    pub fn p95(&self) -> f64 {
        let sorted = self.sorted();
        let rank = (sorted.len() as f64 * 0.95).ceil() as usize;
        sorted[rank.clamp(1, sorted.len()) - 1]
    }

    pub fn least(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub fn most(&self) -> f64 {
        self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }

    /// Half of the distance between the largest and the smallest.
    pub fn spread(&self) -> f64 {
        (self.most() - self.least()) / 2.0
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Converts each measurement, as from seconds to a rate.
    pub fn map(&self, convert: impl Fn(f64) -> f64) -> Self {
        Self(self.0.iter().copied().map(convert).collect())
    }

    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_is_that_of_the_sorted_values() {
        let samples = Samples::from(vec![5.0, 1.0, 9.0, 3.0, 7.0]);
        assert_eq!(samples.median(), 5.0);
        assert_eq!(samples.p95(), 9.0);
        assert_eq!(samples.spread(), 4.0);
        let many = Samples::from((1..=100).map(f64::from).collect::<Vec<_>>());
        assert_eq!(many.p95(), 95.0);
    }

    #[test]
    fn one_value_is_its_own_median_without_spread() {
        let samples = Samples::from(4.0);
        assert_eq!(
            (samples.median(), samples.p95(), samples.spread()),
            (4.0, 4.0, 0.0)
        );
    }
}
