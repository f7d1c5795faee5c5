//! The defaults of a command: those of its image, and the additions of its sandbox.

use std::ffi::OsString;

use sandtree_store::{Image, ImageRecord, SandboxRecord};

use super::ExecSpec;
use crate::error::{Result, store_error};
use crate::inner::Inner;

/// The command if neither the caller nor the image gives one.
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
        let mut defaults = Self::of_image(&image.record);
        let additions = record.env.iter();
        defaults
            .env
            .extend(additions.map(|(key, value)| (key.into(), value.into())));
        Ok(defaults)
    }

    /// Those of a command that belongs to an image, and to no sandbox.
    pub fn of_image(record: &ImageRecord) -> Self {
        let ImageRecord {
            schema, defaults, ..
        } = record;
        // Schema 1 recorded user and workdir, but no version applied them; they stay ignored.
        let followed =
            |said: &Option<String>| said.clone().filter(|text| *schema > 1 && !text.is_empty());
        let env = defaults.env.iter();
        Self {
            env: env.map(|(key, value)| (key.into(), value.into())).collect(),
            user: followed(&defaults.user),
            workdir: followed(&defaults.workdir).map(OsString::from),
        }
    }

    /// The caller's settings override the defaults.
    pub fn complete(&self, spec: ExecSpec) -> ExecSpec {
        ExecSpec {
            env: self.env.iter().cloned().chain(spec.env).collect(),
            user: spec.user.or_else(|| self.user.clone()),
            workdir: spec.workdir.or_else(|| self.workdir.clone()),
            ..spec
        }
    }
}

/// The main command of a sandbox: the image's entry point, or the caller's, with the caller's
/// arguments in place of the image's.
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

/// Whether an image has a command of its own.
pub(crate) fn has_entrypoint(host: &Inner, record: &SandboxRecord) -> Result<bool> {
    Ok(!image_of(host, record)?
        .record
        .defaults
        .entrypoint
        .is_empty())
}

/// The image that a sandbox was made from.
pub(crate) fn image_of(host: &Inner, record: &SandboxRecord) -> Result<Image> {
    host.store
        .image_by_digest(&record.image_digest)
        .map_err(store_error("read an image"))
}
