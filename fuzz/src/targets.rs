//! The fuzz targets, and the promises that each checks.

use std::fmt::Debug;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use sandtree_proto::frame::{
    Decoded, Decoder, Frame, MAX_PAYLOAD, Nonce, PADDING, StreamId, encode_preamble,
};
use sandtree_proto::message::{decode_item, encode_item, from_bytes, to_frame};
use sandtree_proto::{
    AgentHello, AgentMessage, ChannelState, DirEntry, ExecStart, Failure, FileKind, HostHello,
    HostMessage, Identity, Network, Open, Outcome, Outgoing, Reply, Request, ScreenInput,
    ScreenRequest, ScreenState, Stat, TermSize,
};
use sandtree_store::artifact::{
    BLOCK, Input, MAX_MEMBER_BYTES, MAX_PIECES, Member, Reader, SparseMap, Writer,
};
use sandtree_store::memory::{Layer, MemoryWriter, PAGE};
use sandtree_store::{Digest as StoreDigest, SnapshotManifest, SnapshotSummary, Store, disk};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};

use crate::{disk_image, ext4, mounts, tar};

pub struct Target {
    pub name: &'static str,
    pub seeds: fn() -> Vec<Vec<u8>>,
    pub check: fn(&[u8]),
}

pub const TARGETS: [Target; 14] = [
    Target {
        name: "frames",
        seeds: streams,
        check: frames,
    },
    Target {
        name: "agent-messages",
        seeds: agent_messages,
        check: round_trip::<AgentMessage>,
    },
    Target {
        name: "host-messages",
        seeds: host_messages,
        check: round_trip::<HostMessage>,
    },
    Target {
        name: "dir-entries",
        seeds: entries,
        check: dir_entries,
    },
    Target {
        name: "outgoing",
        seeds: outgoing_seeds,
        check: outgoing,
    },
    Target {
        name: "qcow2",
        seeds: disks,
        check: qcow2,
    },
    Target {
        name: "memory-layer",
        seeds: layers,
        check: memory_layer,
    },
    Target {
        name: "ext4",
        seeds: ext4::seeds,
        check: ext4::check,
    },
    Target {
        name: "disk-image",
        seeds: disk_image::seeds,
        check: disk_image::check,
    },
    Target {
        name: "artifact",
        seeds: artifacts,
        check: artifact,
    },
    Target {
        name: "snapshot-manifest",
        seeds: manifests,
        check: snapshot_manifest,
    },
    Target {
        name: "index",
        seeds: indexes,
        check: index,
    },
    Target {
        name: "mounts",
        seeds: mounts::seeds,
        check: mounts::check,
    },
    Target {
        name: "tar",
        seeds: tar::seeds,
        check: tar::check,
    },
];

/// Any bytes in any pieces cause no panic and no growth, and a valid stream after them is still
/// understood.
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
    let nonce = Nonce([0xA5; 16]);
    let mut good = vec![0; PADDING];
    encode_preamble(&mut good, nonce);
    decoder.feed(&good);
    let mut found = std::iter::from_fn(|| decoder.next());
    assert!(
        found.any(|f| f == Ok(Decoded::Preamble(nonce))),
        "a new stream is found behind any garbage"
    );
}

/// A decoded message can be encoded into one frame again, and decodes to the same message.
fn round_trip<M: Serialize + DeserializeOwned + PartialEq + Debug>(input: &[u8]) {
    let cut = &input[..input.len().min(MAX_PAYLOAD)];
    if let Ok(message) = from_bytes::<M>(cut) {
        assert_eq!(from_bytes::<M>(&payload(&message)), Ok(message));
    }
}

/// Every entry consumes bytes, so a listing always ends.
fn dir_entries(input: &[u8]) {
    let mut bytes = input.to_vec();
    let mut before = bytes.len();
    while let Ok(Some(_)) = decode_item::<DirEntry>(&mut bytes) {
        assert!(bytes.len() < before);
        before = bytes.len();
    }
}

