"""Where packages come from."""

from __future__ import annotations

QUICKSAND_INDEX_URL = "https://microsoft.github.io/quicksand/simple/"
"""Quicksand's own index, with the wheels that are too large for PyPI."""
PYPI_INDEX_URL = "https://pypi.org/simple/"
