//! Artifacts and snapshot directories: there and back, and everything that must not come in.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::machine;
use crate::artifact::{Damage, Input, Member, Reader, SparseMap, Writer};
use crate::disk::overlay;
use crate::memory::{MemoryWriter, PAGE};
use crate::snapshot::Assembly;
use crate::{
    AccelChoice, Arch, Blob, CaptureRecord, Consistency, Digest, DiskFormat, Error, ExecDefaults,
    ExportSpec, ImageReference, ImageSpec, Init, KernelFormat, KernelSpec, MemoryKind, Name, Named,
    Network, Pinned, Progress, Settings, Silent, Snapshot, SnapshotDisk, SnapshotManifest,
    SnapshotMemory, Store, Target,
};

const CLUSTER: usize = 64 << 10;
const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = MIB;

/// How large the memory of a test's guest is.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub pages: u64,
}

/// Enough for one piece.
pub(super) const SMALL: Size = Size { pages: 24 };
/// More than all the buffers of an export hold.
const LARGE: Size = Size { pages: 3000 };

/// An overlay with one cluster of data.
fn overlay_with(byte: u8) -> Vec<u8> {
    let mut bytes = overlay::empty(DISK_BYTES).unwrap();
    bytes.resize(6 * CLUSTER, 0);
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    let used_once = 1u64 << 63;
    put(
        3 * CLUSTER,
        &((4 * CLUSTER as u64) | used_once).to_be_bytes(),
    );
    put(
        4 * CLUSTER,
        &((5 * CLUSTER as u64) | used_once).to_be_bytes(),
    );
    put(5 * CLUSTER, &[byte; CLUSTER]);
    put(2 * CLUSTER + 8, &[0, 1, 0, 1]);
    bytes
}

fn memory_layer(ram_bytes: u64, pages: std::ops::Range<u64>, byte: u8) -> Vec<u8> {
    let file = tempfile::tempfile().unwrap();
    let mut writer = MemoryWriter::new(&file, ram_bytes).unwrap();
    for page in pages {
        writer
            .append(
                page,
                &vec![byte.wrapping_add(page as u8) | 1; PAGE as usize],
            )
            .unwrap();
    }
    let len = writer.finish().unwrap().len_bytes();
    let mut bytes = vec![0; len as usize];
    crate::fs::ReadAt::read_exact_at(&file, &mut bytes, 0).unwrap();
    bytes
}

/// An image with holes, and a kernel with modules that have equal content.
pub(super) fn put_image(store: &Store, name: &str) -> ImageReference {
    let staged = store.stage().unwrap();
    let files = &store.files;
    files
        .create(&staged.path().join("kernel"), b"kernel")
        .unwrap();
    files.create_dir(&staged.path().join("modules")).unwrap();
    for module in ["a.ko", "b.ko"] {
        files
            .create(&staged.path().join("modules").join(module), b"module")
            .unwrap();
    }
    let modules = vec!["a.ko".to_owned(), "b.ko".to_owned()];
    let spec = KernelSpec {
        arch: Arch::X86_64,
        release: "6".to_owned(),
        format: KernelFormat::Vmlinux,
        modules,
    };
    let kernel = store.publish_kernel(staged, spec).unwrap().digest;
    let staged = store.stage().unwrap();
    let rootfs = [
        vec![7; 100],
        vec![0; 3 * CLUSTER],
        name.as_bytes().to_vec(),
        vec![0; 2 * CLUSTER],
    ]
    .concat();
    files
        .create(&staged.path().join("rootfs.raw"), &rootfs)
        .unwrap();
    let spec = image_spec(&kernel);
    let digest = store.publish_image(staged, spec).unwrap().digest;
    let name: Name = name.parse().unwrap();
    store.set_image_name(&name, &digest).unwrap();
    ImageReference {
        name,
        digest,
        kernel,
    }
}

pub(super) fn image_spec(kernel: &Digest) -> ImageSpec {
    let init = Init::Agent;
    let defaults = ExecDefaults::default();
    ImageSpec {
        arch: Arch::X86_64,
        kernel: kernel.clone(),
        init,
        defaults,
        disk_bytes: None,
    }
}

