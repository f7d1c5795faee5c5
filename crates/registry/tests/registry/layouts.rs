//! Images in directories, made by umoci and skopeo, and directories that lie.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use sandtree_registry::{Digest, Error, Layout, Platform};
use serde_json::json;

use crate::real::{layout, skopeo};
use crate::server::run;

fn machine(architecture: &str) -> Platform {
    Platform {
        os: "linux".into(),
        architecture: architecture.into(),
        variant: None,
    }
}

/// Every layer is the file that its descriptor says.
fn all_layers_are_right(layout: &Layout, tag: Option<&str>) {
    let (manifest, config) = layout.choose(&machine("amd64"), tag).unwrap();
    assert_eq!(
        (manifest.layers.len(), config.config.user.as_str()),
        (3, "user")
    );
    for layer in &manifest.layers {
        let bytes = fs::read(layout.blob(layer).unwrap()).unwrap();
        assert_eq!(
            (bytes.len() as u64, Digest::of(&bytes)),
            (layer.size, layer.digest)
        );
    }
}

#[test]
fn an_oci_layout_is_read() {
    let dir = layout("amd64");
    let opened = Layout::open(&dir.path().join("image")).unwrap();
    all_layers_are_right(&opened, None);
    all_layers_are_right(&opened, Some("1"));
    assert!(matches!(
        opened.choose(&machine("amd64"), Some("2")),
        Err(Error::NotFound { .. })
    ));
    assert!(matches!(
        opened.choose(&machine("arm64"), None),
        Err(Error::NoPlatform { .. })
    ));
}

#[test]
fn several_images_are_distinguished_by_their_tags() {
    let dir = layout("amd64");
    let image = dir.path().join("image");
    let tagged = format!("{}:1", image.display());
    run("umoci", &["tag", "--image", &tagged, "same"]);
    all_layers_are_right(&Layout::open(&image).unwrap(), None);
    run(
        "umoci",
        &[
            "config",
            "--image",
            &tagged,
            "--tag",
            "other",
            "--config.user",
            "other",
        ],
    );
    let opened = Layout::open(&image).unwrap();
    assert!(matches!(
        opened.choose(&machine("amd64"), None),
        Err(Error::File { .. })
    ));
    assert_eq!(
        opened
            .choose(&machine("amd64"), Some("other"))
            .unwrap()
            .1
            .config
            .user,
        "other"
    );
    all_layers_are_right(&opened, Some("same"));
}

#[test]
fn a_damaged_document_is_found() {
    let dir = layout("amd64");
    let opened = Layout::open(&dir.path().join("image")).unwrap();
    let (manifest, _) = opened.choose(&machine("amd64"), None).unwrap();
    let path = opened.blob(&manifest.config).unwrap();
    let bytes = fs::read_to_string(&path)
        .unwrap()
        .replace("\"user\"", "\"root\"");
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    assert!(matches!(
        opened.choose(&machine("amd64"), None),
        Err(Error::WrongDigest { .. })
    ));
}

#[test]
fn an_unpacked_docker_archive_is_read() {
    let dir = layout("amd64");
    let source = format!("oci:{}/image:1", dir.path().display());
    let archive = dir.path().join("archive.tar");
    skopeo(&[
        &source,
        &format!("docker-archive:{}:team/app:1.2", archive.display()),
    ]);
    let unpacked = dir.path().join("unpacked");
    fs::create_dir(&unpacked).unwrap();
    run(
        "tar",
        &[
            "-xf",
            archive.to_str().unwrap(),
            "-C",
            unpacked.to_str().unwrap(),
        ],
    );
    let opened = Layout::open(&unpacked).unwrap();
    all_layers_are_right(&opened, None);
    all_layers_are_right(&opened, Some("1.2"));
    assert!(matches!(
        opened.choose(&machine("amd64"), Some("2")),
        Err(Error::NotFound { .. })
    ));
}

/// A Docker archive of one layer of this name.
fn archive(dir: &Path, layer: &str) {
    let config = json!({"architecture": "amd64", "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [Digest::of(b"layer")]}});
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let manifest = json!([{"Config": "config.json", "RepoTags": null, "Layers": [layer]}]);
    fs::write(dir.join("manifest.json"), manifest.to_string()).unwrap();
}

#[test]
fn names_and_links_that_lead_out_of_the_layout_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    fs::write(dir.path().join("layer"), "layer").unwrap();
    symlink("../layer", root.join("link")).unwrap();
    symlink("..", root.join("up")).unwrap();
    let absolute = dir.path().join("layer");
    for name in [
        "../layer",
        absolute.to_str().unwrap(),
        "link",
        "up/layer",
        "x/../../layer",
        "",
        ".",
    ] {
        archive(&root, name);
        assert!(
            matches!(Layout::open(&root), Err(Error::File { .. })),
            "{name}"
        );
    }
    fs::write(root.join("layer"), "layer").unwrap();
    fs::remove_file(root.join("link")).unwrap();
    symlink("layer", root.join("link")).unwrap();
    archive(&root, "link");
    assert!(
        Layout::open(&root)
            .unwrap()
            .choose(&machine("amd64"), None)
            .is_ok(),
        "a link inside is one"
    );
}

#[test]
fn layers_that_are_no_files_or_compressed_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    run("mkfifo", &[dir.path().join("pipe").to_str().unwrap()]);
    fs::write(dir.path().join("packed"), [0x1f, 0x8b, 8, 0]).unwrap();
    for name in ["pipe", "packed"] {
        archive(dir.path(), name);
        assert!(
            matches!(Layout::open(dir.path()), Err(Error::File { .. })),
            "{name}"
        );
    }
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(
        Layout::open(empty.path()),
        Err(Error::File { .. })
    ));
}
