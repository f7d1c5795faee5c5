//! What the store promises, tested through its own interface.

mod artifact;
mod crash;
mod images;
mod index;
mod model;
mod packing;
mod qemu;
mod residue;
mod snapshots;
mod states;
mod store;

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    AccelChoice, Arch, Consistency, Digest, Error, ExecDefaults, Head, Image, ImageSpec, Init,
    KernelBundle, KernelFormat, KernelSpec, LayerId, MachineRecord, MemoryState, Network, Notes,
    Origin, Owned, Phase, SandboxDir, SandboxId, SandboxRecord, SaveSpec, Silent, Snapshot,
    StateId, StateKind, StateManifest, StateRecord, StateSource, Store, WarmOf, WarmRecord,
};

fn record(name: &str) -> SandboxRecord {
    SandboxRecord {
        schema: SandboxRecord::SCHEMA,
        id: SandboxId::random().unwrap(),
        name: name.parse().unwrap(),
        image: "tiny".parse().unwrap(),
        image_digest: Digest::of(b"image"),
        kernel_digest: Digest::of(b"kernel"),
        arch: Arch::X86_64,
        memory_bytes: 512 << 20,
        cpus: 1,
        disk_bytes: 1 << 30,
        network: Network::Isolated,
        accel: AccelChoice::Auto,
        qemu_args: Vec::new(),
        ports: Vec::new(),
        created_at_unix_ms: 1,
        auto_remove: false,
        memory_dir: None,
        memory_mode: None,
        auto_checkpoint: None,
        snapshot: None,
        cpu: None,
        save_on_stop: None,
        durable: false,
        env: Default::default(),
        nested: false,
        batch: None,
        labels: BTreeMap::new(),
        expiry: None,
        display: None,
    }
}

/// A checkpoint of `disk` with one layer of memory.
fn manifest(disk: Vec<LayerId>, memory: LayerId) -> StateManifest {
    StateManifest {
        schema: StateManifest::SCHEMA,
        id: StateId::random().unwrap(),
        kind: StateKind::Checkpoint,
        tag: None,
        parent: None,
        created_at_unix_ms: 2,
        sequence: 0,
        boot_id: "boot".to_owned(),
        disk,
        disk_bytes: 1 << 30,
        memory: MemoryState::Layers {
            layers: vec![memory],
        },
        ram_bytes: 512 << 20,
        mode: None,
        degraded: Notes::default(),
        memory_layer_bytes: 0,
        disk_layer_bytes: 0,
        pause_us: 1,
        machine: Some(machine()),
        execs: Vec::new(),
        mounts: Vec::new(),
    }
}

fn machine() -> MachineRecord {
    MachineRecord {
        arch: Arch::X86_64,
        machine_type: "pc-q35-7.2".to_owned(),
        cpu: "max".to_owned(),
        accelerator: "tcg".to_owned(),
        qemu_version: "7.2.22".to_owned(),
        cpus: 1,
        network: Network::Isolated,
        qemu_args: Vec::new(),
        cpu_features: Vec::new(),
        tsc_khz: None,
        silent_network: false,
        mounts_port: false,
        display: None,
    }
}

/// A layer that only the store takes for a disk: small, and unlike every other.
fn small_disk(owned: &Owned) -> Result<LayerId, Error> {
    let layer = LayerId::random()?;
    owned
        .files()
        .create(&owned.disk_layer(&layer), layer.as_str().as_bytes())?;
    Ok(layer)
}

/// What a capture does with the store, in its order; `fresh` is the active overlay after it.
fn capture(owned: &Owned, fresh: LayerId, kind: StateKind) -> Result<StateManifest, Error> {
    let memory = LayerId::random()?;
    owned
        .files()
        .create(&owned.memory_layer(&memory), memory.as_str().as_bytes())?;
    let staged = owned.stage_state()?;
    owned
        .files()
        .create(&staged.path().join("devices"), b"devices")?;
    owned.files().create_dir(&staged.path().join("execs"))?;
    owned
        .files()
        .create(&staged.path().join("execs/out"), b"hello")?;
    let head = owned.head()?;
    owned.freeze_disk(head.active().unwrap())?;
    let mut state = manifest(head.disk.clone(), memory);
    (state.kind, state.parent) = (kind, head.parent.clone());
    owned.set_head(&Head {
        disk: [head.disk, vec![fresh]].concat(),
        ..head
    })?;
    owned.publish_state(staged, state)
}

/// What a warm image of a sandbox says of itself.
fn warm_record(owned: &SandboxDir) -> WarmRecord {
    let record = owned.record();
    WarmRecord {
        schema: WarmRecord::SCHEMA,
        of: WarmOf::Image(record.image_digest.clone()),
        memory_bytes: record.memory_bytes,
        cpus: record.cpus,
        network: record.network,
        accelerator: "tcg".to_owned(),
    }
}

