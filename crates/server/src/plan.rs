//! The way from the steps of a template to a recipe.
//!
//! ```text
//!   steps: ENV USER RUN WORKDIR COPY …          recipe: run = [ … ]
//!            │    │   │     │      │
//!            │    └───┼─────┼──────┼──► with this user from here on; a step that adds it
//!            └────────┼─────┼──────┼──► with this variable from here on, and in the image
//!                     ▼     ▼      ▼
//!                   each a step of its own, kept for the next build
//! ```

mod script;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use sandtree::Network;
use sandtree::image::{Check, CopyFile, Recipe, Run, RunStep, Size};
use serde::Deserialize;
use serde_json::Value;

use self::script::COPIED;
use crate::error::{Fault, Result};

const STEPS_MAX: usize = 1000;
const MIB: u64 = 1 << 20;
/// The least space that steps get.
const ROOM_LEAST_MIB: u64 = 64;
/// A shell gets each twice, and Linux refuses a longer argument than 128 KiB.
const COMMAND_MAX: usize = 64 << 10;
const FREE_MOST_MIB: u64 = 1 << 20;

/// A request to start a build.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Wanted {
    pub from_image: Option<String>,
    pub from_template: Option<String>,
    pub from_image_registry: Option<Value>,
    #[serde(default)]
    pub force: bool,
    #[serde(default)]
    pub steps: Vec<Step>,
    pub start_cmd: Option<String>,
    pub ready_cmd: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default)]
    pub args: Vec<String>,
    pub files_hash: Option<String>,
    pub force: Option<bool>,
}

/// What the steps begin from.
#[derive(Debug, Clone, Default)]
pub struct Base {
    /// As a recipe names it.
    pub from: String,
    pub bytes: u64,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub env: BTreeMap<String, String>,
    /// Whether it has the user of E2B's templates.
    pub has_user: bool,
}

/// A recipe, and how clients know its steps.
#[derive(Debug)]
pub struct Plan {
    pub recipe: Recipe,
    /// Variables of commands in the image.
    pub env: BTreeMap<String, String>,
    /// One for each step of the recipe.
    pub titles: Vec<Title>,
    /// Whether it has a service, which the build starts once.
    pub has_service: bool,
    /// Steps from this one on run again.
    pub anew_from: Option<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Title {
    /// `base`, or the number of the client's step.
    pub step: String,
    pub text: String,
}

/// The user of E2B's templates.
const USER: &str = "user";

/// Plans the steps. `archive` finds an uploaded file by its hash.
pub fn plan(
    wanted: Wanted,
    base: Base,
    free_mib: Option<u64>,
    archive: impl Fn(&str) -> Result<PathBuf>,
) -> Result<Plan> {
    if wanted.steps.len() > STEPS_MAX {
        return Err(Fault::bad_request("a template has at most 1000 steps"));
    }
    let mut planning = Planning::new(base);
    if wanted.force {
        planning.anew_from = Some(0);
    }
    for (index, step) in wanted.steps.into_iter().enumerate() {
        let number = (index + 1).to_string();
        let refused = |fault: Fault| Fault {
            message: format!("step {number}: {}", fault.message),
            ..fault
        };
        if step.force == Some(true) {
            planning.anew_from.get_or_insert(planning.run.len());
        }
        planning.add(&number, step, &archive).map_err(refused)?;
    }
    let plan = planning.finish(free_mib)?;
    with_service(plan, wanted.start_cmd, wanted.ready_cmd)
}

/// Adds the commands that each boot runs.
fn with_service(mut plan: Plan, start: Option<String>, ready: Option<String>) -> Result<Plan> {
    let line = |text: Option<String>| text.filter(|text| !text.is_empty());
    let workdir = plan.recipe.workdir.as_deref();
    let start = line(start).map(|text| script::run(&text, workdir));
    let ready = line(ready).map(|text| script::run(&text, workdir));
    let is_line = |text: &String| text.len() < COMMAND_MAX && !text.contains('\0');
    if ![&start, &ready].into_iter().flatten().all(is_line) {
        let message = "startCmd and readyCmd are lines below 32 KiB for a shell";
        return Err(Fault::bad_request(message));
    }
    plan.has_service = start.is_some() || ready.is_some();
    plan.recipe.start = start;
    plan.recipe.ready = ready.map(Check::Line);
    Ok(plan)
}

struct Planning {
    base: Base,
    run: Vec<Run>,
    titles: Vec<Title>,
    user: String,
    workdir: Option<String>,
    env: BTreeMap<String, String>,
    /// Variables that only the steps have.
    arguments: BTreeSet<String>,
    anew_from: Option<usize>,
}

impl Planning {
    fn new(base: Base) -> Self {
        let mut planning = Self {
            run: Vec::new(),
            titles: Vec::new(),
            user: base.user.clone().unwrap_or_else(|| USER.to_owned()),
            workdir: base.workdir.clone(),
            env: BTreeMap::new(),
            arguments: BTreeSet::new(),
            anew_from: None,
            base,
        };
        if !planning.base.has_user {
            let title = format!("add the user {USER}");
            let title = Title {
                step: "base".to_owned(),
                text: title,
            };
            planning.root(title, script::add_user(USER));
        }
        planning
    }

