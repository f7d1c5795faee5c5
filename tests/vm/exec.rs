//! Commands in a sandbox, through `sandtree run` and `sandtree exec`.

mod support;

use support::World;

#[test]
fn a_foreground_run_leaves_nothing_and_passes_the_exit_code_on() {
    let world = World::new();
    let answer = world.run(["run", "tiny", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]);
    assert_eq!((answer.code, answer.out(), answer.err().as_str()), (3, "out\n", "err\n"));
    world.assert_empty();
}
