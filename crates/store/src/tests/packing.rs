//! Snapshots and images as members by digest: there and back, and what must not come in.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::artifact::{Place, SMALL, Size, compress, flip, image_spec, put_image, put_snapshot};
use crate::artifact::Damage;
use crate::publish::Staged;
use crate::{
    Arch, Digest, Error, ExportSpec, Image, ImageReference, ImageSpec, KernelFormat, KernelSpec,
    Named, Packable, PackedMember, Pinned, Role, Silent, Store, Target,
};

/// More than a read brings.
const LARGE: Size = Size { pages: 600 };

fn read(store: &Store, what: &Packable<'_>, member: &PackedMember) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    store
        .open_member(what, member)
        .unwrap()
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Brings the members that `there` lacks into a staging directory of it.
fn carry(here: &Store, what: &Packable<'_>, there: &Store) -> Staged {
    let staged = there.stage().unwrap();
    for member in here.packing(what).unwrap() {
        if !there.has_member(&member.digest, member.bytes).unwrap() {
            put(&staged, &member.digest, &read(here, what, &member).unwrap());
        }
    }
    staged
}

fn put(staged: &Staged, digest: &Digest, bytes: &[u8]) {
    std::fs::write(staged.path().join(digest.as_str()), bytes).unwrap();
}

fn count(staged: &Staged) -> usize {
    std::fs::read_dir(staged.path()).unwrap().count()
}

fn unpack(store: &Store, snapshot: &Digest, dir: &Staged) -> Result<Pinned, Error> {
    let name = "x".parse().unwrap();
    store.unpack_snapshot(
        snapshot,
        dir.path(),
        Target::Name {
            name: &name,
            replace: false,
        },
        &Silent,
    )
}

/// An image whose kernel has an initial file system, pinned.
fn image_with_initramfs(store: &Store) -> Image {
    let staged = store.stage().unwrap();
    for (file, bytes) in [("kernel", "kernel"), ("initramfs", "cpio")] {
        std::fs::write(staged.path().join(file), bytes).unwrap();
    }
    let release = "6".to_owned();
    let format = KernelFormat::Vmlinux;
    let spec = KernelSpec {
        arch: Arch::X86_64,
        release,
        format,
        modules: Vec::new(),
    };
    let kernel = store.publish_kernel(staged, spec).unwrap();
    let staged = store.stage().unwrap();
    let file = std::fs::File::create(staged.path().join("rootfs.raw")).unwrap();
    file.set_len(1 << 20).unwrap();
    let spec = ImageSpec {
        disk_bytes: Some(2 << 20),
        ..image_spec(&kernel.digest)
    };
    store.publish_image(staged, spec).unwrap()
}

#[test]
fn a_snapshot_with_memory_travels_by_its_members() {
    let here = Place::new();
    let there = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", LARGE, 2);
    compress(&here.store, &snapshot.manifest.disk.layers[0]);
    let what = Packable::Snapshot(&snapshot);
    let members = here.store.packing(&what).unwrap();
    let digests: BTreeSet<_> = members.iter().map(|member| &member.digest).collect();
    assert_eq!(digests.len(), members.len(), "each content once");
    let roles: Vec<_> = members.iter().map(|member| member.role).collect();
    assert!(roles.is_sorted(), "{roles:?}");
    assert_eq!(
        (roles[0], &members[0].digest),
        (Role::Manifest, &snapshot.digest)
    );
    let dir = carry(&here.store, &what, &there.store);
    assert_eq!(count(&dir), members.len());
    let unpacked = unpack(&there.store, &snapshot.digest, &dir).unwrap();
    drop(dir);
    assert_eq!(unpacked.manifest, snapshot.manifest);
    assert_eq!(
        there
            .store
            .verify_snapshot(&snapshot.digest, &Silent)
            .unwrap()
            .damaged,
        []
    );
    assert_eq!(
        there.store.named(&"x".parse().unwrap()).unwrap(),
        Some(Named::Snapshot(snapshot.digest.clone()))
    );
    assert_eq!(
        there.store.packing(&Packable::Snapshot(&unpacked)).unwrap(),
        members
    );
}

#[test]
fn an_image_travels_alone_and_its_holes_stay() {
    let here = Place::new();
    let there = Place::new();
    let image = image_with_initramfs(&here.store);
    let what = Packable::Image(&image);
    let members = here.store.packing(&what).unwrap();
    let roles: Vec<_> = members.iter().map(|member| member.role).collect();
    assert_eq!(
        roles,
        [
            Role::Image,
            Role::Kernel,
            Role::KernelFile,
            Role::Initramfs,
            Role::Rootfs
        ]
    );
    let dir = there.store.stage().unwrap();
    for member in &members {
        let bytes = read(&here.store, &what, member).unwrap();
        there
            .store
            .files
            .create(&dir.path().join(member.digest.as_str()), &bytes)
            .unwrap();
    }
    let unpacked = there
        .store
        .unpack_image(&image.digest, dir.path(), &Silent)
        .unwrap();
    drop(dir);
    assert_eq!(
        (&unpacked.digest, &unpacked.record),
        (&image.digest, &image.record)
    );
    assert!(std::fs::metadata(unpacked.rootfs()).unwrap().blocks() < 16);
    let kernel = there.store.kernel(&image.record.kernel).unwrap();
    assert_eq!(std::fs::read(kernel.initramfs().unwrap()).unwrap(), b"cpio");
    assert_eq!(
        there.store.gc(true).unwrap().removed,
        [],
        "it stays while the result lives"
    );
    drop((unpacked, kernel));
    assert_eq!(there.store.gc(true).unwrap().removed.len(), 2);
}

#[test]
fn an_initial_file_system_is_part_of_artifacts_and_directories() {
    let here = Place::new();
    let there = Place::new();
    let image = image_with_initramfs(&here.store);
    let name = "tiny".parse().unwrap();
    let kernel = image.record.kernel.clone();
    let reference = ImageReference {
        name,
        digest: image.digest.clone(),
        kernel,
    };
    let snapshot = put_snapshot(&here.store, &reference, "a", SMALL, 1);
    let mut artifact = Vec::new();
    here.store
        .export(&snapshot, &ExportSpec::default(), &mut artifact, &Silent)
        .unwrap();
    let imported = there
        .store
        .import(&mut &artifact[..], Target::Unnamed, &Silent)
        .unwrap();
    assert_eq!(
        there
            .store
            .verify_snapshot(&imported.digest, &Silent)
            .unwrap()
            .damaged,
        []
    );
    assert!(
        there
            .store
            .kernel(&reference.kernel)
            .unwrap()
            .initramfs()
            .is_some()
    );
    let dir = there.dir.path().join("dir");
    there
        .store
        .export_dir(&imported, &dir, false, &Silent)
        .unwrap();
    flip(&dir.join("blobs").join(Digest::of(b"cpio").as_str()), 1);
    let damaged = Store::verify_dir(&dir, &Silent).unwrap().damaged;
    assert!(
        matches!(&damaged[..], [found] if found.what.starts_with("kernel ")),
        "{damaged:?}"
    );
}

#[test]
fn what_the_store_has_need_not_come() {
    let here = Place::new();
    let there = Place::new();
    let image = put_image(&here.store, "tiny");
    put_image(&there.store, "tiny");
    let one = put_snapshot(&here.store, &image, "one", SMALL, 1);
    let two = put_snapshot(&here.store, &image, "two", SMALL, 2);
    let dir = carry(&here.store, &Packable::Snapshot(&one), &there.store);
    assert_eq!(count(&dir), 1 + one.blobs().count(), "the image is there");
    let unpacked = unpack(&there.store, &one.digest, &dir).unwrap();
    unpacked
        .blobs()
        .for_each(|blob| compress(&there.store, blob));
    let dir = carry(&here.store, &Packable::Snapshot(&two), &there.store);
    assert_eq!(
        count(&dir),
        3,
        "the manifest, a disk layer and a memory layer"
    );
    let target = Target::Unnamed;
    let unpacked = there
        .store
        .unpack_snapshot(&two.digest, dir.path(), target, &Silent)
        .unwrap();
    assert_eq!(
        there
            .store
            .verify_snapshot(&unpacked.digest, &Silent)
            .unwrap()
            .damaged,
        []
    );
    let nothing = there.store.stage().unwrap();
    drop(
        there
            .store
            .unpack_snapshot(&two.digest, nothing.path(), Target::Unnamed, &Silent)
            .unwrap(),
    );
    drop(
        there
            .store
            .unpack_image(&image.digest, nothing.path(), &Silent)
            .unwrap(),
    );
    assert!(
        !there.store.has_member(&one.digest, 1).unwrap(),
        "of another size"
    );
}

#[test]
fn a_derived_image_takes_its_root_file_system_from_another_one() {
    let here = Place::new();
    let there = Place::new();
    let reference = put_image(&here.store, "tiny");
    put_image(&there.store, "tiny");
    let image = here.store.image_by_digest(&reference.digest).unwrap();
    let spec = ImageSpec {
        init: crate::Init::Image,
        ..image_spec(&reference.kernel)
    };
    let derived = here.store.derive_image(&image, spec).unwrap();
    let dir = carry(&here.store, &Packable::Image(&derived), &there.store);
    assert_eq!(count(&dir), 1, "only its description");
    let unpacked = there
        .store
        .unpack_image(&derived.digest, dir.path(), &Silent)
        .unwrap();
    assert_eq!(unpacked.record, derived.record);
    drop(unpacked);
    // An image that lends a damaged file is put aside, so that the file is not taken from it
    // again.
    drop(there.store.gc(false).unwrap());
    flip(
        &there
            .store
            .image_by_digest(&reference.digest)
            .unwrap()
            .rootfs(),
        5,
    );
    assert!(
        there
            .store
            .unpack_image(&derived.digest, dir.path(), &Silent)
            .is_err()
    );
    assert_eq!(there.put_aside(&format!("image-{}", reference.digest)), 1);
    assert!(
        !there
            .store
            .has_member(&derived.record.rootfs.digest, derived.record.rootfs.bytes)
            .unwrap()
    );
}

/// A store into which nothing comes: after each attempt it holds nothing.
fn refused(there: &Place, dir: &Staged, unpacked: Result<(), Error>, what: &str) -> Error {
    let error = unpacked.expect_err(what);
    let own = dir
        .path()
        .parent()
        .unwrap()
        .file_name()
        .unwrap()
        .to_str()
        .unwrap();
    let left: Vec<_> = there
        .content()
        .into_iter()
        .filter(|path| *path != format!("staging/{own}"))
        .collect();
    assert_eq!(left, Vec::<String>::new(), "{what}: {error}");
    error
}

#[test]
fn a_member_that_is_missing_damaged_or_of_another_size_leaves_nothing() {
    let here = Place::new();
    let there = Place::new();
    let snapshot = put_snapshot(&here.store, &put_image(&here.store, "tiny"), "a", SMALL, 1);
    let what = Packable::Snapshot(&snapshot);
    let dir = carry(&here.store, &what, &there.store);
    let bring = || unpack(&there.store, &snapshot.digest, &dir).map(drop);
    for member in here.store.packing(&what).unwrap() {
        let whole = read(&here.store, &what, &member).unwrap();
        let path = dir.path().join(member.digest.as_str());
        std::fs::remove_file(&path).unwrap();
        let error = refused(&there, &dir, bring(), "a missing member");
        assert!(
            matches!(
                &error,
                Error::Artifact(Damage::Absent { digest }) if *digest == member.digest
            ),
            "{error}"
        );
        let mut bent = whole.clone();
        if let Some(last) = bent.last_mut() {
            *last ^= 1;
            put(&dir, &member.digest, &bent);
            refused(&there, &dir, bring(), "a damaged member");
            put(&dir, &member.digest, &whole[1..]);
            refused(&there, &dir, bring(), "a short member");
        }
        put(&dir, &member.digest, &[&whole[..], b"x"].concat());
        refused(&there, &dir, bring(), "a long member");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        let error = refused(&there, &dir, bring(), "a link");
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        std::fs::remove_file(&path).unwrap();
        put(&dir, &member.digest, &whole);
    }
    put(
        &dir,
        &Digest::of(b"surplus"),
        b"other bytes than its name says",
    );
    bring().unwrap();
}

/// An image of descriptions that somebody wrote, with files that are what they say.
fn hostile(dir: &Staged, image: &str, kernel: &str) -> Digest {
    let bundle = Digest::of(kernel.as_bytes());
    let image = image.replace("KERNEL", bundle.as_str());
    let digest = Digest::of(image.as_bytes());
    put(dir, &bundle, kernel.as_bytes());
    put(dir, &digest, image.as_bytes());
    put(dir, &Digest::of(b"x"), b"x");
    digest
}

#[test]
fn descriptions_that_lead_anywhere_are_refused() {
    let there = Place::new();
    let dir = there.store.stage().unwrap();
    let blob = format!("{{\"bytes\":1,\"digest\":\"{}\"}}", Digest::of(b"x"));
    let kernel = |arch: &str, file: &str| {
        format!(
            "{{\"arch\":\"{arch}\",\"format\":\"vmlinux\",\"kernel\":{blob},\"modules\":[{{\"content\":{blob},\
             \"file\":\"{file}\"}}],\"release\":\"6\",\"schema\":1}}"
        )
    };
    let image = |disk: &str, schema: u32| {
        format!(
            "{{\"arch\":\"x86_64\",\"defaults\":{{\"cmd\":[],\"env\":{{}},\"user\":null,\"workdir\":null}},{disk}\
             \"init\":\"agent\",\"kernel\":\"KERNEL\",\"rootfs\":{blob},\"schema\":{schema}}}"
        )
    };
    let bring = |image: &str, kernel: &str| {
        let digest = hostile(&dir, image, kernel);
        there
            .store
            .unpack_image(&digest, dir.path(), &Silent)
            .map(drop)
    };
    for file in [
        "../kernel",
        "/etc/passwd",
        "",
        ".",
        "..",
        ".hidden",
        "a/b.ko",
    ] {
        let error = refused(
            &there,
            &dir,
            bring(&image("", 1), &kernel("x86_64", file)),
            file,
        );
        assert!(
            matches!(error, Error::Artifact(Damage::Image { .. })),
            "{file}: {error}"
        );
    }
    let sized = image("\"disk_bytes\":1000,", 2);
    for (image, kernel) in [
        (image("", 1), kernel("aarch64", "a.ko")),
        (sized, kernel("x86_64", "a.ko")),
    ] {
        let error = refused(&there, &dir, bring(&image, &kernel), "what does not fit");
        assert!(
            matches!(error, Error::Artifact(Damage::Image { .. })),
            "{error}"
        );
    }
    for image in [image("", 2), image("\"extra\":1,", 1), image("", 7)] {
        refused(
            &there,
            &dir,
            bring(&image, &kernel("x86_64", "a.ko")),
            "what is not canonical",
        );
    }
    bring(&image("", 1), &kernel("x86_64", "a.ko")).unwrap();
}

#[test]
fn a_damaged_member_fails_at_its_end_and_a_layer_is_put_aside() {
    let here = Place::new();
    let image = put_image(&here.store, "tiny");
    let snapshot = put_snapshot(&here.store, &image, "a", LARGE, 1);
    let what = Packable::Snapshot(&snapshot);
    let members = here.store.packing(&what).unwrap();
    let rootfs = members
        .iter()
        .find(|member| member.role == Role::Rootfs)
        .unwrap();
    flip(&rootfs_path(&here.store, &image), 1);
    assert_eq!(
        read(&here.store, &what, rootfs).unwrap_err().kind(),
        ErrorKind::InvalidData
    );
    let layer = members
        .iter()
        .find(|member| member.role == Role::MemoryLayer)
        .unwrap();
    flip(&here.store.layout.layer(&layer.digest), layer.bytes - 1);
    let mut content = here.store.open_member(&what, layer).unwrap();
    let mut bytes = vec![0; layer.bytes as usize];
    assert_eq!(
        content.read_exact(&mut bytes).unwrap_err().kind(),
        ErrorKind::InvalidData
    );
    assert_eq!(
        content.read(&mut bytes).unwrap_err().kind(),
        ErrorKind::InvalidData,
        "also when it is asked again"
    );
    assert_eq!(here.put_aside(&format!("layer-{}", layer.digest)), 1);
    let foreign = PackedMember {
        digest: Digest::of(b"x"),
        bytes: 1,
        role: Role::Output,
    };
    assert!(here.store.open_member(&what, &foreign).is_err());
}

fn rootfs_path(store: &Store, image: &ImageReference) -> std::path::PathBuf {
    let path = store.image_by_digest(&image.digest).unwrap().rootfs();
    assert!(path.starts_with(Path::new(store.root())));
    path
}