    fn add(
        &mut self,
        number: &str,
        step: Step,
        archive: impl Fn(&str) -> Result<PathBuf>,
    ) -> Result<()> {
        if step.args.iter().any(|arg| arg.contains('\0')) {
            return Err(Fault::bad_request("an argument has a zero byte"));
        }
        let title = Title {
            step: number.to_owned(),
            text: format!("{} {}", step.kind, step.args.join(" ")),
        };
        let args: Vec<&str> = step.args.iter().map(String::as_str).collect();
        match (step.kind.as_str(), args.as_slice()) {
            ("RUN", [command]) => self.command(title, command, None),
            ("RUN", [command, user]) => self.command(title, command, Some(user)),
            ("ENV" | "ARG", pairs) if pairs.len() % 2 == 0 => {
                return self.variables(&step.kind, pairs);
            }
            ("WORKDIR", [path]) => self.workdir(title, path),
            ("USER", [user, ..]) => self.user(title, user)?,
            ("COPY", [from, to, rest @ ..]) if rest.len() <= 2 => {
                let hash = step.files_hash.as_deref();
                let hash = hash.ok_or_else(|| Fault::bad_request("filesHash is missing"))?;
                let source = archive(hash)?;
                self.copy(title, source, [from, to], rest)?;
            }
            (kind, args) => {
                let count = args.len();
                let message = format!("invalid step {kind:?} with {count} arguments");
                return Err(Fault::bad_request(message));
            }
        }
        Ok(())
    }

    fn variables(&mut self, kind: &str, pairs: &[&str]) -> Result<()> {
        for pair in pairs.chunks_exact(2) {
            let [name, value] = pair else { continue };
            if name.is_empty() || name.contains('=') {
                let message = format!("{name:?} is not the name of a variable");
                return Err(Fault::bad_request(message));
            }
            let value = self.expanded(value);
            self.env.insert((*name).to_owned(), value);
            if kind == "ARG" {
                self.arguments.insert((*name).to_owned());
            } else {
                self.arguments.remove(*name);
            }
        }
        Ok(())
    }

    /// A value with the variables so far in the places of `$NAME` and `${NAME}`.
    fn expanded(&self, value: &str) -> String {
        let known = |name: &str| {
            let found = self.env.get(name).or_else(|| self.base.env.get(name));
            let usual = (name == "PATH").then_some(PATH);
            found.map(String::as_str).or(usual).unwrap_or_default()
        };
        let mut expanded = String::new();
        let mut rest = value;
        while let Some(at) = rest.find(['$', '\\']) {
            expanded.push_str(&rest[..at]);
            rest = &rest[at..];
            if let Some(after) = rest.strip_prefix(r"\$") {
                expanded.push('$');
                rest = after;
                continue;
            }
            match variable(rest) {
                Some((name, after)) => {
                    expanded.push_str(known(name));
                    rest = after;
                }
                None => {
                    expanded.push_str(&rest[..1]);
                    rest = &rest[1..];
                }
            }
        }
        expanded + rest
    }

    fn command(&mut self, title: Title, command: &str, user: Option<&str>) {
        let user = user.filter(|user| !user.is_empty());
        let step = RunStep {
            user: Some(user.unwrap_or(&self.user).to_owned()),
            workdir: self.workdir.clone(),
            env: self.env.clone(),
            ..RunStep::new(script::run(command, self.workdir.as_deref()))
        };
        self.push(title, step);
    }

    fn workdir(&mut self, title: Title, path: &str) {
        let path = self.absolute(path);
        self.root(title, script::make_dir(&path, &self.user.clone()));
        self.workdir = Some(path);
    }