/// A reader makes any claims: the window holds, and the reader gets the bytes of the reported
/// offset.
fn outgoing(input: &[u8]) {
    const WINDOW: usize = 257;
    let mut stream = Outgoing::new(WINDOW);
    for order in input.chunks_exact(2) {
        let number = u64::from(order[1]) * 3;
        match order[0] % 5 {
            0 => {
                let produced = stream.produced();
                let bytes: Vec<u8> = (0..stream.room().min(order[1].into()))
                    .map(|i| (produced + i as u64) as u8)
                    .collect();
                stream.push(&bytes);
            }
            1 => {
                if let Some((offset, bytes)) = stream.take(order[1].into()) {
                    assert!(
                        bytes
                            .iter()
                            .enumerate()
                            .all(|(i, b)| *b == (offset + i as u64) as u8)
                    );
                }
            }
            // A refused claim is fine; the assertion below checks the window.
            2 => drop(stream.consumed(number)),
            // As above.
            3 => drop(stream.rewind(number)),
            _ => {
                stream.take_end();
            }
        }
        assert!(stream.produced() - stream.base() <= WINDOW as u64);
    }
}

/// A check of a damaged or hostile image ends, in bounded time and memory.
fn qcow2(input: &[u8]) {
    // The verdict may be any; only a panic or a hang breaks the promise.
    drop(disk::check::bytes(input));
}

/// An accepted manifest is its own canonical form, and obeys the rules that no later code checks.
fn snapshot_manifest(input: &[u8]) {
    let Ok((manifest, digest)) = SnapshotManifest::parse(input) else {
        return;
    };
    assert_eq!(manifest.to_bytes(), input);
    assert_eq!(digest, StoreDigest::of(input));
    let memory = manifest.memory.iter();
    let outputs = memory.clone().flat_map(|memory| memory.outputs.keys());
    for path in outputs {
        assert!(
            path.split('/')
                .all(|name| !name.is_empty() && !name.starts_with('.')),
            "{path:?}"
        );
    }
    let layers: Vec<_> = memory
        .flat_map(|memory| &memory.layers)
        .chain(&manifest.disk.layers)
        .collect();
    assert!(
        layers.len() <= 1024
            && layers
                .iter()
                .map(|layer| layer.bytes)
                .try_fold(0, u64::checked_add)
                .is_some()
    );
}

/// The length of the header fields under the checksum; in an input, the run table follows them.
const LAYER_FIELDS: usize = 48;

/// With any fields and table, also with a right checksum: a layer that is read obeys every rule of
/// the format, so that no later code checks again.
fn memory_layer(input: &[u8]) {
    let file = layer_file(input);
    let len = file.metadata().expect("an open file has a length").len();
    let Ok(layer) = Layer::read(&file) else {
        return;
    };
    let mut runs: Vec<_> = layer
        .data
        .iter()
        .map(|run| run.pages)
        .chain(layer.zero)
        .collect();
    runs.sort_by_key(|run| run.first);
    assert!(
        runs.iter()
            .all(|run| run.count > 0 && run.end() * PAGE <= layer.ram_bytes)
    );
    assert!(runs.windows(2).all(|pair| pair[0].end() <= pair[1].first));
    let mut end = PAGE;
    for run in layer.data {
        assert_eq!(run.file_offset, end);
        end += run.pages.count * PAGE;
    }
    assert_eq!(end + runs.len() as u64 * 16, len);
}

/// The data pages are a hole: no code reads them, so all bytes of an input are worth mutating.
fn layer_file(input: &[u8]) -> File {
    let (fields, table) = input.split_at(input.len().min(LAYER_FIELDS));
    let claimed = fields
        .get(24..32)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u64::from_le_bytes);
    let file = tempfile::tempfile().expect("a temporary file");
    let checksum = Sha256::digest(input);
    let table_offset = PAGE + claimed.min(1 << 36);
    for (bytes, offset) in [
        (fields, 0),
        (&checksum[..], LAYER_FIELDS as u64),
        (table, table_offset),
    ] {
        file.write_all_at(bytes, offset)
            .expect("room for a few kilobytes");
    }
    file.set_len(table_offset + table.len() as u64)
        .expect("a sparse file");
    file
}

