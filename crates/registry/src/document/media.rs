//! The media types of OCI and of Docker.

use crate::error::Error;
use crate::text::cleaned;

pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
pub const OCI_LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
pub const OCI_LAYER_GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
pub const OCI_LAYER_ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
/// The configuration of an artifact that has none.
pub const OCI_EMPTY: &str = "application/vnd.oci.empty.v1+json";
pub const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
pub const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
pub const DOCKER_LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar";
pub const DOCKER_LAYER_GZIP: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";
pub const DOCKER_LAYER_ZSTD: &str = "application/vnd.docker.image.rootfs.diff.tar.zstd";

/// The documents that we accept for a reference.
pub(crate) const ACCEPTED: [&str; 4] = [OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST];

/// How the tar archive of a layer is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerPacking {
    Plain,
    Gzip,
    Zstd,
}

impl LayerPacking {
    /// The packing that a layer's media type names.
    pub fn of(media_type: &str) -> Result<Self, Error> {
        match essence(media_type) {
            OCI_LAYER | DOCKER_LAYER => Ok(Self::Plain),
            OCI_LAYER_GZIP | DOCKER_LAYER_GZIP => Ok(Self::Gzip),
            OCI_LAYER_ZSTD | DOCKER_LAYER_ZSTD => Ok(Self::Zstd),
            // "Foreign" and "nondistributable" layers are refused as well: their content would have
            // to be fetched from an address that the manifest names.
            other => Err(Error::UnknownMediaType {
                media_type: cleaned(other),
            }),
        }
    }
}

/// A media type without its parameters.
pub(crate) fn essence(media_type: &str) -> &str {
    media_type.split(';').next().unwrap_or_default().trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_oci_and_docker_are_known() {
        assert_eq!(
            LayerPacking::of(DOCKER_LAYER_GZIP).unwrap(),
            LayerPacking::Gzip
        );
        assert_eq!(
            LayerPacking::of(OCI_LAYER_ZSTD).unwrap(),
            LayerPacking::Zstd
        );
        assert_eq!(LayerPacking::of(OCI_LAYER).unwrap(), LayerPacking::Plain);
    }

    #[test]
    fn foreign_layers_are_refused_by_name() {
        for kind in [
            "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
            "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
            "text/html",
        ] {
            assert!(
                LayerPacking::of(kind)
                    .unwrap_err()
                    .to_string()
                    .contains(kind)
            );
        }
    }
}
