//! The verbs of a host that have several arguments, most of which move content.

use std::fs::File;
use std::path::PathBuf;

use sandtree::image::{ImportSpec, Recipe};
use sandtree::{
    BuildSpec, ContentDiff, DiffOptions, Error, ExportOptions, FileExport, Host, PullSpec,
    RegistryAccess, Result,
};
use serde::Deserialize;
use serde_json::Value;

use crate::config::{absolute, absolute_reference, registry_access};
use crate::convert::json;
use crate::progress::Meter;

/// How a registry is reached, in addition to the environment.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Access {
    username: Option<String>,
    password: Option<String>,
    plain_http: bool,
    ca: Option<PathBuf>,
}

impl Access {
    pub fn access(self) -> RegistryAccess {
        RegistryAccess {
            username: self.username,
            password: self.password,
            plain_http: self.plain_http,
            ca: self.ca,
            ..registry_access()
        }
    }
}

#[derive(Debug, Deserialize)]
pub struct EnsureImage {
    name: String,
    rebuild: bool,
}

impl EnsureImage {
    pub async fn answer(self, host: &Host, meter: &Meter) -> Result<String> {
        let image = if self.rebuild {
            host.rebuild_image(&self.name, meter.image()).await?
        } else {
            host.ensure_image(&self.name, meter.image()).await?
        };
        json(&image)
    }
}

#[derive(Debug, Deserialize)]
pub struct BuildImage {
    recipe: PathBuf,
    name: Option<String>,
    /// Runs every step again.
    anew: bool,
}

impl BuildImage {
    pub async fn answer(self, host: &Host, meter: &Meter) -> Result<String> {
        let path = absolute(self.recipe)?;
        let shown = path.display().to_string();
        let recipe = Recipe::read(&path).map_err(|error| error.making(&shown))?;
        let spec = BuildSpec {
            name: self.name,
            anew: self.anew,
            access: registry_access(),
            ..BuildSpec::default()
        };
        json(&host.build_image(&recipe, spec, meter.build()).await?)
    }
}

#[derive(Debug, Deserialize)]
pub struct ImportImage {
    path: PathBuf,
    name: Option<String>,
    spec: ImportSpec,
}

impl ImportImage {
    pub async fn answer(self, host: &Host, meter: &Meter) -> Result<String> {
        let path = absolute(self.path)?;
        let importing = host.import_image(&path, self.name.as_deref(), self.spec, meter.image());
        json(&importing.await?)
    }
}

#[derive(Debug, Deserialize)]
pub struct TagSnapshot {
    pub snapshot: String,
    pub name: String,
    pub replace: bool,
}

#[derive(Debug, Deserialize)]
pub struct Export {
    reference: String,
    path: PathBuf,
    replace: bool,
    memory: bool,
    plain: bool,
    without_image: bool,
    since: Option<String>,
}

impl Export {
    pub async fn answer(self, host: &Host, meter: &Meter) -> Result<String> {
        let since = self.since.as_deref().map(absolute_reference).transpose()?;
        let export = FileExport {
            reference: absolute_reference(&self.reference)?,
            memory: self.memory,
            options: ExportOptions {
                plain: self.plain,
                without_image: self.without_image,
                since,
            },
            path: absolute(self.path)?,
            replace: self.replace.into(),
        };
        let progress = meter.transfer("exporting");
        json(&host.export_file(export, progress).await?)
    }
}

#[derive(Debug, Deserialize)]
pub struct Import {
    path: PathBuf,
    name: String,
    replace: bool,
}

impl Import {
    pub async fn answer(self, host: &Host, meter: &Meter) -> Result<String> {
        let file = File::open(&self.path).map_err(|e| Error::io("open", &self.path, e))?;
        let progress = meter.transfer("importing");
        let importing = host.import(file, &self.name, self.replace.into(), progress);
        json(&importing.await?)
    }
}

#[derive(Debug, Deserialize)]
pub struct Push {
    what: String,
    reference: String,
    access: Access,
}

impl Push {
    pub async fn answer(self, host: &Host, meter: &Meter) -> Result<String> {
        let access = self.access.access();
        let pushing = host.push(&self.what, &self.reference, access, meter.image());
        json(&pushing.await?)
    }
}

#[derive(Debug, Deserialize)]
pub struct Pull {
    reference: String,
    name: Option<String>,
    replace: bool,
    access: Access,
    spec: ImportSpec,
}

impl Pull {
    pub async fn answer(self, host: &Host, meter: &Meter) -> Result<String> {
        let spec = PullSpec {
            name: self.name,
            replace: self.replace,
            access: self.access.access(),
            import: self.spec,
        };
        json(&host.pull(&self.reference, &spec, meter.image()).await?)
    }
}

#[derive(Debug, Deserialize)]
pub struct DiffFiles {
    before: String,
    after: String,
    times: bool,
}

impl DiffFiles {
    pub async fn answer(self, host: &Host) -> Result<String> {
        let before = absolute_reference(&self.before)?;
        let after = absolute_reference(&self.after)?;
        let options = DiffOptions {
            times: self.times,
            ..DiffOptions::default()
        };
        json(&host.diff(&before, &after, options).await?)
    }
}

#[derive(Debug, Deserialize)]
pub struct DiffContent {
    before: String,
    after: String,
    path: String,
}

impl DiffContent {
    pub async fn answer(self, host: &Host) -> Result<String> {
        let before = absolute_reference(&self.before)?;
        let after = absolute_reference(&self.after)?;
        let path = self.path.as_bytes();
        let content = host.content_diff(&before, &after, path).await?;
        json(&shown(content))
    }
}

/// As `sandtree diff --json` prints it.
fn shown(content: ContentDiff) -> Value {
    let (kind, text) = match content {
        ContentDiff::Same => ("same", String::new()),
        ContentDiff::Binary => ("binary", String::new()),
        ContentDiff::TooLarge { .. } => ("too_large", String::new()),
        ContentDiff::Text(text) => ("text", text),
    };
    serde_json::json!({ "kind": kind, "diff": text })
}
