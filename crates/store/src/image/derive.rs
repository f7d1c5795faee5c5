//! Images that are made from others.

use super::{Image, ImageRecord, ImageSpec, KernelBundle};
use crate::pin::Pin;
use crate::publish::Staged;
use crate::{Digest, Error, SandboxId, Store, lock};

impl Store {
    /// An image with the root file system of another one, by a link, which stays as long as the
    /// result lives.
    pub fn derive_image(&self, image: &Image, spec: ImageSpec) -> Result<Image, Error> {
        let record = ImageRecord::new(spec, image.record.rootfs.clone())?;
        let staged = self.stage()?;
        self.files
            .share(&image.rootfs(), &staged.path().join("rootfs.raw"))?;
        self.publish_described(staged, &record)
    }

    /// An image that stays, named or not, while the result lives.
    pub fn pin_image(&self, digest: &Digest) -> Result<Image, Error> {
        let shell = Staged::shell(&self.files, &self.layout, &SandboxId::random()?)?;
        let _store = lock::store(&self.files, &self.layout)?;
        shell.write_pin(&Pin::Image(digest.clone()))?;
        Ok(self.image_by_digest(digest)?.held_by(shell))
    }

    /// A kernel bundle that stays, needed by an image or not, while the result lives.
    pub fn pin_kernel(&self, digest: &Digest) -> Result<KernelBundle, Error> {
        let shell = Staged::shell(&self.files, &self.layout, &SandboxId::random()?)?;
        let _store = lock::store(&self.files, &self.layout)?;
        shell.write_pin(&Pin::Kernel(digest.clone()))?;
        Ok(self.kernel(digest)?.held_by(shell))
    }
}
