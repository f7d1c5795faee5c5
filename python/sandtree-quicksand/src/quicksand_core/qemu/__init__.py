"""QEMU: the platform, its installation, and the resolution of images."""