/// An accepted archive is, to the last byte, what our own writer would have written. So two readers
/// cannot see different content.
fn artifact(input: &[u8]) {
    for archive in [input.to_vec(), with_checksums(input)] {
        if let Some(written) = rewritten(&archive) {
            assert!(
                written == archive || !archive.starts_with(b"arti"),
                "another spelling was accepted"
            );
        }
    }
}

/// Reads an archive as an import does, and writes its content again.
fn rewritten(archive: &[u8]) -> Option<Vec<u8>> {
    let mut reader = Reader::new(Input::new(archive).ok()?);
    let mut writer = Writer::new(Vec::new());
    while let Some(found) = reader.next_member().ok()? {
        assert!(
            found.map.bytes() <= MAX_MEMBER_BYTES && found.map.pieces().len() as u64 <= MAX_PIECES
        );
        let pieces = found.map.pieces();
        assert!(pieces.windows(2).all(|pair| pair[0].end() < pair[1].offset));
        assert!(
            pieces
                .iter()
                .all(|piece| piece.bytes > 0 && piece.end() <= found.map.bytes())
        );
        writer
            .begin(&found.member, &found.map)
            .expect("room for what fits the input");
        copy_member(&mut reader, &mut writer)?;
    }
    Some(writer.finish().expect("room for what fits the input"))
}

fn copy_member(reader: &mut Reader<Input<&[u8]>>, writer: &mut Writer<Vec<u8>>) -> Option<()> {
    let mut buffer = vec![0; 4096];
    loop {
        match reader.read(&mut buffer).ok()? {
            0 => return Some(()),
            read => writer
                .data(&buffer[..read])
                .expect("room for what fits the input"),
        }
    }
}

