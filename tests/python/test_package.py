"""The package itself: errors, names, types, examples. Without guests, but for the examples."""

import ast
import asyncio
import copy
import dataclasses
import importlib
import inspect
import os
import pathlib
import pickle
import re
import subprocess
import sys
import textwrap

import pytest

import sandtree
import sandtree.sync
from sandtree import _errors, _native, _process

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_every_code_has_a_class_of_its_kind():
    codes = dict(_native.codes())
    assert codes
    for code, kind in codes.items():
        assert issubclass(_errors.class_of(code, kind), _errors._KINDS[kind]), code
    for code in _errors._CODES:
        assert code in codes, f"no error has the code {code}"
    assert _errors.class_of("of_a_newer_program", "busy") is sandtree.Busy


def test_errors_are_data():
    report = {
        "code": "wrong_state",
        "kind": "wrong_state",
        "message": "sandbox a is paused",
        "causes": ["a cause"],
        "arguments": {"sandbox": "a", "phase": "paused"},
    }
    error = _errors.from_report(report)
    assert type(error) is sandtree.WrongState
    assert "a cause" in str(error) and "paused" in error.hint
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.code, again.arguments) == (type(error), error.code, error.arguments)
    late = _errors.from_report({"code": "guest_timeout", "kind": "timeout", "message": "late"})
    assert isinstance(late, TimeoutError) and isinstance(late, sandtree.TimedOut)
    missing = _errors.from_report({"code": "file_not_found", "kind": "not_found", "message": "gone"})
    assert isinstance(missing, FileNotFoundError) and str(missing) == "gone"


