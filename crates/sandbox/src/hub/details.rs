//! How a detached command was started, as far as clients that find it again need to know.
//!
//! Always: neither its environment nor its input is kept: both may be secret, and what is kept here
//! becomes part of captured states.

use sandtree_proto::ExecStart;
use sandtree_proto::message::LABEL_MAX;
use serde::{Deserialize, Serialize};

/// Longer arguments are not kept: lists have to be short.
const CONFIG_MAX: usize = 2048;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ExecDetails {
    /// All its output is on stdout.
    pub terminal: bool,
    pub stdin: bool,
    /// What its client calls it.
    pub label: Option<String>,
    /// How long it is kept after its end. `None`: as long as the guest.
    pub kept_ms: Option<u64>,
    /// `None`: it is too long.
    pub config: Option<ExecConfig>,
}

/// What a command consists of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ExecConfig {
    pub argv: Vec<String>,
    /// `None`: the user's home.
    pub workdir: Option<String>,
}

impl ExecDetails {
    pub(super) fn of(start: &ExecStart) -> Self {
        Self {
            terminal: start.terminal.is_some(),
            stdin: start.stdin,
            label: None,
            kept_ms: None,
            config: ExecConfig::of(start),
        }
    }

    /// Those of a client that finds its commands again. `None`: the label is too long.
    pub(super) fn labelled(
        start: &ExecStart,
        label: Option<String>,
        kept_ms: Option<u64>,
    ) -> Option<Self> {
        if label.as_ref().is_some_and(|label| label.len() > LABEL_MAX) {
            return None;
        }
        Some(Self {
            label,
            kept_ms,
            ..Self::of(start)
        })
    }

    /// How much room it takes in a list.
    pub(super) fn size(&self) -> usize {
        self.config.as_ref().map_or(0, ExecConfig::size)
    }
}

impl ExecConfig {
    fn of(start: &ExecStart) -> Option<Self> {
        let text = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).into_owned();
        let config = Self {
            argv: start.argv.iter().map(text).collect(),
            workdir: Some(text(&start.cwd)).filter(|cwd| !cwd.is_empty()),
        };
        (config.size() <= CONFIG_MAX).then_some(config)
    }

    fn size(&self) -> usize {
        let words = self.argv.iter().chain(&self.workdir);
        words.map(|word| word.len() + 3).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(argv: &[&str]) -> ExecStart {
        ExecStart {
            tag: "t".into(),
            argv: argv.iter().map(|word| word.as_bytes().to_vec()).collect(),
            env: vec![(b"TOKEN".to_vec(), b"secret".to_vec())],
            cwd: b"/tmp".to_vec(),
            user: String::new(),
            terminal: None,
            stdin: true,
            timeout_ms: None,
        }
    }

    #[test]
    fn details_are_those_of_the_start_without_its_environment() {
        let details = ExecDetails::of(&start(&["sleep", "9"]));
        let config = details.config.clone().unwrap();
        assert_eq!(config.argv, ["sleep", "9"]);
        assert_eq!(config.workdir.as_deref(), Some("/tmp"));
        assert!(details.stdin && !details.terminal);
        assert!(!serde_json::to_string(&details).unwrap().contains("secret"));
    }

    #[test]
    fn long_arguments_and_labels_are_not_kept() {
        let long = start(&["sh", "-c", &"x".repeat(CONFIG_MAX)]);
        assert_eq!(ExecDetails::of(&long).config, None);
        let labelled = |length| ExecDetails::labelled(&long, Some("x".repeat(length)), None);
        assert!(labelled(LABEL_MAX).is_some());
        assert!(labelled(LABEL_MAX + 1).is_none());
    }
}
