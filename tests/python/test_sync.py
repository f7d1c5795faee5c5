"""The tests of `test_sandbox.py` with the API that has no `async`: the same text, without its words."""

import pathlib
import re

_HERE = pathlib.Path(__file__).parent
_WORDS = [
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    # The classes that wait are those of sandtree.sync.
    (r"^    (Host|Sandbox),\n", ""),
]

_text = (_HERE / "test_sandbox.py").read_text()
for _pattern, _replacement in _WORDS:
    _text = re.sub(_pattern, _replacement, _text, flags=re.MULTILINE)
_text = _text.replace("from sandtree import (", "from sandtree.sync import Host, Sandbox\nfrom sandtree import (", 1)
exec(compile(_text, str(_HERE / "test_sandbox.py"), "exec"))
