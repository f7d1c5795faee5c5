//! What is fuzzed, and what must hold.

use std::fmt::Debug;
use std::fs::File;
use std::os::unix::fs::FileExt;

use sandtree_proto::frame::{Decoded, Decoder, Frame, MAX_PAYLOAD, Nonce, PADDING, StreamId, encode_preamble};
use sandtree_proto::message::{decode_entry, encode_entry, from_bytes, to_frame};
use sandtree_proto::{
    AgentHello, AgentMessage, ChannelState, DirEntry, ExecStart, Failure, FileKind, HostHello, HostMessage, Identity,
    Network, Open, Outcome, Outgoing, Reply, Request, Stat, TermSize,
};
use sandtree_store::disk;
use sandtree_store::memory::{Layer, MemoryWriter, PAGE};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};

pub struct Target {
    pub name: &'static str,
    pub seeds: fn() -> Vec<Vec<u8>>,
    pub check: fn(&[u8]),
}

pub const TARGETS: [Target; 7] = [
    Target { name: "frames", seeds: streams, check: frames },
    Target { name: "agent-messages", seeds: agent_messages, check: round_trip::<AgentMessage> },
    Target { name: "host-messages", seeds: host_messages, check: round_trip::<HostMessage> },
    Target { name: "dir-entries", seeds: entries, check: dir_entries },
    Target { name: "outgoing", seeds: outgoing_seeds, check: outgoing },
    Target { name: "qcow2", seeds: disks, check: qcow2 },
    Target { name: "memory-layer", seeds: layers, check: memory_layer },
];

/// Any bytes in any cutting: no panic, no growth, and after them a good stream is still understood.
fn frames(input: &[u8]) {
    let mut decoder = Decoder::new();
    let step = 1 + usize::from(input.first().copied().unwrap_or(0)) * 3;
    for chunk in input.chunks(step) {
        decoder.feed(chunk);
        while let Some(found) = decoder.next() {
            if let Ok(Decoded::Frame(Frame::Data { bytes, .. } | Frame::Message(bytes))) = found {
                assert!(bytes.len() <= MAX_PAYLOAD);
            }
        }
    }
    let (nonce, mut good) = (Nonce([0xA5; 16]), vec![0; PADDING]);
    encode_preamble(&mut good, nonce);
    decoder.feed(&good);
    let mut found = std::iter::from_fn(|| decoder.next());
    assert!(found.any(|f| f == Ok(Decoded::Preamble(nonce))), "a new stream is found behind any garbage");
}

/// What came in a frame fits one again, and says the same.
fn round_trip<M: Serialize + DeserializeOwned + PartialEq + Debug>(input: &[u8]) {
    let cut = &input[..input.len().min(MAX_PAYLOAD)];
    if let Ok(message) = from_bytes::<M>(cut) {
        assert_eq!(from_bytes::<M>(&payload(&message)), Ok(message));
    }
}

/// Every entry takes bytes off, so that a listing always ends.
fn dir_entries(input: &[u8]) {
    let mut bytes = input.to_vec();
    let mut before = bytes.len();
    while let Ok(Some(_)) = decode_entry(&mut bytes) {
        assert!(bytes.len() < before);
        before = bytes.len();
    }
}

/// A reader that claims anything: the window holds, and what it gets are the bytes at the offset that is told.
fn outgoing(input: &[u8]) {
    const WINDOW: usize = 257;
    let mut stream = Outgoing::new(WINDOW);
    for order in input.chunks_exact(2) {
        let number = u64::from(order[1]) * 3;
        match order[0] % 5 {
            0 => {
                let produced = stream.produced();
                let bytes: Vec<u8> =
                    (0..stream.room().min(order[1].into())).map(|i| (produced + i as u64) as u8).collect();
                stream.push(&bytes);
            }
            1 => {
                if let Some((offset, bytes)) = stream.take(order[1].into()) {
                    assert!(bytes.iter().enumerate().all(|(i, b)| *b == (offset + i as u64) as u8));
                }
            }
            // Claims may be refused; they must not change what is true.
            2 => drop(stream.consumed(number)),
            3 => drop(stream.rewind(number)),
            _ => drop(stream.take_end()),
        }
        assert!(stream.produced() - stream.base() <= WINDOW as u64);
    }
}

/// A damaged or hostile image gets a verdict, in bounded time and memory.
fn qcow2(input: &[u8]) {
    drop(disk::check::bytes(input));
}

/// Bytes of a header that the checksum covers; the run table follows them in an input.
const LAYER_FIELDS: usize = 48;

/// Whatever fields and table say, also under a checksum that is right: a layer that is read obeys every rule of the
/// format, so that nobody who uses it needs to look again.
fn memory_layer(input: &[u8]) {
    let file = layer_file(input);
    let len = file.metadata().expect("an open file has a length").len();
    let Ok(layer) = Layer::read(&file) else { return };
    let mut runs: Vec<_> = layer.data.iter().map(|run| run.pages).chain(layer.zero).collect();
    runs.sort_by_key(|run| run.first);
    assert!(runs.iter().all(|run| run.count > 0 && run.end() * PAGE <= layer.ram_bytes));
    assert!(runs.windows(2).all(|pair| pair[0].end() <= pair[1].first));
    let mut end = PAGE;
    for run in layer.data {
        assert_eq!(run.file_offset, end);
        end += run.pages.count * PAGE;
    }
    assert_eq!(end + runs.len() as u64 * 16, len);
}

