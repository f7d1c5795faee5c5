//! A host: everything that does not concern a single sandbox.

use std::collections::BTreeMap;

use pyo3::prelude::{Py, PyAny, PyResult, pyclass, pyfunction, pymethods};
use sandtree::{Error, Result, SandboxSpec, SaveOnStop, parse_target};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::config::{absolute_reference, config};
use crate::convert::{json, parse, reports};
use crate::progress::Meter;
use crate::runtime::{self, Operation};
use crate::sandbox::Sandbox;
use crate::transfers::{
    BuildImage, DiffContent, DiffFiles, EnsureImage, Export, Import, ImportImage, Pull, Push,
    TagSnapshot,
};

#[pyclass(frozen)]
#[derive(Debug)]
pub struct Host {
    host: sandtree::Host,
}

/// A sandbox to create: fields of [`SandboxSpec`], and what it is saved as.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    spec: Map<String, Value>,
    save: Option<SaveAs>,
    /// Trust the host's certificate authorities.
    host_ca: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SaveAs {
    target: String,
    replace: bool,
    labels: BTreeMap<String, String>,
}

/// A verb with its arguments and a JSON answer.
#[derive(Debug, Deserialize)]
#[serde(tag = "verb", rename_all = "snake_case")]
enum Call {
    List,
    Find { sandbox: String },
    Doctor,
    Images,
    InspectImage { image: String },
    EnsureImage(EnsureImage),
    BuildImage(BuildImage),
    ImportImage(ImportImage),
    RemoveImage { image: String },
    Snapshots,
    InspectSnapshot { snapshot: String },
    Verify { snapshot: String },
    TagSnapshot(TagSnapshot),
    RemoveSnapshot { snapshot: String },
    Export(Export),
    Import(Import),
    Push(Push),
    Pull(Pull),
    Gc { dry_run: bool },
    Usage,
    Tree,
    Diff(DiffFiles),
    ContentDiff(DiffContent),
}

#[pymethods]
impl Host {
    /// Carries out a verb. Request and result are JSON.
    fn call(
        &self,
        request: &str,
        progress: Option<Py<PyAny>>,
        done: Py<PyAny>,
    ) -> PyResult<Operation> {
        let request: Result<Call> = parse("request", request);
        let host = self.host.clone();
        let meter = Meter::new(progress);
        runtime::start(done, async move { answer(&host, request?, &meter).await })
    }

    /// Creates a sandbox that belongs to this process. The result is a [`Sandbox`].
    fn create(
        &self,
        request: &str,
        progress: Option<Py<PyAny>>,
        done: Py<PyAny>,
    ) -> PyResult<Operation> {
        let request: Result<Create> = parse("request", request);
        let host = self.host.clone();
        let meter = Meter::new(progress);
        runtime::start(done, async move { create(&host, request?, &meter).await })
    }

    /// A sandbox by its name or id. The result is a [`Sandbox`].
    fn sandbox(&self, reference: &str, done: Py<PyAny>) -> PyResult<Operation> {
        let host = self.host.clone();
        let reference = reference.to_owned();
        runtime::start(done, async move {
            Ok(Sandbox::found(host.sandbox(&reference)?))
        })
    }
}

/// Opens a host. The result is a [`Host`].
#[pyfunction]
pub fn open(given: &str, done: Py<PyAny>) -> PyResult<Operation> {
    let config = config(given);
    runtime::start(done, async move {
        let host = sandtree::Host::open(config?).await?;
        Ok(Host { host })
    })
}

async fn create(host: &sandtree::Host, request: Create, meter: &Meter) -> Result<Sandbox> {
    let spec = request.spec()?;
    spec.check()?;
    let prepared = host
        .prepare(spec, meter.transfer("reading"), meter.image())
        .await?;
    let begun = host.begin_one(prepared.spec.clone()).await?;
    let owned = begun.own().await?.commit().await?.owned();
    let created = owned.into_iter().next().expect("one was created");
    Ok(Sandbox::owned(created))
}

impl Create {
    /// The defaults of the library, with the given fields instead.
    fn spec(self) -> Result<SandboxSpec> {
        let wrong = |error: serde_json::Error| {
            Error::invalid("specification of a sandbox", "", &error.to_string())
        };
        let defaults = SandboxSpec {
            image: None,
            ..SandboxSpec::new("")
        };
        let mut fields = serde_json::to_value(defaults).map_err(wrong)?;
        for (name, value) in self.spec {
            fields[name] = value;
        }
        let mut spec: SandboxSpec = serde_json::from_value(fields).map_err(wrong)?;
        spec.image = spec.image.as_deref().map(absolute_reference).transpose()?;
        spec.snapshot = spec
            .snapshot
            .as_deref()
            .map(absolute_reference)
            .transpose()?;
        if self.host_ca {
            spec.ca_bundle = Some(sandtree::ca::host_bundle()?);
        }
        spec.save_on_stop = self.save.map(SaveAs::on_stop).transpose()?;
        Ok(spec)
    }
}

impl SaveAs {
    fn on_stop(self) -> Result<SaveOnStop> {
        Ok(SaveOnStop {
            target: parse_target(&self.target)?,
            replace: self.replace,
            labels: self.labels,
            compress: false,
        })
    }
}

async fn answer(host: &sandtree::Host, call: Call, meter: &Meter) -> Result<String> {
    match call {
        Call::List => {
            let (sandboxes, errors) = host.list()?;
            json(&serde_json::json!({ "sandboxes": sandboxes, "errors": reports(&errors) }))
        }
        Call::Find { sandbox } => json(&host.find(&sandbox)?),
        Call::Doctor => json(&host.doctor().await),
        Call::Images => json(&host.images().await?),
        Call::InspectImage { image } => json(&host.inspect_image(&image)?),
        Call::EnsureImage(ensure) => ensure.answer(host, meter).await,
        Call::BuildImage(build) => build.answer(host, meter).await,
        Call::ImportImage(import) => import.answer(host, meter).await,
        Call::RemoveImage { image } => json(&host.remove_image(&image).await?),
        Call::Snapshots => {
            let list = host.snapshots().await?;
            json(&serde_json::json!({ "snapshots": list.snapshots, "trouble": list.trouble }))
        }
        Call::InspectSnapshot { snapshot } => {
            let snapshot = absolute_reference(&snapshot)?;
            json(&host.inspect_snapshot(&snapshot).await?)
        }
        Call::Verify { snapshot } => {
            let snapshot = absolute_reference(&snapshot)?;
            json(&host.verify(&snapshot, meter.transfer("verifying")).await?)
        }
        Call::TagSnapshot(tag) => {
            let tagging = host.tag_snapshot(&tag.snapshot, &tag.name, tag.replace.into());
            json(&tagging.await?)
        }
        Call::RemoveSnapshot { snapshot } => {
            let snapshot = absolute_reference(&snapshot)?;
            json(&host.remove_snapshot(&snapshot).await?)
        }
        Call::Export(export) => export.answer(host, meter).await,
        Call::Import(import) => import.answer(host, meter).await,
        Call::Push(push) => push.answer(host, meter).await,
        Call::Pull(pull) => pull.answer(host, meter).await,
        Call::Gc { dry_run } => json(&host.gc(dry_run).await?),
        Call::Usage => json(&host.usage().await?),
        Call::Tree => {
            let tree = host.tree().await?;
            let errors = reports(&tree.broken);
            json(&serde_json::json!({ "nodes": tree.nodes, "errors": errors }))
        }
        Call::Diff(diff) => diff.answer(host).await,
        Call::ContentDiff(diff) => diff.answer(host).await,
    }
}
