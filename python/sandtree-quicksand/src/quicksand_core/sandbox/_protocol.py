"""What the parts of a sandbox know of each other."""

from __future__ import annotations

from .._types import SandboxConfig


class Started:
    """The state of a sandbox that its methods check."""

    config: SandboxConfig

    @property
    def is_running(self) -> bool:
        raise NotImplementedError

    def _require_running(self, message: str = "Sandbox is not running") -> None:
        if not self.is_running:
            raise RuntimeError(message)