/// Publishes a snapshot. Those with equal numbers share what the number stands for.
pub(super) fn put_snapshot(
    store: &Store,
    image: &ImageReference,
    name: &str,
    size: Size,
    layers: u8,
) -> Pinned {
    let assembly = Assembly::new(store).unwrap();
    let put = |bytes: Vec<u8>| {
        let blob = Blob {
            digest: Digest::of(&bytes),
            bytes: bytes.len() as u64,
        };
        let path = assembly.plain(&blob.digest);
        if store.files.kind(&path).unwrap().is_none() {
            store.files.create(&path, &bytes).unwrap();
        }
        blob
    };
    let ram_bytes = ((size.pages + 8) * PAGE).next_multiple_of(MIB);
    let memory = SnapshotMemory {
        bytes: ram_bytes,
        kind: MemoryKind::Layers,
        layers: (0..layers)
            .map(|layer| put(memory_layer(ram_bytes, 1..size.pages, layer)))
            .collect(),
        devices: put(b"devices".to_vec()),
        machine: machine(),
        commands: Some(put(b"[]".to_vec())),
        outputs: BTreeMap::from([
            ("t/out".to_owned(), put(b"said".to_vec())),
            ("t/err".to_owned(), put(Vec::new())),
        ]),
    };
    let mut manifest = SnapshotManifest {
        schema: 1,
        requires: Vec::new(),
        created_at_unix_ms: 5,
        parent: None,
        labels: BTreeMap::from([("k".to_owned(), name.to_owned())]),
        image: image.clone(),
        arch: Arch::X86_64,
        settings: settings(ram_bytes),
        disk: SnapshotDisk {
            format: DiskFormat::Qcow2,
            file_system: "ext4".to_owned(),
            bytes: DISK_BYTES,
            layers: (0..layers)
                .map(|layer| put(overlay_with(layer + 1)))
                .collect(),
        },
        memory: Some(memory),
        capture: CaptureRecord {
            mode: None,
            consistency: Consistency::Exact,
            degraded: Vec::new(),
        },
        mounts: Vec::new(),
    };
    manifest.requires = manifest.features();
    let name: Name = name.parse().unwrap();
    assembly
        .publish(
            manifest,
            Target::Name {
                name: &name,
                replace: false,
            },
            None,
        )
        .unwrap()
}

fn settings(memory_bytes: u64) -> Settings {
    Settings {
        memory_bytes,
        cpus: 1,
        disk_bytes: DISK_BYTES,
        network: Network::Isolated,
        accel: AccelChoice::Auto,
        cpu: None,
        display: None,
        qemu_args: Vec::new(),
        ports: Vec::new(),
        memory_mode: None,
        auto_checkpoint: None,
    }
}

/// A store on the real file system.
pub(super) struct Place {
    pub store: Store,
    pub dir: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        Self::below(&std::env::temp_dir())
    }

    fn below(parent: &Path) -> Self {
        let dir = tempfile::tempdir_in(parent).unwrap();
        Self {
            store: Store::open(&dir.path().join("store")).unwrap(),
            dir,
        }
    }

    /// Everything but what never goes away: names of files below the store.
    pub fn content(&self) -> Vec<String> {
        let mut found = Vec::new();
        for dir in [
            "staging",
            "layers",
            "snapshots",
            "images",
            "kernels",
            "names/images",
            "quarantine",
        ] {
            let entries = self.store.files.list(&self.store.root().join(dir)).unwrap();
            found.extend(
                entries
                    .iter()
                    .map(|entry| format!("{dir}/{}", entry.name.to_str().unwrap())),
            );
        }
        found
    }

    fn staging(&self) -> usize {
        self.content()
            .iter()
            .filter(|path| path.starts_with("staging/"))
            .count()
    }

    /// How many things of this name are in quarantine, by its beginning.
    pub fn put_aside(&self, name: &str) -> usize {
        self.content()
            .iter()
            .filter(|path| path.starts_with(&format!("quarantine/{name}")))
            .count()
    }
}

fn plain() -> ExportSpec {
    ExportSpec {
        plain: true,
        ..ExportSpec::default()
    }
}

fn export(store: &Store, snapshot: &Snapshot, spec: &ExportSpec) -> Vec<u8> {
    let mut out = Vec::new();
    let exported = store.export(snapshot, spec, &mut out, &Silent).unwrap();
    assert_eq!(exported.bytes_out, out.len() as u64);
    out
}

fn import(store: &Store, mut artifact: &[u8], name: &str) -> Result<Pinned, Error> {
    store.import(
        &mut artifact,
        Target::Name {
            name: &name.parse().unwrap(),
            replace: false,
        },
        &Silent,
    )
}

fn members(artifact: &[u8]) -> Vec<(Member, SparseMap, Vec<u8>)> {
    let mut reader = Reader::new(Input::new(artifact).unwrap());
    let mut members = Vec::new();
    while let Some(found) = reader.next_member().unwrap() {
        let mut data = vec![0; found.map.data_bytes() as usize];
        assert_eq!(reader.read(&mut data).unwrap(), data.len());
        members.push((found.member, found.map, data));
    }
    members
}

fn archive(members: &[(Member, SparseMap, Vec<u8>)]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    for (member, map, data) in members {
        writer.begin(member, map).unwrap();
        writer.data(data).unwrap();
    }
    writer.finish().unwrap()
}

/// The whole content of a blob of the pool.
fn blob(store: &Store, blob: &Blob) -> Vec<u8> {
    let mut bytes = Vec::new();
    store
        .open_blob(blob)
        .unwrap()
        .read_to_end(&mut bytes)
        .unwrap();
    bytes
}

