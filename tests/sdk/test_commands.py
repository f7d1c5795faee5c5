"""Commands and terminals, by E2B's Python client."""

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    TimeoutException,
)

from conftest import eventually


def test_output_and_exit_codes(sandbox):
    done = sandbox.commands.run("echo out; echo err >&2; echo $FOO; pwd; whoami")
    assert done.stdout == "out\nfrom create\n/home/user\nuser\n"
    assert done.stderr == "err\n"
    assert done.exit_code == 0
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo partly; exit 3")
    assert failed.value.exit_code == 3
    assert failed.value.stdout == "partly\n"


def test_settings_of_a_command(sandbox):
    done = sandbox.commands.run("pwd; echo $FOO; whoami", cwd="/tmp", envs={"FOO": "own"}, user="root")
    assert done.stdout == "/tmp\nown\nroot\n"
    assert sandbox.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == sandbox.sandbox_id
    with pytest.raises(InvalidArgumentException, match="cwd '/no/such' does not exist"):
        sandbox.commands.run("true", cwd="/no/such")
    with pytest.raises(AuthenticationException, match="invalid username: 'nobody-here'"):
        sandbox.commands.run("true", user="nobody-here")


def test_the_guest_says_who_its_users_are(own):
    """The server looks at the guest's users only when it has to, and is never behind them."""
    made = own()
    run = lambda line, **options: made.commands.run(line, **options).stdout
    assert run("pwd; whoami") == "/home/user\nuser\n"
    made.files.make_dir("below")
    assert run("pwd", cwd="below") == run("pwd", cwd="~/below") == run("pwd", cwd="/home/user/../user/below")
    with pytest.raises(InvalidArgumentException, match="cwd '/etc/passwd' is not a directory"):
        run("true", cwd="/etc/passwd")
    run("sed -i 's/^user:/other:/' /etc/passwd", user="root")
    assert run("id -u") == run("id -u") == "0\n"
    assert run("whoami", user="other") == "other\n"
    with pytest.raises(AuthenticationException, match="invalid username: 'user'"):
        run("true", user="user")
    # A number is the name of no user here, although it means one to the agent.
    with pytest.raises(AuthenticationException, match="invalid username: '0'"):
        run("true", user="0")
    run("sed -i 's/^other:/user:/; s,/home/user,/tmp,' /etc/passwd", user="root")
    assert run("pwd; whoami") == run("pwd; whoami", user="user") == "/tmp\nuser\n"


def test_output_is_streamed_and_none_is_lost(sandbox):
    pieces = []
    done = sandbox.commands.run("for i in 1 2 3; do echo $i; sleep 0.3; done", on_stdout=pieces.append)
    assert "".join(pieces) == "1\n2\n3\n"
    assert len(pieces) > 1
    assert done.exit_code == 0
    large = sandbox.commands.run("head -c 5000000 /dev/zero | tr '\\0' x")
    assert large.stdout == "x" * 5_000_000
    text = sandbox.commands.run("printf 'ä€😀%.0s' $(seq 20000)").stdout
    assert text == "ä€😀" * 20000


def test_background_commands(sandbox):
    command = sandbox.commands.run("echo begun; sleep 600", background=True)
    listed = {process.pid: process for process in sandbox.commands.list()}
    assert "sleep 600" in listed[command.pid].args[-1]
    assert sandbox.commands.kill(command.pid) is True
    with pytest.raises(CommandExitException):
        command.wait()
    assert command.pid not in {process.pid for process in sandbox.commands.list()}
    assert sandbox.commands.kill(command.pid) is False
    assert sandbox.commands.kill(999_999) is False


def test_a_command_outlives_its_client_and_is_joined(sandbox):
    command = sandbox.commands.run("read line; echo got $line; sleep 0.2; exit 7", background=True, stdin=True)
    command.disconnect()
    joined = sandbox.commands.connect(command.pid)
    sandbox.commands.send_stdin(command.pid, "hello\n")
    with pytest.raises(CommandExitException) as ended:
        joined.wait()
    assert ended.value.exit_code == 7
    assert ended.value.stdout == "got hello\n"
    # For a while, its end can still be learned.
    with pytest.raises(CommandExitException) as again:
        sandbox.commands.connect(command.pid).wait()
    assert again.value.exit_code == 7
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(999_999)


def test_input_ends(sandbox):
    command = sandbox.commands.run("wc -c", background=True, stdin=True)
    sandbox.commands.send_stdin(command.pid, "x" * 100_000)
    sandbox.commands.close_stdin(command.pid)
    assert command.wait().stdout == "100000\n"


def test_a_command_that_takes_too_long_is_killed(sandbox):
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 600.5", timeout=1)
    eventually(lambda: "sleep 600.5" not in sandbox.commands.run("ps axo args").stdout)


def test_terminals(sandbox):
    seen = []
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    sandbox.pty.resize(terminal.pid, PtySize(rows=40, cols=123))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; exit 5\n")
    with pytest.raises(CommandExitException) as ended:
        terminal.wait(on_pty=seen.append)
    assert ended.value.exit_code == 5
    assert b"40 123" in b"".join(seen)


def test_a_stream_of_a_killed_sandbox_ends_with_the_reason(own):
    made = own()
    command = made.commands.run("sleep 600", background=True)
    Sandbox.kill(made.sandbox_id)
    with pytest.raises(TimeoutException, match="killed or reached its"):
        command.wait()
