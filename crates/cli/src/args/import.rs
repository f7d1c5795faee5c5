//! The options that make an image from a root file system, a disk or an OCI image.

use std::path::PathBuf;

use sandtree::image::{ImportSpec, KernelChoice, OwnKernel};
use sandtree::{Error, Init, Result};

use super::values::size;

/// How to make an image from something else.
#[derive(Debug, clap::Args)]
pub struct Made {
    /// Kernel of the image. cloud: Debian's kernel for virtual machines; full: Debian's kernel for
    /// all hardware; FILE: your own [default: cloud]
    #[arg(long, value_name = "cloud|full|FILE")]
    pub kernel: Option<PathBuf>,
    /// With --kernel FILE: a cpio archive, unpacked before ours
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub initramfs: Option<PathBuf>,
    /// With --kernel FILE: the directory of its modules
    #[arg(long, value_name = "DIR", requires = "kernel")]
    pub modules: Option<PathBuf>,
    /// Process 1 in the guest. agent: our agent; image: the image's own init [default: agent]
    #[arg(long, value_name = "agent|image", value_parser = init)]
    pub init: Option<Init>,
    /// Disk size of its sandboxes [default: at least 4 GiB of free space]
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
                return own_kernel(file, &self.initramfs, &self.modules).map(KernelChoice::Own);
            }
        };
        match self.initramfs.as_ref().or(self.modules.as_ref()) {
            None => Ok(choice),
            Some(path) => {
                let rule = "only a kernel that is a file takes one";
                Err(Error::invalid(
                    "addition to Debian's kernel",
                    path.display(),
                    rule,
                ))
            }
        }
    }
}

/// A kernel of the user's own. Its paths are absolute, because keepers have another working
/// directory.
pub fn own_kernel(
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
        _ => Err("use agent or image".into()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Typed {
        #[command(flatten)]
        made: Made,
    }

    fn kernel(typed: &[&str]) -> Result<KernelChoice> {
        let typed = Typed::try_parse_from(["pull"].iter().chain(typed)).unwrap();
        typed.made.spec().map(|spec| spec.kernel)
    }

    #[test]
    fn a_kernel_is_one_of_debians_or_a_file() {
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
        assert!(Typed::try_parse_from(["pull", "--initramfs", "/i"]).is_err());
    }
}