#[test]
fn a_snapshot_travels_whole_and_its_artifact_is_the_same_everywhere() {
    let here = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", LARGE, 3);
    for spec in [plain(), ExportSpec::default()] {
        let artifact = export(&here.store, &snapshot, &spec);
        assert!(
            export(&here.store, &snapshot, &spec) == artifact,
            "two exports differ"
        );
        // Another file system, where there is one.
        let shm = Path::new("/dev/shm");
        let there = if shm.is_dir() {
            Place::below(shm)
        } else {
            Place::new()
        };
        let imported = import(&there.store, &artifact, "b").unwrap();
        assert_eq!(imported.digest, snapshot.digest);
        assert_eq!(
            there.store.named(&"b".parse().unwrap()).unwrap(),
            Some(Named::Snapshot(snapshot.digest.clone()))
        );
        assert_eq!(imported.manifest, snapshot.manifest);
        for part in snapshot.blobs() {
            assert!(blob(&there.store, part) == blob(&here.store, part));
        }
        let image = &snapshot.manifest.image;
        let rootfs = |store: &Store| {
            std::fs::read(store.image_by_digest(&image.digest).unwrap().rootfs()).unwrap()
        };
        assert!(rootfs(&there.store) == rootfs(&here.store));
        assert_eq!(
            there.store.kernel(&image.kernel).unwrap().modules().count(),
            2
        );
        assert!(
            export(&there.store, &imported, &spec) == artifact,
            "an export after an import differs"
        );
        drop(imported);
        assert_eq!(there.staging(), 0);
    }
    drop(snapshot);
    assert_eq!(here.staging(), 0);
}

#[test]
fn holes_stay_holes() {
    let here = Place::new();
    let there = Place::new();
    let image = put_image(&here.store, "tiny");
    let snapshot = put_snapshot(&here.store, &image, "a", SMALL, 1);
    let rootfs = import(&there.store, &export(&here.store, &snapshot, &plain()), "a").map(|_| {
        std::fs::metadata(there.store.image_by_digest(&image.digest).unwrap().rootfs()).unwrap()
    });
    let rootfs = rootfs.unwrap();
    assert!(
        rootfs.blocks() * 512 < rootfs.len() / 2,
        "{} of {} bytes are allocated",
        rootfs.blocks() * 512,
        rootfs.len()
    );
}

#[test]
fn what_is_compressed_in_the_pool_makes_the_same_artifact() {
    let here = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", LARGE, 2);
    let artifact = export(&here.store, &snapshot, &plain());
    snapshot
        .blobs()
        .for_each(|blob| compress(&here.store, blob));
    assert!(export(&here.store, &snapshot, &plain()) == artifact);
    assert_eq!(
        import(&here.store, &artifact, "b").unwrap().digest,
        snapshot.digest
    );
}

/// What a save with compression leaves in the pool.
pub(super) fn compress(store: &Store, blob: &Blob) {
    let plain = store.layout.layer(&blob.digest);
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.set_pledged_src_size(Some(blob.bytes)).unwrap();
    encoder.include_contentsize(true).unwrap();
    encoder.write_all(&std::fs::read(&plain).unwrap()).unwrap();
    std::fs::write(
        store.layout.compressed_layer(&blob.digest),
        encoder.finish().unwrap(),
    )
    .unwrap();
    std::fs::remove_file(plain).unwrap();
}

#[test]
fn an_artifact_without_its_image_needs_that_image() {
    let here = Place::new();
    let there = Place::new();
    let image = put_image(&here.store, "tiny");
    let snapshot = put_snapshot(&here.store, &image, "a", SMALL, 1);
    let artifact = export(
        &here.store,
        &snapshot,
        &ExportSpec {
            without_image: true,
            ..plain()
        },
    );
    let refused = import(&there.store, &artifact, "b").unwrap_err();
    assert!(
        matches!(
            &refused,
            Error::MissingImage { digest, here: None, .. } if *digest == image.digest
        ),
        "{refused}"
    );
    // The same name, for another image.
    let staged = there.store.stage().unwrap();
    there
        .store
        .files
        .create(&staged.path().join("rootfs.raw"), b"another")
        .unwrap();
    let spec = image_spec(&image.kernel);
    let other = there.store.publish_image(staged, spec).unwrap().digest;
    there.store.set_image_name(&image.name, &other).unwrap();
    let refused = import(&there.store, &artifact, "b")
        .unwrap_err()
        .to_string();
    for part in ["tiny", image.digest.as_str(), other.as_str()] {
        assert!(refused.contains(part), "{refused}");
    }
    assert_eq!(there.staging(), 0);
    let alike = Place::new();
    put_image(&alike.store, "tiny");
    assert_eq!(
        import(&alike.store, &artifact, "b").unwrap().digest,
        snapshot.digest
    );
}

