//! Options and values that several commands share. The arguments of one command are in the file of
//! that command, below `commands`.

mod import;
mod machine;
mod values;

use std::path::PathBuf;

use sandtree::MachineUser;

pub use import::{Made, own_kernel};
pub use machine::Shape;
pub use values::{BadSandboxRef, duration, port, sandbox_ref, size};

#[derive(Debug, Clone, clap::Args)]
pub struct Global {
    /// Where sandboxes and images are kept [default: ~/.local/share/sandtree]
    #[arg(long, global = true, value_name = "DIR", env = "SANDTREE_HOME")]
    pub home: Option<PathBuf>,
    /// The QEMU to use [default: the first on PATH]
    #[arg(long, global = true, value_name = "PROGRAM", env = "SANDTREE_QEMU")]
    pub qemu: Option<PathBuf>,
    /// Whom machines run as: auto (as root, a user id for each) or caller
    #[arg(
        long,
        global = true,
        value_name = "auto|caller",
        env = "SANDTREE_MACHINE_USER",
        default_value = "auto",
        hide_default_value = true
    )]
    pub machine_user: MachineUser,
    /// Answer in JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// What to log to stderr: error, warn, info, debug, or a filter
    #[arg(
        long,
        global = true,
        value_name = "FILTER",
        env = "SANDTREE_LOG",
        hide = true
    )]
    pub log: Option<String>,
}
