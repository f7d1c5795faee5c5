"""The code interpreter: runs code for clients, over HTTP on port 49999.

    POST   /execute               {"code", "context_id"?, "language"?, "env_vars"?} -> one JSON object a line
    POST   /contexts              {"language"?, "cwd"?} -> {"id", "language", "cwd"}
    GET    /contexts              all of them
    POST   /contexts/ID/restart   a new process, without the variables of the old one
    DELETE /contexts/ID
    GET    /health

A context is a Jupyter kernel: a process that keeps its variables between executions. Executions of one context run one
after the other, those of several contexts at the same time. Each language has a context of its own for executions that
name none.

Always: a request, its body and the number of contexts have limits. Output is never dropped: a client that reads slowly
slows the stream down, and the kernel keeps what was not sent. A client that goes away interrupts its execution.
"""

import asyncio
import json
import logging
import os
import queue
import signal
import uuid

import tornado.httpserver
import tornado.iostream
import tornado.web
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager

PORT = 49999
HERE = os.path.dirname(os.path.abspath(__file__))
# Where sockets of kernels are: a port of the guest would be visible to its programs.
SOCKETS = "/run/code-interpreter"
# The variables of the sandbox, which Sandtree writes when the sandbox gets its name.
VARIABLES = "/run/sandtree/env.json"
HOME = "/home/user"

BODY_MAX = 64 << 20
CONTEXTS_MAX = 64
# Executions that wait for the one before them.
WAITING_MAX = 100
START_SECONDS = 120
# Silence after which a line tells the client, and everything between, that the execution still runs.
KEEPALIVE_SECONDS = 5
# How often an execution without a client is interrupted, and when its kernel is given up.
INTERRUPT_SECONDS = 1
INTERRUPTS_MAX = 30

PRELOAD = "import matplotlib.pyplot, numpy, pandas"
# The names of our kernels begin with this: for Jupyter, "python" is a kernel of its own.
SPEC = "interpreter-"
ALIASES = {"py": "python", "python3": "python", "js": "javascript", "sh": "bash"}
FORMATS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}

log = logging.getLogger("code-interpreter")


class Refused(Exception):
    """A request that cannot be served: the status of the answer, and its text."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


class Variables:
    """The variables of the sandbox, read again when they change."""

    def __init__(self, path):
        self.path = path
        self.stamp = None
        self.values = {}

    def now(self):
        try:
            found = os.stat(self.path)
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if stamp != self.stamp:
                with open(self.path, encoding="utf-8") as file:
                    self.values = texts(json.load(file))
                self.stamp = stamp
        except (OSError, ValueError, Refused) as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("the variables of the sandbox cannot be read: %s", error)
        return self.values


class Context:
    """One kernel, and the executions that wait for it."""

    def __init__(self, language, cwd, specs):
        self.id = str(uuid.uuid4())
        self.language = language
        self.cwd = cwd
        self.specs = specs
        self.waiting = 0
        self.is_removed = False
        self.turn = asyncio.Lock()
        self.manager = None
        self.client = None

    def described(self):
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    async def start(self):
        self.manager = AsyncKernelManager(
            kernel_name=SPEC + self.language,
            kernel_spec_manager=self.specs,
            transport="ipc",
            connection_file=os.path.join(SOCKETS, f"{uuid.uuid4().hex}.json"),
        )
        try:
            await self.manager.start_kernel(cwd=self.cwd)
            self.client = self.manager.client()
            self.client.start_channels(stdin=False, hb=False)
            await self.client.wait_for_ready(timeout=START_SECONDS)
        except BaseException:
            await self.end()
            raise

    async def end(self):
        if self.client is not None:
            self.client.stop_channels()
            self.client = None
        if self.manager is not None:
            await self.manager.shutdown_kernel(now=True)
            self.manager.cleanup_connection_file()
            self.manager.cleanup_ipc_files()
            self.manager = None

    async def kill(self):
        """Ends the kernel at once. A running execution reports it, and replaces the kernel."""
        if self.manager is not None and await self.manager.is_alive():
            await self.manager.signal_kernel(signal.SIGKILL)

    async def restart(self):
        """Ends what runs, and starts a new kernel in the same directory."""
        before = self.manager
        await self.kill()
        async with self.turn:
            if self.manager is before and not self.is_removed:
                await self.end()
                await self.start()

    async def remove(self):
        self.is_removed = True
        await self.kill()
        async with self.turn:
            await self.end()

    async def run(self, code, environment, silent=False):
        """Runs code, and yields what comes of it, or None where nothing does for a while."""
        content = {
            "code": code,
            "silent": silent,
            "store_history": not silent,
            "user_expressions": {},
            "allow_stdin": False,
            # A failed execution is no reason to refuse the next one.
            "stop_on_error": False,
            # Understood by our own kernels.
            "environment": environment,
        }
        request = self.client.session.msg("execute_request", content)
        self.client.shell_channel.send(request)
        ident = request["header"]["msg_id"]
        quiet = 0
        while True:
            try:
                message = await self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                if not await self.manager.is_alive():
                    yield await self.died()
                    return
                quiet += 1
                if quiet % KEEPALIVE_SECONDS == 0:
                    yield None
                continue
            if message["parent_header"].get("msg_id") != ident:
                continue
            quiet = 0
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
            event = output(message)
            if event is not None:
                yield event
        await self.answered(ident)

    async def answered(self, ident):
        """Takes the kernel's answer, which says nothing that its messages did not."""
        while True:
            try:
                reply = await self.client.get_shell_msg(timeout=1)
            except queue.Empty:
                return
            if reply["parent_header"].get("msg_id") == ident:
                return

    async def died(self):
        """Replaces a kernel that ended by itself."""
        await self.end()
        if not self.is_removed:
            await self.start()
        return {
            "type": "error",
            "name": "KernelDied",
            "value": "the process that ran the code ended, and was replaced by a new one without its variables",
            "traceback": "The process that ran the code ended: it was killed, exited, or used more memory than there is.",
        }

    async def interrupt(self):
        if self.manager is not None and await self.manager.is_alive():
            await self.manager.interrupt_kernel()


