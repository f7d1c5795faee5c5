"""Code that is run in contexts, by E2B's code interpreter clients and CubeSandbox's."""

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor

import cubesandbox
import pytest
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox
from e2b_code_interpreter.charts import ChartType

from conftest import eventually, sandtree


@pytest.fixture(scope="module")
def interpreter():
    made = Sandbox.create(timeout=900, envs={"FOO": "from create"})
    yield made
    made.kill()


def test_results_logs_and_variables_that_stay(interpreter):
    first = interpreter.run_code("import sys\nx = 20\nprint('out')\nprint('err', file=sys.stderr)\nx + 1")
    assert first.text == "21"
    assert first.logs.stdout == ["out\n"]
    assert first.logs.stderr == ["err\n"]
    assert first.error is None
    second = interpreter.run_code("x * 2")
    assert second.text == "40"
    assert second.execution_count == first.execution_count + 1
    assert interpreter.run_code("'it is text'").text == "it is text"
    assert interpreter.run_code("pass").results == []


def test_the_user_and_the_directory_are_those_of_e2b(interpreter):
    said = interpreter.run_code("import os, getpass\nprint(getpass.getuser(), os.getcwd())")
    assert said.logs.stdout == ["root /home/user\n"]


def test_errors_have_a_traceback(interpreter):
    error = interpreter.run_code("def fails():\n    return 1 / 0\nfails()").error
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
    assert "fails" in error.traceback
    assert interpreter.run_code("input()").error.name == "StdinNotImplementedError"
    assert interpreter.run_code("1 +").error.name == "SyntaxError"
    assert interpreter.run_code("2").text == "2"


def test_output_is_streamed_in_order(interpreter):
    seen = []
    done = interpreter.run_code(
        "import time\nfor i in range(3):\n    print(i, flush=True)\n    time.sleep(0.3)\nprint('x' * 300_000)\n'end'",
        on_stdout=lambda message: seen.append(message.line),
        on_result=lambda result: seen.append(result.text),
    )
    assert "".join(seen) == "0\n1\n2\n" + "x" * 300_000 + "\nend"
    assert len(seen) > 3
    assert done.text == "end"
    many = interpreter.run_code("from IPython.display import display\nfor i in range(300): display(i)")
    assert [result.text for result in many.results] == [str(i) for i in range(300)]


def test_every_format_of_a_result(interpreter):
    code = """
class Everything:
    def _repr_mimebundle_(self, include, exclude):
        return {
            "text/plain": "plain", "text/html": "<b>", "text/markdown": "*m*", "image/svg+xml": "<svg/>",
            "image/jpeg": "anBn", "application/pdf": "cGRm", "text/latex": "$l$", "application/json": {"a": 1},
            "application/javascript": "js()", "application/own": "mine",
        }
Everything()
"""
    result = interpreter.run_code(code).results[0]
    assert result.is_main_result
    assert (result.text, result.html, result.markdown, result.svg) == ("plain", "<b>", "*m*", "<svg/>")
    assert (result.jpeg, result.pdf, result.latex, result.json) == ("anBn", "cGRm", "$l$", {"a": 1})
    assert (result.javascript, result.extra) == ("js()", {"application/own": "mine"})
    frame = interpreter.run_code("import pandas\npandas.DataFrame({'a': [1, 2], 'b': [float('nan'), 0.5]})").results[0]
    assert frame.data == {"a": [1, 2], "b": [None, 0.5]}
    assert "<table" in frame.html