#[test]
fn an_artifact_since_a_snapshot_holds_only_what_that_one_lacks() {
    let here = Place::new();
    let there = Place::new();
    let image = put_image(&here.store, "tiny");
    let base = put_snapshot(&here.store, &image, "base", LARGE, 1);
    let next = put_snapshot(&here.store, &image, "next", LARGE, 2);
    let since = ExportSpec {
        since: Some(base.digest.clone()),
        ..plain()
    };
    let artifact = export(&here.store, &next, &since);
    assert_eq!(
        members(&artifact).len(),
        4,
        "two records, a disk layer and a memory layer"
    );
    let refused = import(&there.store, &artifact, "next").unwrap_err();
    assert!(
        matches!(&refused, Error::MissingBase { base: missing } if *missing == base.digest),
        "{refused}"
    );
    assert_eq!(there.content(), Vec::<String>::new());
    drop(import(&there.store, &export(&here.store, &base, &plain()), "base").unwrap());
    assert_eq!(
        import(&there.store, &artifact, "next").unwrap().digest,
        next.digest
    );
    assert!(export(&there.store, &next, &plain()) == export(&here.store, &next, &plain()));
}

#[test]
fn a_base_that_is_damaged_is_found_and_put_aside() {
    let here = Place::new();
    let there = Place::new();
    let image = put_image(&here.store, "tiny");
    let base = put_snapshot(&here.store, &image, "base", SMALL, 1);
    let next = put_snapshot(&here.store, &image, "next", SMALL, 2);
    drop(import(&there.store, &export(&here.store, &base, &plain()), "base").unwrap());
    let layer = base.manifest.memory.as_ref().unwrap().layers[0].clone();
    flip(&there.store.layout.layer(&layer.digest), layer.bytes / 2);
    let artifact = export(
        &here.store,
        &next,
        &ExportSpec {
            since: Some(base.digest.clone()),
            ..plain()
        },
    );
    let refused = import(&there.store, &artifact, "next").unwrap_err();
    assert!(
        matches!(&refused, Error::Corrupt { path, .. } if path.to_str().unwrap().contains("quarantine")),
        "{refused}"
    );
    assert_eq!(there.staging(), 0);
    assert!(
        there
            .store
            .named(&"next".parse().unwrap())
            .unwrap()
            .is_none()
    );
}

/// A way to bring a snapshot into a store that has it.
type Bring<'a> = &'a dyn Fn(&Store, Target<'_>) -> Result<Pinned, Error>;

/// Damages what the store has of a snapshot; whatever brings it in again heals it, and keeps what
/// was there.
#[track_caller]
fn heals(bring: Bring<'_>, there: &Place, path: &Path, aside: &str) {
    let before = there.put_aside(aside);
    flip(path, std::fs::metadata(path).unwrap().len() / 2);
    let brought = bring(&there.store, Target::Unnamed).unwrap();
    let found = there
        .store
        .verify_snapshot(&brought.digest, &Silent)
        .unwrap();
    assert_eq!(found.damaged, [], "{}", path.display());
    assert_eq!(there.put_aside(aside), before + 1, "{}", path.display());
}

#[test]
fn what_the_store_has_is_read_by_an_import_and_healed() {
    let here = Place::new();
    let there = Place::new();
    let image = put_image(&here.store, "tiny");
    let snapshot = put_snapshot(&here.store, &image, "a", SMALL, 1);
    let artifact = export(&here.store, &snapshot, &plain());
    let dir = here.dir.path().join("dir");
    here.store
        .export_dir(&snapshot, &dir, false, &Silent)
        .unwrap();
    drop(import(&there.store, &artifact, "a").unwrap());
    let layer = snapshot.manifest.disk.layers[0].clone();
    let layout = &there.store.layout;
    let ways: [Bring<'_>; 2] = [
        &|store, target| store.import(&mut &artifact[..], target, &Silent),
        &|store, target| store.import_dir(&dir, target, &Silent),
    ];
    for bring in ways {
        let image_aside = format!("image-{}", image.digest);
        let kernel_aside = format!("kernel-{}", image.kernel);
        heals(
            bring,
            &there,
            &layout.layer(&layer.digest),
            &format!("layer-{}", layer.digest),
        );
        heals(
            bring,
            &there,
            &layout.image(&image.digest).join("rootfs.raw"),
            &image_aside,
        );
        heals(
            bring,
            &there,
            &layout.kernel(&image.kernel).join("kernel"),
            &kernel_aside,
        );
        heals(
            bring,
            &there,
            &layout.kernel(&image.kernel).join("modules/b.ko"),
            &kernel_aside,
        );
        compress(&there.store, &layer);
        heals(
            bring,
            &there,
            &layout.compressed_layer(&layer.digest),
            &format!("layer-{}", layer.digest),
        );
        let before = there.put_aside("");
        drop(bring(&there.store, Target::Unnamed).unwrap());
        assert_eq!(there.put_aside(""), before, "what is whole is left alone");
    }
}

#[test]
fn a_directory_is_not_read_for_what_the_store_has_whole() {
    let here = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", SMALL, 1);
    let dir = here.dir.path().join("dir");
    here.store
        .export_dir(&snapshot, &dir, false, &Silent)
        .unwrap();
    let layer = &snapshot.manifest.disk.layers[0];
    flip(&dir.join("blobs").join(layer.digest.as_str()), 1);
    drop(
        here.store
            .import_dir(&dir, Target::Unnamed, &Silent)
            .unwrap(),
    );
    // With both of them damaged, there is nothing to publish.
    flip(&here.store.layout.layer(&layer.digest), 1);
    let refused = here
        .store
        .import_dir(&dir, Target::Unnamed, &Silent)
        .unwrap_err();
    assert!(
        matches!(refused, Error::Artifact(Damage::Content { .. })),
        "{refused}"
    );
}

/// Changes one bit of a file that is read-only.
pub(super) fn flip(path: &Path, at: u64) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at as usize] ^= 1;
    std::fs::remove_file(path).unwrap();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_layer_is_not_exported_but_put_aside() {
    let here = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", LARGE, 1);
    let layer = snapshot.manifest.disk.layers[0].clone();
    flip(&here.store.layout.layer(&layer.digest), layer.bytes - 1);
    not_exported(&here, &snapshot, &layer);
}

