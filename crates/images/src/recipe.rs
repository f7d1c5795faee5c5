//! Recipes: TOML files that say what an image is made from.
//!
//! ```toml
//! from = "debian"                      # an image's name, a file or directory, or a reference to a registry
//! packages = ["ripgrep"]
//! files = [{ source = "app", target = "/opt/app" }]
//! run = ["pip install --break-system-packages requests"]
//! network = "full"
//! ```
//!
//! Always: a recipe is checked as a whole before its first step runs. Paths in it are relative to
//! the directory of its file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sandtree_store::{DisplaySize, ExecDefaults, Init, Network, Ready};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, io_error};
use crate::spec::{KernelChoice, OwnKernel};

const MIB: u64 = 1 << 20;
const SIZE_MIN: u64 = 16 * MIB;
const SIZE_MAX: u64 = 1 << 40;
/// Enough for a large service under emulation.
const READY_SECONDS: u64 = 300;
const READY_SECONDS_MAX: u64 = 3600;
/// Linux refuses a longer argument of a program.
const LINE_MAX: usize = 128 << 10;

/// What an image is made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// An image's name, the path of a file or directory to import, or a reference to a registry.
    pub from: String,
    /// The image's name. `None`: the name of the recipe's file.
    pub name: Option<String>,
    /// Packages to install with the distribution's own tool.
    #[serde(default)]
    pub packages: Vec<String>,
    #[serde(default)]
    pub files: Vec<CopyFile>,
    /// Commands that run in a machine with `sh -c`, as root unless they name a user.
    #[serde(default)]
    pub run: Vec<Run>,
    /// The network of that machine. `None`: isolated, unless it has to fetch packages.
    pub network: Option<Network>,
    /// The memory of that machine.
    pub memory: Option<Size>,
    /// The size of that machine's disk, and thus of the image. `None`: a few GiB more than the base
    /// has.
    pub room: Option<Size>,
    /// Whether that machine trusts the certificate authorities that the host trusts. The
    /// certificates stay in the image; the variables that lead programs to them do not.
    #[serde(default)]
    pub host_ca: bool,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub entrypoint: Option<Vec<String>>,
    pub cmd: Option<Vec<String>>,
    /// A line for `sh -c` that runs in the background from each boot on. Empty: nothing does.
    pub start: Option<String>,
    /// A check that each boot repeats until it succeeds. Empty: no boot waits.
    pub ready: Option<Check>,
    /// The size of the screen that sandboxes get. `None`: that of the base, which may have none.
    pub display: Option<DisplaySize>,
    pub init: Option<Init>,
    /// The size of the disk that sandboxes get.
    pub size: Option<Size>,
    /// `None`: the kernel of the base.
    pub kernel: Option<Kernel>,
}

/// A file or directory of the host that is copied into the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyFile {
    pub source: PathBuf,
    /// An absolute path in the image.
    pub target: String,
    /// `user:group` by name or number. `None`: root.
    pub owner: Option<String>,
    /// Octal, for a single file. `None`: the mode on the host.
    pub mode: Option<String>,
    /// Whether the source is a tar archive, whose members are copied into the target.
    #[serde(default)]
    pub unpack: bool,
}

impl CopyFile {
    pub fn new(source: impl Into<PathBuf>, target: impl Into<String>) -> Self {
        Self {
            source: source.into(),
            target: target.into(),
            owner: None,
            mode: None,
            unpack: false,
        }
    }

    fn check(&self) -> Result<()> {
        let refused = |what: String| Err(Error::Recipe { what });
        let Self { target, mode, .. } = self;
        if !target.starts_with('/') {
            return refused(format!("the target {target:?} is not an absolute path"));
        }
        let mode = mode.as_deref();
        if mode.is_some_and(|mode| parse_mode(mode).is_none()) {
            return refused(format!(
                "the mode of {target:?} is not an octal number below 10000"
            ));
        }
        Ok(())
    }
}

