//! Users and groups from the files in `/etc`. The C library's look-ups load code at run time, which
//! a static program in a bare guest does not have.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;
use sandtree_proto::Failure;

use crate::failure::refusal;
use crate::open::open_without_waiting;

/// More than any real list of users has.
const FILE_MAX: u64 = 4 << 20;

/// The user that a command runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub name: String,
    pub home: String,
    pub shell: String,
}

/// The two files, as text. A guest may lack them.
#[derive(Debug, Default)]
pub struct Database {
    passwd: String,
    group: String,
}

/// The beginning of a regular file. The agent's loop reads it, and a guest may put a pipe or an
/// endless device in its place.
fn text(path: &Path) -> io::Result<String> {
    let file = open_without_waiting(path, OFlags::empty())?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut bytes = Vec::new();
    file.take(FILE_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Database {
    pub fn read() -> Self {
        Self {
            passwd: text(Path::new("/etc/passwd")).unwrap_or_default(),
            group: text(Path::new("/etc/group")).unwrap_or_default(),
        }
    }

    /// Finds `name`, `uid`, `name:group` or `uid:gid`; the empty string is root.
    pub fn find(&self, spec: &str) -> Result<Account, Failure> {
        let (user, group) = match spec.split_once(':') {
            Some((user, group)) => (user, Some(group)),
            None => (spec, None),
        };
        let mut account = self.user(if user.is_empty() { "0" } else { user })?;
        account.groups = self.memberships(&account);
        if let Some(group) = group {
            account.gid = self.group(group)?;
            account.groups = vec![account.gid];
        }
        Ok(account)
    }

    fn user(&self, wanted: &str) -> Result<Account, Failure> {
        let accounts = || self.passwd.lines().filter_map(account);
        if let Some(found) = accounts().find(|account| account.name == wanted) {
            return Ok(found);
        }
        let Ok(uid) = wanted.parse::<u32>() else {
            return Err(refusal(
                Errno::INVAL,
                format!("no user {wanted} in the guest"),
            ));
        };
        Ok(accounts()
            .find(|account| account.uid == uid)
            .unwrap_or_else(|| nameless(uid)))
    }

    fn group(&self, wanted: &str) -> Result<u32, Failure> {
        let named = self
            .group
            .lines()
            .filter_map(group)
            .find(|group| group.name == wanted)
            .map(|group| group.gid);
        let unknown = || refusal(Errno::INVAL, format!("no group {wanted} in the guest"));
        named.or_else(|| wanted.parse().ok()).ok_or_else(unknown)
    }

    fn memberships(&self, account: &Account) -> Vec<u32> {
        let groups = self.group.lines().filter_map(group);
        let joined = groups.filter(|group| {
            group
                .members
                .split(',')
                .any(|member| member == account.name)
        });
        let mut all: Vec<u32> = std::iter::once(account.gid)
            .chain(joined.map(|group| group.gid))
            .collect();
        let mut seen = BTreeSet::new();
        all.retain(|gid| seen.insert(*gid));
        all
    }
}

fn account(line: &str) -> Option<Account> {
    let fields: Vec<&str> = line.split(':').collect();
    let [name, _, uid, gid, _, home, shell] = fields[..] else {
        return None;
    };
    Some(Account {
        uid: uid.parse().ok()?,
        gid: gid.parse().ok()?,
        groups: Vec::new(),
        name: name.to_owned(),
        home: if home.is_empty() {
            "/".to_owned()
        } else {
            home.to_owned()
        },
        shell: if shell.is_empty() {
            "/bin/sh".to_owned()
        } else {
            shell.to_owned()
        },
    })
}

/// A number without an entry: in root's group, with the root directory as its home, as in container
/// runtimes.
fn nameless(uid: u32) -> Account {
    let name = if uid == 0 {
        "root".to_owned()
    } else {
        uid.to_string()
    };
    Account {
        uid,
        gid: 0,
        groups: Vec::new(),
        name,
        home: "/".to_owned(),
        shell: "/bin/sh".to_owned(),
    }
}

struct Group<'a> {
    name: &'a str,
    gid: u32,
    members: &'a str,
}

fn group(line: &str) -> Option<Group<'_>> {
    let mut fields = line.split(':');
    let name = fields.next()?;
    let _password = fields.next()?;
    let gid = fields.next()?;
    Some(Group {
        name,
        gid: gid.parse().ok()?,
        members: fields.next().unwrap_or(""),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database() -> Database {
        Database {
            passwd: "root:x:0:0:root:/root:/bin/ash\nann:x:1000:100::/home/ann:\nbroken\n".into(),
            group: "root:x:0:\nusers:x:100:\nwheel:x:10:bob,ann\n".into(),
        }
    }

    #[test]
    fn only_the_beginning_of_a_regular_file_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert!(text(&pipe).is_err());
        assert!(text(Path::new("/dev/zero")).is_err());
        let long = dir.path().join("long");
        std::fs::write(&long, vec![b'a'; FILE_MAX as usize + 5]).unwrap();
        assert_eq!(text(&long).unwrap().len(), FILE_MAX as usize);
    }

    #[test]
    fn users_by_name_and_number() {
        let ann = database().find("ann").unwrap();
        assert_eq!(
            (ann.uid, ann.gid, ann.groups.as_slice()),
            (1000, 100, [100, 10].as_slice())
        );
        assert_eq!(ann.shell, "/bin/sh");
        assert_eq!(database().find("1000").unwrap(), ann);
        assert_eq!(database().find("").unwrap().home, "/root");
        let nobody = database().find("7").unwrap();
        assert_eq!(
            (nobody.home.as_str(), nobody.gid, nobody.groups),
            ("/", 0, vec![0])
        );
    }

    #[test]
    fn a_group_given_by_hand_replaces_the_memberships() {
        let ann = database().find("ann:wheel").unwrap();
        assert_eq!((ann.gid, ann.groups), (10, vec![10]));
        assert_eq!(database().find(":5").unwrap().gid, 5);
    }

    #[test]
    fn each_membership_counts_once() {
        let database = Database {
            passwd: "user:x:1000:1000:,,,:/home/user:/bin/bash\n".into(),
            group: "adm:x:4:user\nsudo:x:27:user,user\nuser:x:1000:user\nadm2:x:4:user\nusers:x:100:username\n".into(),
        };
        assert_eq!(database.find("user").unwrap().groups, [1000, 4, 27]);
    }

    #[test]
    fn a_guest_without_users_has_numbers() {
        let root = Database::default().find("").unwrap();
        assert_eq!(
            (root.uid, root.gid, root.name.as_str(), root.home.as_str()),
            (0, 0, "root", "/")
        );
        assert_eq!(Database::default().find("5:6").unwrap().gid, 6);
        let homeless = Database {
            passwd: "x:x:9:9:::\n".into(),
            group: String::new(),
        };
        assert_eq!(homeless.find("x").unwrap().home, "/");
    }

    #[test]
    fn an_unknown_user_or_group_is_named() {
        assert_eq!(
            database().find("zoe").unwrap_err().message,
            "no user zoe in the guest"
        );
        assert_eq!(
            database().find("ann:zoo").unwrap_err().message,
            "no group zoo in the guest"
        );
    }
}