#[test]
fn a_damaged_frame_is_not_exported_but_put_aside() {
    let here = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", LARGE, 1);
    let layer = snapshot.manifest.disk.layers[0].clone();
    compress(&here.store, &layer);
    let frame = here.store.layout.compressed_layer(&layer.digest);
    let bytes = std::fs::read(&frame).unwrap();
    std::fs::write(&frame, &bytes[..bytes.len() / 2]).unwrap();
    not_exported(&here, &snapshot, &layer);
}

fn not_exported(here: &Place, snapshot: &Snapshot, layer: &Blob) {
    let failed = here
        .store
        .export(snapshot, &plain(), &mut std::io::sink(), &Silent)
        .unwrap_err();
    assert!(
        matches!(
            &failed,
            Error::Corrupt { path, .. } if path.starts_with(here.store.layout.quarantine())
        ),
        "{failed}"
    );
    assert!(here.store.find_blob(layer).is_err());
}

/// A store into which nothing comes: after each attempt it is what it was.
struct Closed(Place);

impl Closed {
    fn refused(&self, artifact: &[u8], what: &str) -> Error {
        let error = match import(&self.0.store, artifact, "x") {
            Ok(_) => panic!("{what} was accepted"),
            Err(error) => error,
        };
        assert_eq!(self.0.content(), Vec::<String>::new(), "{what}: {error}");
        error
    }
}

fn closed() -> Closed {
    Closed(Place::new())
}

/// Where each member of an archive begins, and how long its headers and all of it are.
fn places(archive: &[u8]) -> Vec<(usize, usize, usize)> {
    let mut at = 0;
    let place = |(member, map, data): (Member, SparseMap, Vec<u8>)| {
        let mut alone = Writer::new(Vec::new());
        alone.begin(&member, &map).unwrap();
        alone.data(&data).unwrap();
        let start = at;
        let bytes = alone.finish().unwrap().len() - 1024;
        at += bytes;
        (start, bytes - data.len().next_multiple_of(512), bytes)
    };
    let places = members(archive).into_iter().map(place).collect();
    assert_eq!(at + 1024, archive.len());
    places
}

#[test]
fn an_artifact_that_is_cut_anywhere_leaves_nothing() {
    let here = Place::new();
    let closed = closed();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", SMALL, 1);
    let whole = export(&here.store, &snapshot, &plain());
    for (start, header, bytes) in places(&whole) {
        for cut in [
            0,
            1,
            300,
            header,
            header + 1,
            (header + bytes) / 2,
            bytes - 1,
        ] {
            closed.refused(&whole[..start + cut], &format!("a cut at {start} + {cut}"));
        }
    }
    for behind in [1, 511, 512, 513, 1024] {
        closed.refused(
            &whole[..whole.len() - behind],
            &format!("a cut {behind} before the end"),
        );
    }
    let compressed = export(&here.store, &snapshot, &ExportSpec::default());
    for at in (0..compressed.len()).step_by(compressed.len() / 40) {
        closed.refused(
            &compressed[..at],
            &format!("a cut of the compressed at {at}"),
        );
    }
}

#[test]
fn an_artifact_with_a_flipped_bit_leaves_nothing() {
    let here = Place::new();
    let closed = closed();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", SMALL, 1);
    let whole = export(&here.store, &snapshot, &plain());
    for (start, header, bytes) in places(&whole) {
        for at in [
            0,
            130,
            150,
            header - 1,
            header,
            (header + bytes) / 2,
            bytes - 1,
        ]
        .into_iter()
        .filter(|at| *at < bytes)
        {
            let mut bent = whole.clone();
            bent[start + at] ^= 4;
            closed.refused(&bent, &format!("a bit flipped at {start} + {at}"));
        }
    }
}

