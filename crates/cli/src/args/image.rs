//! What can be typed about images and registries.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use sandtree::image::{ImportSpec, KernelChoice, OwnKernel};
use sandtree::{Error, Init, Result};

use super::{Shape, size};

#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Make an image: a built-in one, or one from a recipe
    Build(Build),
    /// Make a root file system, an OCI image or a disk an image
    Import(ImportImage),
    /// List images
    Ls,
    /// Show everything known of an image
    Inspect {
        /// A name or a digest
        #[arg(value_name = "IMAGE")]
        image: String,
    },
    /// Take images' names away; their content stays as long as anything uses it
    Rm {
        /// Names, or digests for all names of an image
        #[arg(required = true, value_name = "IMAGE")]
        images: Vec<String>,
    },
    /// Keep a booted state, from which sandboxes of the same shape begin
    Warm(Box<Warm>),
}

#[derive(Debug, Args)]
pub struct Build {
    /// A built-in image, or the file of a recipe: what has a / or ends in .toml
    #[arg(value_name = "debian|tiny|RECIPE.toml")]
    pub what: String,
    /// What to call it [default: as the recipe says, or the file's name without its ending]
    #[arg(long)]
    pub name: Option<String>,
    /// Do every step anew, from what its sources have today
    #[arg(long)]
    pub no_cache: bool,
    /// Show what the steps say, as on a terminal
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pub access: Access,
}

#[derive(Debug, Args)]
pub struct ImportImage {
    /// A tar archive, a directory, an OCI or Docker archive, an OCI layout, a qcow2 or a raw disk
    pub path: PathBuf,
    /// What to call it [default: the file's name without its endings]
    #[arg(long)]
    pub name: Option<String>,
    #[command(flatten)]
    pub made: Made,
}

#[derive(Debug, Args)]
pub struct Warm {
    /// List the booted states
    #[arg(long, conflicts_with_all = ["rm", "image", "Shape"])]
    pub ls: bool,
    /// Remove the booted states of the image instead
    #[arg(long, conflicts_with = "Shape")]
    pub rm: bool,
    #[command(flatten)]
    pub shape: Shape,
    /// A name or a digest
    #[arg(required_unless_present = "ls", value_name = "IMAGE")]
    pub image: Option<String>,
}

#[derive(Debug, Args)]
pub struct Pull {
    /// HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]
    #[arg(value_name = "REFERENCE")]
    pub reference: String,
    /// What to call it [default: the end of the repository's name, with the tag unless that is
    /// latest]
    #[arg(long)]
    pub name: Option<String>,
    /// Take the name from the snapshot that has it
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub access: Access,
    #[command(flatten)]
    pub made: Made,
}

#[derive(Debug, Args)]
pub struct Push {
    /// An image or a snapshot, by its name or digest
    #[arg(value_name = "IMAGE|SNAPSHOT")]
    pub what: String,
    /// HOST[:PORT]/REPOSITORY[:TAG]
    #[arg(value_name = "REFERENCE")]
    pub reference: String,
    #[command(flatten)]
    pub access: Access,
}

/// How a registry is reached.
#[derive(Debug, Args)]
pub struct Access {
    /// Who one is to the registry [default: as Docker's configuration says]
    #[arg(long, value_name = "USER", requires = "password_stdin")]
    pub username: Option<String>,
    /// Read the password from standard input
    #[arg(long, requires = "username")]
    pub password_stdin: bool,
    /// Talk without encryption also to a registry on another machine
    #[arg(long)]
    pub plain_http: bool,
    /// Trust the certificates in this file, too
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
}

/// How something is made an image that is none of ours.
#[derive(Debug, Args)]
pub struct Made {
    /// Its kernel: Debian's for virtual machines, Debian's for every machine, or a file [default:
    /// cloud]
    #[arg(long, value_name = "cloud|full|FILE")]
    pub kernel: Option<PathBuf>,
    /// With a kernel that is a file: a cpio archive that is unpacked before ours
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initramfs: Option<PathBuf>,
    /// With a kernel that is a file: the directory of its modules
    #[arg(long, value_name = "DIR", requires = "kernel")]
    pub modules: Option<PathBuf>,
    /// Who is process 1: our agent, or the image's own init [default: agent]
    #[arg(long, value_name = "agent|image", value_parser = init)]
    pub init: Option<Init>,
    /// Size of the disk that sandboxes get [default: with 4 GiB of room, at least]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub disk: Option<u64>,
}