def test_figures_are_pictures_and_charts(interpreter):
    code = """
import matplotlib.pyplot as plt
plt.plot([1, 2], [3, 4], label="line"); plt.xlabel("time (s)"); plt.title("Title"); plt.show()
plt.scatter([1], [2]); plt.show()
plt.bar(["a", "b"], [1, 2]); plt.show()
plt.pie([1, 3], labels=["x", "y"]); plt.show()
plt.boxplot([[1, 2, 3, 4, 5, 20]]); plt.show()
figure, (left, right) = plt.subplots(1, 2); left.plot([1], [2]); right.barh(["a"], [3]); plt.show()
"""
    results = interpreter.run_code(code, timeout=120).results
    assert [result.chart.type for result in results] == [
        ChartType.LINE,
        ChartType.SCATTER,
        ChartType.BAR,
        ChartType.PIE,
        ChartType.BOX_AND_WHISKER,
        ChartType.SUPERCHART,
    ]
    assert all(base64.b64decode(result.png).startswith(b"\x89PNG") for result in results)
    line, _, bar, pie, box, both = (result.chart for result in results)
    assert (line.title, line.x_label, line.x_unit) == ("Title", "time (s)", "s")
    assert (line.elements[0].label, line.elements[0].points) == ("line", [(1, 3), (2, 4)])
    assert [(one.label, one.value) for one in bar.elements] == [("a", 1), ("b", 2)]
    assert [(one.label, one.angle) for one in pie.elements] == [("x", 90), ("y", 270)]
    assert (box.elements[0].median, box.elements[0].max, box.elements[0].outliers) == (3.5, 5, [20])
    assert [chart.type for chart in both.elements] == [ChartType.LINE, ChartType.BAR]


def test_variables_of_the_sandbox_and_of_one_execution(interpreter):
    code = "import os\nos.environ.get('FOO'), os.environ.get('ONCE')"
    assert interpreter.run_code(code).text == "('from create', None)"
    assert interpreter.run_code(code, envs={"FOO": "own", "ONCE": "1"}).text == "('own', '1')"
    assert interpreter.run_code(code).text == "('from create', None)"
    assert interpreter.run_code("import subprocess\nsubprocess.getoutput('echo $FOO')").text == "from create"


def test_contexts_have_their_own_variables_and_run_in_parallel(interpreter):
    interpreter.run_code("shared = 'of the default'")
    context = interpreter.create_code_context(cwd="/tmp")
    assert (context.language, context.cwd) == ("python", "/tmp")
    assert context.id in {one.id for one in interpreter.list_code_contexts()}
    assert interpreter.run_code("import os\nos.getcwd()", context=context).text == "/tmp"
    assert interpreter.run_code("shared", context=context).error.name == "NameError"
    # Each waits for the other: one after the other, neither would end.
    wait = """
import os, time
open('/tmp/{own}', 'w').close()
while not os.path.exists('/tmp/{other}'): time.sleep(0.05)
'met'
"""
    with ThreadPoolExecutor() as pool:
        one = pool.submit(interpreter.run_code, wait.format(own="a", other="b"))
        two = pool.submit(interpreter.run_code, wait.format(own="b", other="a"), context=context)
        assert (one.result().text, two.result().text) == ("met", "met")
    interpreter.run_code("mine = 1", context=context)
    interpreter.restart_code_context(context)
    assert interpreter.run_code("mine", context=context).error.name == "NameError"
    assert interpreter.run_code("import os\nos.getcwd()", context=context).text == "/tmp"
    # A process that ends is replaced.
    died = interpreter.run_code("print('last words', flush=True)\nos._exit(3)", context=context)
    assert died.error.name == "KernelDied"
    assert interpreter.run_code("1 + 1", context=context).text == "2"
    interpreter.remove_code_context(context.id)
    with pytest.raises(NotFoundException, match="not found"):
        interpreter.run_code("1", context=context)
    with pytest.raises(NotFoundException):
        interpreter.remove_code_context(context)
    assert context.id not in {one.id for one in interpreter.list_code_contexts()}


def test_executions_of_one_context_wait_for_each_other(interpreter):
    interpreter.run_code("order = []")
    code = "import time\norder.append('begin')\ntime.sleep(0.2)\norder.append('end')"
    with ThreadPoolExecutor() as pool:
        assert all(done.error is None for done in pool.map(interpreter.run_code, [code] * 3))
    assert interpreter.run_code("' '.join(order)").text == "begin end begin end begin end"


