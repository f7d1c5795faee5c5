"""Values of the API: frozen dataclasses that cost little at import.

`dataclass(frozen=True)` compiles six methods for each class, and `dataclasses` imports much. Together they took two thirds
of the time of `import sandtree`. Values share their methods instead, and become dataclasses when `dataclasses` first asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from inspect import Signature

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[T], T]:
        return lambda decorator: decorator


_MISSING: Any = object()


class _Field:
    """What `dataclasses.field` describes."""

    def __init__(self, default: Any = _MISSING, default_factory: Any = _MISSING, repr: bool = True) -> None:
        self.default = default
        self.default_factory = default_factory
        self.repr = repr

    @property
    def has_default(self) -> bool:
        return self.default is not _MISSING or self.default_factory is not _MISSING

    def value(self) -> Any:
        """The value of a field that was not given."""
        return self.default if self.default_factory is _MISSING else self.default_factory()

    def options(self) -> dict[str, Any]:
        given = {"default": self.default, "default_factory": self.default_factory, "repr": self.repr}
        return {name: option for name, option in given.items() if option is not _MISSING}


def field(*, default: Any = _MISSING, default_factory: Any = _MISSING, repr: bool = True) -> Any:
    """As in `dataclasses`."""
    return _Field(default, default_factory, repr)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(kind: type[T]) -> type[T]:
    """Makes a class what `dataclass(frozen=True)` makes of it."""
    known = dict(fields(kind))
    for name in kind.__annotations__:
        given = vars(kind).get(name, _MISSING)
        known[name] = given if isinstance(given, _Field) else _Field(given)
        if name in vars(kind):
            delattr(kind, name)
    attributes = {
        **{name: vars(_Methods)[name] for name in _METHODS},
        "_known": known,
        "__match_args__": tuple(known),
        "__dataclass_fields__": _Dataclass(kind),
        "__signature__": _Constructor(),
    }
    for name, attribute in attributes.items():
        setattr(kind, name, attribute)
    return kind


def fields(kind: type[Any]) -> dict[str, _Field]:
    """The fields of a value, by name."""
    return getattr(kind, "_known", {})


_METHODS = ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__")


class _Methods:
    """The methods that all values have."""

    def __init__(self, *values: Any, **named: Any) -> None:
        known = fields(type(self))
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
            if name in given:
                continue
            if not described.has_default:
                raise TypeError(f"{label}() needs a value for {name!r}")
            given[name] = described.value()
        self.__dict__.update(given)

    def __repr__(self) -> str:
        known = fields(type(self)).items()
        shown = (f"{name}={getattr(self, name)!r}" for name, described in known if described.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return _all(self) == _all(other)

    def __hash__(self) -> int:
        return hash(_all(self))

    def __setattr__(self, name: str, _: Any) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")


def _all(values: Any) -> tuple[Any, ...]:
    return tuple(getattr(values, name) for name in fields(type(values)))


class _Dataclass:
    """`__dataclass_fields__` of a value: its first reader makes the class a dataclass, which replaces this."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind

    def __get__(self, _: Any, __: Any) -> Any:
        import dataclasses

        known = fields(self._kind)
        for name in self._kind.__annotations__:
            setattr(self._kind, name, dataclasses.field(**known[name].options()))
        return dataclasses.dataclass(init=False, repr=False, eq=False)(self._kind).__dataclass_fields__


class _Constructor:
    """The signature of a value's constructor, as editors show it."""

    def __get__(self, _: Any, kind: type[Any]) -> Signature:
        from inspect import Parameter, Signature

        def parameter(name: str, described: _Field) -> Parameter:
            default = described.value() if described.has_default else Parameter.empty
            return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default)

        return Signature([parameter(name, described) for name, described in fields(kind).items()])