def output(message):
    """The event that a kernel's message becomes for the client; None if there is none."""
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        when = message["header"]["date"].isoformat()
        return {"type": content["name"], "text": content["text"], "timestamp": when}
    if kind in ("execute_result", "display_data"):
        return result(content["data"], kind == "execute_result")
    if kind == "error":
        trace = "\n".join(content["traceback"])
        return {"type": "error", "name": content["ename"], "value": content["evalue"], "traceback": trace}
    if kind == "execute_input":
        return {"type": "number_of_executions", "execution_count": content["execution_count"]}
    return None


def result(data, is_main):
    found = {"type": "result", "is_main_result": is_main}
    extra = {}
    for mime, value in data.items():
        if mime in FORMATS:
            found[FORMATS[mime]] = value
        else:
            extra[mime] = value
    text = found.get("text")
    # A string is shown without the quotes of its representation.
    if text is not None and len(text) > 1 and text[0] == text[-1] == "'":
        found["text"] = text[1:-1]
    if extra:
        found["extra"] = extra
    return found


class Contexts:
    """All contexts, and the one of each language that executions use without a choice."""

    def __init__(self):
        self.specs = KernelSpecManager(kernel_dirs=[os.path.join(HERE, "kernels")], ensure_native_kernel=False)
        self.languages = sorted(name.removeprefix(SPEC) for name in self.specs.find_kernel_specs())
        self.all = {}
        self.default = {}
        self.starting = {}

    def language(self, name):
        name = (name or "python").strip().lower()
        name = ALIASES.get(name, name)
        if name not in self.languages:
            raise Refused(400, f"language {name!r} is not available: use {', '.join(self.languages)}")
        return name

    async def create(self, language=None, cwd=None):
        language = self.language(language)
        cwd = cwd or HOME
        if not os.path.isdir(cwd):
            raise Refused(400, f"cwd {cwd!r} is not a directory")
        if len(self.all) >= CONTEXTS_MAX:
            raise Refused(429, f"there are {CONTEXTS_MAX} contexts: remove one")
        context = Context(language, cwd, self.specs)
        self.all[context.id] = context
        try:
            # An execution that finds it already waits until it has started.
            async with context.turn:
                await context.start()
        except BaseException:
            del self.all[context.id]
            raise
        return context

    async def prepare(self):
        """Makes the context that most clients use, with the modules that take long to import."""
        context = await self.of_language("python")
        async for _ in context.run(PRELOAD, {}, silent=True):
            pass

    async def of_language(self, name):
        """The context of a language, which is made at its first use."""
        language = self.language(name)
        async with self.starting.setdefault(language, asyncio.Lock()):
            if language not in self.default:
                self.default[language] = await self.create(language)
        return self.default[language]

    def find(self, ident):
        if ident not in self.all:
            raise Refused(404, f"Context {ident} not found")
        return self.all[ident]

    async def remove(self, ident):
        context = self.all.pop(self.find(ident).id)
        if self.default.get(context.language) is context:
            del self.default[context.language]
        await context.remove()


