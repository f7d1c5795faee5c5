//! A host inside the test's own process, in which a test can hold a verb at any of its steps and
//! look at it from outside.
//!
//! Always: a test reads a machine's memory by other means than the product's: through
//! `/proc/PID/mem`, at the address that `/proc/PID/maps` gives.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use sandtree::keeper::KeeperProgram;
use sandtree::{
    ExecSpec, Fault, Faults, FileOwner, Host, HostConfig, Lifetime, RunIn, Sandbox, SandboxSpec,
    Step,
};

use serde_json::Value;

use super::{DEADLINE, World, eventually, processes_of, program};

pub const PAGE: usize = 4096;

/// A store, and a host that has opened it.
pub struct Lab {
    // Dropped before the world: its machines must end before the store is removed.
    pub host: Host,
    pub world: World,
    holds: tempfile::TempDir,
}

/// A step at which a verb waits. Dropping it releases the verb, so that a failing test does not
/// leave it waiting.
pub struct Hold {
    dir: PathBuf,
}

impl Hold {
    pub fn is_reached(&self) -> bool {
        self.dir.join("reached").exists()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        fs::write(self.dir.join("go"), "").expect("the hold can be let go");
    }
}

pub fn config(home: &Path) -> HostConfig {
    let path = std::env::var_os("PATH").expect("there is a PATH");
    HostConfig::new(home, std::env::split_paths(&path).collect())
}

/// Sandboxes of such a host run in keepers of the `sandtree` under test.
pub fn in_keepers() -> RunIn {
    RunIn::Keeper(KeeperProgram {
        path: program().to_owned(),
        args: vec!["keeper".into()],
    })
}

impl Lab {
    pub async fn open() -> Lab {
        Lab::of(World::new()).await
    }

    pub async fn of(world: World) -> Lab {
        let config = config(world.home());
        Lab::configured(world, config).await
    }

    pub async fn configured(world: World, config: HostConfig) -> Lab {
        let host = Host::open(config).await.expect("the store opens");
        Lab {
            world,
            host,
            holds: tempfile::tempdir().expect("a temporary directory can be made"),
        }
    }

    /// Injects a fault at a step, from now on.
    pub fn fault(&self, step: Step, fault: Fault) {
        self.host.set_faults(Faults {
            fault: Some((step, fault)),
            ..Faults::default()
        });
    }

    pub fn no_fault(&self) {
        self.host.set_faults(Faults::default());
    }

    /// From now on, each verb waits at this step until the result is dropped.
    pub fn hold(&self, step: Step) -> Hold {
        let dir = tempfile::Builder::new()
            .tempdir_in(self.holds.path())
            .expect("a directory can be made")
            .keep();
        let faults = Faults {
            fault: Some((step, Fault::Hold)),
            hold: Some(dir.clone()),
            ..Faults::default()
        };
        self.host.set_faults(faults);
        Hold { dir }
    }

    /// Runs a verb, and `look` while the verb waits at a step.
    pub async fn held<T, L>(
        &self,
        step: Step,
        verb: impl Future<Output = T>,
        look: impl FnOnce() -> L,
    ) -> (T, L) {
        let hold = self.hold(step);
        let looked = async {
            reached(&hold, step).await;
            // Only this verb waits there: the next ones pass.
            self.no_fault();
            let looked = tokio::task::block_in_place(look);
            drop(hold);
            looked
        };
        tokio::join!(verb, looked)
    }

    /// As `held`, at one step and then at another.
    pub async fn held_twice<T, L>(
        &self,
        steps: [Step; 2],
        verb: impl Future<Output = T>,
        mut look: impl FnMut(Step) -> L,
    ) -> (T, [L; 2]) {
        let first = self.hold(steps[0]);
        let looked = async {
            reached(&first, steps[0]).await;
            let seen = tokio::task::block_in_place(|| look(steps[0]));
            let second = self.hold(steps[1]);
            drop(first);
            reached(&second, steps[1]).await;
            self.no_fault();
            let seen = [seen, tokio::task::block_in_place(|| look(steps[1]))];
            drop(second);
            seen
        };
        tokio::join!(verb, looked)
    }

    /// The manifest of a state.
    pub fn manifest(&self, sandbox: &Sandbox, state: &str) -> Value {
        self.json(sandbox, &format!("states/{state}/manifest.json"))
    }

