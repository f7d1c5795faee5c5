//! The content of measured images: files of the host, as archives and as an OCI image.

use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use sandtree::{Error, Result};
use serde_json::json;

use crate::tool::Tools;

const FROM: [&str; 2] = ["/usr/share", "/usr/lib"];
const FILES_MAX: usize = 20_000;
const BYTES_MAX: u64 = 300_000_000;
/// Larger files are left out: they would leave no room for many small ones.
const FILE_MAX: u64 = 16_000_000;

/// Files of the host, sorted, each after its directory.
#[derive(Default)]
pub struct Content {
    paths: Vec<PathBuf>,
    pub files: usize,
    bytes: u64,
}

impl Content {
    /// Collects files that the caller may read.
    pub fn of_host() -> Self {
        let mut content = Self::default();
        FROM.iter().for_each(|dir| content.collect(Path::new(dir)));
        content
    }

    fn collect(&mut self, dir: &Path) {
        let Ok(entries) = dir.read_dir() else { return };
        let mut entries: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        entries.sort();
        self.paths.push(dir.to_owned());
        for path in entries {
            let Ok(found) = path.symlink_metadata() else {
                continue;
            };
            let bytes = if found.is_file() { found.len() } else { 0 };
            if self.files == FILES_MAX || self.bytes + bytes > BYTES_MAX {
                return;
            }
            if found.is_dir() {
                self.collect(&path);
            } else if found.is_symlink()
                || found.is_file() && bytes <= FILE_MAX && File::open(&path).is_ok()
            {
                self.paths.push(path);
                self.files += 1;
                self.bytes += bytes;
            }
        }
    }

    /// Packs part number `part` of `parts`. Returns the size of the archive.
    pub async fn pack(
        &self,
        tools: &Tools,
        (part, parts): (usize, usize),
        archive: &Path,
    ) -> Result<u64> {
        let each = self.paths.len().div_ceil(parts).max(1);
        let list = archive.with_extension("list");
        let mut names = Vec::new();
        for path in self.paths.iter().skip(part * each).take(each) {
            names.extend_from_slice(
                path.strip_prefix("/")
                    .unwrap_or(path)
                    .as_os_str()
                    .as_bytes(),
            );
            names.push(0);
        }
        std::fs::write(&list, names).map_err(|e| Error::io("write", &list, e))?;
        let fixed = [
            "-C",
            "/",
            "--null",
            "--verbatim-files-from",
            "--no-recursion",
            "--numeric-owner",
        ];
        let mut args: Vec<&std::ffi::OsStr> = fixed.iter().map(AsRef::as_ref).collect();
        args.extend([
            "-T".as_ref(),
            list.as_os_str(),
            "-cf".as_ref(),
            archive.as_os_str(),
        ]);
        tools.run("tar", &args).await?;
        std::fs::metadata(archive)
            .map(|found| found.len())
            .map_err(|e| Error::io("look at", archive, e))
    }
}

/// Makes an OCI image in a directory, whose layers are the archives, packed by gzip. Returns the
/// size of the layers.
pub async fn lay_out(tools: &Tools, archives: &[PathBuf], dir: &Path) -> Result<u64> {
    let blobs = dir.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).map_err(|e| Error::io("make directory", &blobs, e))?;
    let mut diff_ids = Vec::new();
    let mut layers = Vec::new();
    let mut bytes = 0;
    for archive in archives {
        diff_ids.push(format!("sha256:{}", sha256(tools, archive).await?));
        tools
            .run("gzip", &["-n".as_ref(), archive.as_os_str()])
            .await?;
        let mut packed = archive.clone().into_os_string();
        packed.push(".gz");
        let layer = blob(
            tools,
            &blobs,
            Path::new(&packed),
            "application/vnd.oci.image.layer.v1.tar+gzip",
        )
        .await?;
        bytes += layer["size"].as_u64().unwrap_or_default();
        layers.push(layer);
    }
    let architecture = if cfg!(target_arch = "aarch64") {
        "arm64"
    } else {
        "amd64"
    };
    let config = json!({
        "architecture": architecture, "os": "linux", "config": { "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"] },
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    });
    let new = dir.join("new");
    write(&new, &config)?;
    let config = blob(
        tools,
        &blobs,
        &new,
        "application/vnd.oci.image.config.v1+json",
    )
    .await?;
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    write(
        &new,
        &json!({ "schemaVersion": 2, "mediaType": media_type, "config": config, "layers": layers }),
    )?;
    let manifest = blob(tools, &blobs, &new, media_type).await?;
    write(
        &dir.join("index.json"),
        &json!({ "schemaVersion": 2, "manifests": [manifest] }),
    )?;
    write(
        &dir.join("oci-layout"),
        &json!({ "imageLayoutVersion": "1.0.0" }),
    )?;
    Ok(bytes)
}

fn write(path: &Path, value: &serde_json::Value) -> Result<()> {
    let written =
        File::create(path).and_then(|mut file| file.write_all(value.to_string().as_bytes()));
    written.map_err(|e| Error::io("write", path, e))
}

/// Moves a file to the blobs. Returns its descriptor.
async fn blob(
    tools: &Tools,
    blobs: &Path,
    file: &Path,
    media_type: &str,
) -> Result<serde_json::Value> {
    let digest = sha256(tools, file).await?;
    let size = std::fs::metadata(file)
        .map_err(|e| Error::io("look at", file, e))?
        .len();
    std::fs::rename(file, blobs.join(&digest)).map_err(|e| Error::io("move", file, e))?;
    Ok(json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size }))
}

async fn sha256(tools: &Tools, path: &Path) -> Result<String> {
    let said = tools.output("sha256sum", &[path]).await?;
    Ok(said.trim_start_matches('\\').chars().take(64).collect())
}