class Handler(tornado.web.RequestHandler):
    """Answers with JSON, and with plain text where a request is refused."""

    contexts = None
    variables = None

    def body(self):
        try:
            body = json.loads(self.request.body or b"{}")
        except ValueError as error:
            raise Refused(400, f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused(400, "the body is not an object")
        return body

    def text(self, body, key):
        value = body.get(key)
        if value is not None and not isinstance(value, str):
            raise Refused(400, f"{key} is not a text")
        return value

    def answer(self, value):
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(value))

    def write_error(self, status_code, **details):
        error = details.get("exc_info", (None, None, None))[1]
        if isinstance(error, Refused):
            self.set_status(error.status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(str(error) if error is not None else f"{status_code}")

    def log_exception(self, kind, error, trace):
        if not isinstance(error, (Refused, tornado.web.HTTPError)):
            log.error("a request failed", exc_info=(kind, error, trace))


class Health(Handler):
    def get(self):
        self.answer("ok")


class Listed(Handler):
    def get(self):
        self.answer([context.described() for context in self.contexts.all.values()])

    async def post(self):
        body = self.body()
        context = await self.contexts.create(self.text(body, "language"), self.text(body, "cwd"))
        self.answer(context.described())


class One(Handler):
    async def delete(self, ident):
        await self.contexts.remove(ident)
        self.answer(None)


class Restart(Handler):
    async def post(self, ident):
        await self.contexts.find(ident).restart()
        self.answer(None)


class Execute(Handler):
    def initialize(self):
        self.gone = asyncio.Event()

    def on_connection_close(self):
        self.gone.set()

    async def post(self):
        body = self.body()
        code = self.text(body, "code")
        if code is None:
            raise Refused(400, "code is missing")
        once = texts(body.get("env_vars") or {})
        context = await self.chosen(self.text(body, "context_id"), self.text(body, "language"))
        if context.waiting >= WAITING_MAX:
            raise Refused(429, f"{WAITING_MAX} executions wait for this context")
        self.set_header("Content-Type", "application/x-ndjson")
        self.set_header("Cache-Control", "no-store")
        # The answer begins at once, also if the context is busy.
        await self.send()
        context.waiting += 1
        try:
            async with context.turn:
                if not self.gone.is_set():
                    await self.run(context, code, {"kept": self.variables.now(), "once": once})
        finally:
            context.waiting -= 1

    async def chosen(self, ident, language):
        if ident and language:
            raise Refused(400, "Only one of context_id or language can be provided")
        if ident:
            return self.contexts.find(ident)
        return await self.contexts.of_language(language)

    async def run(self, context, code, environment):
        if context.is_removed:
            gone = {"type": "error", "name": "ContextRemoved", "value": "the context was removed", "traceback": ""}
            await self.send(gone)
            await self.send({"type": "end_of_execution"})
            return
        if context.client is None:
            # Its last kernel could not be replaced.
            await context.start()
        watch = asyncio.ensure_future(self.interrupt(context))
        try:
            async for event in context.run(code, environment):
                await self.send(event or {"type": "keepalive"})
        finally:
            watch.cancel()
        await self.send({"type": "end_of_execution"})

    async def send(self, event=None):
        """Sends a line, and waits until the client takes it."""
        if self.gone.is_set():
            return
        if event is not None:
            self.write(json.dumps(event) + "\n")
        try:
            await self.flush()
        except tornado.iostream.StreamClosedError:
            self.gone.set()

    async def interrupt(self, context):
        """Interrupts an execution whose client is gone, until it ends."""
        await self.gone.wait()
        for _ in range(INTERRUPTS_MAX):
            await context.interrupt()
            await asyncio.sleep(INTERRUPT_SECONDS)
        log.warning("a kernel does not obey: it is replaced")
        await context.kill()


def texts(value):
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Refused(400, "variables are texts by name")
    for name, text in value.items():
        if not name or "=" in name or "\0" in name + text:
            raise Refused(400, f"{name!r} is not the name of a variable, or its value has a zero byte")
    return value


async def main():
    logging.basicConfig(level=logging.WARNING)
    os.makedirs(SOCKETS, mode=0o700, exist_ok=True)
    Handler.contexts = Contexts()
    Handler.variables = Variables(VARIABLES)
    application = tornado.web.Application(
        [
            ("/health", Health),
            ("/contexts", Listed),
            ("/contexts/([0-9a-f-]{1,64})", One),
            ("/contexts/([0-9a-f-]{1,64})/restart", Restart),
            ("/execute", Execute),
        ],
        log_function=lambda handler: None,
    )
    await Handler.contexts.prepare()
    server = tornado.httpserver.HTTPServer(application, max_body_size=BODY_MAX, max_buffer_size=BODY_MAX + (1 << 20))
    server.listen(PORT, address="127.0.0.1")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