#[test]
fn members_out_of_order_twice_missing_or_foreign_are_refused() {
    let here = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", SMALL, 1);
    let members = members(&export(&here.store, &snapshot, &plain()));
    let closed = closed();
    let damage = |members: &[_], what: &str| match closed.refused(&archive(members), what) {
        Error::Artifact(damage) => damage,
        other => panic!("{what}: {other}"),
    };
    let mut swapped = members.clone();
    swapped.swap(4, 5);
    assert!(matches!(damage(&swapped, "a swap"), Damage::Order { .. }));
    for index in 1..members.len() {
        let twice = [&members[..=index], &members[index..]].concat();
        assert!(matches!(
            damage(&twice, "a duplicate"),
            Damage::Twice { .. }
        ));
        let missing = [&members[..index], &members[index + 1..]].concat();
        assert!(matches!(
            damage(&missing, "a gap"),
            Damage::Order { .. } | Damage::Missing { .. }
        ));
    }
    let foreign = (
        Member::Blob(Digest::of(b"x")),
        SparseMap::dense(1),
        b"x".to_vec(),
    );
    assert!(matches!(
        damage(
            &[&members[..], std::slice::from_ref(&foreign)].concat(),
            "a stranger"
        ),
        Damage::Surplus { .. }
    ));
    let first = [&[foreign][..], &members].concat();
    assert!(matches!(
        closed.refused(&archive(&first), "a stranger at first"),
        Error::Artifact(_)
    ));
}

#[test]
fn sizes_are_those_of_the_manifest() {
    let here = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", SMALL, 1);
    let members = members(&export(&here.store, &snapshot, &plain()));
    let closed = closed();
    for index in 0..members.len() {
        let mut more = members.clone();
        let data = [&more[index].2[..], &[1; 4096]].concat();
        (more[index].1, more[index].2) = (SparseMap::dense(data.len() as u64), data);
        let error = closed.refused(&archive(&more), "more than declared");
        assert!(
            index < 5 || matches!(error, Error::Artifact(Damage::Bytes { .. })),
            "{index}: {error}"
        );
    }
}

/// A manifest with a change, in an artifact that is otherwise right.
fn with_manifest(
    members: &[(Member, SparseMap, Vec<u8>)],
    change: impl FnOnce(&mut SnapshotManifest),
) -> Vec<u8> {
    let (mut manifest, old) = SnapshotManifest::parse(&members[1].2).unwrap();
    change(&mut manifest);
    let bytes = manifest.to_bytes();
    let record = String::from_utf8(members[0].2.clone())
        .unwrap()
        .replace(old.as_str(), Digest::of(&bytes).as_str());
    let mut members = members.to_vec();
    for (member, content) in members.iter_mut().zip([record.into_bytes(), bytes]) {
        (member.1, member.2) = (SparseMap::dense(content.len() as u64), content);
    }
    archive(&members)
}

#[test]
fn layers_that_are_none_are_refused_although_their_digests_are_right() {
    let here = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", SMALL, 1);
    let members = members(&export(&here.store, &snapshot, &plain()));
    assert_eq!(with_manifest(&members, |_| ()), archive(&members));
    let smaller = with_manifest(&members, |manifest| manifest.disk.bytes = DISK_BYTES / 2);
    assert!(matches!(
        closed().refused(&smaller, "a smaller disk"),
        Error::Artifact(Damage::DiskBytes { .. })
    ));
    let other_ram = with_manifest(&members, |manifest| {
        manifest.settings.memory_bytes += MIB;
        manifest.memory.as_mut().unwrap().bytes += MIB;
    });
    assert!(matches!(
        closed().refused(&other_ram, "another memory"),
        Error::Artifact(Damage::RamBytes { .. })
    ));
    // The layers of disk and memory trade places.
    let mut traded = members.clone();
    let layers = [
        &snapshot.manifest.disk.layers[0],
        &snapshot.manifest.memory.as_ref().unwrap().layers[0],
    ];
    let at = layers.map(|layer| {
        traded
            .iter()
            .position(|(name, ..)| *name == Member::Blob(layer.digest.clone()))
            .unwrap()
    });
    traded.swap(at[0], at[1]);
    let traded = with_manifest(&traded, |manifest| {
        std::mem::swap(
            &mut manifest.disk.layers[0],
            &mut manifest.memory.as_mut().unwrap().layers[0],
        );
    });
    assert!(matches!(
        closed().refused(&traded, "memory as a disk"),
        Error::DiskLayer { layer: 0, .. }
    ));
}

#[test]
fn claims_that_no_disk_can_hold_are_refused_before_anything_is_written() {
    let here = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", SMALL, 1);
    let members = members(&export(&here.store, &snapshot, &plain()));
    let huge = with_manifest(&members, |manifest| {
        manifest.memory.as_mut().unwrap().devices.bytes = 1 << 52
    });
    let error = closed().refused(&huge, "four petabytes");
    assert!(
        matches!(error, Error::NotEnoughSpace { needed_bytes, .. } if needed_bytes >= 1 << 52),
        "{error}"
    );
}

