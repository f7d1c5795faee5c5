//! Options and values that several commands share. The arguments of one command are in the file of
//! that command, below `commands`.

mod import;
mod machine;
mod values;

use std::path::PathBuf;

use sandtree::{MachineUser, Spares};

pub use import::{Made, own_kernel};
pub use machine::Shape;
pub use values::{BadSandboxRef, duration, expiry_action, mount, port, sandbox_ref, size};

#[derive(Debug, Clone, clap::Args)]
pub struct Global {
    /// Directory of the store [default: ~/.local/share/sandtree]
    #[arg(long, global = true, value_name = "DIR", env = "SANDTREE_HOME")]
    pub home: Option<PathBuf>,
    /// The QEMU to use [default: the first on PATH]
    #[arg(long, global = true, value_name = "PROGRAM", env = "SANDTREE_QEMU")]
    pub qemu: Option<PathBuf>,
    /// User of the QEMU processes. auto: as root, a separate user id for each machine; caller: the
    /// calling user
    #[arg(
        long,
        global = true,
        value_name = "auto|caller",
        env = "SANDTREE_MACHINE_USER",
        default_value = "auto",
        hide_default_value = true
    )]
    pub machine_user: MachineUser,
    /// When QEMU is started ahead of the next revert of a sandbox
    #[arg(
        long,
        global = true,
        value_name = "never|after-checkpoint|always",
        env = "SANDTREE_SPARES",
        default_value = "after-checkpoint",
        hide = true
    )]
    pub spares: Spares,
    /// Print results and errors as JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Log level for stderr: error, warn, info, debug, or a filter
    #[arg(
        long,
        global = true,
        value_name = "FILTER",
        env = "SANDTREE_LOG",
        hide = true
    )]
    pub log: Option<String>,
}
