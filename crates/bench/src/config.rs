//! The options of every benchmark, and the environment. Other modules do not read the environment.

use std::path::PathBuf;

use sandtree::{Error, HostConfig, MachineUser, Result};

#[derive(Debug, clap::Args)]
pub struct Global {
    /// The store to measure in, the same as `sandtree` uses [default: ~/.local/share/sandtree]
    #[arg(long, global = true, value_name = "DIR", env = "SANDTREE_HOME")]
    home: Option<PathBuf>,
    /// The QEMU to use [default: the first on PATH]
    #[arg(long, global = true, value_name = "PROGRAM", env = "SANDTREE_QEMU")]
    qemu: Option<PathBuf>,
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
    machine_user: MachineUser,
    /// Also write the figures to FILE, as JSON; - for stdout, in place of the table
    #[arg(long, global = true, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// The program `sandtree` to measure [default: the one next to this program]
    #[arg(long, global = true, value_name = "PROGRAM")]
    sandtree: Option<PathBuf>,
    /// Where `scripts/quicksand` has installed Quicksand, to compare with it
    #[arg(long, global = true, value_name = "DIR")]
    pub quicksand: Option<PathBuf>,
    /// Log level for stderr: error, warn, info, debug, or a filter
    #[arg(
        long,
        global = true,
        value_name = "FILTER",
        env = "SANDTREE_LOG",
        hide = true
    )]
    log: Option<String>,
}

impl Global {
    pub fn log_to_stderr(&self) {
        let filter = self.log.as_deref().unwrap_or("warn");
        tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .with_target(false)
            .log_internal_errors(false)
            .init();
    }

    pub fn config(&self) -> Result<HostConfig> {
        let home = match &self.home {
            Some(home) => home.clone(),
            None => default_home()?,
        };
        let home = std::path::absolute(&home).map_err(|e| Error::io("resolve", &home, e))?;
        let qemu = self.qemu.as_ref().map(std::path::absolute).transpose();
        let qemu = qemu.map_err(|e| Error::io("resolve", "the path of --qemu", e))?;
        Ok(HostConfig {
            qemu,
            machine_user: self.machine_user,
            ..HostConfig::new(home, search())
        })
    }
}

impl Global {
    /// The path of the program `sandtree`, which may not exist.
    pub fn sandtree(&self) -> Result<PathBuf> {
        if let Some(program) = &self.sandtree {
            return std::path::absolute(program).map_err(|e| Error::io("resolve", program, e));
        }
        Ok(own_program()?.with_file_name("sandtree"))
    }

    /// The options that another benchmark of the same store gets.
    pub fn repeated(&self) -> Result<Vec<PathBuf>> {
        let config = self.config()?;
        let mut options = vec!["--home".into(), config.home];
        if let Some(qemu) = config.qemu {
            options.extend(["--qemu".into(), qemu]);
        }
        if config.machine_user == MachineUser::Caller {
            options.extend(["--machine-user".into(), "caller".into()]);
        }
        if let Some(quicksand) = &self.quicksand {
            options.extend(["--quicksand".into(), quicksand.clone()]);
        }
        Ok(options)
    }
}

pub fn own_program() -> Result<PathBuf> {
    std::env::current_exe().map_err(|e| Error::io("find", "our own program", e))
}

/// The arguments of this program, without the paths among them.
pub fn arguments() -> Vec<String> {
    let words = std::env::args().skip(1);
    words.filter(|word| !word.contains('/')).collect()
}

/// The directories of PATH.
pub fn search() -> Vec<PathBuf> {
    std::env::var_os("PATH")
        .map(|path| std::env::split_paths(&path).collect())
        .unwrap_or_default()
}

/// The same store as `sandtree` uses without options.
fn default_home() -> Result<PathBuf> {
    let dir = |name| {
        std::env::var_os(name)
            .filter(|dir| !dir.is_empty())
            .map(PathBuf::from)
    };
    let data = dir("XDG_DATA_HOME").or_else(|| Some(dir("HOME")?.join(".local/share")));
    let rule = "set HOME, SANDTREE_HOME or --home";
    let data = data.ok_or_else(|| Error::invalid("place of the store", "", rule))?;
    Ok(data.join("sandtree"))
}