def test_what_cannot_run_is_refused_with_the_reason(interpreter):
    with pytest.raises(SandboxException, match="'cobol' is not available: use .*python"):
        interpreter.run_code("1", language="cobol")
    with pytest.raises(SandboxException, match="'/no/such' is not a directory"):
        interpreter.create_code_context(cwd="/no/such")


def test_an_execution_without_a_client_is_interrupted(interpreter):
    with pytest.raises(TimeoutException):
        interpreter.run_code("import time\nopen('/tmp/began', 'w').close()\ntime.sleep(1000)", timeout=3)
    # The same context works again, with its variables.
    interpreter.run_code("kept = 'kept'")
    with pytest.raises(TimeoutException):
        interpreter.run_code("while True:\n    pass", timeout=2)
    assert interpreter.run_code("kept", timeout=30).text == "kept"


def test_variables_survive_a_pause(interpreter):
    interpreter.run_code("import secrets\ntoken = secrets.token_hex(8)")
    token = interpreter.run_code("token").text
    interpreter.pause()
    interpreter.connect()
    assert interpreter.run_code("token").text == token


def test_the_service_starts_again_with_the_sandbox(interpreter):
    interpreter.run_code("gone = 1")
    sandtree("stop", interpreter.sandbox_id)
    sandtree("start", interpreter.sandbox_id)
    eventually(interpreter.is_running)
    assert interpreter.run_code("gone").error.name == "NameError"
    assert interpreter.run_code("import os\nos.environ['FOO']").text == "from create"


def test_the_async_client():
    async def run():
        sandbox = await AsyncSandbox.create(timeout=300)
        try:
            seen = []
            done = await sandbox.run_code("print('hello')\n6 * 7", on_stdout=lambda message: seen.append(message.line))
            assert (done.text, seen) == ("42", ["hello\n"])
            (context,) = await sandbox.list_code_contexts()
            both = await asyncio.gather(sandbox.run_code("'one'"), sandbox.run_code("'two'", context=context))
            assert [one.text for one in both] == ["one", "two"]
            other = await sandbox.create_code_context(cwd="/tmp", language="python")
            assert {one.id for one in await sandbox.list_code_contexts()} == {context.id, other.id}
            assert (await sandbox.run_code("import os\nmine = 1\nos.getcwd()", context=other)).text == "/tmp"
            assert (await sandbox.run_code("mine", context=context)).error.name == "NameError"
            await sandbox.restart_code_context(other)
            assert (await sandbox.run_code("mine", context=other)).error.name == "NameError"
            await sandbox.remove_code_context(other)
            for gone in [sandbox.remove_code_context(other.id), sandbox.restart_code_context(other)]:
                with pytest.raises(NotFoundException):
                    await gone
            with pytest.raises(SandboxException, match="'cobol' is not available"):
                await sandbox.run_code("1", language="cobol")
            with pytest.raises(SandboxException, match="'/no/such' is not a directory"):
                await sandbox.create_code_context(cwd="/no/such")
            with pytest.raises(TimeoutException):
                await sandbox.run_code("import time\ntime.sleep(100)", timeout=1)
        finally:
            await sandbox.kill()

    asyncio.run(run())


def test_cubesandbox_runs_code():
    with cubesandbox.Sandbox.create("code-interpreter-v1", timeout=300, env_vars={"FOO": "bar"}) as sandbox:
        lines = []
        done = sandbox.run_code("import os\nprint('hi')\nos.environ['FOO'] + os.environ['ONCE']", envs={"ONCE": "!"},
                                on_stdout=lambda message: lines.append(message))
        assert done.text == "bar!"
        assert len(lines) == 1
        failed = sandbox.run_code("1 / 0")
        assert failed.error.name == "ZeroDivisionError"
        with pytest.raises(cubesandbox.ApiError, match="HTTP 400"):
            sandbox.run_code("1", language="cobol")
