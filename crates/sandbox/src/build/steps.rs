//! The steps of a recipe, and what each of them depends on.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use sandtree_images::{hex, is_plain, memo, parse_mode};
use sandtree_store::{Digest, Name, Network};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::ca;
use crate::error::{Error, Result};
use crate::guest::{ExecSpec, check_archive};
use crate::image::{CopyFile, Recipe, RunStep};

/// Part of every key. It changes when steps are done differently.
const RECIPE: u32 = 1;

/// Installs packages with the tool that the distribution has.
const INSTALL: &str = r#"
if command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update && apt-get install -y --no-install-recommends "$@" && apt-get clean && rm -rf /var/lib/apt/lists/*
elif command -v apk >/dev/null; then apk add --no-cache "$@"
elif command -v dnf >/dev/null; then dnf install -y "$@" && dnf clean all
elif command -v microdnf >/dev/null; then microdnf install -y "$@" && microdnf clean all
else echo "this image has none of apt-get, apk, dnf and microdnf to install packages with" >&2; exit 127
fi"#;

#[derive(Debug, Clone)]
pub(super) enum Step {
    Packages(Vec<String>),
    File {
        file: CopyFile,
        /// Of everything in it.
        digest: String,
    },
    Run {
        run: RunStep,
        /// Of everything in each of its files.
        digests: Vec<String>,
    },
}

impl Step {
    /// All that its result depends on. Where a file comes from is not: its content is.
    fn shape(&self) -> serde_json::Value {
        match self {
            Self::Packages(packages) => serde_json::json!({ "packages": packages }),
            Self::File { file, digest } => shape_of(file, digest),
            Self::Run { run, digests } => {
                let copied = run.files.iter().zip(digests);
                let copied: Vec<_> = copied
                    .map(|(file, digest)| shape_of(file, digest))
                    .collect();
                let plain = RunStep {
                    files: Vec::new(),
                    ..run.clone()
                };
                let mut shape = serde_json::json!({ "run": plain });
                // Without files it is written as ever, so that steps from before count as done.
                if !copied.is_empty() {
                    shape["files"] = copied.into();
                }
                shape
            }
        }
    }
}

/// All that the result of a copy depends on.
fn shape_of(file: &CopyFile, digest: &str) -> serde_json::Value {
    let CopyFile {
        target,
        owner,
        mode,
        unpack,
        ..
    } = file;
    let mut shape = serde_json::json!({
        "target": target, "owner": owner, "mode": mode, "digest": digest,
    });
    if *unpack {
        shape["unpack"] = true.into();
    }
    shape
}

/// The digest of what is to be copied. An archive is checked before any step runs.
fn source_digest(file: &CopyFile) -> Result<String> {
    if file.unpack {
        check_archive(&file.source)?;
    }
    digest_of(&file.source)
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packages(packages) => write!(f, "install {}", packages.join(" ")),
            Self::File { file, .. } => {
                write!(f, "copy {} to {}", file.source.display(), file.target)
            }
            Self::Run { run, .. } => f.write_str(run.command.lines().next().unwrap_or_default()),
        }
    }
}

pub(super) struct Steps(Vec<Step>);

impl Steps {
    /// Reads every file that is to be copied.
    pub fn of(recipe: &Recipe, has_packages: bool) -> Result<Self> {
        let mut steps = Vec::new();
        if !recipe.packages.is_empty() && !has_packages {
            steps.push(Step::Packages(recipe.packages.clone()));
        }
        for file in &recipe.files {
            steps.push(Step::File {
                file: file.clone(),
                digest: source_digest(file)?,
            });
        }
        for run in recipe.run.iter().cloned() {
            let run = RunStep::from(run);
            let digests = run.files.iter().map(source_digest).collect::<Result<_>>()?;
            steps.push(Step::Run { run, digests });
        }
        Ok(Self(steps))
    }

    /// No steps.
    pub fn none() -> Self {
        Self(Vec::new())
    }

    /// The files, if all steps copy files for which no machine is needed.
    pub fn plain_files(&self) -> Option<Vec<CopyFile>> {
        let plain = |step: &Step| match step {
            Step::File { file, .. } if is_plain(file) => Some(file.clone()),
            _ => None,
        };
        self.0.iter().map(plain).collect()
    }

    /// Checks that the copied files still have the digests that are part of the keys.
    pub fn check_files_unchanged(&self) -> Result<()> {
        self.0.iter().try_for_each(|step| match step {
            Step::File { file, digest } => check_unchanged(file, digest),
            _ => Ok(()),
        })
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Step> {
        self.0.iter()
    }

    /// Of the machine that does them. Who says nothing has none, unless packages come from
    /// somewhere.
    pub fn network(&self, recipe: &Recipe) -> Network {
        let fetches = self.0.iter().any(|step| matches!(step, Step::Packages(_)));
        recipe.network.unwrap_or(if fetches {
            Network::Full
        } else {
            Network::Isolated
        })
    }

    /// What each step is noted under: everything that shapes its result.
    pub fn keys(&self, base: &Digest, recipe: &Recipe) -> Result<Vec<Name>> {
        let trusted = if recipe.host_ca {
            Some(digest_of(&ca::host_bundle()?)?)
        } else {
            None
        };
        let machine = (
            self.network(recipe),
            recipe.memory,
            recipe.size,
            recipe.room,
        );
        let mut key = Digest::of(&json(&(RECIPE, base, machine, &recipe.env, trusted)));
        let mut keys = Vec::new();
        for step in &self.0 {
            key = Digest::of(&json(&(&key, step.shape())));
            keys.push(memo::key("step", &key));
        }
        Ok(keys)
    }
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data")
}

/// Checks that a copied file still has the digest that is part of its step's key.
pub(super) fn check_unchanged(file: &CopyFile, digest: &str) -> Result<()> {
    if digest_of(&file.source)? == digest {
        return Ok(());
    }
    Err(Error::invalid(
        "file to copy",
        file.source.display(),
        "it changed while the image was made",
    ))
}

pub(super) fn install(packages: &[String]) -> ExecSpec {
    let words = ["/bin/sh", "-c", INSTALL, "install"]
        .into_iter()
        .map(str::to_owned);
    as_root(words.chain(packages.iter().cloned()).collect())
}

pub(super) fn command(run: &RunStep, recipe: &Recipe) -> ExecSpec {
    let env = recipe.env.iter().chain(&run.env);
    let spec = as_root(vec!["/bin/sh".into(), "-c".into(), run.command.clone()]);
    ExecSpec {
        env: env.map(|(key, value)| (key.into(), value.into())).collect(),
        user: run.user.clone().or(spec.user),
        workdir: run.workdir.clone().map(Into::into).or(spec.workdir),
        timeout: run.timeout.map(Duration::from_secs),
        ..spec
    }
}

/// The command that gives a copy the owner and the mode of the recipe.
pub(super) fn attributes(file: &CopyFile) -> Option<ExecSpec> {
    let owner = file.owner.as_ref().map(|_| r#"chown -R -- "$2" "$1""#);
    let mode = file
        .mode
        .as_deref()
        .and_then(parse_mode)
        .map(|_| r#"chmod -- "$3" "$1""#);
    let script = [owner, mode]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(" && ");
    if script.is_empty() {
        return None;
    }
    let owner = file.owner.clone().unwrap_or_default();
    let mode = file.mode.clone().unwrap_or_default();
    Some(as_root(vec![
        "/bin/sh".into(),
        "-c".into(),
        script,
        "attributes".into(),
        file.target.clone(),
        owner,
        mode,
    ]))
}

fn as_root(argv: Vec<String>) -> ExecSpec {
    ExecSpec {
        user: Some("root".into()),
        workdir: Some("/".into()),
        ..ExecSpec::argv(argv)
    }
}

/// The digest of a file or a tree: of names, kinds, permissions and contents.
fn digest_of(path: &Path) -> Result<String> {
    let mut hasher = Sha256::new();
    add(&mut hasher, path, b"")?;
    Ok(hex(&hasher.finalize()))
}

fn add(hasher: &mut Sha256, path: &Path, name: &[u8]) -> Result<()> {
    let failed = |e| Error::io("read", path, e);
    let found = path.symlink_metadata().map_err(failed)?;
    let mode = found.permissions().mode();
    field(hasher, name);
    field(hasher, &mode.to_le_bytes());
    if found.is_symlink() {
        field(
            hasher,
            path.read_link().map_err(failed)?.as_os_str().as_bytes(),
        );
    } else if found.is_dir() {
        let entries = path
            .read_dir()
            .map_err(failed)?
            .collect::<io::Result<Vec<_>>>()
            .map_err(failed)?;
        let mut names: Vec<_> = entries.into_iter().map(|entry| entry.file_name()).collect();
        names.sort();
        hasher.update((names.len() as u64).to_le_bytes());
        for name in names {
            add(hasher, &path.join(&name), name.as_bytes())?;
        }
    } else if found.is_file() {
        hasher.update(found.size().to_le_bytes());
        let mut file = std::fs::File::open(path).map_err(failed)?;
        let mut chunk = vec![0; 64 << 10];
        while let count @ 1.. = file.read(&mut chunk).map_err(failed)? {
            hasher.update(&chunk[..count]);
        }
    }
    Ok(())
}

/// Bytes that cannot be taken for those after them.
fn field(hasher: &mut Sha256, bytes: &[u8]) {
    hasher.update((bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(text: &str, dir: &Path) -> Recipe {
        Recipe::parse(text, dir).unwrap()
    }

    #[test]
    fn a_step_has_another_key_when_anything_before_it_is_other() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("app"), "one").unwrap();
        let base = Digest::of(b"base");
        let keys = |text: &str| {
            let recipe = recipe(text, dir.path());
            Steps::of(&recipe, false)
                .unwrap()
                .keys(&base, &recipe)
                .unwrap()
        };
        let text = "from = \"a\"\nfiles = [{ source = \"app\", target = \"/app\" }]\nrun = [\"one\", \"two\"]";
        let before = keys(text);
        assert_eq!(before, keys(text));
        let other_end = keys(&text.replace("two", "three"));
        assert_eq!(before[..2], other_end[..2]);
        assert_ne!(before[2], other_end[2]);
        std::fs::write(dir.path().join("app"), "two").unwrap();
        assert!(
            before
                .iter()
                .zip(keys(text))
                .all(|(before, after)| *before != after)
        );
    }

    #[test]
    fn a_missing_file_is_reported_before_any_step_runs() {
        let recipe = recipe(
            "from = \"a\"\nfiles = [{ source = \"gone\", target = \"/x\" }]",
            Path::new("/nowhere"),
        );
        assert!(
            Steps::of(&recipe, false)
                .err()
                .unwrap()
                .to_string()
                .contains("/nowhere/gone")
        );
    }
}