    pub fn head(&self, sandbox: &Sandbox) -> Value {
        self.json(sandbox, "head.json")
    }

    fn json(&self, sandbox: &Sandbox, file: &str) -> Value {
        let path = self.dir(sandbox).join(file);
        let text = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_slice(&text).expect("a record is JSON")
    }

    pub fn dir(&self, sandbox: &Sandbox) -> PathBuf {
        self.world.home().join("sandboxes").join(sandbox.id())
    }

    /// The machines of a sandbox, found by their open files.
    pub fn machines(&self, sandbox: &Sandbox) -> BTreeSet<u32> {
        machines_of(&self.dir(sandbox))
    }

    pub fn machine(&self, sandbox: &Sandbox) -> u32 {
        let machines = self.machines(sandbox);
        assert_eq!(machines.len(), 1, "one machine of {}", sandbox.name());
        *machines.first().expect("there is one")
    }

    /// Every machine of the store's sandboxes. A QEMU that waits for a revert is none yet: it has
    /// no disk that it writes to.
    pub fn all_machines(&self) -> BTreeSet<u32> {
        machines_of(&self.world.home().join("sandboxes"))
    }

    /// The one machine of the store that is not in `known`.
    pub fn new_machine(&self, known: &BTreeSet<u32>) -> u32 {
        let new: Vec<u32> = self.all_machines().difference(known).copied().collect();
        assert_eq!(new.len(), 1, "one new machine");
        new[0]
    }
}

/// Every QEMU of a store that waits for a revert: it has a kernel, and no disk of a sandbox that it
/// writes to.
pub fn spares_of(home: &Path) -> BTreeSet<u32> {
    let machines = machines_of(&home.join("sandboxes"));
    qemus_of(home).difference(&machines).copied().collect()
}

/// The QEMUs that can write to a file below a directory.
fn machines_of(dir: &Path) -> BTreeSet<u32> {
    let mut machines = qemus_of(dir);
    machines.retain(|pid| !written_by(*pid, dir).is_empty());
    machines
}

/// The files below a directory that a process has open for writing.
pub fn written_by(pid: u32, dir: &Path) -> BTreeSet<PathBuf> {
    let opened = opened_by(pid, dir).into_iter();
    let written = opened.filter(|(_, access)| *access != 0);
    written.map(|(path, _)| path).collect()
}

/// The files below a directory that a process has open, each with how.
pub fn opened_by(pid: u32, dir: &Path) -> Vec<(PathBuf, u32)> {
    let fds = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten();
    let opened = fds.flatten().filter_map(|fd| {
        let target = fs::read_link(fd.path()).ok()?;
        let number = fd.file_name().into_string().ok()?;
        let shown = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
        let flags = shown.lines().find_map(|line| line.strip_prefix("flags:"))?;
        let flags = u32::from_str_radix(flags.trim(), 8).ok()?;
        // O_ACCMODE: 0 reads only.
        target.starts_with(dir).then_some((target, flags & 3))
    });
    opened.collect()
}

/// Until it executes QEMU, a child of this process still has the open files of all tests.
fn qemus_of(dir: &Path) -> BTreeSet<u32> {
    let comm = |pid: u32| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    processes_of(dir)
        .into_iter()
        .filter(|pid| comm(*pid).starts_with("qemu-system"))
        .collect()
}

async fn reached(hold: &Hold, step: Step) {
    let mut looks = tokio::time::interval(Duration::from_millis(1));
    let came = tokio::time::timeout(DEADLINE, async {
        while !hold.is_reached() {
            looks.tick().await;
        }
    });
    came.await
        .unwrap_or_else(|_| panic!("{step} is never come to"));
}

pub fn spec(name: &str) -> SandboxSpec {
    SandboxSpec {
        name: Some(name.into()),
        ..SandboxSpec::new("tiny")
    }
}

/// Runs a shell line that must succeed, and returns its output.
pub async fn sh(sandbox: &Sandbox, line: &str) -> String {
    let started = sandbox
        .exec(ExecSpec {
            timeout: Some(DEADLINE),
            ..ExecSpec::shell(line)
        })
        .await;
    let said = started
        .unwrap_or_else(|e| panic!("{line}: {e:?}"))
        .output(1 << 20)
        .await
        .expect("it answers");
    assert!(said.status.success(), "{line}: {said:?}");
    String::from_utf8(said.stdout)
        .expect("it prints text")
        .trim()
        .to_owned()
}