/// A command, alone or with settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Run {
    Line(String),
    Step(RunStep),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunStep {
    pub command: String,
    pub user: Option<String>,
    pub workdir: Option<String>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The seconds after which the command counts as failed.
    pub timeout: Option<u64>,
    /// Files that are copied before the command runs, as a part of the same step.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<CopyFile>,
}

impl RunStep {
    /// A command that runs as root, in `/`.
    pub fn new(command: impl Into<String>) -> Self {
        Self {
            command: command.into(),
            user: None,
            workdir: None,
            env: BTreeMap::new(),
            timeout: None,
            files: Vec::new(),
        }
    }
}

impl From<Run> for RunStep {
    fn from(run: Run) -> Self {
        match run {
            Run::Line(command) => Self::new(command),
            Run::Step(step) => step,
        }
    }
}

/// A line for `sh -c`, alone or with the time that it has to succeed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Check {
    Line(String),
    Timed(TimedCheck),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimedCheck {
    pub command: String,
    /// The seconds after which a boot gives up.
    pub timeout: u64,
}

impl Check {
    fn command(&self) -> &str {
        match self {
            Self::Line(command) | Self::Timed(TimedCheck { command, .. }) => command,
        }
    }

    fn seconds(&self) -> u64 {
        match self {
            Self::Line(_) => READY_SECONDS,
            Self::Timed(timed) => timed.timeout,
        }
    }

    fn recorded(&self) -> Option<Ready> {
        let command = self.command().to_owned();
        let timeout_ms = self.seconds().saturating_mul(1000);
        (!command.is_empty()).then_some(Ready {
            command,
            timeout_ms,
        })
    }
}

/// Bytes, as a number or as `512M`, `8G`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "SizeText", into = "u64")]
pub struct Size(pub u64);

#[derive(Deserialize)]
#[serde(untagged)]
enum SizeText {
    Bytes(u64),
    Text(String),
}

impl TryFrom<SizeText> for Size {
    type Error = String;

    fn try_from(size: SizeText) -> Result<Self, String> {
        let bytes = match &size {
            SizeText::Bytes(bytes) => Some(*bytes),
            SizeText::Text(text) => parse_size(text),
        };
        bytes
            .filter(|bytes| bytes.is_multiple_of(MIB))
            .map(Self)
            .ok_or_else(|| "a size is a whole number of MiB: 512M, 8G".into())
    }
}

impl From<Size> for u64 {
    fn from(size: Size) -> u64 {
        size.0
    }
}

