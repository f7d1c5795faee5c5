//! Users of a guest, as its `/etc/passwd` names them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sandtree::Code;

use crate::error::{Fault, Result};
use crate::gateway::Connection;

/// The user of commands and files that name none, if the guest has it.
const DEFAULT: &str = "user";
pub const ROOT: &str = "root";
const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
const PASSWD_MAX: usize = 1 << 20;
const NAMES_MAX: usize = 10_000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: PathBuf,
}

/// All users and groups of a guest.
#[derive(Debug, Clone)]
pub struct Users {
    users: Vec<User>,
    /// By number.
    groups: HashMap<u32, String>,
}

/// The name of a user that the guest finds by itself: the one that a client names, or the default.
/// `None`: it may mean something else to the guest, or the default is not known.
pub fn unseen(connection: &Connection, name: Option<&str>) -> Option<String> {
    let name = match name {
        Some(name) => name,
        None => {
            // A guest that had no such user when it was last looked at may have it now.
            let passwd = connection.texts.last(PASSWD);
            let users = passwd.map(|passwd| Users::parse(&passwd, ""));
            let is_missing = users.is_some_and(|users| !users.has(DEFAULT));
            (!is_missing).then_some(DEFAULT)?
        }
    };
    // For the agent these are numbers and groups.
    let is_plain = !name.is_empty() && !name.contains(':') && name.parse::<u32>().is_err();
    is_plain.then(|| name.to_owned())
}

impl Users {
    pub async fn of(connection: &Connection) -> Result<Self> {
        let (passwd, group) = tokio::try_join!(text(connection, PASSWD), text(connection, GROUP))?;
        Ok(Self::parse(&passwd, &group))
    }

    /// The users alone: groups have numbers instead of names.
    pub async fn without_groups(connection: &Connection) -> Result<Self> {
        let passwd = text(connection, PASSWD).await?;
        Ok(Self::parse(&passwd, ""))
    }

