//! How a command runs where its caller says nothing: as its image says, and with what its sandbox
//! adds.

use std::ffi::OsString;

use sandtree_store::{Image, ImageRecord, SandboxRecord};

use super::ExecSpec;
use crate::error::{Result, store_error};
use crate::inner::Inner;

/// What runs if neither the caller nor the image says anything.
const SHELL: &str = "/bin/sh";

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Defaults {
    env: Vec<(OsString, OsString)>,
    user: Option<String>,
    workdir: Option<OsString>,
}

impl Defaults {
    pub fn of(host: &Inner, record: &SandboxRecord) -> Result<Self> {
        let image = image_of(host, record)?;
        let ImageRecord {
            schema, defaults, ..
        } = &image.record;
        let env = defaults.env.iter().chain(&record.env);
        // In images of older programs they say what nobody followed.
        let followed =
            |said: &Option<String>| said.clone().filter(|text| *schema > 1 && !text.is_empty());
        Ok(Self {
            env: env.map(|(key, value)| (key.into(), value.into())).collect(),
            user: followed(&defaults.user),
            workdir: followed(&defaults.workdir).map(OsString::from),
        })
    }

    /// What the caller says comes last, and counts.
    pub fn complete(&self, spec: ExecSpec) -> ExecSpec {
        ExecSpec {
            env: self.env.iter().cloned().chain(spec.env).collect(),
            user: spec.user.or_else(|| self.user.clone()),
            workdir: spec.workdir.or_else(|| self.workdir.clone()),
            ..spec
        }
    }
}

/// What `run` runs in a sandbox: the image's entry point, or another that is asked for, with
/// arguments of the caller's instead of the image's.
pub(crate) fn main_command(
    host: &Inner,
    record: &SandboxRecord,
    args: Vec<OsString>,
    entrypoint: Option<Vec<OsString>>,
) -> Result<Vec<OsString>> {
    let image = image_of(host, record)?;
    let defaults = &image.record.defaults;
    let texts = |texts: &[String]| texts.iter().map(OsString::from).collect::<Vec<_>>();
    let args = match (&entrypoint, args.is_empty()) {
        (None, true) => texts(&defaults.cmd),
        _ => args,
    };
    let mut command = entrypoint.unwrap_or_else(|| texts(&defaults.entrypoint));
    command.extend(args);
    Ok(if command.is_empty() {
        vec![SHELL.into()]
    } else {
        command
    })
}

/// Whether an image says by itself what is to run in it.
pub(crate) fn has_entrypoint(host: &Inner, record: &SandboxRecord) -> Result<bool> {
    Ok(!image_of(host, record)?
        .record
        .defaults
        .entrypoint
        .is_empty())
}

fn image_of(host: &Inner, record: &SandboxRecord) -> Result<Image> {
    host.store
        .image_by_digest(&record.image_digest)
        .map_err(store_error("read an image"))
}
