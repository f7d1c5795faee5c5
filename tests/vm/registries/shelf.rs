//! A registry with one image, `x:1`, that can serve it wrongly.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};

use sandtree_store::Digest;
use serde_json::{Value, json};

use super::scripted::{Peer, Request, Server, head, reply};
use super::server::run;

pub const MANIFEST: &str = "/v2/x/manifests/1";
const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG_TYPE: &str = "application/vnd.oci.image.config.v1+json";
const LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar";
const BYTES: &str = "application/octet-stream";

/// The content: for each path its media type and its bytes.
pub struct Shelf {
    documents: BTreeMap<String, (String, Vec<u8>)>,
    /// The path of the layer.
    pub layer: String,
}

impl Shelf {
    /// An image of one layer with some hundred kilobytes.
    pub fn new() -> Self {
        Self::edited(archive(), |_, _| ())
    }

    /// As [`new`](Self::new), with a changed manifest and configuration.
    pub fn edited(layer: Vec<u8>, edit: impl FnOnce(&mut Value, &mut Value)) -> Self {
        let described = |media_type: &str, bytes: &[u8]| json!({ "mediaType": media_type, "digest": digest(bytes), "size": bytes.len() });
        let rootfs = json!({ "type": "layers", "diff_ids": [digest(&layer)] });
        let mut config =
            json!({ "architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs });
        let layers = [described(LAYER_TYPE, &layer)];
        let mut manifest =
            json!({ "schemaVersion": 2, "mediaType": MANIFEST_TYPE, "layers": layers });
        edit(&mut manifest, &mut config);
        let config = config.to_string().into_bytes();
        if manifest["config"].is_null() && manifest["manifests"].is_null() {
            manifest["config"] = described(CONFIG_TYPE, &config);
        }
        let blob = |bytes: Vec<u8>| {
            (
                format!("/v2/x/blobs/{}", digest(&bytes)),
                (BYTES.to_owned(), bytes),
            )
        };
        let media_type = manifest["mediaType"]
            .as_str()
            .unwrap_or(MANIFEST_TYPE)
            .to_owned();
        let manifest = (
            MANIFEST.to_owned(),
            (media_type, manifest.to_string().into_bytes()),
        );
        let layer = blob(layer);
        let path = layer.0.clone();
        Self {
            documents: BTreeMap::from([manifest, layer, blob(config)]),
            layer: path,
        }
    }

    pub fn bytes(&self, path: &str) -> &[u8] {
        &self.documents[path].1
    }

    /// Serves it, except for the paths that the test answers itself.
    pub fn start(
        self,
        unless: impl Fn(&Shelf, &Request, &mut Peer) -> bool + Send + Sync + 'static,
    ) -> Server {
        Server::start(move |request, peer| {
            if !unless(&self, request, peer) {
                self.serve(request, peer);
            }
        })
    }

    fn serve(&self, request: &Request, peer: &mut Peer) {
        let Some((media_type, bytes)) = self.documents.get(&request.path) else {
            return reply(peer, request, 404, &[], b"");
        };
        let Some(range) = request.header("range") else {
            return reply(peer, request, 200, &[("Content-Type", media_type)], bytes);
        };
        let from: usize = range
            .strip_prefix("bytes=")
            .unwrap()
            .strip_suffix('-')
            .unwrap()
            .parse()
            .unwrap();
        let range = format!("bytes {from}-{}/{}", bytes.len() - 1, bytes.len());
        reply(
            peer,
            request,
            206,
            &[("Content-Range", &range)],
            &bytes[from..],
        );
    }
}

/// Announces everything, sends the first half and closes.
pub fn break_off(peer: &mut Peer, bytes: &[u8]) {
    head(peer, 200, &[("Content-Length", &bytes.len().to_string())]);
    drop(peer.get_mut().write_all(&bytes[..bytes.len() / 2]));
}

/// Sends nothing until the client has left.
pub fn stall(peer: &mut Peer) {
    drop(peer.read(&mut [0]));
}

pub fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", Digest::of(bytes))
}

/// A layer with one file that does not compress.
fn archive() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let mut state = 1_u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    fs::write(
        dir.path().join("noise"),
        (0..300_000).map(|_| next()).collect::<Vec<u8>>(),
    )
    .unwrap();
    let path = dir.path().to_str().unwrap();
    let file = dir.path().join("layer.tar");
    run(
        "tar",
        &[
            "--sort=name",
            "--mtime=@0",
            "-C",
            path,
            "-cf",
            file.to_str().unwrap(),
            "noise",
        ],
    );
    fs::read(file).unwrap()
}

/// A layer with a file that claims two tebibytes.
pub fn boast() -> Vec<u8> {
    let mut header = [0; 512];
    header[..4].copy_from_slice(b"huge");
    header[100..108].copy_from_slice(b"0000644\0");
    header[108..116].copy_from_slice(b"0000000\0");
    header[116..124].copy_from_slice(b"0000000\0");
    header[124] = 0x80;
    header[128..136].copy_from_slice(&(2_u64 << 40).to_be_bytes());
    header[136..148].copy_from_slice(b"00000000000\0");
    header[148..156].fill(b' ');
    header[156] = b'0';
    header[257..265].copy_from_slice(b"ustar  \0");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    [&header[..], &[0; 4096]].concat()
}

/// A layer with one file of a single repeated character, as small as `zstd` makes it.
pub fn bomb(character: &str, bytes: u64) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().to_str().unwrap();
    let script = "cd \"$1\" && head -c \"$2\" /dev/zero | tr '\\000' \"$3\" > swells && tar -cf - swells | zstd -q -o layer";
    run(
        "sh",
        &["-c", script, "sh", path, &bytes.to_string(), character],
    );
    fs::read(dir.path().join("layer")).unwrap()
}
