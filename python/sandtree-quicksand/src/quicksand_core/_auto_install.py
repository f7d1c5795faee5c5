"""Gets the images of an image package that was installed without them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ._index import QUICKSAND_INDEX_URL

logger = logging.getLogger("quicksand.auto_install")

_TRUTHY = {"1", "true", "yes", "on"}


def auto_install_images(package_name: str, images_dir: Path) -> bool:
    """Installs the same version of a package from Quicksand's index, unless QUICKSAND_AUTO_INSTALL forbids it.

    Returns whether pip succeeded. pip chooses the place of the files; `images_dir` is not used.
    """
    del images_dir
    if os.environ.get("QUICKSAND_AUTO_INSTALL", "1").strip().lower() not in _TRUTHY:
        return False
    try:
        installed = version(package_name)
    except PackageNotFoundError:
        logger.debug("%s is not installed", package_name)
        return False
    pip = [sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps"]
    pip += ["--index-url", QUICKSAND_INDEX_URL, f"{package_name}=={installed}"]
    logger.info("installing %s==%s from %s", package_name, installed, QUICKSAND_INDEX_URL)
    try:
        status = subprocess.run(pip, check=False).returncode
    except OSError:
        logger.warning("pip could not be started", exc_info=True)
        return False
    if status != 0:
        logger.warning("pip install failed (exit %s)", status)
    return status == 0
