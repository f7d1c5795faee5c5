//! A word in each kind of a state's content: on the disk, in a file system in memory, and in the
//! memory of a process.

use super::World;

/// A process that remembers a word and counts the questions, only in its own memory.
const REMEMBER: &str = "mkfifo /run/ask /run/answer; \
    (n=0; kept=nothing; while read -r word < /run/ask; do \
        [ \"$word\" = ask ] || { kept=$word; n=0; }; echo \"$kept $n\" > /run/answer; [ \"$word\" = ask ] && n=$((n+1)); \
    done) > /dev/null 2>&1 < /dev/null &";

/// Makes a new guest remember `word` everywhere.
pub fn begin(world: &World, sandbox: &str, word: &str) {
    assert_eq!(world.sh(sandbox, REMEMBER).code, 0);
    write(world, sandbox, word);
}

/// Replaces the word everywhere.
pub fn write(world: &World, sandbox: &str, word: &str) {
    let line = format!(
        "echo {word} > /srv/word; echo {word} > /run/word; echo {word} > /run/ask; cat /run/answer"
    );
    let answer = world.sh(sandbox, &line);
    assert_eq!(
        (answer.code, answer.out()),
        (0, format!("{word} 0\n").as_str()),
        "{answer:?}"
    );
}

/// Asserts that the guest holds `word` everywhere, and that its process has answered `times`
/// questions since the word was set.
#[track_caller]
pub fn assert_holds(world: &World, sandbox: &str, word: &str, times: u32) {
    let line = "cat /srv/word /run/word; echo ask > /run/ask; cat /run/answer";
    let answer = world.run(["exec", "--timeout", "60s", sandbox, "--", "sh", "-c", line]);
    assert_eq!(
        (answer.code, answer.out()),
        (0, format!("{word}\n{word}\n{word} {times}\n").as_str()),
        "{answer:?}"
    );
}

/// Asserts that the disk holds `word`: the part that survives a boot.
#[track_caller]
pub fn assert_disk_holds(world: &World, sandbox: &str, word: &str) {
    let answer = world.sh(sandbox, "cat /srv/word; ls /run/word");
    assert_eq!(answer.out(), format!("{word}\n"), "{answer:?}");
}