/// Whether every file of a state is what its seal says.
fn is_whole(source: &StateSource) -> bool {
    source.digests(&Default::default()).unwrap() == source.sealed().unwrap().unwrap().files
}

/// The layers that the head and the states of a sandbox list.
fn listed(sandbox: &SandboxDir) -> BTreeSet<LayerId> {
    let states = sandbox.states().unwrap().readable;
    let of_states = states
        .iter()
        .flat_map(|state| state.disk.iter().chain(state.memory.layers()));
    of_states
        .cloned()
        .chain(sandbox.head().unwrap().disk)
        .collect()
}

/// The layers that a sandbox has files of.
fn present(sandbox: &SandboxDir) -> BTreeSet<LayerId> {
    let disk = LayerId::random().unwrap();
    let dirs = [sandbox.disk_layer(&disk), sandbox.memory_layer(&disk)];
    let entries = dirs
        .iter()
        .flat_map(|path| sandbox.files().list(path.parent().unwrap()).unwrap());
    entries
        .map(|entry| {
            entry
                .name
                .to_str()
                .unwrap()
                .split('.')
                .next()
                .unwrap()
                .parse()
                .unwrap()
        })
        .collect()
}

fn publish_kernel(store: &Store, kernel: &[u8]) -> KernelBundle {
    let staged = store.stage().unwrap();
    store
        .files
        .create(&staged.path().join("kernel"), kernel)
        .unwrap();
    store
        .files
        .create_dir(&staged.path().join("modules"))
        .unwrap();
    store
        .files
        .create(&staged.path().join("modules/a.ko"), b"module")
        .unwrap();
    let format = KernelFormat::Vmlinux;
    let modules = vec!["a.ko".to_owned()];
    let spec = KernelSpec {
        arch: Arch::X86_64,
        release: "6.1".to_owned(),
        format,
        modules,
    };
    store.publish_kernel(staged, spec).unwrap()
}

/// Publishes a kernel and the image `tiny` on it. The same content in every store.
fn ground(store: &Store) -> Image {
    let kernel = publish_kernel(store, b"kernel");
    let staged = store.stage().unwrap();
    store
        .files
        .create(&staged.path().join("rootfs.raw"), b"root file system")
        .unwrap();
    let init = Init::Agent;
    let defaults = ExecDefaults::default();
    let spec = ImageSpec {
        arch: Arch::X86_64,
        kernel: kernel.digest.clone(),
        init,
        defaults,
        disk_bytes: None,
    };
    let image = store.publish_image(staged, spec).unwrap();
    store
        .set_image_name(&"tiny".parse().unwrap(), &image.digest)
        .unwrap();
    image
}

/// A sandbox of `tiny` that runs.
fn grounded(store: &Store, record: &SandboxRecord) -> Owned {
    let image = ground(store);
    let image_digest = image.digest.clone();
    let kernel_digest = image.record.kernel.clone();
    let record = SandboxRecord {
        image_digest,
        kernel_digest,
        ..record.clone()
    };
    let mut owned = store.create_sandbox(record, Origin::Image).unwrap();
    owned
        .set_state(&StateRecord::new(Phase::Running, 7))
        .unwrap();
    owned
}

/// What is captured and saved next is unlike what was before.
fn write_something(owned: &Owned) {
    let layer = small_disk(owned).unwrap();
    let head = owned.head().unwrap();
    owned
        .set_head(&Head {
            disk: [head.disk, vec![layer]].concat(),
            ..head
        })
        .unwrap();
}

fn spec() -> SaveSpec {
    SaveSpec {
        writer_runs: false,
        labels: [("purpose".to_owned(), "test".to_owned())].into(),
        consistency: Consistency::Exact,
        parent: None,
        created_at_unix_ms: 3,
        compress: false,
        disk_only: false,
        degraded: Vec::new(),
    }
}

/// Whether every byte of a snapshot, its image and its kernel is what it should be. Nothing is
/// moved.
fn assert_whole(store: &Store, snapshot: &Snapshot, what: &str) {
    for blob in snapshot.blobs() {
        let content = store
            .open_blob(blob)
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut content = content;
        let found =
            crate::progress::read_through("blob".as_ref(), &mut *content, &Silent, &mut |_| Ok(()));
        assert_eq!(found.unwrap(), *blob, "{what}");
    }
    let image = &snapshot.manifest.image;
    store
        .image_by_digest(&image.digest)
        .unwrap_or_else(|error| panic!("{what}: {error}"));
    store
        .kernel(&image.kernel)
        .unwrap_or_else(|error| panic!("{what}: {error}"));
}
