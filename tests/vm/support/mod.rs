//! A store for each test, driven through the `sandtree` command.
//!
//! Always: the processes of a test end with it, also when it fails, by id. A test that passes
//! leaves nothing: no sandbox, no process, no file. A test that fails keeps its store, and prints
//! the path.

pub mod exactness;
pub mod held;
pub mod lab;
pub mod lifecycle;
pub mod margin;
pub mod mount;
pub mod ordinary;
pub mod pty;
pub mod shared;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;

/// The deadline of a wait. Nothing takes longer unless it hangs.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// The `sandtree` that was built with these tests.
pub fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_sandtree"))
}

/// The `sandtree-bench` of the same build. Cargo does not build it with these tests: `make vm`
/// does.
pub fn bench_program() -> PathBuf {
    let path = program().with_file_name("sandtree-bench");
    assert!(
        path.exists(),
        "run `make programs`: {path:?} does not exist"
    );
    path
}

/// A store with the image `tiny` and its warm state, and nothing else.
pub struct World {
    home: Option<tempfile::TempDir>,
    path: PathBuf,
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl World {
    pub fn new() -> Self {
        Self::made_by(|path| link_tree(base(), path))
    }

    fn made_by(make: impl FnOnce(&Path)) -> Self {
        let home = tempfile::Builder::new()
            .prefix("st-")
            .tempdir()
            .expect("a temporary directory can be made");
        let path = home.path().join("home");
        make(&path);
        World {
            home: Some(home),
            path,
        }
    }

    /// A store with `debian`, its warm state, the image of [`with_inits`], and nothing else.
    pub fn debian() -> Self {
        Self::made_by(|path| link_tree(debian_base(), path))
    }

    /// A store with the same content as another.
    pub fn like(store: &Path) -> Self {
        Self::made_by(|path| link_tree(store, path))
    }

    /// The same at a given path.
    pub fn like_at(store: &Path, path: PathBuf) -> Self {
        link_tree(store, &path);
        World { home: None, path }
    }

    /// With its own copies of all files: the link count of a shared file changes with other stores.
    pub fn copied() -> Self {
        Self::made_by(copy_base)
    }

    /// A store at a given path.
    pub fn at(path: PathBuf) -> Self {
        link_tree(base(), &path);
        World { home: None, path }
    }

    /// As `at`, with its own copies of all files, so that their owner can be changed.
    pub fn copied_to(path: PathBuf) -> Self {
        copy_base(&path);
        World { home: None, path }
    }

    /// A path for a store that does not exist yet.
    pub fn empty_at(path: PathBuf) -> Self {
        World { home: None, path }
    }

    pub fn home(&self) -> &Path {
        &self.path
    }

    /// The command without arguments.
    pub fn command(&self) -> Command {
        let mut command = Command::new(program());
        command
            .env("SANDTREE_HOME", &self.path)
            .env_remove("SANDTREE_QEMU")
            .stdin(Stdio::null());
        command
    }

    /// Runs `sandtree ARGS` to its end.
    #[track_caller]
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Answer {
        finish(
            self.command()
                .args(args)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        )
    }

    /// As `run`, with these bytes on standard input.
    pub fn run_with_input<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        input: &[u8],
    ) -> Answer {
        let mut child = self
            .command()
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        // A command may end without reading all of its input; the test checks that itself.
        let feeding = std::thread::spawn(move || drop(stdin.write_all(&input)));
        let answer = finish(child);
        feeding.join().unwrap();
        answer
    }

    /// Runs the command and asserts that it succeeds.
    #[track_caller]
    pub fn ok<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Answer {
        let answer = self.run(args);
        assert_eq!(answer.code, 0, "{answer:#?}");
        answer
    }

    /// Runs the command with `--json` and returns its output.
    #[track_caller]
    pub fn json<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Value {
        let mut command = self.command();
        command
            .arg("--json")
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let answer = finish(command.spawn().unwrap());
        assert_eq!(answer.code, 0, "{answer:#?}");
        serde_json::from_slice(&answer.stdout).unwrap_or_else(|e| panic!("{e}: {answer:#?}"))
    }

    /// Starts a sandbox in the background.
    #[track_caller]
    pub fn start(&self, name: &str, options: &[&str]) -> Value {
        let args = [&["run", "-d", "--name", name], options, &["tiny"]].concat();
        self.json(args)
    }

    /// Runs a shell line in a sandbox.
    #[track_caller]
    pub fn sh(&self, sandbox: &str, line: &str) -> Answer {
        self.run(["exec", sandbox, "--", "sh", "-c", line])
    }

    pub fn inspect(&self, sandbox: &str) -> Value {
        self.json(["inspect", sandbox])
    }

