//! Images made by `umoci` and sent by `skopeo`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use serde_json::json;

use super::server::{Registry, run};
use super::{document, put_document, skopeo};
use crate::support::World;

/// The output of [`Made::entry point`](Made), with the arguments of the image.
pub const REPORT: &str = "arg one\narg two words\ncolor blue\nuser app:app home /home/app\nin /srv\ndata .: opaque stays opaque: new\n";

const ENTRY_POINT: &str = "#!/bin/sh
for arg in \"$@\"; do echo \"arg $arg\"; done
echo \"color $COLOR\"
echo \"user $(id -un):$(id -gn) home $HOME\"
echo \"in $(pwd)\"
echo data $(cd /data; ls -A . opaque)
";

/// How an image is stored in a registry.
#[derive(Debug, Clone, Copy)]
pub enum Packing {
    Gzip,
    Zstd,
    /// With Docker's own media types.
    Docker,
}

/// An image of three layers, of which the later ones remove files of the first: a busybox, and an
/// entry point that prints how it was started.
pub struct Made {
    dir: tempfile::TempDir,
}

impl Made {
    /// The busybox is that of the image `tiny`.
    pub fn new(world: &World, color: &str) -> Self {
        let made = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        let base = made.dir.path().join("base");
        write_base(&base, color);
        let images: Vec<_> = fs::read_dir(world.home().join("images"))
            .unwrap()
            .flatten()
            .collect();
        let tiny = images[0].path().join("rootfs.raw");
        let busybox = base.join("bin/busybox");
        run(
            "debugfs",
            &[
                "-R",
                &format!("dump /bin/busybox {}", busybox.display()),
                tiny.to_str().unwrap(),
            ],
        );
        fs::set_permissions(&busybox, fs::Permissions::from_mode(0o755)).unwrap();
        let later = made.dir.path().join("later");
        fs::create_dir(&later).unwrap();
        fs::write(later.join("new"), "").unwrap();
        made.lay(base.to_str().unwrap(), later.to_str().unwrap(), color);
        made
    }

    fn lay(&self, base: &str, later: &str, color: &str) {
        let layout = self.dir.path().join("layout");
        let image = format!("{}:1", layout.display());
        run("umoci", &["init", "--layout", layout.to_str().unwrap()]);
        run("umoci", &["new", "--image", &image]);
        for layer in [
            &[base, "/"][..],
            &["--whiteout", "/data/gone"],
            &["--opaque", later, "/data/opaque"],
        ] {
            run(
                "umoci",
                &[&["insert", "--rootless", "--image", &image], layer].concat(),
            );
        }
        let color = format!("COLOR={color}");
        let used = [
            "--config.entrypoint",
            "/bin/report",
            "--config.cmd",
            "one",
            "--config.cmd",
            "two words",
        ];
        let run_as = [
            "--config.user",
            "app",
            "--config.workingdir",
            "/srv",
            "--config.env",
            "PATH=/bin",
        ];
        let config = [
            "config",
            "--image",
            &image,
            "--os",
            "linux",
            "--config.env",
            &color,
        ];
        run(
            "umoci",
            &[&config[..], &used, &run_as, &["--architecture", "amd64"]].concat(),
        );
        run(
            "umoci",
            &[
                "config",
                "--image",
                &image,
                "--tag",
                "arm",
                "--architecture",
                "arm64",
            ],
        );
    }

    /// The path of its layout with one of its tags, in `skopeo`'s notation.
    pub fn place(&self, tag: &str) -> String {
        format!("oci:{}:{tag}", self.dir.path().join("layout").display())
    }

    pub fn send(&self, registry: &Registry, to: &str, packing: Packing) {
        let to = format!("docker://{}/{to}", registry.host);
        let place = self.place("1");
        match packing {
            Packing::Gzip => skopeo(&[&place, &to]),
            Packing::Docker => skopeo(&["--format", "v2s2", &place, &to]),
            Packing::Zstd => {
                let plain = format!("dir:{}", self.dir.path().join("plain").display());
                skopeo(&["--dest-decompress", &place, &plain]);
                skopeo(&["--dest-compress-format", "zstd", &plain, &to]);
            }
        }
    }

    /// Sends it for several architectures, with an index of them.
    pub fn send_index(&self, registry: &Registry, repository: &str, tag: &str) {
        let listed = [("1", "amd64"), ("arm", "arm64")].map(|(tag, architecture)| {
            let to = format!("{repository}:{architecture}");
            skopeo(&[
                &self.place(tag),
                &format!("docker://{}/{to}", registry.host),
            ]);
            entry(registry, &to, architecture)
        });
        put_index(
            registry,
            &format!("{repository}:{tag}"),
            &[listed[1].clone(), listed[0].clone()],
        );
    }
}

/// The entry of an index for one of its images.
pub fn entry(registry: &Registry, of: &str, architecture: &str) -> serde_json::Value {
    let fetched = super::client(registry)
        .manifest(&super::reference(registry, of))
        .unwrap();
    json!({
        "mediaType": fetched.media_type,
        "digest": fetched.digest.to_string(),
        "size": fetched.bytes.len(),
        "platform": { "os": "linux", "architecture": architecture },
    })
}

pub fn put_index(registry: &Registry, to: &str, entries: &[serde_json::Value]) {
    let media_type = "application/vnd.oci.image.index.v1+json";
    put_document(
        registry,
        to,
        media_type,
        &json!({ "schemaVersion": 2, "mediaType": media_type, "manifests": entries }),
    );
}

/// The media types of an image's layers in a registry.
pub fn layer_types(registry: &Registry, of: &str) -> String {
    let (_, manifest) = document(registry, of);
    let layers = manifest["layers"].as_array().unwrap().iter();
    layers
        .map(|layer| super::text(&layer["mediaType"]).to_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

fn write_base(base: &Path, color: &str) {
    for dir in ["bin", "etc", "data/opaque", "srv", "home/app"] {
        fs::create_dir_all(base.join(dir)).unwrap();
    }
    for applet in ["sh", "cat", "id", "ls"] {
        symlink("busybox", base.join("bin").join(applet)).unwrap();
    }
    for (file, content) in [
        ("bin/report", ENTRY_POINT),
        (
            "etc/passwd",
            "root:x:0:0::/:/bin/sh\napp:x:1234:1235::/home/app:/bin/sh\n",
        ),
        ("etc/group", "root:x:0:\napp:x:1235:\n"),
        ("etc/color", color),
        ("data/gone", ""),
        ("data/stays", ""),
        ("data/opaque/old", ""),
    ] {
        fs::write(base.join(file), content).unwrap();
    }
    fs::set_permissions(base.join("bin/report"), fs::Permissions::from_mode(0o755)).unwrap();
}