/// The data pages are a hole: nobody reads them, and so all of an input is worth bending.
fn layer_file(input: &[u8]) -> File {
    let (fields, table) = input.split_at(input.len().min(LAYER_FIELDS));
    let claimed = fields.get(24..32).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
    let file = tempfile::tempfile().expect("a temporary file");
    let checksum = Sha256::digest(input);
    let table_offset = PAGE + claimed.min(1 << 36);
    for (bytes, offset) in [(fields, 0), (&checksum[..], LAYER_FIELDS as u64), (table, table_offset)] {
        file.write_all_at(bytes, offset).expect("room for a few kilobytes");
    }
    file.set_len(table_offset + table.len() as u64).expect("a sparse file");
    file
}

fn streams() -> Vec<Vec<u8>> {
    let mut stream = Vec::new();
    encode_preamble(&mut stream, Nonce([1; 16]));
    let frames = [
        Frame::Message(vec![0, 1, 1]),
        Frame::Data { channel: 1, stream: StreamId::Out, offset: 0, bytes: vec![7; 300] },
        Frame::Window { channel: 1, stream: StreamId::In, consumed: 9 },
        Frame::Eof { channel: 1, stream: StreamId::Err, offset: 300 },
    ];
    let mut seeds = vec![Vec::new(), stream.clone()];
    for frame in frames {
        frame.encode(&mut stream);
        seeds.push(stream.clone());
    }
    seeds
}

fn payload(message: &impl Serialize) -> Vec<u8> {
    match to_frame(message) {
        Ok(Frame::Message(bytes)) => bytes,
        other => unreachable!("seeds are short messages: {other:?}"),
    }
}

fn agent_messages() -> Vec<Vec<u8>> {
    let failure = Failure { errno: 2, message: "no".into() };
    let state = ChannelState {
        channel: 3,
        tag: "t".into(),
        received: 5,
        out: (1, 2),
        err: (0, 0),
        outcome: Some(Outcome::NotStarted(failure.clone())),
    };
    let stat =
        Stat { kind: FileKind::Dir, mode: 0o755, uid: 1, gid: 2, size: 3, modified_ns: -4, target: b"x".to_vec() };
    [
        AgentMessage::Hello(AgentHello { version: 1, build: "b".into(), channels: vec![state] }),
        AgentMessage::Started { channel: 1, pid: 2 },
        AgentMessage::Ended { channel: 1, outcome: Outcome::Signaled { signal: 9 } },
        AgentMessage::Reply { id: 1, reply: Ok(Reply::Stat(stat)) },
        AgentMessage::Reply { id: 1, reply: Err(failure) },
    ]
    .iter()
    .map(payload)
    .collect()
}

fn host_messages() -> Vec<Vec<u8>> {
    let exec = ExecStart {
        tag: "t".into(),
        argv: vec![b"sh".to_vec(), b"-c".to_vec()],
        env: vec![(b"K".to_vec(), b"V".to_vec())],
        cwd: b"/".to_vec(),
        user: "u:g".into(),
        terminal: Some(TermSize { rows: 1, cols: 2 }),
        stdin: true,
        timeout_ms: Some(5),
    };
    let identity = Identity {
        hostname: "h".into(),
        machine_id: "0".repeat(32),
        unix_time_ns: 1,
        entropy: vec![1; 64],
        network: Network::Full,
    };
    [
        HostMessage::Hello(HostHello { version_min: 1, version_max: 1 }),
        HostMessage::Open { channel: 1, window: 9, open: Open::Exec(exec) },
        HostMessage::Open { channel: 1, window: 9, open: Open::TarIn { path: b"/srv".to_vec() } },
        HostMessage::Resume { channel: 1, out: 2, err: 3 },
        HostMessage::Request { id: 1, request: Request::Configure(identity) },
    ]
    .iter()
    .map(payload)
    .collect()
}

fn entries() -> Vec<Vec<u8>> {
    let stat = Stat { kind: FileKind::File, mode: 1, uid: 2, gid: 3, size: 4, modified_ns: 5, target: vec![] };
    let entry = |name: &[u8]| encode_entry(&DirEntry { name: name.to_vec(), stat: stat.clone() });
    vec![entry(b"a"), [entry(b"a"), entry(b"\xff\n")].concat()]
}

fn outgoing_seeds() -> Vec<Vec<u8>> {
    vec![(0..200).collect(), vec![0, 255, 1, 255, 2, 20, 3, 30, 4, 0]]
}

/// A fresh overlay; its tables are where a bent number does most.
fn disks() -> Vec<Vec<u8>> {
    vec![disk::overlay::empty(1 << 20).expect("a megabyte is a possible size")]
}

/// Fields and run table of an empty layer, and of one with data and zeros side by side and apart.
fn layers() -> Vec<Vec<u8>> {
    let fields_and_table = |pages: &[(u64, u8)]| {
        let file = tempfile::tempfile().expect("a temporary file");
        let mut writer = MemoryWriter::new(&file, 64 * PAGE).expect("a possible size");
        let page = |byte| vec![byte; PAGE as usize];
        pages.iter().for_each(|(first, byte)| writer.append(*first, &page(*byte)).expect("pages in order"));
        let layer = writer.finish().expect("room for a few pages");
        let mut bytes = vec![0; layer.len_bytes() as usize];
        file.read_exact_at(&mut bytes, 0).expect("what was written");
        [&bytes[..LAYER_FIELDS], &bytes[(PAGE + layer.data_bytes) as usize..]].concat()
    };
    vec![fields_and_table(&[]), fields_and_table(&[(1, 7), (2, 0), (3, 7), (9, 7), (20, 0), (63, 7)])]
}