    /// Everything in the store except images: sandboxes, their names, unfinished work.
    pub fn residue(&self) -> Vec<PathBuf> {
        let entries = |dir: &str| {
            fs::read_dir(self.path.join(dir))
                .unwrap()
                .map(|e| e.unwrap().path())
        };
        ["sandboxes", "names/sandboxes", "staging"]
            .into_iter()
            .flat_map(entries)
            .collect()
    }

    /// Asserts that nothing is left, and that no process uses this store. A keeper may take a
    /// moment to end after its answer.
    pub fn assert_empty(&self) {
        assert_eq!(self.residue(), Vec::<PathBuf>::new());
        until("no process uses the store", || {
            processes_of(&self.path).is_empty()
        });
    }

    fn end_everything(&self) {
        for pid in processes_of(&self.path) {
            kill(pid, "KILL");
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.end_everything();
        if std::thread::panicking() {
            let kept = self.home.take().map(tempfile::TempDir::keep);
            eprintln!(
                "the store of the failed test is kept: {}",
                kept.unwrap_or(self.path.clone()).display()
            );
            for sandbox in fs::read_dir(self.path.join("sandboxes"))
                .into_iter()
                .flatten()
                .flatten()
            {
                for log in ["console.log", "keeper.log"].map(|name| sandbox.path().join(name)) {
                    let said = fs::read(&log).unwrap_or_default();
                    eprintln!("{}:\n{}", log.display(), String::from_utf8_lossy(&said));
                }
            }
        }
    }
}

/// The output and exit code of a command.
pub struct Answer {
    pub code: i32,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

impl Answer {
    pub fn out(&self) -> &str {
        std::str::from_utf8(&self.stdout).expect("stdout is text")
    }

    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// Asserts that Sandtree itself failed, with all of these words in its message.
    pub fn failed_with(&self, words: &[&str]) {
        assert_eq!(self.code, 125, "{self:#?}");
        for word in words {
            assert!(
                self.err().contains(word),
                "{word:?} is not in: {}",
                self.err()
            );
        }
    }
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let cut =
            |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(4000)]).into_owned();
        f.debug_struct("Answer")
            .field("code", &self.code)
            .field("stdout", &cut(&self.stdout))
            .field("stderr", &cut(&self.stderr))
            .finish()
    }
}

/// The code of an [`Answer`] whose program did not end in time.
pub const NOT_IN_TIME: i32 = -1;

/// Waits for a child's end, at most [`DEADLINE`].
#[track_caller]
pub fn finish(child: Child) -> Answer {
    finish_within(child, DEADLINE)
}

/// Waits for a child's end, and kills it at the deadline.
#[track_caller]
pub fn finish_within(mut child: Child, deadline: Duration) -> Answer {
    let read = |stream: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            stream.map(|mut s| s.read_to_end(&mut bytes).unwrap());
            bytes
        })
    };
    let stdout = read(child.stdout.take().map(|s| Box::new(s) as _));
    let stderr = read(child.stderr.take().map(|s| Box::new(s) as _));
    let code = match wait(&mut child, deadline) {
        Some(code) => code,
        None => {
            child.kill().unwrap();
            child.wait().unwrap();
            NOT_IN_TIME
        }
    };
    Answer {
        code,
        stdout: stdout.join().unwrap(),
        stderr: stderr.join().unwrap(),
    }
}

/// A child's exit code, 128 + n for a signal; `None` if it does not end in time.
#[track_caller]
pub fn wait(child: &mut Child, deadline: Duration) -> Option<i32> {
    use std::os::unix::process::ExitStatusExt;
    let status = eventually(deadline, || child.try_wait().unwrap())?;
    Some(
        status
            .code()
            .unwrap_or_else(|| 128 + status.signal().unwrap()),
    )
}

/// Calls `look` until it returns something, for at most `deadline`.
#[track_caller]
pub fn eventually<T>(deadline: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            margin::note(began.elapsed(), deadline);
            return Some(found);
        }
        if began.elapsed() > deadline {
            return None;
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

/// Waits until a condition holds.
#[track_caller]
pub fn until(what: &str, condition: impl FnMut() -> bool) {
    let mut condition = condition;
    eventually(DEADLINE, || condition().then_some(())).unwrap_or_else(|| panic!("never: {what}"));
}

pub fn kill(pid: u32, signal: &str) {
    let killed = Command::new("kill")
        .arg(format!("-{signal}"))
        .arg(pid.to_string())
        .stderr(Stdio::null())
        .status();
    killed.expect("kill runs");
}

/// Whether a process exists and is no zombie.
pub fn is_alive(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status
        .lines()
        .any(|line| line.starts_with("State:") && !line.contains('Z'))
}

/// The processes that hold a file of this store open: keepers and machines.
pub fn processes_of(home: &Path) -> Vec<u32> {
    let uses = |pid: u32| {
        let fds = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten();
        fds.filter_map(|fd| fs::read_link(fd.path()).ok())
            .any(|target| target.starts_with(home))
    };
    let pids = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok());
    pids.filter(|pid| *pid != std::process::id() && uses(*pid))
        .collect()
}

