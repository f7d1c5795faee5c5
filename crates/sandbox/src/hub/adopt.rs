//! The commands of a restored guest: combines the list of its agent with the recorded commands of
//! the state.
//!
//! ```text
//!   the stream      0 ......................... guest's produced
//!   the guest has                |.............|
//!   we have         |..................|            continue from the end of ours
//!                   |..........................|=== ours is of a later moment: drop ===, continue from the guest's end
//!                   |....|                          bytes are missing in between: drop ours, start with the guest's
//! ```
//!
//! Always: the guest's list is hostile. A tag names a directory only if it is a plain name.
//! Channels with an invalid description are closed, and so are channels that are no commands,
//! because their purpose ended with the captured machine.

use std::collections::{HashMap, VecDeque};

use sandtree_proto::{ChannelState, Outcome, Outgoing};

use super::details::ExecDetails;
use super::from_agent::FORGOTTEN;
use super::record::{ExecRecord, Segment, is_plain};
use super::slot::{Arrived, ExecKind, Flow, Kind, Owner, Slot};
use super::spool::{Beginning, Kept, Progress, Spool};
use super::switch::{Switch, WINDOW_MAX};

/// The least window of a guest, if no record has one.
const WINDOW_UNKNOWN: u32 = 4096;

impl Switch {
    /// Makes the spools of all commands that were recorded or run in the guest. The channels are
    /// then resumed as after a break, and those that were not adopted are closed.
    pub(super) fn adopt(&mut self, records: Vec<ExecRecord>, listed: &[ChannelState]) {
        let highest = listed.iter().map(|state| state.channel).max().unwrap_or(0);
        self.next_channel = self.next_channel.max(highest.wrapping_add(1));
        let mut records: HashMap<String, ExecRecord> =
            records.into_iter().map(|r| (r.tag.clone(), r)).collect();
        for state in listed
            .iter()
            .filter(|state| is_plain(&state.tag) && makes_sense(state))
        {
            // Of two channels with one tag, the first counts.
            if !self.spools.contains_key(&state.tag) {
                let record = records
                    .remove(&state.tag)
                    .unwrap_or_else(|| unknown(&state.tag));
                self.adopt_running(record, state);
            }
        }
        for record in records.into_values() {
            self.adopt_ended(record);
        }
    }

    fn adopt_running(&mut self, record: ExecRecord, state: &ChannelState) {
        let ExecRecord {
            tag,
            command,
            pid,
            window,
            out,
            err,
            details,
            ..
        } = record;
        let window = window.clamp(1, WINDOW_MAX);
        let arrived = Arrived {
            bytes: state.received,
            window,
        };
        let out = join(out, state.out);
        let err = join(err, state.err);
        let slot = Slot {
            owner: Owner::Spool { tag: tag.clone() },
            kind: Kind::Exec(Box::new(ExecKind {
                tag: tag.clone(),
                command: command.clone(),
                details: details.clone(),
            })),
            pid,
            // A wrong record must not make an honest agent break the rules.
            window: WINDOW_MAX.into(),
            opening: None,
            waits: false,
            behind: VecDeque::new(),
            input: Outgoing::new(0),
            arrived: Some(arrived),
            out: Flow::from(out.length),
            err: Flow::from(err.length),
            ended: false,
            waiting: VecDeque::new(),
        };
        self.channels.insert(state.channel, slot);
        let progress = Progress {
            out,
            err,
            pid,
            outcome: None,
        };
        self.keep(Beginning {
            tag,
            command,
            channel: Some(state.channel),
            window,
            progress,
            details,
        });
    }

    fn adopt_ended(&mut self, record: ExecRecord) {
        let ExecRecord {
            tag,
            command,
            pid,
            ended,
            window,
            out,
            err,
            details,
        } = record;
        let outcome = ended.unwrap_or_else(|| Outcome::Lost {
            reason: FORGOTTEN.to_owned(),
        });
        let [out, err] = [out, err].map(|segments| Kept {
            ended: true,
            ..Kept::of(segments, 0)
        });
        let progress = Progress {
            out,
            err,
            pid,
            outcome: Some(outcome),
        };
        self.keep(Beginning {
            tag,
            command,
            channel: None,
            window,
            progress,
            details,
        });
    }

    fn keep(&mut self, beginning: Beginning) {
        let tag = beginning.tag.clone();
        let spool = Spool::start(&self.execs, beginning, &self.room, self.inputs.clone());
        self.spools.insert(tag, spool);
    }
}

fn makes_sense(state: &ChannelState) -> bool {
    let ordered = |held: (u64, u64)| held.0 <= held.1 && held.1 - held.0 <= WINDOW_MAX.into();
    ordered(state.out) && ordered(state.err)
}

/// A command that its client closed between the capture and the record.
fn unknown(tag: &str) -> ExecRecord {
    let tag = tag.to_owned();
    let command = String::new();
    let window = WINDOW_UNKNOWN;
    ExecRecord {
        tag,
        command,
        pid: None,
        ended: None,
        window,
        out: Vec::new(),
        err: Vec::new(),
        details: ExecDetails::default(),
    }
}

/// The part of our output from which the guest's stream continues: `held` is the offset of the
/// first byte that the guest has, and the number of bytes it has produced.
fn join(mut segments: Vec<Segment>, held: (u64, u64)) -> Kept {
    let (first, produced) = held;
    segments.retain(|segment| segment.start < produced);
    if let Some(last) = segments.last_mut() {
        last.bytes = last.bytes.min(produced - last.start);
    }
    match segments.last() {
        Some(last) if last.end() >= first => Kept::of(segments, first),
        _ => Kept::of(Vec::new(), first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments(bounds: &[u64]) -> Vec<Segment> {
        let pieces = bounds.windows(2).map(|pair| (pair[0], pair[1] - pair[0]));
        pieces
            .map(|(start, bytes)| Segment {
                start,
                bytes,
                file: format!("out.{start}"),
            })
            .collect()
    }

    #[test]
    fn kept_output_is_combined_with_the_guests() {
        // Begin and end of: our output, the guest's, and what is kept.
        let cases = [
            (vec![0, 5, 9], (7, 12), (0, 9)),
            (vec![0, 5, 9], (7, 9), (0, 9)),
            (vec![0, 5, 9], (2, 6), (0, 6)),
            (vec![0, 5, 9], (2, 5), (0, 5)),
            (vec![0, 5], (6, 9), (6, 6)),
            (vec![], (6, 9), (6, 6)),
            (vec![4, 9], (4, 4), (4, 4)),
            (vec![4, 9], (8, 10), (4, 9)),
        ];
        for (ours, held, wanted) in cases {
            let kept = join(segments(&ours), held);
            assert_eq!((kept.base, kept.length), wanted, "{ours:?} {held:?}");
            assert!(
                kept.segments.iter().all(|segment| segment.end() <= held.1),
                "{ours:?} {held:?}"
            );
        }
    }
}
