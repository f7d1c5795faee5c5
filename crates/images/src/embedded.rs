//! Recipes that are part of this program: files of the directory `recipes`, embedded.
//!
//! Always: such a recipe begins from Debian or from another embedded recipe. No machine is needed
//! to make its image: its commands run in the directory that `mmdebstrap` has installed, as root of
//! it, before the files are added. Its files are text and belong to root. It is also an ordinary
//! recipe: a copy of its directory builds the same content.

use std::path::Path;

use sandtree_store::{Digest, ExecDefaults, Image};

use crate::debian::{self, Additions};
use crate::error::Result;
use crate::job::Job;
use crate::new_image::{Content, Node};
use crate::recipe::{CopyFile, Recipe, Run, Size, parse_mode};

/// The directory of an embedded recipe, which exists nowhere.
const DIR: &str = "/";
const MODE: u16 = 0o644;

/// A recipe with the files that it copies.
#[derive(Debug)]
pub(crate) struct Embedded {
    pub name: &'static str,
    recipe: &'static str,
    /// The sources of the recipe's files, and their contents.
    files: &'static [(&'static str, &'static str)],
}

/// What a recipe and those below it add to Debian.
struct OverDebian {
    additions: Additions,
    defaults: ExecDefaults,
}

/// A file of an embedded recipe, by its name in the recipe's directory.
macro_rules! embed {
    ($name:literal: $($file:literal),* $(,)?) => {
        Embedded {
            name: $name,
            recipe: include_str!(concat!("../recipes/", $name, "/recipe.toml")),
            files: &[$(($file, include_str!(concat!("../recipes/", $name, "/", $file)))),*],
        }
    };
}

static ALL: &[Embedded] = &[
    embed!("code-interpreter-v1":
        "server.py",
        "kernel.py",
        "charts.py",
        "python.json",
    ),
    embed!("desktop":
        "desktop",
        "desktop-ready",
        "keep-name",
        "hosts",
        "xorg.conf",
        "xfce4-session.xml",
        "xfwm4.xml",
        "xfce4-panel.xml",
        "xfce4-desktop.xml",
        "xsettings.xml",
        "policies.json",
    ),
    embed!("browser":
        "firefox.desktop",
        "start.html",
    ),
];

/// The embedded recipe of this name.
pub(crate) fn find(name: &str) -> Option<&'static Embedded> {
    ALL.iter().find(|embedded| embedded.name == name)
}

impl Embedded {
    /// A number that changes with the recipe and its files, and with those of its base.
    pub fn version(&self) -> u32 {
        let mut all = self.recipe.to_owned();
        if let Some(base) = self.base() {
            all.push_str(&format!("\0{}", base.version()));
        }
        for (name, content) in self.files {
            all.push_str(&format!("\0{name}\0{content}"));
        }
        let digest = Digest::of(all.as_bytes());
        u32::from_str_radix(&digest.as_str()[..8], 16).expect("a digest is hexadecimal")
    }

    /// Makes the image, without a name.
    pub fn build(&self, job: &mut Job<'_>) -> Result<Image> {
        let OverDebian {
            additions,
            defaults,
        } = self.over_debian()?;
        debian::build_with(job, &additions, defaults)
    }

    fn over_debian(&self) -> Result<OverDebian> {
        let recipe = self.parsed()?;
        let base = match self.base() {
            Some(base) => base.over_debian()?,
            None => OverDebian {
                additions: Additions::default(),
                defaults: debian::defaults(),
            },
        };
        let defaults = recipe.defaults_over(&base.defaults);
        let mut additions = base.additions;
        let nodes = recipe.files.iter().map(|file| self.node(file));
        additions.nodes.extend(nodes);
        additions.packages.extend(recipe.packages);
        let lines = recipe.run.into_iter().map(|run| match run {
            Run::Line(line) => line,
            Run::Step(step) => step.command,
        });
        additions.run.extend(lines);
        additions.disk_bytes = recipe
            .size
            .map(|Size(bytes)| bytes)
            .or(additions.disk_bytes);
        if let Some(kernel) = recipe.kernel {
            additions.kernel = kernel.into();
        }
        Ok(OverDebian {
            additions,
            defaults,
        })
    }

    /// The embedded recipe that this one begins from. `None`: it begins from Debian.
    fn base(&self) -> Option<&'static Self> {
        find(&self.parsed().ok()?.from)
    }

    fn parsed(&self) -> Result<Recipe> {
        Recipe::parse(self.recipe, Path::new(DIR))
    }

    fn node(&self, file: &CopyFile) -> Node {
        let mode = file.mode.as_deref().and_then(parse_mode);
        Node {
            path: file.target.clone(),
            mode: mode.and_then(|mode| mode.try_into().ok()).unwrap_or(MODE),
            owner: 0,
            content: Content::Text(self.content(file).to_owned()),
        }
    }

    fn content(&self, file: &CopyFile) -> &'static str {
        let is_its = |(name, _): &&(&str, &str)| Path::new(DIR).join(name) == file.source;
        let found = self.files.iter().find(is_its);
        found.expect("a test finds every file").1
    }
}

#[cfg(test)]
mod tests {
    use sandtree_store::{DisplaySize, Network};

    use super::*;
    use crate::recipe::Kernel;
    use crate::spec::KernelChoice;

    #[test]
    fn embedded_recipes_need_no_machine_and_have_their_files() {
        for (index, embedded) in ALL.iter().enumerate() {
            let recipe = embedded.parsed().unwrap();
            assert_eq!(recipe.name.as_deref(), Some(embedded.name));
            let base = ALL.iter().position(|other| other.name == recipe.from);
            assert!(recipe.from == "debian" || base.is_some_and(|base| base < index));
            assert!(recipe.init.is_none() && recipe.room.is_none());
            assert!(matches!(recipe.kernel, None | Some(Kernel::Kind(_))));
            assert!(recipe.run.iter().all(|run| matches!(run, Run::Line(_))));
            // Commands have the host's network and trust what it trusts.
            let has_network = recipe.network == Some(Network::Full) && recipe.host_ca;
            assert_eq!(has_network, !recipe.run.is_empty());
            assert_eq!(recipe.files.len(), embedded.files.len());
            for file in &recipe.files {
                assert!(file.owner.is_none());
                assert!(!embedded.content(file).is_empty());
            }
        }
    }

    #[test]
    fn a_browser_is_a_desktop_with_more() {
        let over = |name| find(name).unwrap().over_debian().unwrap();
        let desktop = over("desktop");
        let browser = over("browser");
        for made in [&desktop, &browser] {
            assert_eq!(made.additions.kernel, KernelChoice::Full);
            assert_eq!(made.defaults.display, Some(DisplaySize::DEFAULT));
            assert!(made.additions.disk_bytes.is_some());
        }
        assert_eq!(desktop.defaults.start, browser.defaults.start);
        assert_ne!(desktop.defaults.ready, browser.defaults.ready);
        let paths = |made: &OverDebian| {
            let nodes = made.additions.nodes.iter();
            nodes.map(|node| node.path.clone()).collect::<Vec<_>>()
        };
        assert!(paths(&browser).starts_with(&paths(&desktop)));
        let packages = &browser.additions.packages;
        assert!(packages.starts_with(&desktop.additions.packages));
        assert!(packages.len() > desktop.additions.packages.len());
    }

    #[test]
    fn another_content_has_another_version() {
        let first = find("code-interpreter-v1").unwrap();
        let other = Embedded {
            files: &first.files[1..],
            ..*first
        };
        assert_ne!(first.version(), other.version());
        assert!(find("code-interpreter").is_none());
    }
}
