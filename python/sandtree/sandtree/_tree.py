"""The states of a sandbox as a tree, as text and as a picture."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Optional, Sequence, Union, overload

from ._types import Degradation, read
from ._value import field, value

_ROW = 26
_INDENT = 22
_COLOURS = {"checkpoint": "#2b6cb0", "auto": "#718096", "left": "#a0aec0", "paused": "#b7791f"}


@value
class State:
    """A state of a sandbox: memory, disk and processes of one moment."""

    id: str
    tag: Optional[str]
    kind: str
    """"checkpoint", "auto", "left", "paused" or "fork"."""
    parent: Optional[str]
    created_at: str
    memory_bytes: int
    disk_bytes: int
    mode: Optional[str]
    current: bool
    """Whether the sandbox continues from it."""
    durability: str
    degraded: tuple[Degradation, ...] = field(default=(), repr=False)

    @property
    def label(self) -> str:
        return self.tag or self.id[:8]


class StateTree(Sequence[State]):
    """The states of a sandbox, oldest first. Looked up by number, tag or id; shown as a tree."""

    def __init__(self, sandbox: str, states: Sequence[State], unreadable: Sequence[str] = ()) -> None:
        self.sandbox = sandbox
        self.unreadable = tuple(unreadable)
        self._states = tuple(states)

    @classmethod
    def _read(cls, sandbox: str, data: Mapping[str, Any]) -> StateTree:
        states = [read(State, state) for state in data["states"]]
        return cls(sandbox, states, [error["message"] for error in data["errors"]])

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, which: Union[int, str]) -> State: ...

    @overload
    def __getitem__(self, which: slice) -> tuple[State, ...]: ...

    def __getitem__(self, which: Union[int, str, slice]) -> Union[State, tuple[State, ...]]:
        if isinstance(which, str):
            for state in self._states:
                if which in (state.tag, state.id):
                    return state
            raise KeyError(which)
        return self._states[which]

    def __contains__(self, which: object) -> bool:
        return any(which in (state, state.tag, state.id) for state in self._states)

    @property
    def current(self) -> Optional[State]:
        """The state that the sandbox continues from."""
        return next((state for state in self._states if state.current), None)

    def children(self, state: Optional[State]) -> list[State]:
        """The states that came from a state; from none, for None."""
        known = {each.id for each in self._states}
        if state is None:
            return [each for each in self._states if each.parent not in known]
        return [each for each in self._states if each.parent == state.id]

    def _rows(self) -> Iterator[tuple[str, int, Optional[State]]]:
        """The lines of the tree: how a line begins, how deep it is, and its state."""
        pending = [(state, "", 0) for state in reversed(self.children(None))]
        last_of: dict[str, bool] = {}
        roots = self.children(None)
        for number, state in enumerate(roots):
            last_of[state.id] = number == len(roots) - 1
        while pending:
            state, lead, depth = pending.pop()
            is_last = last_of[state.id]
            yield lead + ("└─ " if is_last else "├─ "), depth, state
            below = self.children(state)
            for number, child in enumerate(below):
                last_of[child.id] = number == len(below) - 1
            lead += "   " if is_last else "│  "
            pending.extend((child, lead, depth + 1) for child in reversed(below))

    def __str__(self) -> str:
        lines = [self.sandbox]
        for lead, _, state in self._rows():
            if state is not None:
                now = "  (now)" if state.current else ""
                kind = "" if state.kind == "checkpoint" else f"  {state.kind}"
                lines.append(f"{lead}{state.label}{kind}{now}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<StateTree of {self.sandbox}: {len(self)} states>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_svg_(self) -> str:
        parts: list[str] = []
        places: dict[str, tuple[int, int]] = {}
        root = (14, 18)
        parts.append(_dot(root, "#1a202c", self.sandbox, bold=True))
        rows = 1
        for _, depth, state in self._rows():
            if state is None:
                continue
            place = (14 + (depth + 1) * _INDENT, 18 + rows * _ROW)
            above = places.get(state.parent or "", root)
            parts.insert(0, _edge(above, place))
            text = state.label + ("" if state.kind == "checkpoint" else f" · {state.kind}")
            parts.append(_dot(place, _COLOURS.get(state.kind, "#2b6cb0"), text, bold=state.current))
            places[state.id] = place
            rows += 1
        height = 18 + rows * _ROW
        body = "".join(parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="480" height="{height}" '
            f'font-family="sans-serif" font-size="13">{body}</svg>'
        )


def _edge(above: tuple[int, int], place: tuple[int, int]) -> str:
    return (
        f'<path d="M{above[0]} {above[1]} V{place[1]} H{place[0]}" fill="none" stroke="#cbd5e0" stroke-width="1.5"/>'
    )


def _dot(place: tuple[int, int], colour: str, text: str, bold: bool) -> str:
    # Imported where it is used: `import sandtree` stays fast.
    from html import escape

    x, y = place
    weight = ' font-weight="bold"' if bold else ""
    now = f'<circle cx="{x}" cy="{y}" r="8" fill="none" stroke="{colour}"/>' if bold else ""
    return (
        f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>{now}'
        f'<text x="{x + 14}" y="{y + 4}" fill="{colour}"{weight}>{escape(text)}</text>'
    )