impl Made {
    pub fn spec(&self) -> Result<ImportSpec> {
        Ok(ImportSpec {
            kernel: self.kernel()?,
            init: self.init,
            disk_bytes: self.disk,
        })
    }

    fn kernel(&self) -> Result<KernelChoice> {
        let choice = match self.kernel.as_ref().map(|kernel| (kernel, kernel.to_str())) {
            None | Some((_, Some("cloud"))) => KernelChoice::Cloud,
            Some((_, Some("full"))) => KernelChoice::Full,
            Some((file, _)) => {
                return own(file, &self.initramfs, &self.modules).map(KernelChoice::Own);
            }
        };
        match self.initramfs.as_ref().or(self.modules.as_ref()) {
            None => Ok(choice),
            Some(path) => {
                let rule = "only a kernel that is a file takes one";
                Err(Error::invalid(
                    "an addition to Debian's kernel",
                    path.display(),
                    rule,
                ))
            }
        }
    }
}

/// A kernel of the user's own, where processes with other working directories find it.
pub fn own(
    kernel: &PathBuf,
    initramfs: &Option<PathBuf>,
    modules: &Option<PathBuf>,
) -> Result<OwnKernel> {
    let absolute =
        |path: &PathBuf| std::path::absolute(path).map_err(|e| Error::io("resolve", path, e));
    Ok(OwnKernel {
        kernel: absolute(kernel)?,
        initramfs: initramfs.as_ref().map(absolute).transpose()?,
        modules: modules.as_ref().map(absolute).transpose()?,
    })
}

fn init(text: &str) -> Result<Init, String> {
    match text {
        "agent" => Ok(Init::Agent),
        "image" => Ok(Init::Image),
        _ => Err("it is agent or image".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{self, Command};
    use clap::Parser;

    fn pull(typed: &[&str]) -> Result<Pull, clap::Error> {
        let args = args::Args::try_parse_from(
            ["sandtree", "pull", "localhost:5000/a"].iter().chain(typed),
        )?;
        match args.command {
            Command::Pull(pull) => Ok(*pull),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_kernel_is_one_of_debians_or_a_file() {
        let kernel = |typed: &[&str]| pull(typed).unwrap().made.spec().map(|spec| spec.kernel);
        assert_eq!(kernel(&[]).unwrap(), KernelChoice::Cloud);
        assert_eq!(kernel(&["--kernel", "full"]).unwrap(), KernelChoice::Full);
        let own = OwnKernel {
            kernel: "/k".into(),
            initramfs: None,
            modules: Some("/m".into()),
        };
        assert_eq!(
            kernel(&["--kernel", "/k", "--modules", "/m"]).unwrap(),
            KernelChoice::Own(own)
        );
        let KernelChoice::Own(here) = kernel(&["--kernel", "./full"]).unwrap() else {
            panic!("it is a file")
        };
        assert!(here.kernel.is_absolute() && here.kernel.ends_with("full"));
        assert!(kernel(&["--kernel", "cloud", "--initramfs", "/i"]).is_err());
        assert!(pull(&["--initramfs", "/i"]).is_err());
    }

    #[test]
    fn a_password_is_never_an_argument() {
        assert!(pull(&["--username", "u"]).is_err());
        assert!(pull(&["--password", "p"]).is_err());
        assert!(pull(&["--username", "u", "--password-stdin"]).is_ok());
    }

    #[test]
    fn what_is_listed_has_no_shape() {
        let warm = |typed: &[&str]| {
            args::Args::try_parse_from(["sandtree", "image", "warm"].iter().chain(typed))
        };
        assert!(warm(&["--ls"]).is_ok());
        assert!(warm(&["--rm", "tiny"]).is_ok());
        assert!(warm(&["tiny", "--memory", "1G", "--network", "none"]).is_ok());
        for bad in [
            &[][..],
            &["--rm"],
            &["--ls", "tiny"],
            &["--ls", "--rm"],
            &["--rm", "tiny", "--cpus", "2"],
        ] {
            assert!(warm(bad).is_err(), "{bad:?}");
        }
    }
}