    fn parse(passwd: &str, group: &str) -> Self {
        let user = |line: &str| {
            let mut fields = line.split(':');
            let name = fields.next()?.to_owned();
            let _password = fields.next()?;
            let uid = fields.next()?.parse().ok()?;
            let gid = fields.next()?.parse().ok()?;
            let _comment = fields.next()?;
            let home = PathBuf::from(fields.next()?);
            Some(User {
                name,
                uid,
                gid,
                home,
            })
        };
        let group_of = |line: &str| {
            let mut fields = line.split(':');
            let name = fields.next()?.to_owned();
            let _password = fields.next()?;
            Some((fields.next()?.parse().ok()?, name))
        };
        Self {
            users: passwd.lines().filter_map(user).take(NAMES_MAX).collect(),
            groups: group.lines().filter_map(group_of).take(NAMES_MAX).collect(),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.users.iter().any(|user| user.name == name)
    }

    /// The user that a client names, or the default.
    pub fn find(&self, name: Option<&str>) -> Result<User> {
        let known = |name: &str| self.users.iter().find(|user| user.name == name).cloned();
        match name {
            Some(name) => known(name)
                .or_else(|| (name == ROOT).then(root))
                .ok_or_else(|| Fault::unauthorized(format!("invalid username: '{name}'"))),
            None => Ok(known(DEFAULT).or_else(|| known(ROOT)).unwrap_or_else(root)),
        }
    }

    /// What the agent calls a user. A guest without a list of users has numbers only.
    pub fn name_for_guest(&self, user: &User) -> String {
        if self.has(&user.name) {
            return user.name.clone();
        }
        user.uid.to_string()
    }

    pub fn user_name(&self, uid: u32) -> String {
        let user = self.users.iter().find(|user| user.uid == uid);
        user.map_or_else(|| uid.to_string(), |user| user.name.clone())
    }

    pub fn group_name(&self, gid: u32) -> String {
        let name = self.groups.get(&gid).cloned();
        name.unwrap_or_else(|| gid.to_string())
    }
}

/// The text of a small file. A bare guest does not have these, and a guest may have put anything in
/// their place: root and absolute paths must work nevertheless, so that a client can repair them.
async fn text(connection: &Connection, path: &'static str) -> Result<Arc<str>> {
    let files = connection.guest.files();
    match connection.texts.read(&files, path, PASSWD_MAX).await {
        Ok(text) => Ok(text),
        Err(error) if error.code() == Some(Code::LinkEnded) => Err(error.into()),
        Err(error) => {
            tracing::debug!(%error, "a guest has no list of users");
            Ok(Arc::default())
        }
    }
}

fn root() -> User {
    User {
        name: ROOT.to_owned(),
        uid: 0,
        gid: 0,
        home: PathBuf::from("/root"),
    }
}

impl User {
    /// A path as the user means it: `~` and relative paths begin at the user's home.
    pub fn path(&self, path: &str) -> Result<PathBuf> {
        if path.contains('\0') {
            return Err(Fault::bad_request("a path contains a NUL byte"));
        }
        let from_home = path
            .strip_prefix("~/")
            .or_else(|| (path == "~").then_some(""));
        let path = from_home.unwrap_or(path);
        let whole = self.home.join(path);
        Ok(normal(&whole))
    }
}

/// A path that means the same to every user.
pub fn absolute(path: &str) -> Option<PathBuf> {
    let is_absolute = path.starts_with('/') && !path.contains('\0');
    is_absolute.then(|| normal(Path::new(path)))
}

/// The path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::from("/");
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                // The root is its own parent.
                let _has_parent = normal.pop();
            }
            std::path::Component::Normal(part) => normal.push(part),
            _ => {}
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        Users::parse(
            "root:x:0:0:root:/root:/bin/sh\nbroken\nuser:x:1000:1001:,,,:/home/user:/bin/bash\n",
            "root:x:0:\nstaff:x:1001:user\n",
        )
    }

    #[test]
    fn users_are_found_by_name() {
        let user = users().find(None).unwrap();
        assert_eq!((user.uid, user.gid), (1000, 1001));
        assert_eq!(users().find(Some("root")).unwrap().uid, 0);
        assert!(users().find(Some("other")).is_err());
        assert_eq!(users().user_name(1000), "user");
        assert_eq!(users().user_name(7), "7");
        assert_eq!(users().group_name(1001), "staff");
        assert_eq!(users().group_name(8), "8");
        let bare = Users::parse("", "");
        assert_eq!(bare.find(None).unwrap().name, "root");
        assert_eq!(bare.find(Some("root")).unwrap().uid, 0);
    }

    #[test]
    fn paths_begin_at_the_home() {
        let user = users().find(None).unwrap();
        let path = |text: &str| user.path(text).unwrap();
        assert_eq!(path("a/b"), Path::new("/home/user/a/b"));
        assert_eq!(path("~/a"), Path::new("/home/user/a"));
        assert_eq!(path("~"), Path::new("/home/user"));
        assert_eq!(path(""), Path::new("/home/user"));
        assert_eq!(path("/x/../y/."), Path::new("/y"));
        assert_eq!(path("../../../.."), Path::new("/"));
        assert!(user.path("a\0b").is_err());
    }

    #[test]
    fn absolute_paths_need_no_user() {
        assert_eq!(absolute("/x/../y/."), Some(PathBuf::from("/y")));
        for other in ["", "a", "~", "~/a", "/a\0b"] {
            assert_eq!(absolute(other), None, "{other:?}");
        }
    }

    #[test]
    fn a_guest_without_a_list_of_users_knows_numbers() {
        let named = |users: Users| users.name_for_guest(&users.find(Some("root")).unwrap());
        assert_eq!(named(users()), "root");
        assert_eq!(named(Users::parse("", "")), "0");
    }
}