fn parse_size(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at(
        text.find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len()),
    );
    let shift = match unit {
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// A kernel by its kind, or the user's own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Kernel {
    Kind(KernelKind),
    Own(OwnKernel),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelKind {
    Cloud,
    Full,
}

impl From<Kernel> for KernelChoice {
    fn from(kernel: Kernel) -> Self {
        match kernel {
            Kernel::Kind(KernelKind::Cloud) => Self::Cloud,
            Kernel::Kind(KernelKind::Full) => Self::Full,
            Kernel::Own(own) => Self::Own(own),
        }
    }
}

impl Recipe {
    /// A recipe without steps.
    pub fn new(from: impl Into<String>) -> Self {
        Self {
            from: from.into(),
            name: None,
            packages: Vec::new(),
            files: Vec::new(),
            run: Vec::new(),
            network: None,
            memory: None,
            room: None,
            host_ca: false,
            env: BTreeMap::new(),
            user: None,
            workdir: None,
            entrypoint: None,
            cmd: None,
            start: None,
            ready: None,
            display: None,
            init: None,
            size: None,
            kernel: None,
        }
    }

    /// Reads a recipe from a file and makes its paths absolute. The file's own path must be
    /// absolute, because the library knows no current directory.
    pub fn read(path: &Path) -> Result<Self> {
        let dir = path.parent().filter(|dir| dir.is_absolute());
        let dir = dir.ok_or_else(|| Error::Recipe {
            what: format!("{} is not the absolute path of a file", path.display()),
        })?;
        let text = std::fs::read_to_string(path).map_err(io_error("read", path))?;
        let mut recipe = Self::parse(&text, dir)?;
        if recipe.name.is_none() {
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            recipe.name = stem.map(str::to_ascii_lowercase);
        }
        Ok(recipe)
    }

    /// Parses a recipe. `dir` is the absolute directory that its paths are relative to.
    pub fn parse(text: &str, dir: &Path) -> Result<Self> {
        let mut recipe: Self = toml::from_str(text).map_err(|error| Error::Recipe {
            what: error.to_string(),
        })?;
        recipe.check()?;
        if is_path(&recipe.from) {
            recipe.from = dir.join(&recipe.from).to_string_lossy().into_owned();
        }
        for file in recipe.copied_mut() {
            file.source = dir.join(&file.source);
        }
        if let Some(Kernel::Own(own)) = &mut recipe.kernel {
            own.kernel = dir.join(&own.kernel);
            own.initramfs = own.initramfs.take().map(|path| dir.join(path));
            own.modules = own.modules.take().map(|path| dir.join(path));
        }
        Ok(recipe)
    }

    fn copied_mut(&mut self) -> impl Iterator<Item = &mut CopyFile> {
        let of_steps = self.run.iter_mut().flat_map(|run| match run {
            Run::Line(_) => [].iter_mut(),
            Run::Step(step) => step.files.iter_mut(),
        });
        self.files.iter_mut().chain(of_steps)
    }

    fn check(&self) -> Result<()> {
        let refused = |what: String| Err(Error::Recipe { what });
        if let Some(package) = self.packages.iter().find(|package| !is_package(package)) {
            return refused(format!("{package:?} is not the name of a package"));
        }
        self.files.iter().try_for_each(CopyFile::check)?;
        for run in &self.run {
            if let Run::Step(step) = run {
                step.files.iter().try_for_each(CopyFile::check)?;
            }
        }
        if let Some(key) = self
            .env
            .keys()
            .find(|key| key.is_empty() || key.contains(['=', '\0']))
        {
            return refused(format!("{key:?} is not the name of a variable"));
        }
        self.check_service()?;
        if self.display.is_some() && self.kernel == Some(Kernel::Kind(KernelKind::Cloud)) {
            let what = "the kernel \"cloud\" has no driver for a display: use kernel = \"full\"";
            return refused(what.to_owned());
        }
        if self.host_ca && self.packages.is_empty() && self.files.is_empty() && self.run.is_empty()
        {
            return refused("host_ca is for steps, and there are none".to_owned());
        }
        let mut sizes = [self.size, self.room].into_iter().flatten();
        if !sizes.all(|size| (SIZE_MIN..=SIZE_MAX).contains(&size.0)) {
            return refused("the size of a disk is from 16M to 1T".to_owned());
        }
        Ok(())
    }

    fn check_service(&self) -> Result<()> {
        let refused = |what: String| Err(Error::Recipe { what });
        let ready = self.ready.as_ref();
        let lines = [self.start.as_deref(), ready.map(Check::command)];
        let is_line = |line: &str| line.len() < LINE_MAX && !line.contains('\0');
        if !lines.into_iter().flatten().all(is_line) {
            return refused("start and ready are lines below 128 KiB for a shell".to_owned());
        }
        if ready.is_some_and(|check| !(1..=READY_SECONDS_MAX).contains(&check.seconds())) {
            return refused("the timeout of ready is from 1 to 3600 seconds".to_owned());
        }
        Ok(())
    }

    /// The defaults of commands in the image: those of the recipe, or else those of its base.
    pub fn defaults_over(&self, base: &ExecDefaults) -> ExecDefaults {
        let mut env = base.env.clone();
        env.extend(self.env.clone());
        ExecDefaults {
            env,
            user: self.user.clone().or(base.user.clone()),
            workdir: self.workdir.clone().or(base.workdir.clone()),
            // A new entry point does not get the arguments of the old one.
            cmd: self.cmd.clone().unwrap_or(if self.entrypoint.is_some() {
                Vec::new()
            } else {
                base.cmd.clone()
            }),
            entrypoint: self.entrypoint.clone().unwrap_or(base.entrypoint.clone()),
            start: match &self.start {
                Some(line) => Some(line.clone()).filter(|line| !line.is_empty()),
                None => base.start.clone(),
            },
            // A new service does not get the check of the old one.
            ready: match (&self.ready, &self.start) {
                (Some(check), _) => check.recorded(),
                (None, Some(_)) => None,
                (None, None) => base.ready.clone(),
            },
            display: self.display.or(base.display),
        }
    }
}

/// Whether the base of a recipe is a path, and not a name or a reference to a registry.
pub fn is_path(text: &str) -> bool {
    text.starts_with(['.', '/'])
}

/// The bits of an octal mode.
pub fn parse_mode(text: &str) -> Option<u32> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o7777)
}

