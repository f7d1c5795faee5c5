//! Which directories of the host a sandbox's mounts are: `mounts.json`.

use super::{Owned, SandboxDir};
use crate::mount::HostDirectories;
use crate::{Error, publish, record};

impl SandboxDir {
    /// The directories of the host that this sandbox's mounts are.
    pub fn host_directories(&self) -> Result<HostDirectories, Error> {
        let path = self.path.join("mounts.json");
        match record::read(&self.files, &path) {
            Err(error) if error.io_kind() == Some(std::io::ErrorKind::NotFound) => {
                Ok(HostDirectories::default())
            }
            read => read,
        }
    }
}

impl Owned {
    pub fn set_host_directories(&self, directories: &HostDirectories) -> Result<(), Error> {
        publish::replace(
            &self.files,
            &self.path.join("mounts.json"),
            &record::canonical(directories),
        )
    }
}
