"""Git in a sandbox, by both flavours of E2B's Python client: repositories of the guest, without a network."""

import pytest
from e2b import CommandExitException, GitAuthException, GitUpstreamException, InvalidArgumentException


@pytest.fixture(scope="module")
def git(box):
    """Git of a user who has a name, as commits need one."""
    box.git.configure_user("Tester", "tester@example.org")
    return box.git


@pytest.fixture(scope="module")
def repository(box, git):
    """A repository with one commit, and a remote for it; the name of its directory."""
    made = "git init -q --bare -b main remote.git && git clone -q remote.git work && cd work && echo one > a.txt"
    box.commands.run(f"{made} && git add . && git commit -q -m first && git push -q")
    return "work"


def test_settings_of_git(git, repository):
    assert git.get_config("user.email") == "tester@example.org"
    git.set_config("sandtree.key", "of one", scope="local", path=repository)
    assert git.get_config("sandtree.key", scope="local", path=repository) == "of one"
    assert git.get_config("sandtree.key") is None
    with pytest.raises(InvalidArgumentException):
        git.set_config("", "x")


def test_changes_are_staged_committed_and_taken_back(box, git, repository):
    box.files.write("work/a.txt", "two\n")
    box.files.write("work/new.txt", "new\n")
    status = git.status(repository)
    assert (status.current_branch, status.upstream) == ("main", "origin/main")
    assert {(one.name, one.status) for one in status.file_status} == {("a.txt", "modified"), ("new.txt", "untracked")}
    git.add(repository, files=["new.txt"])
    assert git.status(repository).staged_count == 1
    git.restore(repository, ["new.txt"], staged=True)
    assert git.status(repository).has_untracked
    git.restore(repository, ["a.txt"])
    assert box.files.read("work/a.txt") == "one\n"
    git.add(repository)
    git.commit(repository, "second", author_name="Another", author_email="another@example.org")
    assert box.commands.run("git log -1 --format='%an %s'", cwd="work").stdout == "Another second\n"
    status = git.status(repository)
    assert (status.ahead, status.is_clean) == (1, True)
    git.reset(repository, mode="hard", target="HEAD~1")
    assert not box.files.exists("work/new.txt")
    with pytest.raises(CommandExitException) as refused:
        git.commit(repository, "third")
    assert "nothing to commit" in refused.value.stdout
    git.commit(repository, "third", allow_empty=True)
    git.reset(repository, mode="soft", target="HEAD~1")


def test_branches(git, repository):
    git.create_branch(repository, "side")
    listed = git.branches(repository)
    assert (listed.current_branch, sorted(listed.branches)) == ("side", ["main", "side"])
    git.checkout_branch(repository, "main")
    git.delete_branch(repository, "side", force=True)
    assert git.branches(repository).branches == ["main"]
    with pytest.raises(CommandExitException, match="no-such"):
        git.checkout_branch(repository, "no-such")


def test_remotes(box, git, repository):
    assert git.remote_get(repository, "none") is None
    git.clone("/home/user/remote.git", path="copy", branch="main", depth=1)
    box.files.write("copy/b.txt", "b\n")
    git.add("copy")
    git.commit("copy", "by the copy")
    git.push("copy")
    git.pull(repository)
    assert box.files.read("work/b.txt") == "b\n"
    git.init("alone", initial_branch="trunk")
    with pytest.raises(GitUpstreamException):
        git.pull("alone")
    git.remote_add("alone", "origin", "/home/user/elsewhere")
    with pytest.raises(CommandExitException, match="does not appear to be a git repository"):
        git.pull("alone", remote="origin", branch="main")
    git.init("other.git", bare=True)
    git.remote_add("alone", "origin", "/home/user/other.git", overwrite=True)
    assert git.remote_get("alone", "origin") == "/home/user/other.git"
    git.commit("alone", "first", allow_empty=True)
    git.push("alone", remote="origin", branch="trunk")
    assert git.status("alone").upstream == "origin/trunk"


def test_credentials_are_asked_for_and_kept(box, git):
    # A remote that lets nobody in, without a network.
    refusing = "ext::sh -c echo% Authentication% failed% >&2"
    with pytest.raises(GitAuthException):
        git.clone(refusing, path="refused", envs={"GIT_ALLOW_PROTOCOL": "ext"})
    git.dangerously_authenticate("someone", "a secret", host="git.test")
    asked = "printf 'protocol=https\\nhost=git.test\\n\\n' | git credential fill"
    assert "password=a secret" in box.commands.run(asked).stdout
    with pytest.raises(InvalidArgumentException):
        git.dangerously_authenticate("", "")