/// Cancelled once some bytes went through.
struct CancelAt(std::sync::atomic::AtomicI64);

impl Progress for CancelAt {
    fn begin(&self, _: u64) {}

    fn advance(&self, bytes: u64) {
        self.0
            .fetch_sub(bytes as i64, std::sync::atomic::Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.0.load(std::sync::atomic::Ordering::Relaxed) < 0
    }
}

#[test]
fn cancelling_leaves_nothing() {
    let here = Place::new();
    let there = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", LARGE, 1);
    let artifact = export(&here.store, &snapshot, &plain());
    let cancel = || CancelAt((snapshot.bytes() as i64 / 2).into());
    let imported = there
        .store
        .import(&mut &artifact[..], Target::Unnamed, &cancel());
    assert!(matches!(imported, Err(Error::Cancelled)));
    assert_eq!(there.content(), Vec::<String>::new());
    let out = here.dir.path().join("out");
    assert!(matches!(
        here.store.export_dir(&snapshot, &out, false, &cancel()),
        Err(Error::Cancelled)
    ));
    assert_eq!(
        std::fs::read_dir(here.dir.path()).unwrap().count(),
        1,
        "only the store is there"
    );
}

#[test]
fn a_taken_name_is_refused_before_anything_is_read() {
    let here = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", SMALL, 1);
    let artifact = export(&here.store, &snapshot, &plain());
    assert!(matches!(
        import(&here.store, &artifact[..4], "a"),
        Err(Error::NameInUse { .. })
    ));
}

#[test]
fn a_directory_is_a_snapshot_that_any_copy_of_it_is_too() {
    let here = Place::new();
    let there = Place::new();
    let image = put_image(&here.store, "tiny");
    let snapshot = put_snapshot(&here.store, &image, "a", LARGE, 2);
    let dir = here.dir.path().join("dir");
    let copy = there.dir.path().join("copy");
    here.store
        .export_dir(&snapshot, &dir, false, &Silent)
        .unwrap();
    assert!(
        std::process::Command::new("cp")
            .arg("-r")
            .args([&dir, &copy])
            .status()
            .unwrap()
            .success()
    );
    for dir in [&dir, &copy] {
        assert_eq!(Store::read_dir_snapshot(dir).unwrap(), *snapshot);
        let verified = Store::verify_dir(dir, &Silent).unwrap();
        assert_eq!(verified.damaged, []);
        assert!(verified.bytes > snapshot.bytes());
    }
    let imported = there.store.import_dir(
        &copy,
        Target::Name {
            name: &"b".parse().unwrap(),
            replace: false,
        },
        &Silent,
    );
    assert_eq!(imported.unwrap().digest, snapshot.digest);
    assert!(export(&there.store, &snapshot, &plain()) == export(&here.store, &snapshot, &plain()));
    // The store has a copy of its own: what becomes of the directory does not matter.
    for entry in std::fs::read_dir(copy.join("blobs")).unwrap() {
        std::fs::write(entry.unwrap().path(), b"changed").unwrap();
    }
    assert!(export(&there.store, &snapshot, &plain()) == export(&here.store, &snapshot, &plain()));
}

#[test]
fn a_directory_is_replaced_only_if_it_is_a_snapshot_and_that_is_asked_for() {
    let here = Place::new();
    let image = put_image(&here.store, "tiny");
    let old = put_snapshot(&here.store, &image, "a", SMALL, 1);
    let new = put_snapshot(&here.store, &image, "b", SMALL, 2);
    let dir = here.dir.path().join("dir");
    here.store.export_dir(&old, &dir, false, &Silent).unwrap();
    let again = here
        .store
        .export_dir(&new, &dir, false, &Silent)
        .unwrap_err();
    assert_eq!(again.io_kind(), Some(std::io::ErrorKind::AlreadyExists));
    assert_eq!(Store::read_dir_snapshot(&dir).unwrap().digest, old.digest);
    here.store.export_dir(&new, &dir, true, &Silent).unwrap();
    assert_eq!(Store::read_dir_snapshot(&dir).unwrap().digest, new.digest);
    let other = here.dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("precious"), b"x").unwrap();
    for path in [&other, &other.join("precious")] {
        let refused = here.store.export_dir(&new, path, true, &Silent);
        assert!(matches!(refused, Err(Error::NotASnapshotDir { .. })));
    }
    assert_eq!(std::fs::read(other.join("precious")).unwrap(), b"x");
    assert_eq!(
        std::fs::read_dir(here.dir.path()).unwrap().count(),
        3,
        "store, dir and other"
    );
}