/// A store with the image and its warm state, made once for all tests. The number is that of the
/// store's format.
fn base() -> &'static Path {
    static BASE: OnceLock<PathBuf> = OnceLock::new();
    BASE.get_or_init(|| made_once("base-home-3", &["run", "tiny", "--", "true"], &[]))
}

/// The same with `debian`, which takes minutes to make. Its content does not depend on the test
/// that comes first.
fn debian_base() -> &'static Path {
    static BASE: OnceLock<PathBuf> = OnceLock::new();
    let run = ["run", "debian", "--", "true"];
    BASE.get_or_init(|| made_once("base-debian-3", &run, &[&with_inits()]))
}

/// The recipe of a Debian with several init programs.
pub fn with_inits() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vm/images/with-inits.toml")
}

/// A store with the image of a `run` and its warm state, made once for all tests.
pub fn made_once(dir: &str, run: &[&str], recipes: &[&Path]) -> PathBuf {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(dir);
    fs::create_dir_all(home.parent().unwrap()).unwrap();
    let lock = fs::File::create(home.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    let before = warm_states(&home);
    let kernels_before = kernel_states(&home);
    let made = |args: &[&OsStr]| {
        let status = Command::new(program())
            .args(args)
            .env("SANDTREE_HOME", &home)
            .stdin(Stdio::null())
            .status();
        assert!(
            status.unwrap().success(),
            "the base store cannot be made: {args:?}"
        );
    };
    made(&run.iter().map(OsStr::new).collect::<Vec<_>>());
    for recipe in recipes {
        made(&["image".as_ref(), "build".as_ref(), recipe.as_ref()]);
    }
    // A rebuilt program makes its own warm states and cannot use older ones.
    if warm_states(&home).len() > before.len() {
        before
            .iter()
            .chain(&kernels_before)
            .for_each(|state| fs::remove_dir_all(state).unwrap());
    }
    assert_eq!(warm_states(&home).len(), 1, "a boot is kept");
    home
}

/// The warm images of a store.
pub fn warm_states(home: &Path) -> Vec<PathBuf> {
    warm_of(home, "image")
}

/// The kernel states of a store.
pub fn kernel_states(home: &Path) -> Vec<PathBuf> {
    warm_of(home, "kernel")
}

/// The warm states of one kind; their records name what they are of.
fn warm_of(home: &Path, kind: &str) -> Vec<PathBuf> {
    let is_of_kind = |path: &PathBuf| {
        let record = fs::read(path.join("warm.json")).unwrap_or_default();
        let record: Value = serde_json::from_slice(&record).unwrap_or_default();
        record[kind].is_string()
    };
    fs::read_dir(home.join("warm"))
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path())
        .filter(is_of_kind)
        .collect()
}

fn copy_base(to: &Path) {
    copy_tree(base(), to, &|from, to| fs::copy(from, to).map(drop));
}

/// Copies a tree by hard links where possible: published files never change.
fn link_tree(from: &Path, to: &Path) {
    copy_tree(from, to, &|from, to| {
        fs::hard_link(from, to).or_else(|_| fs::copy(from, to).map(drop))
    });
}

fn copy_tree(from: &Path, to: &Path, copy: &dyn Fn(&Path, &Path) -> std::io::Result<()>) {
    fs::create_dir_all(to).unwrap();
    fs::set_permissions(to, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target, copy);
            continue;
        }
        // Worlds that shared a lock would wait for each other.
        if entry.file_name() != "lock" {
            copy(&entry.path(), &target).unwrap();
        }
    }
}

#[track_caller]
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

/// Runs a shell line that must succeed, and returns its output.
#[track_caller]
pub fn say(world: &World, sandbox: &str, line: &str) -> String {
    let answer = world.sh(sandbox, line);
    assert_eq!(answer.code, 0, "{line}: {answer:?}");
    answer.out().trim_end().to_owned()
}

#[track_caller]
pub fn entries(dir: &Path) -> BTreeSet<PathBuf> {
    fs::read_dir(dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .collect()
}

/// The directory of a sandbox in the store.
pub fn dir_of(world: &World, sandbox: &str) -> PathBuf {
    world
        .home()
        .join("sandboxes")
        .join(text(&world.inspect(sandbox)["id"]))
}