/// The same archive with right checksums, because readers refuse headers with wrong ones.
fn with_checksums(input: &[u8]) -> Vec<u8> {
    let mut archive = input.to_vec();
    for block in archive
        .chunks_exact_mut(512)
        .filter(|block| block[257..].starts_with(b"ustar"))
    {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    archive
}

fn streams() -> Vec<Vec<u8>> {
    let mut stream = Vec::new();
    encode_preamble(&mut stream, Nonce([1; 16]));
    let frames = [
        Frame::Message(vec![0, 1, 1]),
        Frame::Data {
            channel: 1,
            stream: StreamId::Out,
            offset: 0,
            bytes: vec![7; 300],
        },
        Frame::Window {
            channel: 1,
            stream: StreamId::In,
            consumed: 9,
        },
        Frame::Eof {
            channel: 1,
            stream: StreamId::Err,
            offset: 300,
        },
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
    let failure = Failure {
        errno: 2,
        message: "no".into(),
    };
    let state = ChannelState {
        channel: 3,
        tag: "t".into(),
        received: 5,
        out: (1, 2),
        err: (0, 0),
        outcome: Some(Outcome::NotStarted(failure.clone())),
    };
    let stat = Stat {
        kind: FileKind::Dir,
        mode: 0o755,
        uid: 1,
        gid: 2,
        size: 3,
        modified_ns: -4,
        target: b"x".to_vec(),
    };
    let screen = ScreenState {
        width: 1280,
        height: 800,
        x: 1,
        y: 2,
        session: true,
    };
    [
        AgentMessage::Hello(AgentHello {
            version: 1,
            build: "b".into(),
            channels: vec![state],
        }),
        AgentMessage::Started { channel: 1, pid: 2 },
        AgentMessage::Ended {
            channel: 1,
            outcome: Outcome::Signaled { signal: 9 },
        },
        AgentMessage::Reply {
            id: 1,
            reply: Ok(Reply::Stat(stat)),
        },
        AgentMessage::Reply {
            id: 1,
            reply: Err(failure),
        },
        AgentMessage::Reply {
            id: 1,
            reply: Ok(Reply::Screen(screen)),
        },
    ]
    .iter()
    .map(payload)
    .collect()
}

fn screen_inputs() -> Vec<ScreenInput> {
    vec![
        ScreenInput::Key {
            keysym: 0xffe3,
            down: true,
        },
        ScreenInput::Text("ä🙂".into()),
        ScreenInput::Move { x: 300, y: 2 },
        ScreenInput::Button {
            number: 1,
            down: true,
        },
        ScreenInput::Pause { ms: 300 },
    ]
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
        HostMessage::Hello(HostHello {
            version_min: 1,
            version_max: 1,
        }),
        HostMessage::Open {
            channel: 1,
            window: 9,
            open: Open::Exec(exec),
        },
        HostMessage::Open {
            channel: 1,
            window: 9,
            open: Open::TarIn {
                path: b"/srv".to_vec(),
            },
        },
        HostMessage::Resume {
            channel: 1,
            out: 2,
            err: 3,
        },
        HostMessage::Request {
            id: 1,
            request: Request::Configure(identity),
        },
        HostMessage::Open {
            channel: 1,
            window: 9,
            open: Open::WriteClipboard,
        },
        HostMessage::Request {
            id: 1,
            request: Request::Screen(ScreenRequest::Input(screen_inputs())),
        },
        HostMessage::Request {
            id: 1,
            request: Request::Screen(ScreenRequest::SetSize {
                width: 1280,
                height: 800,
            }),
        },
    ]
    .iter()
    .map(payload)
    .collect()
}

fn entries() -> Vec<Vec<u8>> {
    let stat = Stat {
        kind: FileKind::File,
        mode: 1,
        uid: 2,
        gid: 3,
        size: 4,
        modified_ns: 5,
        target: vec![],
    };
    let entry = |name: &[u8]| {
        encode_item(&DirEntry {
            name: name.to_vec(),
            stat: stat.clone(),
        })
    };
    vec![entry(b"a"), [entry(b"a"), entry(b"\xff\n")].concat()]
}

fn outgoing_seeds() -> Vec<Vec<u8>> {
    vec![(0..200).collect(), vec![0, 255, 1, 255, 2, 20, 3, 30, 4, 0]]
}

/// A new overlay; mutations of its tables have the most effect.
fn disks() -> Vec<Vec<u8>> {
    vec![disk::overlay::empty(1 << 20).expect("a megabyte is a possible size")]
}

/// Members of every kind: records, a blob, one with holes, one that ends with a hole.
fn artifacts() -> Vec<Vec<u8>> {
    let hole = vec![0; BLOCK as usize];
    let blobs = [
        b"blob".to_vec(),
        [&hole[..], &hole, b"end"].concat(),
        [vec![7; BLOCK as usize], hole].concat(),
    ];
    let mut writer = Writer::new(Vec::new());
    writer
        .whole(&Member::Artifact, b"{}")
        .expect("memory has room");
    writer
        .whole(&Member::Manifest, &[b'm'; 600])
        .expect("memory has room");
    let mut seeds = vec![writer.finish().expect("memory has room")];
    for blob in blobs {
        let mut writer = Writer::new(Vec::new());
        writer
            .whole(&Member::Artifact, b"{}")
            .expect("memory has room");
        let map = SparseMap::of_stream(blob.len() as u64, &mut &blob[..])
            .expect("as many bytes as it has");
        writer
            .begin(&Member::Blob(StoreDigest::of(&blob)), &map)
            .expect("memory has room");
        map.pieces().iter().for_each(|piece| {
            writer
                .data(&blob[piece.offset as usize..piece.end() as usize])
                .expect("memory has room");
        });
        seeds.push(writer.finish().expect("memory has room"));
    }
    // The smallest possible frame: one uncompressed block.
    let frame = |archive: &Vec<u8>| {
        let block = ((archive.len() as u32) << 3) | 1;
        [
            &[0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x48][..],
            &block.to_le_bytes()[..3],
            archive,
        ]
        .concat()
    };
    seeds.push(frame(&seeds[0]));
    assert!(
        seeds.iter().all(|seed| rewritten(seed).is_some()),
        "a seed is no archive"
    );
    seeds
}

/// The vector of docs/format.md, and one without memory.
fn manifests() -> Vec<Vec<u8>> {
    let golden = include_bytes!("../../docs/vectors/snapshot-manifest.json").to_vec();
    let (mut disk_only, _) = SnapshotManifest::parse(&golden).expect("the vector is a manifest");
    (disk_only.memory, disk_only.requires) = (None, Vec::new());
    vec![golden, disk_only.to_bytes()]
}

/// Fields and run table of an empty layer, and of one with adjacent and separate runs of data and
/// zeros.
fn layers() -> Vec<Vec<u8>> {
    let fields_and_table = |pages: &[(u64, u8)]| {
        let file = tempfile::tempfile().expect("a temporary file");
        let mut writer = MemoryWriter::new(&file, 64 * PAGE).expect("a possible size");
        let page = |byte| vec![byte; PAGE as usize];
        pages
            .iter()
            .for_each(|(first, byte)| writer.append(*first, &page(*byte)).expect("pages in order"));
        let layer = writer.finish().expect("room for a few pages");
        let mut bytes = vec![0; layer.len_bytes() as usize];
        file.read_exact_at(&mut bytes, 0).expect("what was written");
        [
            &bytes[..LAYER_FIELDS],
            &bytes[(PAGE + layer.data_bytes) as usize..],
        ]
        .concat()
    };
    vec![
        fields_and_table(&[]),
        fields_and_table(&[(1, 7), (2, 0), (3, 7), (9, 7), (20, 0), (63, 7)]),
    ]
}

/// A store with a few snapshots, and their list.
struct Indexed {
    dir: PathBuf,
    store: Store,
    listed: Vec<SnapshotSummary>,
}

static INDEXED: OnceLock<Indexed> = OnceLock::new();

fn make_indexed() -> Indexed {
    let dir = tempfile::tempdir()
        .expect("a temporary directory can be made")
        .keep();
    let store = Store::open(&dir).expect("a store can be made");
    let vector = include_bytes!("../../docs/vectors/snapshot-manifest.json");
    let (manifest, _) = SnapshotManifest::parse(vector).expect("the test vector is good");
    for created_at_unix_ms in 0..20 {
        let bytes = SnapshotManifest {
            created_at_unix_ms,
            ..manifest.clone()
        }
        .to_bytes();
        let snapshot = dir.join("snapshots").join(StoreDigest::of(&bytes).as_str());
        std::fs::create_dir(&snapshot).expect("it is new");
        std::fs::write(snapshot.join("manifest.json"), bytes).expect("it is new");
    }
    let listed = store.list_snapshots().expect("it can be listed").snapshots;
    Indexed { dir, store, listed }
}

/// Removes the files that targets share between runs.
pub fn clean_up() {
    if let Some(Indexed { dir, .. }) = INDEXED.get() {
        std::fs::remove_dir_all(dir).expect("it is ours");
    }
}

fn indexes() -> Vec<Vec<u8>> {
    let good = std::fs::read(INDEXED.get_or_init(make_indexed).dir.join("index.sqlite"))
        .expect("it was listed");
    vec![good, Vec::new(), b"SQLite format 3\0".to_vec()]
}

/// With any index the list is the same, also after the index was rebuilt.
fn index(input: &[u8]) {
    let Indexed { dir, store, listed } = INDEXED.get_or_init(make_indexed);
    std::fs::write(dir.join("index.sqlite"), input).expect("it is ours");
    for _ in 0..2 {
        assert_eq!(
            store.list_snapshots().expect("it can be listed").snapshots,
            *listed
        );
    }
}
