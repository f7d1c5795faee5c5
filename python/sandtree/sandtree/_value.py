"""Values that operations answer: frozen dataclasses that share their methods.

`dataclass(frozen=True)` compiles six methods for each class, which took half of the time of `import sandtree`.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field
from typing import TYPE_CHECKING, Any, Callable, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[T], T]:
        return lambda decorator: decorator


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(kind: type[T]) -> type[T]:
    """Makes a class what `dataclass(frozen=True)` makes of it, but for the signature of its constructor."""
    made = dataclass(init=False, repr=False, eq=False)(kind)
    for name in ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__"):
        setattr(made, name, vars(_Methods)[name])
    return made


class _Methods:
    """The methods that all values have."""

    __dataclass_fields__: dict[str, Field[Any]]

    def __init__(self, *values: Any, **named: Any) -> None:
        known = self.__dataclass_fields__
        label = type(self).__name__
        if len(values) > len(known):
            raise TypeError(f"{label}() has {len(known)} fields, and {len(values)} values were given")
        given = dict(zip(known, values))
        for name, each in named.items():
            if name not in known or name in given:
                problem = "two values for" if name in given else "no field"
                raise TypeError(f"{label}() has {problem} {name!r}")
            given[name] = each
        for name, described in known.items():
            if name not in given:
                given[name] = _default(label, described)
        self.__dict__.update(given)

    def __repr__(self) -> str:
        known = self.__dataclass_fields__.items()
        shown = (f"{name}={getattr(self, name)!r}" for name, described in known if described.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return _all(self) == _all(other)

    def __hash__(self) -> int:
        return hash(_all(self))

    def __setattr__(self, name: str, _: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


def _all(values: Any) -> tuple[Any, ...]:
    return tuple(getattr(values, name) for name in values.__dataclass_fields__)


def _default(label: str, described: Field[Any]) -> Any:
    if described.default is not MISSING:
        return described.default
    if described.default_factory is not MISSING:
        return described.default_factory()
    raise TypeError(f"{label}() needs a value for {described.name!r}")
