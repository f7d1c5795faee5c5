//! The client and a real registry, with `skopeo` and `umoci` on the other side.

use std::fs::{self, File};
use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use sandtree_registry::{
    Access, Client, Credentials, Descriptor, Document, Error, Fetched, ImageConfig, Index,
    LayerPacking, Limits, Manifest, Platform, Secret, fetch_all, media,
};
use tempfile::TempDir;

use crate::server::{Kind, PASSWORD, Registry, USER, run};
use crate::{Count, client, noise, reference};

const THREADS: NonZeroUsize = NonZeroUsize::new(4).unwrap();

/// An OCI layout with one image of three layers, made by umoci.
pub fn layout(architecture: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let image = image.to_str().unwrap();
    let tagged = format!("{image}:1");
    run("umoci", &["init", "--layout", image]);
    run("umoci", &["new", "--image", &tagged]);
    for layer in 0..3 {
        let file = dir.path().join(format!("file{layer}"));
        fs::write(&file, noise(200_000 + layer, layer as u64)).unwrap();
        let target = format!("/file{layer}");
        run(
            "umoci",
            &[
                "insert",
                "--rootless",
                "--image",
                &tagged,
                file.to_str().unwrap(),
                &target,
            ],
        );
    }
    let config = [
        "--config.env",
        "A=1",
        "--config.user",
        "user",
        "--config.cmd",
        "/bin/app",
    ];
    let mut arguments = vec![
        "config",
        "--image",
        &tagged,
        "--architecture",
        architecture,
        "--os",
        "linux",
    ];
    arguments.extend(config);
    run("umoci", &arguments);
    dir
}

pub fn skopeo(arguments: &[&str]) {
    let mut all = vec![
        "--insecure-policy",
        "copy",
        "--quiet",
        "--src-tls-verify=false",
        "--dest-tls-verify=false",
    ];
    all.extend(arguments);
    run("skopeo", &all);
}

fn from_layout(layout: &TempDir) -> String {
    format!("oci:{}/image:1", layout.path().display())
}

fn manifest(client: &Client, rest: &str) -> (Fetched, Manifest) {
    let fetched = client
        .manifest(&reference(client.registry(), rest))
        .unwrap();
    let Document::Manifest(manifest) =
        Document::parse(&fetched.media_type, &fetched.bytes).unwrap()
    else {
        panic!("{rest} is not a manifest");
    };
    (fetched, *manifest)
}

fn blobs_of(manifest: &Manifest) -> Vec<Descriptor> {
    [manifest.config.clone()]
        .into_iter()
        .chain(manifest.layers.clone())
        .collect()
}

/// Pulls everything by our own hand and by skopeo, and compares byte by byte.
fn pulls_as_skopeo_does(client: &Client, rest: &str) -> ImageConfig {
    let ours = tempfile::tempdir().unwrap();
    let theirs = tempfile::tempdir().unwrap();
    let (fetched, manifest) = manifest(client, rest);
    let (repository, _) = rest.split_once(':').unwrap();
    let count = Count::default();
    let blobs = blobs_of(&manifest);
    let target = |descriptor: &Descriptor| File::create(ours.path().join(descriptor.digest.hex()));
    fetch_all(client, repository, &blobs, THREADS, &target, &count.watch()).unwrap();
    assert_eq!(
        count.bytes(),
        blobs.iter().map(|blob| blob.size).sum::<u64>()
    );
    let dir = format!("dir:{}", theirs.path().display());
    skopeo(&[&format!("docker://{}/{rest}", client.registry()), &dir]);
    assert!(fs::read(theirs.path().join("manifest.json")).unwrap() == fetched.bytes);
    for blob in &blobs {
        let name = blob.digest.hex();
        assert!(
            fs::read(ours.path().join(&name)).unwrap()
                == fs::read(theirs.path().join(&name)).unwrap()
        );
    }
    ImageConfig::parse(&fs::read(ours.path().join(manifest.config.digest.hex())).unwrap()).unwrap()
}

