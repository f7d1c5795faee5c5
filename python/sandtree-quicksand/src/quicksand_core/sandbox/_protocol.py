"""What the parts of a sandbox know of each other."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import sandtree

from .._types import SandboxConfig

T = TypeVar("T")


class Started:
    """The state of a sandbox that its methods check."""

    config: SandboxConfig

    @property
    def is_running(self) -> bool:
        raise NotImplementedError

    def _require_running(self, message: str = "Sandbox is not running") -> None:
        if not self.is_running:
            raise RuntimeError(message)

    def _running(self, message: str = "Sandbox is not running") -> sandtree.Sandbox:
        raise NotImplementedError


async def as_runtime_error(work: Awaitable[T]) -> T:
    """Quicksand has no exceptions of its own."""
    try:
        return await work
    except sandtree.SandtreeError as error:
        raise RuntimeError(str(error)) from error
