//! What steps of a template do in the guest, as scripts for any POSIX shell.

/// Where the files of a COPY step are until the step has moved them.
pub(super) const COPIED: &str = "/.sandtree-copy";

/// A word for a shell, whatever is in it.
pub(super) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Runs a command as E2B does: in a login shell, bash if there is one, and at home unless there is
/// another directory for it.
pub(super) fn run(command: &str, workdir: Option<&str>) -> String {
    let command = quoted(command);
    let home = if workdir.is_none() {
        "cd 2>/dev/null || cd /\n"
    } else {
        ""
    };
    format!(
        "{home}[ ! -x /bin/bash ] || exec /bin/bash -l -c {command}\nexec /bin/sh -l -c {command}"
    )
}

/// Makes sure that there is a user of this name, with a home. An image without users gets root as
/// well.
pub(super) fn add_user(name: &str) -> String {
    format!("name={}\n{ADD_USER}", quoted(name))
}

const ADD_USER: &str = r#"set -e
[ -s /etc/passwd ] || echo 'root:x:0:0:root:/root:/bin/sh' >/etc/passwd
[ -s /etc/group ] || echo 'root:x:0:' >/etc/group
if grep -q "^$name:" /etc/passwd; then exit 0; fi
id=1000
while cut -d: -f3 /etc/passwd /etc/group | grep -qx "$id"; do id=$((id + 1)); done
shell=/bin/sh
[ ! -x /bin/bash ] || shell=/bin/bash
grep -q "^$name:" /etc/group || echo "$name:x:$id:" >>/etc/group
group=$(grep "^$name:" /etc/group | cut -d: -f3)
echo "$name:x:$id:$group::/home/$name:$shell" >>/etc/passwd
mkdir -p "/home/$name"
chown "$id:$group" "/home/$name"
if [ -d /etc/sudoers.d ]; then echo "$name ALL=(ALL:ALL) NOPASSWD: ALL" >"/etc/sudoers.d/$name"; fi"#;

/// Makes a directory that belongs to a user, unless it exists.
pub(super) fn make_dir(path: &str, user: &str) -> String {
    let path = quoted(path);
    let user = quoted(user);
    format!("[ -d {path} ] || {{ mkdir -p {path} && chown {user} {path}; }}")
}

/// What a COPY step moves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copy<'a> {
    /// The directory that the pattern is below, in the archive; empty for its root.
    pub below: &'a str,
    /// The file or directory in it; empty if the pattern may match several.
    pub name: &'a str,
    pub target: &'a str,
    pub owner: &'a str,
    /// Octal; empty to keep the modes.
    pub mode: &'a str,
}

pub(super) fn copy(what: Copy<'_>) -> String {
    format!(
        "below={}\nname={}\ntarget={}\nowner={}\nmode={}\nfrom={COPIED}\n{COPY}",
        quoted(what.below),
        quoted(what.name),
        quoted(what.target),
        quoted(what.owner),
        quoted(what.mode),
    )
}

/// The content of a directory is copied into the target; a file becomes the target, or goes into
/// it if it is a directory.
const COPY: &str = r#"set -e
trap 'rm -rf "$from"' EXIT
chown -hR "$owner" "$from"
source=$from/$below
if [ -n "$name" ] && { [ -L "$source/$name" ] || [ ! -d "$source/$name" ]; }; then
    if [ ! -e "$source/$name" ] && [ ! -L "$source/$name" ]; then
        echo "$below/$name is not in the uploaded archive" >&2
        exit 1
    fi
    [ -z "$mode" ] || [ -L "$source/$name" ] || chmod "$mode" "$source/$name"
    case $target in */) mkdir -p "$target" ;; *) mkdir -p "$(dirname "$target")" ;; esac
    if [ -d "$target" ]; then target=${target%/}/$name; fi
    rm -f "$target"
    mv "$source/$name" "$target"
    exit 0
fi
source=$source/$name
[ -z "$mode" ] || chmod -R "$mode" "$source"
if [ ! -d "$target" ]; then
    mkdir -p "$target"
    chown "$owner" "$target"
fi
cp -a "$source/." "$target/""#;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_word_is_one_word_to_a_shell() {
        for word in ["plain", "it's", "$(exit 1) `x` \"\n", "", "-n"] {
            let script = format!("printf %s {}", quoted(word));
            // starts: sh
            let said = Command::new("sh").arg("-c").arg(script).output().unwrap();
            assert_eq!(String::from_utf8(said.stdout).unwrap(), word);
        }
    }

    #[test]
    fn a_command_keeps_its_own_quotes_and_status() {
        let script = run("echo \"it's\"; exit 3", None);
        // starts: sh
        let said = Command::new("sh").arg("-c").arg(script).output().unwrap();
        assert_eq!(said.stdout, b"it's\n");
        assert_eq!(said.status.code(), Some(3));
    }

    /// Runs a COPY step of an archive with `app/main`, `app/lib/x` and `link`, in a directory.
    fn copied(dir: &Path, what: Copy<'_>) -> bool {
        let from = dir.join("from");
        fs::create_dir_all(from.join("app/lib")).unwrap();
        fs::write(from.join("app/main"), "main").unwrap();
        fs::write(from.join("app/lib/x"), "x").unwrap();
        let mut script = copy(Copy {
            target: &format!("{}/{}", dir.display(), what.target),
            owner: &own_user(),
            ..what
        });
        script = script.replace(COPIED, &from.display().to_string());
        // starts: sh
        let done = Command::new("sh").arg("-c").arg(script).status().unwrap();
        assert!(!from.exists());
        done.success()
    }

    fn own_user() -> String {
        // starts: id
        let said = Command::new("id").arg("-u").output().unwrap();
        String::from_utf8(said.stdout).unwrap().trim().to_owned()
    }

    const FILE: Copy<'_> = Copy {
        below: "app",
        name: "main",
        target: "",
        owner: "",
        mode: "",
    };

    #[test]
    fn a_file_becomes_the_target_or_goes_into_it() {
        let dir = tempfile::tempdir().unwrap();
        let to = |target| Copy { target, ..FILE };
        assert!(copied(dir.path(), to("a/exact")));
        assert!(copied(dir.path(), to("into/")));
        assert!(copied(dir.path(), to("into")));
        let text = |path: &str| fs::read_to_string(dir.path().join(path)).unwrap();
        assert_eq!(
            (text("a/exact"), text("into/main")),
            ("main".into(), "main".into())
        );
        let missing = Copy {
            name: "other",
            ..to("b")
        };
        assert!(!copied(dir.path(), missing));
    }

    #[test]
    fn the_content_of_a_directory_goes_into_the_target() {
        let dir = tempfile::tempdir().unwrap();
        let whole = Copy {
            below: "",
            name: "app",
            target: "srv",
            mode: "0750",
            ..FILE
        };
        assert!(copied(dir.path(), whole));
        let mode = |path: &str| {
            let found = fs::metadata(dir.path().join(path)).unwrap();
            found.permissions().mode() & 0o777
        };
        assert_eq!((mode("srv/main"), mode("srv/lib/x")), (0o750, 0o750));
        let several = Copy {
            below: "app",
            name: "",
            target: "srv",
            ..FILE
        };
        assert!(copied(dir.path(), several));
        assert_ne!(mode("srv/main"), 0o750);
    }
}
