//! Programs that ask more of a file system than most: git, SQLite, a C compiler, pip.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::Mounted;
use crate::support::World;

/// Programs that need locks, mappings, renames and hard links to work as they should.
#[test]
fn git_and_sqlite_work_on_a_mount() {
    let world = World::debian();
    let dir = tempfile::tempdir().unwrap();
    let mount = format!("{}:/work", dir.path().display());
    world.ok(["run", "-d", "--name", "d", "--mount", &mount, "debian"]);
    let git = "set -e; cd /work; export HOME=/root
        git config --global user.email a@b; git config --global user.name a
        git init -q r; cd r; for i in $(seq 20); do echo $i > f$i; done; chmod +x f1; ln -s f1 l
        git add -A; git commit -qm one; git status --porcelain
        git checkout -q -b b; echo 2 >> f2; git commit -qam two; git checkout -q -; git merge -q b
        git gc -q; git fsck --no-progress; git clone -q . ../clone
        cd ../clone; git status --porcelain";
    let said = world.sh("d", git);
    assert_eq!((said.code, said.out()), (0, ""), "{said:#?}");
    // The host agrees with the guest about its repository.
    let status = Command::new("git")
        .args(["-c", "safe.directory=*", "-C"])
        .arg(dir.path().join("clone"))
        .args(["status", "--porcelain"])
        .output();
    assert_eq!(status.expect("git runs").stdout, b"");
    let one = "import sqlite3; c = sqlite3.connect('/work/db', timeout=60)\n\
        for i in range(20): c.execute('insert into t values(?)', (i,)); c.commit()";
    let two = format!(
        "import sqlite3, subprocess, sys\n\
         c = sqlite3.connect('/work/db', timeout=60)\n\
         assert c.execute('pragma journal_mode=wal').fetchone() == ('wal',)\n\
         c.execute('create table t(a)'); c.commit()\n\
         two = [subprocess.Popen([sys.executable, '-c', {one:?}]) for _ in range(2)]\n\
         assert [p.wait() for p in two] == [0, 0]\n\
         print(c.execute('select count(*) from t').fetchone())\n\
         print(c.execute('pragma integrity_check').fetchone())"
    );
    let said = world.run(["exec", "d", "--", "python3", "-c", &two]);
    assert_eq!(said.out().trim(), "(40,)\n('ok',)", "{said:#?}");
    installs_a_package(&world, dir.path());
    makes_a_file_without_a_name(&world, dir.path());
}

/// `pip` installs into a directory and into an environment on the mount, without a network.
fn installs_a_package(world: &World, dir: &Path) {
    let wheel = "import zipfile\n\
        name = 'tiny_thing-1.0'\n\
        z = zipfile.ZipFile(f'/work/{name}-py3-none-any.whl', 'w')\n\
        z.writestr('tiny_thing/__init__.py', 'answer = 42\\n')\n\
        z.writestr(f'{name}.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: tiny-thing\\nVersion: 1.0\\n')\n\
        z.writestr(f'{name}.dist-info/WHEEL', 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n\
        z.writestr(f'{name}.dist-info/RECORD', '')\n\
        z.close()";
    let made = world.run(["exec", "d", "--", "python3", "-c", wheel]);
    assert_eq!(made.code, 0, "{made:#?}");
    let install = "set -e; cd /work; python3 -m venv --without-pip venv
        pip=\"pip install -q --no-index --no-deps --no-cache-dir --disable-pip-version-check\"
        $pip --target site tiny_thing-1.0-py3-none-any.whl
        $pip --target venv/lib/python3*/site-packages tiny_thing-1.0-py3-none-any.whl
        PYTHONPATH=site python3 -c 'import tiny_thing; print(tiny_thing.answer)'
        venv/bin/python -c 'import tiny_thing; print(tiny_thing.__file__)'";
    let said = world.sh("d", install);
    assert_eq!(said.code, 0, "{said:#?}");
    let out = said.out();
    assert!(out.starts_with("42\n/work/venv/lib/"), "{said:#?}");
    assert!(dir.join("site/tiny_thing/__init__.py").exists());
}

fn makes_a_file_without_a_name(world: &World, dir: &Path) {
    let program = "import os\n\
        f = os.open('/work', os.O_TMPFILE | os.O_RDWR, 0o640)\n\
        assert os.fstat(f).st_nlink == 0\n\
        os.write(f, b'without a name'); os.fsync(f)\n\
        assert os.pread(f, 99, 8) == b'a name'\n\
        before = sorted(os.listdir('/work'))\n\
        root = os.open('/', os.O_RDONLY)\n\
        os.link(f'/proc/self/fd/{f}', '/work/named', src_dir_fd=root, follow_symlinks=True)\n\
        assert sorted(os.listdir('/work')) == sorted(before + ['named'])\n\
        os.write(f, b', and then'); os.close(f)\n\
        print(open('/work/named').read())";
    let said = world.run(["exec", "d", "--", "python3", "-c", program]);
    assert_eq!(said.out(), "without a name, and then\n", "{said:#?}");
    let named = fs::read_to_string(dir.join("named")).unwrap();
    assert_eq!(named, "without a name, and then");
}

/// The host's own compiler, on a read-only mount, builds on a shared one. It runs in a chroot of
/// both, because the guest's image has none.
#[test]
fn a_c_build_works_on_a_mount() {
    let tools = ["gcc", "make", "ld"].map(|tool| Path::new("/usr/bin").join(tool));
    if !tools.iter().all(|tool| tool.exists()) || !Path::new("/lib").is_symlink() {
        println!("not checked: this host has no compiler in /usr");
        return;
    }
    let m = Mounted::new();
    m.write("number.h", "#define NUMBER 1\n");
    m.write(
        "number.c",
        "#include \"number.h\"\nint number(void) { return NUMBER; }\n",
    );
    m.write("fixed.c", "int fixed(void) { return 40; }\n");
    m.write(
        "main.c",
        "#include <stdio.h>\nint number(void); int fixed(void);\n\
         int main(void) { printf(\"%d\\n\", number() + fixed()); return 0; }\n",
    );
    m.write(
        "Makefile",
        "program: main.o number.o fixed.o\n\tgcc -o $@ $^\nnumber.o: number.h\n\
         %.o: %.c\n\tgcc -O1 -c -o $@ $<\n",
    );
    let work = m.option("/host/work", "");
    let options = ["--memory", "512M", "--mount", "/usr:/host/usr:ro"];
    let options = [&options[..], &["--mount", &work]].concat();
    m.world.start("a", &options);
    m.say(
        "a",
        "cd /host; ln -s usr/lib usr/lib64 usr/bin .; mkdir -p tmp dev; touch dev/null",
    );
    let build = "chroot /host sh -c 'cd /work && make' && chroot /host /work/program";
    let first = m.say("a", build);
    assert!(first.ends_with("\n41"), "{first}");
    // make trusts the times of files: of what it made, and of what the host changes.
    m.write("number.h", "#define NUMBER 2\n");
    let second = m.say("a", build);
    assert!(second.ends_with("\n42"), "{second}");
    assert!(
        second.contains("number.o") && !second.contains("-c -o fixed.o"),
        "{second}"
    );
    // starts: our own program
    let ran = Command::new(m.path("program"))
        .output()
        .expect("it is a program");
    assert_eq!(ran.stdout, b"42\n");
}
