"""The API of `sandtree` without `async`: the same classes and methods, which wait. Ctrl-C cancels and undoes.

    from sandtree.sync import Sandbox

    with Sandbox("debian") as sb:
        print(sb.execute("uname -a").stdout)
"""

from ._sync._command import Command
from ._sync._display import Display, View
from ._sync._files import Files
from ._sync._host import Host
from ._sync._sandbox import Forward, Sandbox

__all__ = ["Command", "Display", "Files", "Forward", "Host", "Sandbox", "View"]
