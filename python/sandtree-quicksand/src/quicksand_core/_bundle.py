"""Bundles: tar archives of a save, plain or packed.

    [DIRECTORY/]manifest.json   [DIRECTORY/]overlays/N.qcow2

Always: a bundle is hostile. Only plain files with these names are unpacked, under names of our own, and no more bytes
than the disk has to spare.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MEMBER = re.compile(r"(?:\./)?(?:[^/.][^/]*/)?(manifest\.json|overlays/(?:0|[1-9]\d{0,3})\.qcow2)")
_MAX_MEMBERS = 10_000
_CHUNK_BYTES = 1 << 20


def is_bundle(image: str) -> bool:
    return image.endswith(".quicksand") and Path(image).is_file()


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The save of a bundle, in a directory that is removed at the end. Raises ValueError if there is none."""
    with tempfile.TemporaryDirectory(prefix=".sandtree-") as directory:
        target = Path(directory)
        (target / "overlays").mkdir()
        try:
            with tarfile.open(path, "r|*") as bundle:
                _unpack(bundle, target)
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(f"{path} is not a bundle of a save: {error}") from error
        yield target


def _unpack(bundle: tarfile.TarFile, target: Path) -> None:
    left = shutil.disk_usage(target).free // 2
    for number, member in enumerate(bundle):
        found = _MEMBER.fullmatch(member.name)
        if number >= _MAX_MEMBERS or member.size > left:
            raise ValueError("the bundle has too much content")
        if found is None or not member.isreg():
            continue
        source = bundle.extractfile(member)
        assert source is not None
        left -= member.size
        # A second file of the same name is refused by "x".
        with open(target / found[1], "xb") as copy:
            shutil.copyfileobj(source, copy, _CHUNK_BYTES)
