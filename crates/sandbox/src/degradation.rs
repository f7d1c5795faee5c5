//! What was done in a lesser way than it could be, as data.
//!
//! A degradation is part of the result of the verb that met it, and of the records of sandboxes and
//! states. In JSON it is `{"code", "message", "arguments"}`, also at rest and on a keeper's socket.
//!
//! Always: a code keeps its name and the names of its arguments; `docs/errors.md` lists them, and a
//! test compares it with this table. The message is for people, and no decision depends on it.
//! A degradation with a code that this program does not know is kept and shown as it is.

use std::fmt;

use sandtree_store::{Note, Notes};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};

use crate::error::Arguments;
use crate::mode::MemoryMode;

/// Makes the enum of one row for each degradation: its code, its values, its words.
macro_rules! degradations {
    ($(
        $(#[$doc:meta])*
        $name:ident = $code:literal { $($value:ident: $type:ty),* }
            $words:literal $(, $shown:expr)*;
    )*) => {
        /// One thing that was done in a lesser way.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(remote = "Self", tag = "code", content = "arguments")]
        pub enum Degradation {
            $($(#[$doc])* #[serde(rename = $code)] $name { $($value: $type),* },)*
            /// A text without a code: from a snapshot's manifest, or recorded by a program from
            /// before codes.
            #[serde(rename = "recorded")]
            Recorded { message: String },
            /// One that a newer program knows.
            #[serde(skip)]
            Unknown { code: String, message: String, arguments: Arguments },
        }

        impl Degradation {
            pub const CODES: &[&str] = &[$($code,)* "recorded"];

            /// The name, which is the same in JSON, HTTP and Python.
            pub fn code(&self) -> &str {
                match self {
                    $(Self::$name { .. } => $code,)*
                    Self::Recorded { .. } => "recorded",
                    Self::Unknown { code, .. } => code,
                }
            }
        }

        impl fmt::Display for Degradation {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$name { $($value),* } => write!(f, $words $(, $shown)*),)*
                    Self::Recorded { message } => f.write_str(message),
                    Self::Unknown { message, .. } => f.write_str(message),
                }
            }
        }
    };
}

degradations! {
    /// A better way to find the pages of a capture does not work.
    MemoryModeUnusable = "memory_mode_unusable" { mode: MemoryMode, reason: String }
        "{mode} does not work here: {reason}";
    /// Devices have memory that only QEMU's own stream holds.
    DeviceMemory = "device_memory" { mode: MemoryMode, devices: Vec<String> }
        "{mode} does not hold the memory of {}", devices.join(", ");
    /// No layer could be put on an earlier one.
    WholeMemory = "whole_memory" { reason: String }
        "all of memory was captured: {reason}";
    WholeDisk = "whole_disk" { reason: String }
        "the whole disk was copied: {reason}";
    /// The guest's file systems were not frozen, or it was not shut down.
    DiskNotFrozen = "disk_not_frozen" { reason: String }
        "the disk is as after a power cut: {reason}";
    /// Only the disk of a paused guest was saved.
    UnwrittenData = "unwritten_data" {}
        "what the guest had not written to its disk when it was paused is not in it";
    /// The machine runs without the preload library.
    MemoryUntracked = "memory_untracked" { reason: String }
        "memory is QEMU's own: {reason}";
    /// Layers could not be mapped.
    FlatMemory = "flat_memory" { reason: String }
        "memory came from a flat file: {reason}";
    FirmwareNotRestored = "firmware_not_restored" { reason: String }
        "the firmware's memory is empty: {reason}";
    /// The guest left the time-stamp counter for a slower clock.
    SlowerClock = "slower_clock" { reason: String }
        "the guest reads a slower clock: {reason}";
    /// The guest could not leave the time-stamp counter.
    ClockSpeed = "clock_speed" { reason: String, failure: String }
        "the guest's clock runs at another speed: {reason}; it could not be replaced: {failure}";
    LateClock = "late_clock" { reason: String }
        "the guest's clock may be late: {reason}";
    /// The image's init had not started everything within the boot timeout.
    StillStarting = "still_starting" {}
        "its init had not finished starting in time";
    /// The sandbox started, and the service of its image did not.
    ServiceNotReady = "service_not_ready" { reason: String }
        "the service of its image is not ready: {reason}";
    /// The booted state of the image did not load, and was removed.
    WarmImageUnusable = "warm_image_unusable" { reason: String }
        "the booted state of its image did not load: {reason}";
    /// The sandbox was booted, because the booted state of its image could not be kept.
    WarmImageNotKept = "warm_image_not_kept" { reason: String }
        "it was booted: the booted state of its image cannot be kept: {reason}";
    /// A kernel state did not load, and was removed.
    KernelStateUnusable = "kernel_state_unusable" { reason: String }
        "a kernel state did not load: {reason}";
    /// The machine booted from power-on, because there can be no kernel state.
    KernelStateNotKept = "kernel_state_not_kept" { reason: String }
        "it booted from power-on: a kernel state cannot be kept: {reason}";
    HookFailed = "hook_failed" { hook: String, reason: String }
        "hook {hook} failed: {reason}";
    /// A port of a snapshot is taken on this host.
    PortMoved = "port_moved" { guest: u16, wanted: u16, published: u16, reason: String }
        "port {guest} of the guest is published on {published}, not on {wanted}: {reason}";
    /// A snapshot of another store does not get the network that it was saved with.
    NetworkWithheld = "network_withheld" {}
        "it is isolated, though saved with network full by another store";
    /// A snapshot of another store does not get its ports.
    PortsWithheld = "ports_withheld" { ports: Vec<String> }
        "ports of a snapshot of another store are not published: {}", ports.join(", ");
    /// A mount of the guest has no directory here.
    MountUnavailable = "mount_unavailable" { path: String, reason: String }
        "the guest cannot use its mount {path}: {reason}";
    /// A restored guest did not compare what it knows of its mounts with the host in time.
    MountsStale = "mounts_stale" { reason: String }
        "mounts may show what the host had before: {reason}";
    /// Arguments of QEMU are not taken from snapshots.
    QemuArgumentsWithheld = "qemu_arguments_withheld" { saved: Vec<String> }
        "arguments of QEMU are not taken from snapshots; it was saved with: {}", saved.join(" ");
}

