//! The protocol of mounts: how a guest uses directories of its host.
//!
//! The agent is a FUSE server for the guest's kernel. It knows every file that the kernel knows, by
//! path and identity, and asks the host for each operation. The host keeps nothing that it cannot
//! lose: each request names its file anew. So all of a mount's state is in the guest's memory, and
//! is captured, reverted and forked with it.
//!
//! ```text
//!   host                                        guest
//!    | preamble(nonce), Hello -----------------> |   the mounts that this host serves
//!    | <------------------------ preamble(nonce) |
//!    | <-------------------- Request{replay} ... |   what an earlier host may have left unanswered
//!    | <----------------- Request(Revalidate) .. |   everything that the guest knows
//!    | Reply ----------------------------------> |
//!    | <---------------------------------- Ready |   what the guest shows is up to date
//!    |                                           |
//!    | <-------------------------------- Request |
//!    | Reply, in the order of the requests ----> |
//!    | Changed --------------------------------> |   another program changed a watched directory
//!    | Mark -----------------------------------> |
//!    | <--------------------------------- Marked |   everything before Mark is applied
//!    | Hold -----------------------------------> |   the guest will be captured
//!    | <----------------------------------- Held |   nothing is unanswered, and nothing is asked
//!    | Go -------------------------------------> |
//! ```
//!
//! A *packet* is one message in postcard encoding, followed by raw data: the bytes of a read or a
//! write. It is cut into frames of the link's format: data frames, and a message frame at its end.
//!
//! Always: enum variants are only ever appended, because an agent inside a restored memory may be
//! older than its host. Paths are relative to the mounted directory, and empty for itself.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::frame::{
    Decoder, Frame, FrameError, HEADER_LEN, MAX_PAYLOAD, Nonce, Part, StreamId, TRAILER_LEN,
    seal_data,
};
use crate::message::MessageError;

/// The name of the virtio-serial port.
pub const PORT_NAME: &str = "dev.sandtree.mounts";
/// Where a guest keeps the changes of its copy-on-write mounts: in `upper`, below the mount's
/// number.
pub const KEPT: &str = "/var/lib/sandtree/mounts";
/// The extended attribute that shows a file's [`stamp`](Attr::stamp) below an overlay, which copies
/// it with the file.
pub const VERSION_XATTR: &str = "trusted.sandtree.version";
/// The version that this build speaks.
pub const VERSION: u16 = 1;
/// The most raw data in one packet.
pub const DATA_MAX: usize = 1024 * 1024;
/// The longest packet. What is not raw data fits one frame.
pub const PACKET_MAX: usize = DATA_MAX + MAX_PAYLOAD;
/// The longest path of a file, in bytes. Linux allows longer ones only to programs that walk.
pub const PATH_MAX: usize = 60_000;

/// Which mount of a guest. Chosen by the host, and never used again for another directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MountId(pub u32);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(
    clippy::large_enum_variant,
    reason = "most messages are replies, and each is handled at once"
)]
pub enum FromHost {
    /// The first message after the preamble. Mounts that it does not list have no directory: their
    /// requests fail with EIO.
    Hello {
        version: u16,
        mounts: Vec<Served>,
    },
    Reply {
        id: u64,
        result: Result<Answer, Errno>,
    },
    /// Something changed at a name of a watched directory. Without a name: the directory itself.
    Changed {
        mount: MountId,
        directory: FileId,
        name: Vec<u8>,
    },
    /// Changes were lost: everything may have changed.
    ChangedAll {
        mount: MountId,
    },
    Mark {
        number: u64,
    },
    Hold,
    Go,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromGuest {
    Request {
        id: u64,
        mount: MountId,
        /// It may have been done already: its own effect is then no error.
        replay: bool,
        request: Request,
    },
    /// The guest does not know these any longer. No reply.
    Forget {
        mount: MountId,
        files: Vec<FileId>,
    },
    Ready,
    Marked {
        number: u64,
    },
    Held,
}

/// A mount that the host serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    pub mount: MountId,
    /// The host refuses changes.
    pub read_only: bool,
}

