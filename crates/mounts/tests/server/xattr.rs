//! Extended attributes.

use sandtree_proto::mount::{Answer, Request};

use crate::support::{EEXIST, EINVAL, ENODATA, EOPNOTSUPP, World};

#[test]
fn attributes_of_users_are_set_read_listed_and_removed() {
    let mut world = World::new();
    world.write("file", "");
    let node = world.client.node("file");
    let name = b"user.note".to_vec();
    let set = |flags| Request::SetXattr {
        node: node.clone(),
        name: name.clone(),
        flags,
    };
    let done = (Ok(Answer::Done), Vec::new());
    assert_eq!(world.client.ask_with(set(0), b"value"), done);
    assert_eq!(world.client.ask_with(set(1), b"value").0, Err(EEXIST));
    assert_eq!(world.client.ask_with(set(64), b"value").0, Err(EINVAL));
    let get = Request::GetXattr {
        node: node.clone(),
        name: name.clone(),
    };
    let value = world.client.ask_with(get.clone(), &[]);
    assert_eq!(value, (Ok(Answer::Done), b"value".to_vec()));
    let list = Request::ListXattr { node: node.clone() };
    let names = world.client.ask_with(list, &[]);
    assert_eq!(names, (Ok(Answer::Done), b"user.note\0".to_vec()));
    let remove = Request::RemoveXattr { node, name };
    assert_eq!(world.client.ask(remove), Ok(Answer::Done));
    assert_eq!(world.client.ask(get), Err(ENODATA));
    assert_eq!(world.client.changes_so_far(), []);
}

#[test]
fn attributes_of_the_system_are_refused() {
    let mut world = World::new();
    world.write("file", "");
    let node = world.client.node("file");
    for name in [
        "security.capability",
        "system.posix_acl_access",
        "trusted.x",
        "x",
    ] {
        let name = name.as_bytes().to_vec();
        let get = Request::GetXattr {
            node: node.clone(),
            name: name.clone(),
        };
        assert_eq!(world.client.ask(get), Err(EOPNOTSUPP));
        let set = Request::SetXattr {
            node: node.clone(),
            name: name.clone(),
            flags: 0,
        };
        assert_eq!(world.client.ask_with(set, b"x").0, Err(EOPNOTSUPP));
        let remove = Request::RemoveXattr {
            node: node.clone(),
            name,
        };
        assert_eq!(world.client.ask(remove), Err(EOPNOTSUPP));
    }
}
