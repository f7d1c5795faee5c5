//! One line of QMP from QEMU, parsed. Pure.

use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use super::event::Event;
use crate::version::Version;

/// The first line of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    pub version: Version,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Message {
    Greeting(Greeting),
    Reply { id: u64, outcome: Outcome },
    Event(Event),
}

/// What became of a command.
pub(crate) type Outcome = Result<Value, Refusal>;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Refusal {
    pub class: String,
    pub desc: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Raw {
    Greeting {
        #[serde(rename = "QMP")]
        greeting: RawGreeting,
    },
    Return {
        id: u64,
        r#return: Value,
    },
    Refused {
        id: u64,
        error: Refusal,
    },
    Event {
        event: String,
        #[serde(default)]
        data: Value,
        #[serde(default)]
        timestamp: Timestamp,
    },
    /// QEMU could not even read the id of what we sent.
    Unnumbered {
        error: Refusal,
    },
}

/// QEMU's time of an event. It says -1 if it has none.
#[derive(Clone, Copy, Default, Deserialize)]
struct Timestamp {
    seconds: i64,
    microseconds: i64,
}

impl Timestamp {
    fn at(self) -> Duration {
        let part = |value: i64| u64::try_from(value).unwrap_or(0);
        Duration::from_secs(part(self.seconds))
            .saturating_add(Duration::from_micros(part(self.microseconds)))
    }
}

#[derive(Deserialize)]
struct RawGreeting {
    version: RawVersions,
}

#[derive(Deserialize)]
struct RawVersions {
    qemu: Version,
}

/// Parses a line; the error says what is wrong with it.
pub(crate) fn parse(line: &[u8]) -> Result<Message, String> {
    let raw =
        serde_json::from_slice(line).map_err(|error| format!("{error} in {:?}", excerpt(line)))?;
    match raw {
        Raw::Greeting { greeting } => Ok(Message::Greeting(Greeting {
            version: greeting.version.qemu,
        })),
        Raw::Return { id, r#return } => Ok(Message::Reply {
            id,
            outcome: Ok(r#return),
        }),
        Raw::Refused { id, error } => Ok(Message::Reply {
            id,
            outcome: Err(error),
        }),
        Raw::Event {
            event,
            data,
            timestamp,
        } => Event::parse(&event, data, timestamp.at())
            .map(Message::Event)
            .map_err(|error| format!("event {event}: {error}")),
        Raw::Unnumbered { error } => Err(format!("a refusal of no known command: {}", error.desc)),
    }
}

fn excerpt(line: &[u8]) -> String {
    String::from_utf8_lossy(&line[..line.len().min(120)]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_greeting_of_qemu() {
        let line = br#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian"}, "capabilities": ["oob"]}}"#;
        let version = Version {
            major: 7,
            minor: 2,
            micro: 22,
        };
        assert_eq!(parse(line), Ok(Message::Greeting(Greeting { version })));
    }

    #[test]
    fn reads_events_with_and_without_data() {
        let stop = br#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "STOP"}"#;
        assert_eq!(
            parse(stop),
            Ok(Message::Event(Event::Stop {
                at: Duration::from_micros(1_000_002)
            }))
        );
        let error = br#"{"event": "BLOCK_IO_ERROR", "data": {"device": "", "node-name": "disk1", "operation": "write", "nospace": true, "action": "report", "reason": "No space left on device", "qom-path": "/machine"}}"#;
        let expected = Event::BlockIoError {
            node: "disk1".into(),
            operation: "write".into(),
            no_space: true,
        };
        assert_eq!(parse(error), Ok(Message::Event(expected)));
        let migration = br#"{"event": "MIGRATION", "data": {"status": "completed"}}"#;
        assert_eq!(
            parse(migration),
            Ok(Message::Event(Event::Migration {
                status: "completed".into()
            }))
        );
        let job =
            br#"{"event": "JOB_STATUS_CHANGE", "data": {"status": "concluded", "id": "copy3"}}"#;
        let expected = Event::Job {
            id: "copy3".into(),
            status: "concluded".into(),
        };
        assert_eq!(parse(job), Ok(Message::Event(expected)));
    }

    #[test]
    fn what_is_not_qmp_is_refused_and_quoted() {
        for line in [
            "",
            "[]",
            "{}",
            "null",
            r#"{"return": {}}"#,
            r#"{"id": -1, "return": {}}"#,
            r#"{"event": "SHUTDOWN"}"#,
        ] {
            assert!(parse(line.as_bytes()).is_err(), "{line}");
        }
        assert!(parse(b"{\"id\": \xff").unwrap_err().contains("id"));
    }
}