impl Degradation {
    /// The values by name. The names belong to the code.
    pub fn arguments(&self) -> Arguments {
        if let Self::Unknown { arguments, .. } = self {
            return arguments.clone();
        }
        let tagged = Self::serialize(self, serde_json::value::Serializer);
        match tagged.map(|mut tagged| tagged["arguments"].take()) {
            Ok(Value::Object(arguments)) => arguments.into_iter().collect(),
            _ => Arguments::new(),
        }
    }

    /// Those of a record.
    pub(crate) fn list(notes: &Notes) -> Vec<Self> {
        notes.0.iter().cloned().map(Self::from).collect()
    }

    /// As records keep them.
    pub(crate) fn notes(list: &[Self]) -> Notes {
        Notes(list.iter().map(Note::from).collect())
    }

    /// As manifests of snapshots keep them.
    pub(crate) fn texts(list: &[Self]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }
}

impl From<&Degradation> for Note {
    fn from(degradation: &Degradation) -> Self {
        let is_text = matches!(degradation, Degradation::Recorded { .. });
        Self {
            code: (!is_text).then(|| degradation.code().to_owned()),
            message: degradation.to_string(),
            arguments: if is_text {
                Arguments::new()
            } else {
                degradation.arguments()
            },
        }
    }
}

impl From<Note> for Degradation {
    fn from(note: Note) -> Self {
        let Note {
            code,
            message,
            arguments,
        } = note;
        let Some(code) = code else {
            return Self::Recorded { message };
        };
        let tagged = json!({ "code": code, "arguments": arguments });
        Self::deserialize(tagged).unwrap_or(Self::Unknown {
            code,
            message,
            arguments,
        })
    }
}

/// A degradation as JSON shows it. One without a code of its own has the code `recorded` there.
#[derive(Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
struct Shown {
    code: String,
    message: String,
    #[cfg_attr(
        feature = "schema",
        schema(value_type = std::collections::BTreeMap<String, Value>)
    )]
    arguments: Arguments,
}

#[cfg(feature = "schema")]
impl utoipa::PartialSchema for Degradation {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        Shown::schema()
    }
}

#[cfg(feature = "schema")]
impl utoipa::ToSchema for Degradation {}

impl Serialize for Degradation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let shown = Shown {
            code: self.code().to_owned(),
            message: self.to_string(),
            arguments: self.arguments(),
        };
        shown.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Degradation {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Shown {
            code,
            message,
            arguments,
        } = Shown::deserialize(deserializer)?;
        Ok(Self::from(Note {
            code: Some(code),
            message,
            arguments,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Degradation> {
        let mode = MemoryMode::SoftDirty;
        let reason = || "no".to_owned();
        vec![
            Degradation::MemoryModeUnusable {
                mode,
                reason: reason(),
            },
            Degradation::DeviceMemory {
                mode,
                devices: vec!["vga.vram".into()],
            },
            Degradation::UnwrittenData {},
            Degradation::PortMoved {
                guest: 80,
                wanted: 8080,
                published: 40000,
                reason: reason(),
            },
            Degradation::PortsWithheld {
                ports: vec!["8080:80".into()],
            },
            Degradation::Recorded { message: reason() },
        ]
    }

    #[test]
    fn a_degradation_is_the_same_on_a_socket_and_in_a_record() {
        for degradation in samples() {
            let sent = serde_json::to_string(&degradation).expect("it is JSON");
            let came: Degradation = serde_json::from_str(&sent).expect("it is read");
            assert_eq!(came, degradation, "{sent}");
            let notes = Degradation::notes(std::slice::from_ref(&degradation));
            assert_eq!(Degradation::list(&notes), [degradation]);
        }
    }

    #[test]
    fn json_shows_code_message_and_arguments() {
        let [mode, ..] = &samples()[..] else {
            panic!("there are samples")
        };
        let shown = serde_json::to_value(mode).expect("it is JSON");
        let expected = json!({
            "code": "memory_mode_unusable",
            "message": "soft-dirty does not work here: no",
            "arguments": { "mode": "soft-dirty", "reason": "no" },
        });
        assert_eq!(shown, expected);
    }

    #[test]
    fn a_degradation_of_a_newer_program_is_kept_as_it_is() {
        let newer = json!({
            "code": "of_the_future",
            "message": "it was done in a lesser way",
            "arguments": { "count": 3 },
        });
        let read: Degradation = serde_json::from_value(newer.clone()).expect("it is read");
        assert_eq!(
            (read.code(), read.to_string().as_str()),
            ("of_the_future", "it was done in a lesser way")
        );
        assert_eq!(serde_json::to_value(&read).expect("it is JSON"), newer);
    }

    #[test]
    fn a_text_of_an_older_program_has_a_code_for_it() {
        let texts = ["the disk is as after a power cut: no".to_owned()];
        let list = Degradation::list(&Notes::from_texts(&texts));
        assert_eq!(list[0].code(), "recorded");
        assert_eq!(Degradation::texts(&list), texts);
    }
}