/// Starts a command that runs in the background.
pub async fn start(sandbox: &Sandbox, line: &str) {
    let spec = ExecSpec {
        lifetime: Lifetime::Detached,
        ..ExecSpec::shell(line)
    };
    drop(sandbox.exec(spec).await.expect("it starts"));
}

/// Copies the tests' own program into a guest, as `/dev/shm/worker`.
pub async fn give_worker(sandbox: &Sandbox) {
    let bytes = fs::read(worker()).expect("the program is built");
    let owner = FileOwner {
        mode: 0o755,
        ..FileOwner::default()
    };
    let files = sandbox.files().await.expect("the guest is there");
    files
        .write("/dev/shm/worker", &mut bytes.as_slice(), owner)
        .await
        .expect("the guest takes it");
}

/// Names the guests' program if it is built already: a guest that runs these tests has no compiler.
pub const WORKER: &str = "SANDTREE_TEST_WORKER";

/// The program of `tests/vm/guest/worker.rs`, built once; it runs in any guest.
pub fn worker() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(built) = std::env::var_os(WORKER) {
            return built.into();
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vm/guest/worker.rs");
        let built =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("worker-{}", std::process::id()));
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        // starts: rustc
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
        rustc.args([
            "--edition",
            "2024",
            "-O",
            "-C",
            "target-feature=+crt-static",
            "-C",
            "strip=symbols",
            "--target",
        ]);
        let status = rustc.arg(target).arg("-o").arg(&built).arg(source).status();
        assert!(
            status.expect("rustc runs").success(),
            "the guests' program cannot be built"
        );
        fs::set_permissions(&built, fs::Permissions::from_mode(0o755)).expect("it is ours");
        built
    })
}

/// All of a guest's memory. Equal pages of two guests are stored once.
pub struct Ram {
    /// `None`: zeros.
    pages: Vec<Option<Arc<[u8]>>>,
}

/// How memory is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Every page is read; the kernel then maps zero pages for untouched ones.
    Whole,
    /// Untouched pages of anonymous memory are not read; they are zeros.
    Untouching,
}

/// A part of a process's memory.
#[derive(Debug, Clone, Copy)]
struct Part {
    start: u64,
    end: u64,
    is_anonymous: bool,
}

impl Ram {
    /// Reads the memory of a stopped machine.
    pub fn read(pid: u32, bytes: u64, look: Look, like: Option<&Ram>) -> Ram {
        let parts = ram_parts(pid, bytes);
        let memory = open(pid, "mem");
        let pagemap = open(pid, "pagemap");
        let mut pages = Vec::with_capacity(bytes as usize / PAGE);
        for part in parts {
            let touched = match (look, part.is_anonymous) {
                (Look::Untouching, true) => touched(&pagemap, part),
                _ => vec![true; ((part.end - part.start) as usize) / PAGE],
            };
            read_part(&memory, part, &touched, like, &mut pages);
        }
        assert_eq!(pages.len() * PAGE, bytes as usize);
        Ram { pages }
    }

    /// The offsets of different bytes, at most a thousand.
    pub fn differences(&self, other: &Ram) -> Vec<usize> {
        assert_eq!(self.pages.len(), other.pages.len());
        let mut found = Vec::new();
        for (index, (a, b)) in self.pages.iter().zip(&other.pages).enumerate() {
            if !same(a.as_ref(), b.as_ref()) {
                let a = bytes_of(a.as_ref());
                let b = bytes_of(b.as_ref());
                let differing = (0..PAGE).filter(|at| a[*at] != b[*at]);
                found.extend(
                    differing
                        .map(|at| index * PAGE + at)
                        .take(1000_usize.saturating_sub(found.len())),
                );
            }
        }
        found
    }

    /// How many pages differ.
    pub fn changed_pages(&self, other: &Ram) -> usize {
        self.pages
            .iter()
            .zip(&other.pages)
            .filter(|(a, b)| !same(a.as_ref(), b.as_ref()))
            .count()
    }
}

fn same(a: Option<&Arc<[u8]>>, b: Option<&Arc<[u8]>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b) || a == b,
        _ => false,
    }
}