#[test]
fn images_of_both_families_are_pulled_byte_by_byte() {
    let registry = Registry::start(Kind::Open);
    let layout = layout("amd64");
    let client = client(&registry.host, Access::default());
    for (format, kind) in [
        ("oci", media::OCI_MANIFEST),
        ("v2s2", media::DOCKER_MANIFEST),
    ] {
        let to = format!("docker://{}/team/{format}:1", registry.host);
        skopeo(&["--format", format, &from_layout(&layout), &to]);
        let rest = format!("team/{format}:1");
        let (fetched, manifest) = manifest(&client, &rest);
        assert_eq!(fetched.media_type, kind);
        assert_eq!(manifest.layers.len(), 3);
        assert!(
            manifest
                .layers
                .iter()
                .all(|layer| LayerPacking::of(&layer.media_type).unwrap() == LayerPacking::Gzip)
        );
        let config = pulls_as_skopeo_does(&client, &rest);
        assert_eq!(
            (config.config.user.as_str(), config.rootfs.diff_ids.len()),
            ("user", 3)
        );
        assert_eq!(
            (
                config.config.env.last().unwrap().as_str(),
                config.config.cmd.as_slice()
            ),
            ("A=1", &["/bin/app".to_owned()][..])
        );
    }
    assert!(matches!(
        client.manifest(&reference(&registry.host, "team/oci:2")),
        Err(Error::NotFound { .. })
    ));
}

#[test]
fn an_index_leads_each_machine_to_its_image() {
    let registry = Registry::start(Kind::Open);
    let client = client(&registry.host, Access::default());
    let mut index = Index {
        schema_version: 2,
        media_type: Some(media::OCI_INDEX.into()),
        artifact_type: None,
        manifests: vec![],
        annotations: Default::default(),
    };
    for architecture in ["amd64", "arm64"] {
        let to = format!("docker://{}/multi:{architecture}", registry.host);
        skopeo(&[&from_layout(&layout(architecture)), &to]);
        let (fetched, _) = manifest(&client, &format!("multi:{architecture}"));
        let platform = Some(Platform {
            os: "linux".into(),
            architecture: architecture.into(),
            variant: None,
        });
        index.manifests.push(Descriptor {
            platform,
            ..Descriptor::of(&fetched.media_type, &fetched.bytes)
        });
    }
    let bytes = serde_json::to_vec(&index).unwrap();
    let digest = client
        .push_manifest(
            &reference(&registry.host, "multi:all"),
            media::OCI_INDEX,
            &bytes,
        )
        .unwrap();
    let fetched = client
        .manifest(&reference(&registry.host, "multi:all"))
        .unwrap();
    assert_eq!(
        (fetched.digest, fetched.bytes.as_slice()),
        (digest, bytes.as_slice())
    );
    let Document::Index(index) = Document::parse(&fetched.media_type, &fetched.bytes).unwrap()
    else {
        panic!()
    };
    let chosen = index.choose("linux", "arm64", Some("v8")).unwrap();
    let (by_digest, _) = manifest(&client, &format!("multi@{}", chosen.digest));
    assert_eq!(by_digest.digest, manifest(&client, "multi:arm64").0.digest);
    assert!(matches!(
        index.choose("linux", "s390x", None),
        Err(Error::NoPlatform { .. })
    ));
    skopeo(&[
        "--all",
        &format!("docker://{}/multi:all", registry.host),
        &format!("docker://{}/copy:all", registry.host),
    ]);
    assert_eq!(
        client
            .manifest(&reference(&registry.host, "copy:all"))
            .unwrap()
            .digest,
        digest
    );
}

/// An artifact of three layers, of which one is larger than a chunk of these tests.
fn artifact() -> (Manifest, Vec<(Descriptor, Vec<u8>)>) {
    let kind = "application/vnd.example.snapshot";
    let config = (Descriptor::of(media::OCI_EMPTY, b"{}"), b"{}".to_vec());
    let layers = [(700_000, 7), (0, 0), (3_500_001, 9)].map(|(length, seed)| {
        let bytes = noise(length, seed);
        (Descriptor::of(&format!("{kind}.layer"), &bytes), bytes)
    });
    let manifest = Manifest {
        schema_version: 2,
        media_type: Some(media::OCI_MANIFEST.into()),
        artifact_type: Some(kind.into()),
        config: config.0.clone(),
        layers: layers
            .iter()
            .map(|(descriptor, _)| descriptor.clone())
            .collect(),
        subject: None,
        annotations: [("org.example.name".to_owned(), "dev".to_owned())].into(),
    };
    (manifest, [config].into_iter().chain(layers).collect())
}