/// Refuses everything that apt or apk would take for an option or a pattern.
fn is_package(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "+-.:=~_".contains(c);
    name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Recipe> {
        Recipe::parse(text, Path::new("/recipes"))
    }

    #[test]
    fn a_recipe_is_read_and_its_paths_are_made_absolute() {
        let recipe = parse(
            r#"
            from = "debian"
            packages = ["jq", "libc6-dev"]
            files = [{ source = "app", target = "/opt/app" }]
            run = ["true", { command = "make", user = "user", timeout = 60 }]
            network = "full"
            env = { A = "1" }
            size = "8G"
            memory = "1G"
            init = "image"
            kernel = "full"
            "#,
        )
        .unwrap();
        assert_eq!(recipe.files[0].source, Path::new("/recipes/app"));
        assert_eq!(
            (recipe.size, recipe.memory),
            (Some(Size(8 << 30)), Some(Size(1 << 30)))
        );
        let steps: Vec<RunStep> = recipe.run.into_iter().map(Into::into).collect();
        assert_eq!(
            (steps[0].command.as_str(), steps[1].timeout),
            ("true", Some(60))
        );
        assert_eq!(
            recipe.kernel.map(KernelChoice::from),
            Some(KernelChoice::Full)
        );
        assert_eq!(
            parse("from = \"./rootfs.tar\"").unwrap().from,
            "/recipes/./rootfs.tar"
        );
    }

    #[test]
    fn files_of_a_step_are_made_absolute_and_checked() {
        let text = r#"
            from = "a"
            run = [{ command = "c", files = [{ source = "x.tar", target = "/x", unpack = true }] }]
            "#;
        let recipe = parse(text).unwrap();
        let steps: Vec<RunStep> = recipe.run.into_iter().map(Into::into).collect();
        assert_eq!(steps[0].files[0].source, Path::new("/recipes/x.tar"));
        assert!(steps[0].files[0].unpack);
        let relative = parse(&text.replace("/x", "x")).unwrap_err().to_string();
        assert!(relative.contains("absolute path"), "{relative}");
    }

    #[test]
    fn an_invalid_recipe_is_refused_with_the_reason() {
        for (text, why) in [
            ("", "missing field `from`"),
            ("from = \"a\"\nrnu = []", "unknown field"),
            (
                "from = \"a\"\npackages = [\"-o x\"]",
                "not the name of a package",
            ),
            ("from = \"a\"\nsize = \"8 apples\"", "whole number of MiB"),
            ("from = \"a\"\nsize = 1048576", "from 16M to 1T"),
            (
                "from = \"a\"\nfiles = [{ source = \"a\", target = \"b\" }]",
                "absolute path",
            ),
            (
                "from = \"a\"\nfiles = [{ source = \"a\", target = \"/b\", mode = \"99999\" }]",
                "octal",
            ),
            (
                "from = \"a\"\nenv = { \"A=B\" = \"1\" }",
                "name of a variable",
            ),
            ("from = \"a\"\nkernel = \"fast\"", "kernel"),
            ("from = \"a\"\ndisplay = \"big\"", "WIDTHxHEIGHT"),
            ("from = \"a\"\ndisplay = \"99999x99999\"", "2560x1600"),
            (
                "from = \"a\"\ndisplay = \"800x600\"\nkernel = \"cloud\"",
                "use kernel = \"full\"",
            ),
            ("from = \"a\"\nstart = \"a\\u0000\"", "for a shell"),
            (
                "from = \"a\"\nready = { command = \"true\", timeout = 3601 }",
                "1 to 3600",
            ),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_recipe_is_read_by_its_absolute_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("Tool.toml");
        std::fs::write(&path, "from = \"./base.tar\"").unwrap();
        let recipe = Recipe::read(&path).unwrap();
        assert_eq!(recipe.name.as_deref(), Some("tool"));
        assert_eq!(Path::new(&recipe.from), dir.path().join("./base.tar"));
        let relative = Recipe::read(Path::new("Tool.toml"))
            .unwrap_err()
            .to_string();
        assert!(relative.contains("absolute path"), "{relative}");
    }

    #[test]
    fn a_new_service_does_not_get_the_check_of_the_old_one() {
        let over = |text: &str, base: &ExecDefaults| {
            let recipe = parse(&format!("from = \"a\"\n{text}")).unwrap();
            recipe.defaults_over(base)
        };
        let timed = "start = \"a\"\nready = { command = \"b\", timeout = 7 }";
        let base = over(timed, &ExecDefaults::default());
        let ready = |command: &str, timeout_ms| {
            let command = command.to_owned();
            Some(Ready {
                command,
                timeout_ms,
            })
        };
        assert_eq!(base.start.as_deref(), Some("a"));
        assert_eq!(base.ready, ready("b", 7000));
        assert_eq!(over("", &base), base);
        assert_eq!(over("ready = \"c\"", &base).ready, ready("c", 300_000));
        let other = over("start = \"d\"", &base);
        assert_eq!(other.start.as_deref(), Some("d"));
        assert_eq!(other.ready, None);
        assert!(!over("start = \"\"", &base).has_service());
    }

    #[test]
    fn an_image_has_the_display_of_its_recipe_or_of_its_base() {
        let over = |text: &str, base: &ExecDefaults| {
            let recipe = parse(&format!("from = \"a\"\n{text}")).unwrap();
            recipe.defaults_over(base).display
        };
        let none = ExecDefaults::default();
        assert_eq!(over("", &none), None);
        assert_eq!(
            over("display = \"1280x800\"", &none),
            Some(DisplaySize::DEFAULT)
        );
        let base = ExecDefaults {
            display: Some(DisplaySize::DEFAULT),
            ..none
        };
        assert_eq!(over("", &base), base.display);
        let small = DisplaySize::new(640, 480).unwrap();
        assert_eq!(over("display = \"640x480\"", &base), Some(small));
    }

    #[test]
    fn a_desktop_has_an_hour_at_most_to_become_ready() {
        let recipe = parse("from = \"a\"\nready = { command = \"b\", timeout = 3600 }").unwrap();
        let ready = recipe.defaults_over(&ExecDefaults::default()).ready;
        assert_eq!(ready.unwrap().timeout_ms, 3_600_000);
    }

    #[test]
    fn a_new_entry_point_does_not_get_the_arguments_of_the_old_one() {
        let base = ExecDefaults {
            entrypoint: vec!["/a".into()],
            cmd: vec!["-x".into()],
            ..ExecDefaults::default()
        };
        assert_eq!(parse("from = \"a\"").unwrap().defaults_over(&base), base);
        let other = parse("from = \"a\"\nentrypoint = [\"/b\"]")
            .unwrap()
            .defaults_over(&base);
        assert_eq!(
            (other.entrypoint, other.cmd),
            (vec!["/b".to_owned()], Vec::new())
        );
    }
}
