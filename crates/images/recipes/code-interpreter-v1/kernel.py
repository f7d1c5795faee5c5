"""The Python kernel of the code interpreter: IPython's, with variables for each execution, and results that clients can
draw and calculate with."""

import importlib.util
import os
import sys

# No client can use the debugger, which takes long to import.
sys.modules["debugpy"] = None

import zmq
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from IPython.core.formatters import BaseFormatter
from traitlets import ObjectName, Unicode
from traitlets.config import Config

del sys.modules["debugpy"]

HERE = os.path.dirname(os.path.abspath(__file__))
# Data of a frame, and of a chart, beyond this many values stays in the kernel.
VALUES_MAX = 1_000_000


class Kernel(IPythonKernel):
    """Sets the variables of an execution before it, and takes them back after it."""

    kept = {}

    async def execute_request(self, stream, ident, parent):
        environment = parent["content"].get("environment", {})
        kept = environment.get("kept", {})
        if kept != self.kept:
            os.environ.update(kept)
            self.kept = kept
        once = environment.get("once", {})
        before = {name: os.environ.get(name) for name in once}
        os.environ.update(once)
        try:
            await super().execute_request(stream, ident, parent)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


class App(IPKernelApp):
    def init_iopub(self, context):
        # Output waits here while a client reads slowly; the default is to drop it.
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)


class DataFormatter(BaseFormatter):
    """The columns of a pandas frame, as JSON."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = dict


class ChartFormatter(BaseFormatter):
    """What a figure of matplotlib shows, as JSON."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = dict

    def __call__(self, shown):
        # matplotlib removes what other formatters know of figures.
        figure = getattr(sys.modules.get("matplotlib.figure"), "Figure", ())
        return chart_data(shown) if isinstance(shown, figure) else None


def frame_data(frame):
    if frame.size > VALUES_MAX:
        return None
    return plain(frame.to_dict(orient="list"))


def plain(value):
    """A value as JSON has it: numbers that JSON has not become null, and times text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "isoformat"):
        return value.isoformat() if value == value else None
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def chart_data(figure):
    """The data of a figure. One that cannot be read is still shown as a picture."""
    try:
        return plain(charts().figure_chart(figure, VALUES_MAX))
    except Exception:
        return {"type": "unknown", "title": None, "elements": []}


def charts():
    """Our module, which programs cannot import by its name."""
    name = "_sandtree_charts"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, os.path.join(HERE, "charts.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def main():
    # Programs import their own modules, not ours.
    sys.path[:] = [path for path in sys.path if path != HERE]
    # The history would be a database in the home of root.
    config = Config({"HistoryManager": {"enabled": False}})
    app = App.instance(kernel_class=Kernel, config=config)
    app.initialize()
    formatters = app.shell.display_formatter.formatters
    data = DataFormatter(parent=app.shell.display_formatter)
    data.for_type_by_name("pandas.core.frame", "DataFrame", frame_data)
    formatters["e2b/data"] = data
    formatters["e2b/chart"] = ChartFormatter(parent=app.shell.display_formatter)
    app.start()


if __name__ == "__main__":
    main()