fn bytes_of(page: Option<&Arc<[u8]>>) -> Vec<u8> {
    page.map_or_else(|| vec![0; PAGE], |page| page.to_vec())
}

fn open(pid: u32, name: &str) -> fs::File {
    fs::File::open(format!("/proc/{pid}/{name}")).unwrap_or_else(|e| panic!("{name} of {pid}: {e}"))
}

fn read_part(
    memory: &fs::File,
    part: Part,
    touched: &[bool],
    like: Option<&Ram>,
    pages: &mut Vec<Option<Arc<[u8]>>>,
) {
    const PIECE_PAGES: usize = 256;
    let mut buffer = vec![0; PIECE_PAGES * PAGE];
    for (piece, touched) in touched.chunks(PIECE_PAGES).enumerate() {
        let at = part.start + (piece * PIECE_PAGES * PAGE) as u64;
        if touched.iter().all(|touched| !touched) {
            pages.extend(touched.iter().map(|_| None));
            continue;
        }
        read_touched(memory, at, touched, &mut buffer);
        for page in buffer[..touched.len() * PAGE].chunks_exact(PAGE) {
            pages.push(shared(
                page,
                like.and_then(|like| like.pages[pages.len()].as_ref()),
            ));
        }
    }
}

/// Fills a buffer with the touched pages, adjacent ones in one read, and zeros between them.
fn read_touched(memory: &fs::File, start: u64, touched: &[bool], buffer: &mut [u8]) {
    let mut first = 0;
    for run in touched.chunk_by(|a, b| a == b) {
        let bytes = &mut buffer[first * PAGE..(first + run.len()) * PAGE];
        if run[0] {
            memory
                .read_exact_at(bytes, start + (first * PAGE) as u64)
                .expect("guest memory is read");
        } else {
            bytes.fill(0);
        }
        first += run.len();
    }
}

fn shared(page: &[u8], like: Option<&Arc<[u8]>>) -> Option<Arc<[u8]>> {
    const ZEROS: [u8; PAGE] = [0; PAGE];
    match like {
        _ if page == ZEROS => None,
        Some(like) if **like == *page => Some(like.clone()),
        _ => Some(page.into()),
    }
}

/// For each page of anonymous memory, whether it was touched.
fn touched(pagemap: &fs::File, part: Part) -> Vec<bool> {
    let mut entries = vec![0; (part.end - part.start) as usize / PAGE * 8];
    pagemap
        .read_exact_at(&mut entries, part.start / PAGE as u64 * 8)
        .expect("the page map is read");
    entries
        .chunks_exact(8)
        .map(|entry| entry != [0; 8])
        .collect()
}

/// The parts of a process's memory that are the guest's: adjacent, writable, and together as large
/// as its memory.
fn ram_parts(pid: u32, bytes: u64) -> Vec<Part> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("the machine lives");
    let parts: Vec<Part> = maps.lines().filter_map(writable_part).collect();
    let mut found: Vec<_> = (0..parts.len())
        .filter_map(|first| neighbours(&parts[first..], bytes))
        .collect();
    assert_eq!(
        found.len(),
        1,
        "one mapping of {bytes} bytes in {pid}:\n{maps}"
    );
    found.remove(0)
}

fn writable_part(line: &str) -> Option<Part> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (start, end) = fields[0].split_once('-').expect("a range");
    let number = |text| u64::from_str_radix(text, 16).expect("an address");
    let part = Part {
        start: number(start),
        end: number(end),
        is_anonymous: fields[4] == "0",
    };
    fields[1].starts_with("rw").then_some(part)
}

/// The first parts, if they have exactly this size up to the next gap: QEMU leaves a gap behind
/// RAM.
fn neighbours(parts: &[Part], bytes: u64) -> Option<Vec<Part>> {
    let count = 1 + parts
        .windows(2)
        .take_while(|pair| pair[0].end == pair[1].start)
        .count();
    (parts[count - 1].end - parts[0].start == bytes).then(|| parts[..count].to_vec())
}

/// Waits until a condition holds, on the test's own thread.
pub async fn until_async(what: &str, mut condition: impl FnMut() -> bool) {
    let came = tokio::task::block_in_place(|| eventually(DEADLINE, || condition().then_some(())));
    assert!(came.is_some(), "never: {what}");
}