/// An error number of Linux.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errno(pub i32);

/// Which file, whatever its name. A number is used again after a file is removed; its time of birth
/// is not.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct FileId {
    pub ino: u64,
    /// In nanoseconds since 1970; 0 where the file system does not know.
    pub born_ns: i64,
}

/// A file as a request names it. The host refuses another file at the same path with ESTALE.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub path: Vec<u8>,
    pub id: FileId,
    /// It has no name any longer, and the host was asked to keep it. The path is empty.
    pub kept: bool,
}

/// What changes when a file's content or attributes change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Version {
    pub mtime_ns: i64,
    pub ctime_ns: i64,
    pub size: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Attr {
    pub id: FileId,
    /// Type and permissions, as in `st_mode`.
    pub mode: u32,
    pub links: u32,
    /// As the guest sees it.
    pub uid: u32,
    pub gid: u32,
    pub version: Version,
    pub atime_ns: i64,
    /// Of 512 bytes.
    pub blocks: u64,
    pub block_size: u32,
    pub device: u32,
    /// The host reports when it changes, until the guest forgets its directory.
    pub watched: bool,
}

impl Attr {
    /// Which version of which file, as text.
    pub fn stamp(&self) -> String {
        let Version {
            mtime_ns,
            ctime_ns,
            size,
        } = self.version;
        let FileId { ino, born_ns } = self.id;
        format!("{ino} {born_ns} {mtime_ns} {ctime_ns} {size}")
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// [`Answer::Attr`] of the mounted directory, whatever its identity.
    Root,
    /// [`Answer::Attr`] or [`Answer::Absent`].
    Lookup { directory: Node, name: Vec<u8> },
    /// [`Answer::Attr`].
    Stat { node: Node },
    /// [`Answer::Changed`].
    Change { node: Node, change: Change },
    /// [`Answer::Done`], with the target as data.
    ReadLink { node: Node },
    /// [`Answer::Made`].
    Make {
        directory: Node,
        name: Vec<u8>,
        what: Make,
    },
    /// [`Answer::Removed`]. `keep`: the guest has it open. `file`: which file the guest means, so
    /// that a repeated request does not remove a newer one; ino 0 where it does not know.
    Remove {
        directory: Node,
        name: Vec<u8>,
        what: Remove,
        keep: bool,
        file: FileId,
    },
    /// [`Answer::Renamed`]. `file` as for `Remove`: the file that moves.
    Rename {
        from: Node,
        name: Vec<u8>,
        to: Node,
        new_name: Vec<u8>,
        how: Rename,
        keep: bool,
        file: FileId,
    },
    /// [`Answer::Made`].
    Link {
        node: Node,
        directory: Node,
        name: Vec<u8>,
    },
    /// [`Answer::Done`], with the data; less than `length` only at the end of the file.
    Read {
        node: Node,
        offset: u64,
        length: u32,
    },
    /// [`Answer::Written`]. The data follows the message.
    Write {
        node: Node,
        offset: u64,
        /// At the end of the file, wherever that is.
        append: bool,
    },
    /// [`Answer::Entries`], with the [`Entry`]s as data.
    List {
        directory: Node,
        /// 0, or that of the last entry received.
        cookie: u64,
        max_bytes: u32,
        attributes: bool,
    },
    /// [`Answer::Done`], when the file is on the host's disk.
    Sync { node: Node },
    /// [`Answer::Changed`]. `mode` is that of fallocate(2).
    Allocate {
        node: Node,
        mode: u32,
        offset: u64,
        length: u64,
    },
    /// [`Answer::Written`]: copies inside the host, at most 16 MiB at once.
    Copy {
        from: Node,
        offset: u64,
        to: Node,
        to_offset: u64,
        length: u64,
    },
    /// [`Answer::Position`].
    Seek { node: Node, offset: u64, what: Seek },
    /// [`Answer::Space`].
    Space,
    /// [`Answer::Verdicts`], in the same order. The data is a sequence of [`Known`].
    Revalidate,
    /// [`Answer::Done`], with the value as data.
    GetXattr { node: Node, name: Vec<u8> },
    /// [`Answer::Done`]. The value follows the message. `flags` are those of setxattr(2).
    SetXattr {
        node: Node,
        name: Vec<u8>,
        flags: u32,
    },
    /// [`Answer::Done`], with the names as data, each ended by a zero byte.
    ListXattr { node: Node },
    /// [`Answer::Done`].
    RemoveXattr { node: Node, name: Vec<u8> },
}

/// What to change of a file. Its owner stays: it is shown mapped, and never changed on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Change {
    pub mode: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<Time>,
    pub mtime: Option<Time>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Time {
    Now,
    At { unix_ns: i64 },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Make {
    /// `exclusive`: an existing file is an error.
    File {
        mode: u32,
        exclusive: bool,
    },
    Directory {
        mode: u32,
    },
    Symlink {
        target: Vec<u8>,
    },
    /// A file without a name, which the host keeps; the request's name is not used.
    Unnamed {
        mode: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Remove {
    File,
    Directory,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rename {
    Replace,
    NoReplace,
    Exchange,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Seek {
    Data,
    Hole,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Done,
    Attr(Attr),
    /// No file has this name. `watched`: the host reports if that changes.
    Absent {
        watched: bool,
    },
    Changed {
        /// Before the change: if the guest knows another version, somebody else changed the file.
        before: Version,
        attr: Attr,
    },
    Made {
        attr: Attr,
        /// The new directory is known completely: it was empty when its watch began.
        watched_from_birth: bool,
        directory: Attr,
    },
    Removed {
        /// What lost the name, with the links that are left. None: a replay found nothing.
        lost: Option<Attr>,
        directory: Attr,
    },
    Renamed {
        attr: Attr,
        /// What lost its name by it, or was exchanged.
        other: Option<Attr>,
        from: Attr,
        to: Attr,
    },
    Written {
        bytes: u32,
        before: Version,
        attr: Attr,
    },
    Entries {
        watched: bool,
        /// No entry follows the last of these.
        end: bool,
    },
    Position {
        offset: u64,
    },
    Space(Space),
    Verdicts(Vec<Verdict>),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Continues after this entry.
    pub cookie: u64,
    pub ino: u64,
    /// As in `d_type`.
    pub kind: u8,
    pub name: Vec<u8>,
    pub attr: Option<Attr>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Space {
    pub block_size: u32,
    pub blocks: u64,
    pub free: u64,
    pub available: u64,
    pub files: u64,
    pub files_free: u64,
    pub name_max: u32,
}

/// What the guest knows of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    pub node: Node,
    pub version: Version,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// And, for a directory, watched from now on.
    Same,
    Differs,
    Gone,
}

#[derive(Debug, Error)]
pub enum MountError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Message(#[from] MessageError),
    #[error("packet of more than {PACKET_MAX} bytes")]
    TooLong,
    #[error("frame of a kind that the port of mounts does not have")]
    Kind,
}

/// Appends a packet to `out`.
pub fn encode<M: Serialize>(message: &M, data: &[u8], out: &mut Vec<u8>) -> Result<(), MountError> {
    let message = postcard::to_stdvec(message).expect("encoding into a vector does not fail");
    if message.len() > MAX_PAYLOAD || data.len() > DATA_MAX {
        return Err(MountError::TooLong);
    }
    let total = message.len() + data.len();
    let frames = total / MAX_PAYLOAD + 1;
    out.reserve(total + frames * (HEADER_LEN + TRAILER_LEN));
    let mut head = message.as_slice();
    let mut tail = data;
    let mut offset = 0;
    while head.len() + tail.len() > MAX_PAYLOAD {
        let start = out.len();
        out.resize(start + HEADER_LEN, 0);
        let of_tail = MAX_PAYLOAD - head.len();
        out.extend_from_slice(std::mem::take(&mut head));
        out.extend_from_slice(&tail[..of_tail]);
        tail = &tail[of_tail..];
        out.resize(out.len() + TRAILER_LEN, 0);
        seal_data(&mut out[start..], 0, StreamId::In, offset);
        offset += MAX_PAYLOAD as u64;
    }
    Frame::Message([head, tail].concat()).encode(out);
    Ok(())
}

/// The message of a packet, and the data behind it.
pub fn decode<'a, M: Deserialize<'a>>(packet: &'a [u8]) -> Result<(M, &'a [u8]), MountError> {
    let malformed = |_| MountError::Message(MessageError::Malformed);
    postcard::take_from_bytes(packet).map_err(malformed)
}

/// Appends one of a sequence that travels as data.
pub fn encode_item<T: Serialize>(item: &T, data: &mut Vec<u8>) {
    let bytes = postcard::to_stdvec(item).expect("encoding into a vector does not fail");
    data.extend(bytes);
}

/// The items of a sequence that travels as data.
pub fn decode_items<'a, T: Deserialize<'a>>(mut data: &'a [u8]) -> Result<Vec<T>, MountError> {
    let mut items = Vec::new();
    while !data.is_empty() {
        let (item, rest) = decode(data)?;
        items.push(item);
        data = rest;
    }
    Ok(items)
}

/// What an [`Assembler`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrived {
    /// A new stream begins here; packets that were cut are void.
    Preamble(Nonce),
    Packet(Vec<u8>),
}

/// Joins the frames of a stream to packets. Holds at most one packet, one frame and one read.
#[derive(Debug, Default)]
pub struct Assembler {
    decoder: Decoder,
    packet: Vec<u8>,
}

impl Assembler {
    /// Room for at least `count` bytes; see [`Decoder::spare`].
    pub fn spare(&mut self, count: usize) -> &mut [u8] {
        self.decoder.spare(count)
    }

    /// Takes in the first `count` bytes of the spare room.
    pub fn filled(&mut self, count: usize) {
        self.decoder.filled(count);
    }

    /// The next preamble or packet, if one is complete. After an error it searches for a preamble.
    #[allow(
        clippy::should_implement_trait,
        reason = "an iterator must not end and then continue; this does"
    )]
    pub fn next(&mut self) -> Option<Result<Arrived, MountError>> {
        loop {
            let found = match self.decoder.next_part()? {
                Ok(Part::Preamble(nonce)) => {
                    self.packet.clear();
                    Ok(Some(Arrived::Preamble(nonce)))
                }
                Ok(Part::Data(bytes)) => join(&mut self.packet, bytes).map(|()| None),
                Ok(Part::Message(bytes)) => join(&mut self.packet, bytes)
                    .map(|()| Some(Arrived::Packet(std::mem::take(&mut self.packet)))),
                Ok(Part::Other) => Err(MountError::Kind),
                Err(error) => Err(error.into()),
            };
            match found {
                Ok(None) => {}
                Ok(Some(arrived)) => return Some(Ok(arrived)),
                Err(error) => {
                    self.resync();
                    return Some(Err(error));
                }
            }
        }
    }

    /// Gives the memory of a packet back, for later ones.
    pub fn reuse(&mut self, mut packet: Vec<u8>) {
        if self.packet.is_empty() {
            packet.clear();
            self.packet = packet;
        }
    }

    /// Searches for a preamble: what a packet says cannot be.
    pub fn resync(&mut self) {
        self.packet = Vec::new();
        self.decoder.resync();
    }
}

/// Appends a frame's payload to a packet.
fn join(packet: &mut Vec<u8>, bytes: &[u8]) -> Result<(), MountError> {
    if packet.len() + bytes.len() > PACKET_MAX {
        return Err(MountError::TooLong);
    }
    packet.extend_from_slice(bytes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::encode_preamble;

    const NONCE: Nonce = Nonce([7; 16]);

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn packet(message: &impl Serialize, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode(message, data, &mut bytes).expect("it fits");
        bytes
    }

    fn lookup() -> FromGuest {
        FromGuest::Request {
            id: 300,
            mount: MountId(2),
            replay: false,
            request: Request::Lookup {
                directory: Node {
                    path: b"src".to_vec(),
                    id: FileId {
                        ino: 77,
                        born_ns: -1,
                    },
                    kept: false,
                },
                name: b"a".to_vec(),
            },
        }
    }

    fn write() -> FromGuest {
        FromGuest::Request {
            id: 1,
            mount: MountId(1),
            replay: true,
            request: Request::Write {
                node: Node {
                    path: Vec::new(),
                    id: FileId { ino: 5, born_ns: 1 },
                    kept: true,
                },
                offset: 4096,
                append: false,
            },
        }
    }

    /// These bytes stand in `docs/mount-protocol.md`.
    #[test]
    fn golden_packets() {
        let hello = FromHost::Hello {
            version: VERSION,
            mounts: vec![Served {
                mount: MountId(1),
                read_only: true,
            }],
        };
        let reply = FromHost::Reply {
            id: 300,
            result: Err(Errno(116)),
        };
        let changed = FromHost::Changed {
            mount: MountId(2),
            directory: FileId {
                ino: 77,
                born_ns: -1,
            },
            name: b"a".to_vec(),
        };
        let found = [
            packet(&hello, &[]),
            packet(&lookup(), &[]),
            packet(&reply, &[]),
            packet(&changed, &[]),
            packet(&write(), b"hi"),
        ];
        let expected = [
            "010000000500000000000000187f6e0900000000000000000001010101187f6e09",
            "010000000f0000000000000026df7b5e000000000000000000ac02020001037372634d0100016126df7b5e",
            "010000000600000000000000d232c7a6000000000000000001ac0201e801d232c7a6",
            "010000000600000000000000d232c7a6000000000000000002024d010161d232c7a6",
            "010000000e0000000000000060e41c3b0000000000000000000101010a00050201802000686960e41c3b",
        ];
        assert_eq!(found.map(|bytes| hex(&bytes)), expected);
    }

    fn synced() -> Assembler {
        let mut assembler = Assembler::default();
        let mut bytes = Vec::new();
        encode_preamble(&mut bytes, NONCE);
        feed(&mut assembler, &bytes);
        let found = assembler.next().expect("a preamble").expect("no error");
        assert_eq!(found, Arrived::Preamble(NONCE));
        assembler
    }

    fn feed(assembler: &mut Assembler, bytes: &[u8]) {
        assembler.spare(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        assembler.filled(bytes.len());
    }

    #[test]
    fn data_of_any_length_up_to_the_limit_comes_back() {
        for length in [
            0,
            1,
            MAX_PAYLOAD - 20,
            MAX_PAYLOAD,
            3 * MAX_PAYLOAD,
            DATA_MAX,
        ] {
            let data: Vec<u8> = (0..length).map(|i| (i % 251) as u8).collect();
            let mut assembler = synced();
            feed(&mut assembler, &packet(&write(), &data));
            let found = assembler.next().expect("a packet").expect("no error");
            let Arrived::Packet(packet) = found else {
                panic!("{found:?}")
            };
            let (message, rest): (FromGuest, _) = decode(&packet).expect("it was encoded");
            assert_eq!(message, write());
            assert!(rest == data, "{length} bytes");
            assert!(assembler.next().is_none());
        }
    }

    #[test]
    fn more_than_a_packet_is_refused_by_both_ends() {
        let mut out = Vec::new();
        let data = vec![0; DATA_MAX + 1];
        assert!(encode(&write(), &data, &mut out).is_err());
        let long = FromGuest::Forget {
            mount: MountId(1),
            files: vec![FileId::default(); MAX_PAYLOAD],
        };
        assert!(encode(&long, &[], &mut out).is_err());
        assert!(out.is_empty());
        let mut assembler = synced();
        let mut frame = Vec::new();
        crate::frame::encode_data(&mut frame, 0, StreamId::In, 0, &vec![0; MAX_PAYLOAD]);
        for _ in 0..PACKET_MAX / MAX_PAYLOAD {
            feed(&mut assembler, &frame);
            assert!(assembler.next().is_none());
        }
        feed(&mut assembler, &frame);
        let found = assembler.next().expect("an error");
        assert!(matches!(found, Err(MountError::TooLong)));
    }

    #[test]
    fn a_new_stream_voids_a_packet_that_was_cut() {
        let mut assembler = synced();
        let bytes = packet(&write(), &[9; 2 * MAX_PAYLOAD]);
        feed(&mut assembler, &bytes[..MAX_PAYLOAD + 500]);
        assert!(assembler.next().is_none());
        let mut again = Vec::new();
        crate::frame::encode_host_preamble(&mut again, Nonce([8; 16]));
        again.extend(packet(&lookup(), &[]));
        feed(&mut assembler, &again);
        assert!(matches!(assembler.next(), Some(Err(_))));
        let found = assembler.next().expect("a preamble").expect("no error");
        assert_eq!(found, Arrived::Preamble(Nonce([8; 16])));
        let found = assembler.next().expect("a packet").expect("no error");
        let Arrived::Packet(packet) = found else {
            panic!("{found:?}")
        };
        let (message, _): (FromGuest, _) = decode(&packet).expect("it was encoded");
        assert_eq!(message, lookup());
    }

    proptest! {
        #[test]
        fn packets_survive_any_cutting(
            lengths in prop::collection::vec(0usize..200_000, 1..5),
            cuts in prop::collection::vec(1usize..70_000, 1..40),
        ) {
            let mut bytes = Vec::new();
            for length in &lengths {
                encode(&write(), &vec![3; *length], &mut bytes).expect("it fits");
            }
            let mut assembler = synced();
            let mut seen = Vec::new();
            let mut rest = bytes.as_slice();
            for cut in cuts.iter().cycle() {
                let (piece, behind) = rest.split_at((*cut).min(rest.len()));
                feed(&mut assembler, piece);
                while let Some(found) = assembler.next() {
                    let Arrived::Packet(packet) = found.expect("nothing is broken") else {
                        panic!("no preamble was sent")
                    };
                    let (message, data): (FromGuest, _) = decode(&packet).expect("a message");
                    prop_assert_eq!(message, write());
                    seen.push(data.len());
                }
                rest = behind;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(seen, lengths);
        }

        #[test]
        fn garbage_neither_panics_nor_grows(
            bytes in prop::collection::vec(any::<u8>(), 0..4000),
            start_synced: bool,
        ) {
            let mut assembler = if start_synced { synced() } else { Assembler::default() };
            for chunk in bytes.chunks(61) {
                feed(&mut assembler, chunk);
                while assembler.next().is_some() {}
                prop_assert!(assembler.packet.len() <= PACKET_MAX);
            }
            let mut good = vec![0; crate::frame::PADDING];
            encode_preamble(&mut good, Nonce([9; 16]));
            feed(&mut assembler, &good);
            let found = std::iter::from_fn(|| assembler.next());
            let is_found = |found: Result<Arrived, MountError>| {
                matches!(found, Ok(Arrived::Preamble(Nonce([9, ..]))))
            };
            prop_assert!(found.into_iter().any(is_found));
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
        ) {
            if let Ok((message, _)) = decode::<FromGuest>(&bytes) {
                let mut out = Vec::new();
                prop_assert!(encode(&message, &[], &mut out).is_ok());
            }
            // Either is fine: neither may panic.
            drop(decode::<FromHost>(&bytes));
            drop(decode_items::<Known>(&bytes));
            drop(decode_items::<Entry>(&bytes));
        }
    }
}