def test_values_behave_as_frozen_dataclasses():
    fork = sandtree.ForkReport(1.0, 2.0, degraded=())
    assert repr(fork) == "ForkReport(pause_ms=1.0, total_ms=2.0, degraded=())"
    assert fork == sandtree.ForkReport(1.0, 2.0, ()) != sandtree.ForkReport(1.0, 3.0, ())
    assert hash(fork) == hash(sandtree.ForkReport(1.0, 2.0, ()))
    assert fork != (1.0, 2.0, ())
    assert pickle.loads(pickle.dumps(fork)) == copy.copy(fork) == fork
    assert dataclasses.replace(fork, total_ms=3.0).total_ms == 3.0
    assert dataclasses.asdict(fork) == {"pause_ms": 1.0, "total_ms": 2.0, "degraded": ()}
    for change in (lambda: setattr(fork, "pause_ms", 3.0), lambda: delattr(fork, "pause_ms")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    for arguments in ([1.0], [1.0, 2.0, (), 4]):
        with pytest.raises(TypeError, match="ForkReport"):
            sandtree.ForkReport(*arguments)
    with pytest.raises(TypeError, match="two values for 'pause_ms'"):
        sandtree.ForkReport(1.0, 2.0, (), pause_ms=1.0)
    one, other = sandtree.Degradation("code", "message"), sandtree.Degradation("code", "message")
    assert one == other and one.arguments == {} and one.arguments is not other.arguments
    assert dataclasses.is_dataclass(sandtree.Reverted)
    inherited = [each.name for each in dataclasses.fields(sandtree.Reverted)]
    assert inherited[0] == "running_ms" and inherited[-1] == "dropped"
    mount = sandtree.Mount("repo", "/work", cow=True)
    assert str(inspect.signature(sandtree.Mount)) == "(host, guest, readonly=False, cow=False)"
    assert dataclasses.replace(mount, cow=False, readonly=True) == sandtree.Mount("repo", "/work", True)
    assert "stdout_bytes" not in repr(sandtree.ExecuteResult("", "", 0))


def test_an_import_loads_nothing_that_most_programs_do_not_need():
    heavy = {"asyncio", "dataclasses", "difflib", "inspect", "pathlib", "subprocess", "typing_extensions", "sandtree._sync"}
    program = f"import sandtree, sys; print(*sorted({heavy!r} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []


def test_both_flavours_have_the_same_methods():
    for name in sandtree.sync.__all__:
        asynchronous, synchronous = getattr(sandtree, name), getattr(sandtree.sync, name)
        only = {"__await__", "__aenter__", "__aexit__", "__enter__", "__exit__"}
        assert set(vars(asynchronous)) - only == set(vars(synchronous)) - only, name
        for method, value in vars(asynchronous).items():
            if inspect.isfunction(value) and method not in only:
                assert inspect.signature(value).parameters.keys() == inspect.signature(
                    vars(synchronous)[method]
                ).parameters.keys(), method


def test_every_option_of_run_is_a_keyword():
    shown = subprocess.run([_process.program(), "run", "--help"], capture_output=True, text=True, check=True)
    options = set(re.findall(r"--([a-z][a-z-]+)", shown.stdout))
    keywords = set(inspect.signature(sandtree.Sandbox).parameters)
    spelled = {
        "label": "labels",
        "force": "replace",
        "mount": "mounts",
        "qemu-arg": "qemu_args",
        "auto-checkpoints": "auto_checkpoint",
    }
    # Of the store, of a single command, or a method: detach(), fork() or main(entrypoint=...).
    elsewhere = {
        "home", "qemu", "machine-user", "json", "help", "version",
        "interactive", "tty", "timeout", "detach", "count", "entrypoint",
    }  # fmt: skip
    missing = [
        option
        for option in options - elsewhere
        if spelled.get(option, option.replace("-", "_")) not in keywords
    ]
    assert not missing, missing


def test_the_program_must_be_of_the_same_version(tmp_path):
    other = tmp_path / "sandtree"
    other.write_text("#!/bin/sh\necho sandtree 9.9.9\n")
    other.chmod(0o755)
    environment = {**os.environ, "SANDTREE_PROGRAM": str(other)}
    failed = subprocess.run(
        [sys.executable, "-c", "import sandtree"], env=environment, capture_output=True, text=True
    )
    assert failed.returncode != 0
    assert "is sandtree 9.9.9" in failed.stderr and "reinstall" in failed.stderr


def test_the_program_is_on_the_path_of_the_installation():
    if "SANDTREE_PROGRAM" in os.environ:
        pytest.skip("the package is not installed")
    assert _process.program() == str(pathlib.Path(sys.prefix).resolve() / "bin/sandtree")


def examples():
    """The examples of docstrings, and the Python blocks of the guide. `test_display.py` runs those with a desktop."""
    for flavour in (sandtree, sandtree.sync):
        for name in sandtree.sync.__all__:
            documented = getattr(flavour, name)
            for member in [documented, *(value for value in vars(documented).values() if inspect.isfunction(value))]:
                found = re.search(r"Example:\n((?:[ ].*\n|\n)+?)(?=\n?\S|\Z)", (inspect.getdoc(member) or "") + "\n")
                if found:
                    yield pytest.param(flavour, textwrap.dedent(found[1]), id=f"{flavour.__name__}.{member.__qualname__}")
    guide = ROOT / "docs/guide/python.md"
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL), 1):
        if '"desktop"' in block:
            continue
        yield pytest.param(sandtree, block, id=f"guide-{number}")


@pytest.mark.parametrize("flavour, text", list(examples()))
def test_examples_run(flavour, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {name: getattr(sandtree, name) for name in sandtree.__all__}
    names.update({name: getattr(flavour, name) for name in sandtree.sync.__all__})
    names["__name__"] = "__main__"
    # A block may use `await` outside of a function, as Jupyter allows it.
    code = compile(text, "<example>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)


def test_the_generated_files_are_current():
    subprocess.run([sys.executable, ROOT / "scripts/python-sync", "--check"], check=True)


def test_every_name_is_exported_once():
    assert len(set(sandtree.__all__)) == len(sandtree.__all__)
    for name in sandtree.__all__:
        assert getattr(sandtree, name) is not None
    assert importlib.import_module("sandtree.sync").Sandbox is not sandtree.Sandbox
