//! Degradations as records keep them. The store does not interpret them.
//!
//! ```text
//! "degraded": [text]                                   for people, and for older programs
//! "degradations": [{"code", "message", "arguments"}]   the same in order, if any has a code
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One thing that was done in a lesser way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// None in records of programs from before codes, and in manifests of snapshots.
    pub code: Option<String>,
    pub message: String,
    pub arguments: BTreeMap<String, Value>,
}

impl Note {
    fn text(message: String) -> Self {
        Self {
            code: None,
            message,
            arguments: BTreeMap::new(),
        }
    }
}

/// The notes of a record: two fields of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Fields", into = "Fields")]
pub struct Notes(pub Vec<Note>);

impl Notes {
    pub fn from_texts(texts: &[String]) -> Self {
        Self(texts.iter().cloned().map(Note::text).collect())
    }
}

#[derive(Serialize, Deserialize)]
struct Fields {
    #[serde(default)]
    degraded: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    degradations: Vec<Note>,
}

impl From<Fields> for Notes {
    fn from(fields: Fields) -> Self {
        if fields.degradations.is_empty() {
            Self::from_texts(&fields.degraded)
        } else {
            Self(fields.degradations)
        }
    }
}

impl From<Notes> for Fields {
    fn from(Notes(notes): Notes) -> Self {
        let degraded = notes.iter().map(|note| note.message.clone()).collect();
        let has_codes = notes.iter().any(|note| note.code.is_some());
        Self {
            degraded,
            degradations: if has_codes { notes } else { Vec::new() },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Record {
        before: u64,
        #[serde(flatten)]
        degraded: Notes,
    }

    fn read(record: Value) -> Record {
        serde_json::from_value(record).expect("it is a record")
    }

    #[test]
    fn a_record_from_before_codes_keeps_its_texts_and_its_form() {
        let old = json!({ "before": 1, "degraded": ["the disk is as after a power cut"] });
        let record = read(old.clone());
        assert_eq!(record.degraded.0[0].code, None);
        assert_eq!(
            record.degraded.0[0].message,
            "the disk is as after a power cut"
        );
        assert_eq!(serde_json::to_value(&record).unwrap(), old);
        let bare = read(json!({ "before": 1 }));
        assert_eq!(bare.degraded, Notes::default());
    }

    #[test]
    fn a_note_with_a_code_is_also_a_text_for_older_programs() {
        let note = Note {
            code: Some("whole_disk".into()),
            message: "the whole disk was copied: no".into(),
            arguments: BTreeMap::from([("reason".into(), json!("no"))]),
        };
        let record = Record {
            before: 1,
            degraded: Notes(vec![note]),
        };
        let written = serde_json::to_value(&record).unwrap();
        assert_eq!(
            written["degraded"],
            json!(["the whole disk was copied: no"])
        );
        assert_eq!(written["degradations"][0]["code"], "whole_disk");
        assert_eq!(read(written), record);
    }
}
