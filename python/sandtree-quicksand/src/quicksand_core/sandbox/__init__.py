"""The sandbox."""

from .._types import ExecuteResult, SandboxConfig, SandboxConfigParams
from ._sandbox import Sandbox
from ._users import SandboxUser

__all__ = ["ExecuteResult", "Sandbox", "SandboxConfig", "SandboxConfigParams", "SandboxUser"]
