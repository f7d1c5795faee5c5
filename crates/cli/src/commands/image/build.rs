//! `sandtree image build`: a built-in image, or one from a recipe.

use std::path::Path;

use sandtree::image::Recipe;
use sandtree::{BuildSpec, Error, Host, ImageInfo, Result};

use crate::args::Global;
use crate::commands::{Outcome, open, registry};
use crate::progress;

#[derive(Debug, clap::Args)]
pub struct BuildArgs {
    /// A built-in image, or a recipe: a path with a / or with the extension .toml
    #[arg(value_name = "debian|tiny|RECIPE.toml")]
    pub what: String,
    /// Name of the image [default: from the recipe, or the file name without extension]
    #[arg(long)]
    pub name: Option<String>,
    /// Run every step again, with the current content of its sources
    #[arg(long)]
    pub no_cache: bool,
    /// Print the output of the steps, also without a terminal
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pub access: registry::Access,
}

pub async fn run(global: &Global, args: BuildArgs) -> Outcome {
    let image = if is_recipe(&args.what) {
        from_recipe(global, &args).await?
    } else {
        built_in(global, &args).await?
    };
    Ok(super::made(global, &image))
}

/// A recipe is given as a path, so that no file can shadow a built-in image.
fn is_recipe(what: &str) -> bool {
    what.contains('/') || what.ends_with(".toml")
}

async fn from_recipe(global: &Global, args: &BuildArgs) -> Result<ImageInfo> {
    let path = std::path::absolute(&args.what).map_err(|e| Error::io("resolve", &args.what, e))?;
    let recipe = Recipe::read(&path).map_err(|error| error.making(&args.what))?;
    let access = registry::access(&args.access).await?;
    let spec = BuildSpec {
        name: args.name.clone(),
        anew: args.no_cache,
        access,
        ..BuildSpec::default()
    };
    build(&open(global).await?, &recipe, spec, args.verbose).await
}

async fn build(host: &Host, recipe: &Recipe, spec: BuildSpec, verbose: bool) -> Result<ImageInfo> {
    let name = spec
        .name
        .clone()
        .or_else(|| recipe.name.clone())
        .unwrap_or_default();
    let (bar, watch) = progress::build(&name, verbose);
    let built = host.build_image(recipe, spec, watch).await;
    bar.finish_and_clear();
    built
}

/// Builds the image if it is missing or another version built it. `--name` adds a name.
async fn built_in(global: &Global, args: &BuildArgs) -> Result<ImageInfo> {
    let name = args.what.as_str();
    if !sandtree::image::is_built_in(name) {
        return Err(Error::invalid(
            "image to build",
            name,
            "debian, tiny, or a recipe by its path, as in ./NAME.toml",
        ));
    }
    let host = open(global).await?;
    let told = progress::image(name);
    let image = if args.no_cache {
        host.rebuild_image(name, told).await?
    } else {
        host.ensure_image(name, told).await?
    };
    if args.name.as_deref().is_none_or(|wanted| wanted == name) {
        return Ok(image);
    }
    let recipe = Recipe::parse(&format!("from = {name:?}"), Path::new("/"))
        .map_err(|error| error.making(name))?;
    build(
        &host,
        &recipe,
        BuildSpec {
            name: args.name.clone(),
            ..BuildSpec::default()
        },
        args.verbose,
    )
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_are_distinguished_from_names() {
        for recipe in ["./debian", "recipe.toml", "a/b", "/x"] {
            assert!(is_recipe(recipe), "{recipe}");
        }
        for name in ["debian", "tiny", "toml"] {
            assert!(!is_recipe(name), "{name}");
        }
    }
}