fn push(
    client: &Client,
    repository: &str,
    blobs: &[(Descriptor, Vec<u8>)],
    count: &Count,
) -> Result<(), Error> {
    for (descriptor, bytes) in blobs {
        let mut open = |from: u64| -> io::Result<Box<dyn Read + Send>> {
            let mut content = Cursor::new(bytes.clone());
            content.seek(SeekFrom::Start(from))?;
            Ok(Box::new(content))
        };
        client.push_blob(repository, descriptor, &mut open, &count.watch())?;
    }
    Ok(())
}

#[test]
fn other_tools_copy_our_artifacts_unchanged() {
    let registry = Registry::start(Kind::Open);
    let client = client(&registry.host, Access::default());
    let (manifest, blobs) = artifact();
    let total = blobs.iter().map(|(blob, _)| blob.size).sum::<u64>();
    let count = Count::default();
    push(&client, "snap/dev", &blobs, &count).unwrap();
    assert_eq!(count.bytes(), total);
    let bytes = serde_json::to_vec(&manifest).unwrap();
    let digest = client
        .push_manifest(
            &reference(&registry.host, "snap/dev:3"),
            media::OCI_MANIFEST,
            &bytes,
        )
        .unwrap();

    let source = format!("docker://{}/snap/dev:3", registry.host);
    skopeo(&[&source, &format!("docker://{}/other/dev:3", registry.host)]);
    assert_eq!(
        client
            .manifest(&reference(&registry.host, "other/dev:3"))
            .unwrap()
            .digest,
        digest
    );
    let dir = tempfile::tempdir().unwrap();
    skopeo(&[&source, &format!("dir:{}", dir.path().display())]);
    assert!(fs::read(dir.path().join("manifest.json")).unwrap() == bytes);
    for (descriptor, bytes) in &blobs {
        assert!(fs::read(dir.path().join(descriptor.digest.hex())).unwrap() == *bytes);
    }
}

#[test]
fn blobs_in_the_registry_are_not_sent_again() {
    let registry = Registry::start(Kind::Open);
    let client = client(&registry.host, Access::default());
    let (_, blobs) = artifact();
    push(&client, "a", &blobs, &Count::default()).unwrap();
    let count = Count::default();
    push(&client, "a", &blobs, &count).unwrap();
    assert_eq!(count.bytes(), 0);
    assert!(client.has_blob("a", &blobs[1].0.digest).unwrap());
    assert!(!client.has_blob("b", &blobs[1].0.digest).unwrap());
}

#[test]
fn a_blob_with_another_digest_than_its_descriptor_is_refused() {
    let registry = Registry::start(Kind::Open);
    let client = client(&registry.host, Access::default());
    let wrong = [(
        Descriptor::of(media::OCI_LAYER, b"right"),
        b"wrong".to_vec(),
    )];
    let error = push(&client, "a", &wrong, &Count::default()).unwrap_err();
    assert!(error.to_string().contains("DIGEST_INVALID"), "{error}");
    assert!(!client.has_blob("a", &wrong[0].0.digest).unwrap());
}

#[test]
fn a_registry_with_passwords_wants_the_right_one() {
    let registry = Registry::start(Kind::Password);
    let with = |password: &str| {
        let credentials = Credentials::Basic {
            username: USER.into(),
            password: Secret::new(password),
        };
        client(
            &registry.host,
            Access {
                credentials,
                ..Access::default()
            },
        )
    };
    let (_, blobs) = artifact();
    push(&with(PASSWORD), "private", &blobs, &Count::default()).unwrap();
    let mut bytes = Vec::new();
    with(PASSWORD)
        .blob("private", &blobs[1].0, &mut bytes, &|_| Ok(()))
        .unwrap();
    assert!(bytes == blobs[1].1);
    for refused in [with("wrong"), client(&registry.host, Access::default())] {
        let error = refused
            .blob("private", &blobs[1].0, &mut bytes, &|_| Ok(()))
            .unwrap_err();
        assert!(matches!(error, Error::Unauthorized { .. }), "{error:?}");
    }
}

