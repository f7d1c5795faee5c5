//! Templates: the names from which clients create sandboxes.
//!
//! A template is an image or a snapshot of the store. `base`, from which clients create without a
//! choice of their own, is `debian`, which has the user that they expect, unless the store or the
//! configuration has another one.

use sandtree::image::Progress;
use sandtree::{Host, ImageInfo};

use crate::config::Config;
use crate::error::{Fault, Result};

/// The template of clients that name none.
pub const BASE: &str = "base";
/// A whole Debian, with the user of E2B's templates.
pub const DEBIAN: &str = "debian";

/// Only busybox.
const TINY: &str = "tiny";

/// The tag that every template has.
const DEFAULT_TAG: &str = ":default";

/// The name in the store of what a client calls a template or a snapshot.
pub fn stored_name(config: &Config, template: &str) -> String {
    let plain = template.strip_suffix(DEFAULT_TAG).unwrap_or(template);
    // E2B's names may begin with the name of a team.
    let plain = plain.rsplit_once('/').map_or(plain, |(_, name)| name);
    let named = plain.replace(':', ".");
    // A path of the host would begin so. No name has a colon, so this one is refused.
    let named = match named.strip_prefix('.') {
        Some(rest) => format!(":{rest}"),
        None => named,
    };
    config.templates.get(&named).cloned().unwrap_or(named)
}

/// The image or snapshot of a template.
pub async fn origin(host: &Host, config: &Config, template: &str) -> String {
    let name = stored_name(config, template);
    let is_missing = image(host, &name).is_none() && host.inspect_snapshot(&name).await.is_err();
    if name == BASE && is_missing {
        return DEBIAN.to_owned();
    }
    name
}

pub fn unknown(name: &str) -> Fault {
    Fault::not_found(format!("template \"{name}\" not found"))
}

/// The image of this name, if the store has it.
pub fn image(host: &Host, name: &str) -> Option<ImageInfo> {
    host.inspect_image(name).ok()
}

/// The image of the store that stands for an image as Dockerfiles name it. `None`: there is none.
pub fn image_for(host: &Host, name: &str) -> Option<String> {
    let plain = name.split_once('@').map_or(name, |(plain, _)| plain);
    let (repository, tag) = match plain.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => (repository, tag),
        _ => (plain, "latest"),
    };
    if matches!(repository, "debian" | "library/debian" | "e2bdev/base") {
        return Some(DEBIAN.to_owned());
    }
    if repository == TINY {
        return Some(TINY.to_owned());
    }
    let last = repository.rsplit('/').next().unwrap_or(repository);
    let candidates = [format!("{last}.{tag}"), last.to_owned()];
    let is_stored = |name: &&String| {
        let is_exact = !repository.contains('/') && (tag == "latest" || name.contains('.'));
        is_exact && image(host, name).is_some()
    };
    candidates.iter().find(is_stored).cloned()
}

/// Makes the image of the template `base`, if it is a built-in one and missing.
pub async fn prepare(
    host: &Host,
    config: &Config,
    progress: impl FnMut(Progress) + Send + 'static,
) -> Result<()> {
    if origin(host, config, BASE).await == DEBIAN {
        host.ensure_image(DEBIAN, progress).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{FileConfig, Options};

    #[test]
    fn the_names_of_clients_become_names_of_the_store() {
        let file = FileConfig {
            templates: [("py".to_owned(), "python-3".to_owned())].into(),
            ..FileConfig::default()
        };
        let config = file.with(Options::default()).unwrap();
        let stored = |name| stored_name(&config, name);
        assert_eq!(stored("base"), "base");
        assert_eq!(stored("mine:default"), "mine");
        assert_eq!(stored("team/mine:v1"), "mine.v1");
        assert_eq!(stored("py"), "python-3");
        for path in ["..", ".hidden", "/etc", "a/..", ":x"] {
            assert!(!sandtree::is_path(&stored(path)), "{path}");
        }
    }
}