    fn user(&mut self, title: Title, user: &str) -> Result<()> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        if user.is_empty() || user.starts_with('-') || !user.chars().all(is_plain) {
            return Err(Fault::bad_request(format!("invalid user {user:?}")));
        }
        let is_known = user.contains(':') || user.bytes().all(|byte| byte.is_ascii_digit());
        if !is_known && user != "root" && user != USER {
            self.root(title, script::add_user(user));
        }
        self.user = user.to_owned();
        Ok(())
    }

    fn copy(
        &mut self,
        title: Title,
        source: PathBuf,
        [from, to]: [&str; 2],
        rest: &[&str],
    ) -> Result<()> {
        let (below, name) = place(from)?;
        let given = |at: usize| rest.get(at).copied().filter(|text| !text.is_empty());
        let owner = given(0).unwrap_or(&self.user).to_owned();
        let mode = given(1).unwrap_or_default();
        if !mode.bytes().all(|byte| (b'0'..=b'7').contains(&byte)) || mode.len() > 5 {
            return Err(Fault::bad_request(format!("invalid mode {mode:?}")));
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.:".contains(c);
        if owner.starts_with('-') || !owner.chars().all(is_plain) {
            return Err(Fault::bad_request(format!("invalid owner {owner:?}")));
        }
        let target = self.absolute(to);
        let script = script::copy(script::Copy {
            below: &below,
            name: &name,
            target: &target,
            owner: &owner,
            mode,
        });
        let step = RunStep {
            files: vec![CopyFile {
                unpack: true,
                ..CopyFile::new(source, COPIED)
            }],
            ..RunStep::new(script)
        };
        self.push(title, step);
        Ok(())
    }

    /// A path from the directory of the steps. Who has none works in the home of the user.
    fn absolute(&self, path: &str) -> String {
        if path.starts_with('/') {
            return path.to_owned();
        }
        let home = match self.user.as_str() {
            "root" => "/root".to_owned(),
            user => format!("/home/{user}"),
        };
        let begin = self.workdir.clone().unwrap_or(home);
        format!("{}/{}", begin.trim_end_matches('/'), path)
    }

    /// A step of root, by number: an image may have no list of users.
    fn root(&mut self, title: Title, script: String) {
        let user = Some("0".to_owned());
        let step = RunStep {
            user,
            ..RunStep::new(script)
        };
        self.push(title, step);
    }

    fn push(&mut self, title: Title, step: RunStep) {
        self.run.push(Run::Step(step));
        self.titles.push(title);
    }

    fn finish(self, free_mib: Option<u64>) -> Result<Plan> {
        if free_mib.is_some_and(|free| free > FREE_MOST_MIB) {
            let message = format!("invalid minFreeDiskMb: at most {FREE_MOST_MIB}");
            return Err(Fault::bad_request(message));
        }
        // The size of an image that is still in its registry is not known.
        let known = free_mib.filter(|_| self.base.bytes > 0);
        let room = known.map(|free| {
            let base = self.base.bytes.div_ceil(MIB);
            Size((base + free.max(ROOM_LEAST_MIB)) * MIB)
        });
        let mut env = self.env;
        env.retain(|name, _| !self.arguments.contains(name));
        let recipe = Recipe {
            run: self.run,
            network: Some(Network::Full),
            room,
            user: Some(self.user),
            workdir: self.workdir,
            ..Recipe::new(self.base.from)
        };
        Ok(Plan {
            recipe,
            env,
            titles: self.titles,
            has_service: false,
            anew_from: self.anew_from,
        })
    }
}

/// What a guest's commands have, if their image says nothing.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The variable at the beginning of a text, and what follows it.
fn variable(text: &str) -> Option<(&str, &str)> {
    let text = text.strip_prefix('$')?;
    if let Some(inner) = text.strip_prefix('{') {
        let (name, rest) = inner.split_once('}')?;
        return is_name(name).then_some((name, rest));
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let end = text.find(|c| !is_part(c)).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    is_name(name).then_some((name, rest))
}

fn is_name(text: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.chars().all(is_part) && text.starts_with(|c: char| !c.is_ascii_digit())
}

/// Where a pattern's files are in its archive: a directory, and a name in it. A pattern that may
/// match several files has no name: everything below its plain beginning belongs to it.
fn place(pattern: &str) -> Result<(String, String)> {
    let mut parts: Vec<&str> = Vec::new();
    for part in pattern.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                if parts.pop().is_none() {
                    let message = format!("{pattern:?} leads out of the uploaded files");
                    return Err(Fault::bad_request(message));
                }
            }
            part => parts.push(part),
        }
    }
    if pattern.starts_with('/') {
        return Err(Fault::bad_request(format!("{pattern:?} is absolute")));
    }
    let plain = parts
        .iter()
        .take_while(|part| !part.contains(['*', '?', '[', '{']));
    let plain: Vec<&str> = plain.copied().collect();
    if plain.len() < parts.len() {
        return Ok((plain.join("/"), String::new()));
    }
    let name = parts.pop().unwrap_or_default();
    Ok((parts.join("/"), name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(steps: &str) -> Result<Plan> {
        let wanted = Wanted {
            steps: serde_json::from_str(steps).unwrap(),
            ..Wanted::default()
        };
        let base = Base {
            from: "debian".into(),
            has_user: true,
            ..Base::default()
        };
        plan(wanted, base, None, |hash| Ok(PathBuf::from(hash)))
    }

    fn steps(plan: &Plan) -> Vec<RunStep> {
        plan.recipe.run.iter().cloned().map(Into::into).collect()
    }

    #[test]
    fn variables_hold_from_their_step_on() {
        let plan = planned(
            r#"[{"type":"RUN","args":["one"]},
                {"type":"ENV","args":["A","1","B","${A}x$A-\\$A$"]},
                {"type":"ARG","args":["C","3"]},
                {"type":"RUN","args":["two","root"]}]"#,
        )
        .unwrap();
        let steps = steps(&plan);
        assert!(steps[0].env.is_empty());
        assert_eq!(steps[1].env["B"], "1x1-$A$");
        assert_eq!(steps[1].env["C"], "3");
        assert_eq!(steps[0].user.as_deref(), Some("user"));
        assert_eq!(steps[1].user.as_deref(), Some("root"));
        assert!(plan.env.contains_key("A") && !plan.env.contains_key("C"));
        let numbers: Vec<&str> = plan
            .titles
            .iter()
            .map(|title| title.step.as_str())
            .collect();
        assert_eq!(numbers, ["1", "4"]);
    }

    #[test]
    fn users_and_directories_hold_from_their_step_on() {
        let plan = planned(
            r#"[{"type":"WORKDIR","args":["/app"]},{"type":"WORKDIR","args":["sub"]},
                {"type":"USER","args":["dev"]},{"type":"RUN","args":["x"],"force":true}]"#,
        )
        .unwrap();
        let steps = steps(&plan);
        assert_eq!(steps[3].workdir.as_deref(), Some("/app/sub"));
        assert_eq!(steps[3].user.as_deref(), Some("dev"));
        assert_eq!(plan.recipe.user.as_deref(), Some("dev"));
        assert_eq!(plan.anew_from, Some(3));
    }

    #[test]
    fn a_copy_brings_its_archive() {
        let plan = planned(
            r#"[{"type":"COPY","args":["a/b.txt","/srv/","root","0644"],"filesHash":"h"}]"#,
        )
        .unwrap();
        let step = &steps(&plan)[0];
        assert_eq!(step.files[0].source, PathBuf::from("h"));
        assert!(step.files[0].unpack);
        assert!(
            step.command
                .contains("below='a'\nname='b.txt'\ntarget='/srv/'")
        );
    }

    #[test]
    fn a_pattern_has_a_plain_beginning() {
        let of = |pattern: &str| place(pattern).unwrap();
        assert_eq!(of("a/b"), ("a".into(), "b".into()));
        assert_eq!(of("./x/../a"), (String::new(), "a".into()));
        assert_eq!(of("."), (String::new(), String::new()));
        assert_eq!(of("src/*.py"), ("src".into(), String::new()));
        assert_eq!(of("**/x"), (String::new(), String::new()));
        assert!(place("../x").is_err() && place("/x").is_err());
    }

    #[test]
    fn what_cannot_be_done_is_refused_with_its_step() {
        for (steps, why) in [
            (
                r#"[{"type":"ADD","args":["a","b"]}]"#,
                "step 1: invalid step \"ADD\"",
            ),
            (r#"[{"type":"RUN","args":[]}]"#, "with 0 arguments"),
            (
                r#"[{"type":"COPY","args":["a","b"]}]"#,
                "filesHash is missing",
            ),
            (
                r#"[{"type":"ENV","args":["A=","b"]}]"#,
                "name of a variable",
            ),
            (r#"[{"type":"USER","args":["a b"]}]"#, "invalid user"),
            (r#"[{"type":"RUN","args":["a\u0000"]}]"#, "zero byte"),
        ] {
            let fault = planned(steps).unwrap_err();
            assert!(fault.message.contains(why), "{steps}: {}", fault.message);
        }
    }
}