#[test]
fn a_registry_with_tls_is_trusted_by_its_ca_file() {
    let registry = Registry::start(Kind::Tls);
    let (_, blobs) = artifact();
    let trusting = client(
        &registry.host,
        Access {
            ca: Some(registry.ca()),
            ..Access::default()
        },
    );
    push(&trusting, "a", &blobs, &Count::default()).unwrap();
    let mut bytes = Vec::new();
    trusting
        .blob("a", &blobs[3].0, &mut bytes, &|_| Ok(()))
        .unwrap();
    assert!(bytes == blobs[3].1);
    let access = Access {
        protocol: sandtree_registry::Protocol::Https,
        ..Access::default()
    };
    let error = client(&registry.host, access)
        .has_blob("a", &blobs[1].0.digest)
        .unwrap_err();
    assert!(matches!(error, Error::Tls { .. }), "{error:?}");
}

#[test]
fn an_unreachable_registry_is_reported() {
    let registry = Registry::start(Kind::Open);
    let client = client(&registry.host, crate::impatient());
    drop(registry);
    let error = client
        .manifest(&reference(client.registry(), "a:1"))
        .unwrap_err();
    assert!(matches!(error, Error::ConnectionLost { .. }), "{error:?}");
}

#[test]
fn a_failed_target_is_named_as_such() {
    let registry = Registry::start(Kind::Open);
    let client = client(&registry.host, Access::default());
    let (_, blobs) = artifact();
    push(&client, "a", &blobs, &Count::default()).unwrap();
    let mut full = File::options()
        .write(true)
        .open(Path::new("/dev/full"))
        .unwrap();
    let error = client
        .blob("a", &blobs[1].0, &mut full, &|_| Ok(()))
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Io {
                operation: "write",
                ..
            }
        ),
        "{error:?}"
    );
}

/// Passes connections on, and cuts so many of them after this many bytes from the client.
fn cutting(to: &str, cuts: u32, after: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let to = to.to_owned();
    let left = Arc::new(AtomicU32::new(cuts));
    thread::spawn(move || {
        for client in listener.incoming() {
            let to = to.clone();
            let left = left.clone();
            thread::spawn(move || pass_on(&client.unwrap(), &to, &left, after));
        }
    });
    host
}

fn pass_on(client: &TcpStream, to: &str, left: &AtomicU32, after: u64) {
    let registry = TcpStream::connect(to).unwrap();
    let mut from = client.try_clone().unwrap();
    let mut back = registry.try_clone().unwrap();
    thread::spawn(move || {
        io::copy(&mut back, &mut from).ok();
        from.shutdown(Shutdown::Both).ok();
    });
    let passed = io::copy(&mut client.take(after), &mut &registry).unwrap_or(0);
    let one_less = |left: u32| left.checked_sub(1).filter(|_| passed == after);
    if left
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less)
        .is_err()
    {
        io::copy(&mut &*client, &mut &registry).ok();
    }
    client.shutdown(Shutdown::Both).ok();
    registry.shutdown(Shutdown::Both).ok();
}

#[test]
fn a_push_that_is_cut_off_again_and_again_arrives() {
    let registry = Registry::start(Kind::Open);
    let (_, blobs) = artifact();
    let large = blobs
        .iter()
        .filter(|(blob, _)| blob.size > 1_000_000)
        .cloned()
        .collect::<Vec<_>>();
    assert!(!large.is_empty());
    for cuts in [1, 2, 3] {
        let host = cutting(&registry.host, cuts, 700_000);
        let limits = Limits {
            chunk_bytes: 300_000,
            ..crate::impatient().limits
        };
        let pushing = client(
            &host,
            Access {
                limits,
                ..Access::default()
            },
        );
        let repository = format!("cut{cuts}");
        push(&pushing, &repository, &large, &Count::default()).unwrap();
        for (blob, bytes) in &large {
            let mut stored = Vec::new();
            client(&registry.host, Access::default())
                .blob(&repository, blob, &mut stored, &|_| Ok(()))
                .unwrap();
            assert!(stored == *bytes);
        }
    }
}