#[test]
fn a_directory_with_a_file_of_somebody_else_is_neither_replaced_nor_removed() {
    let here = Place::new();
    let image = put_image(&here.store, "tiny");
    let old = put_snapshot(&here.store, &image, "a", SMALL, 1);
    let new = put_snapshot(&here.store, &image, "b", SMALL, 2);
    let dir = here.dir.path().join("dir");
    here.store.export_dir(&old, &dir, false, &Silent).unwrap();
    let digest = Digest::of(b"elsewhere");
    for foreign in [
        "notes.txt",
        "blobs/notes.txt",
        &format!("blobs/{digest}/deep"),
        "sub/manifest.json",
        ".hidden",
    ] {
        let path = dir.join(foreign);
        let entry = foreign.strip_suffix("/deep").unwrap_or(foreign);
        let entry = entry.strip_suffix("/manifest.json").unwrap_or(entry);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, b"mine").unwrap();
        for refused in [
            here.store
                .export_dir(&new, &dir, true, &Silent)
                .unwrap_err(),
            Store::remove_dir_snapshot(&dir).unwrap_err(),
        ] {
            assert!(matches!(
                &refused,
                Error::NotASnapshotDir { foreign: Some(found), .. } if found == Path::new(entry)
            ));
            assert!(refused.to_string().contains(entry), "{refused}");
        }
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        assert_eq!(Store::read_dir_snapshot(&dir).unwrap().digest, old.digest);
        here.store.files.remove_tree(&dir.join(entry)).unwrap();
    }
    std::os::unix::fs::symlink("/etc/passwd", dir.join("blobs").join(digest.as_str())).unwrap();
    assert!(matches!(
        Store::remove_dir_snapshot(&dir),
        Err(Error::NotASnapshotDir {
            foreign: Some(_),
            ..
        })
    ));
    std::fs::remove_file(dir.join("blobs").join(digest.as_str())).unwrap();
    here.store.export_dir(&new, &dir, true, &Silent).unwrap();
    Store::remove_dir_snapshot(&dir).unwrap();
    assert_eq!(
        std::fs::read_dir(here.dir.path()).unwrap().count(),
        1,
        "only the store is there"
    );
}

#[test]
fn what_an_interrupted_export_left_beside_is_in_nobodys_way() {
    let here = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", SMALL, 1);
    let dir = here.dir.path().join("dir");
    let left = here.dir.path().join(".dir.sandtree-0123456789abcdef");
    std::fs::create_dir(&left).unwrap();
    assert!(matches!(
        Store::read_dir_snapshot(&left),
        Err(Error::NotASnapshotDir { .. })
    ));
    here.store
        .export_dir(&snapshot, &dir, false, &Silent)
        .unwrap();
    assert_eq!(
        Store::read_dir_snapshot(&dir).unwrap().digest,
        snapshot.digest
    );
    assert!(
        left.exists(),
        "it is not ours to remove: another export may be at work there"
    );
}

#[test]
fn damage_in_a_directory_is_named_and_does_not_come_in() {
    let here = Place::new();
    let there = Place::new();
    let image = put_image(&here.store, "tiny");
    let snapshot = put_snapshot(&here.store, &image, "a", SMALL, 1);
    let dir = here.dir.path().join("dir");
    let rootfs = here
        .store
        .image_by_digest(&image.digest)
        .unwrap()
        .record
        .rootfs
        .digest;
    let blobs: Vec<_> = snapshot
        .blobs()
        .filter(|blob| blob.bytes > 0)
        .map(|blob| blob.digest.clone())
        .collect();
    for digest in blobs.iter().chain([&rootfs, &image.digest, &image.kernel]) {
        here.store
            .export_dir(&snapshot, &dir, dir.exists(), &Silent)
            .unwrap();
        flip(&dir.join("blobs").join(digest.as_str()), 1);
        let verified = Store::verify_dir(&dir, &Silent).unwrap();
        let named = if [&rootfs, &image.kernel].contains(&digest) {
            &image.digest
        } else {
            digest
        };
        assert!(
            matches!(&verified.damaged[..], [found] if found.what.contains(named.as_str())),
            "{verified:?}"
        );
        assert!(
            there
                .store
                .import_dir(&dir, Target::Unnamed, &Silent)
                .is_err()
        );
        assert_eq!(there.content(), Vec::<String>::new());
    }
    here.store
        .export_dir(&snapshot, &dir, true, &Silent)
        .unwrap();
    std::fs::remove_file(dir.join("blobs").join(blobs[0].as_str())).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", dir.join("blobs").join(blobs[0].as_str())).unwrap();
    assert!(matches!(
        there.store.import_dir(&dir, Target::Unnamed, &Silent),
        Err(Error::Corrupt { .. })
    ));
    assert!(matches!(
        Store::read_dir_snapshot(&dir),
        Err(Error::Corrupt { .. })
    ));
    std::fs::write(dir.join("manifest.json"), b"{}").unwrap();
    let verified = Store::verify_dir(&dir, &Silent).unwrap();
    assert_eq!(verified.damaged[0].what, "manifest");
}
