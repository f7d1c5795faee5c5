//! Extended attributes of users. Others (`security.`, `system.`, `trusted.`) mean something to the
//! host's kernel: a guest neither sees nor sets them.

use std::ffi::CString;

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use sandtree_proto::mount::{Answer, Node};

use super::Desk;
use crate::place;

const USER: &[u8] = b"user.";
/// The longest value, and the longest list of names, that Linux has.
const VALUE_MAX: usize = 64 * 1024;

impl Desk<'_> {
    pub(super) fn get_xattr(&mut self, node: &Node, name: &[u8]) -> Result<Answer, Errno> {
        let name = user_name(name)?;
        let found = self.locate(node)?;
        let path = place::by_descriptor(&found.file);
        self.out.resize(VALUE_MAX, 0);
        let length = rustix::fs::getxattr(path, &name, self.out.as_mut_slice())?;
        self.out.truncate(length);
        Ok(Answer::Done)
    }

    pub(super) fn set_xattr(
        &mut self,
        node: &Node,
        name: &[u8],
        flags: u32,
    ) -> Result<Answer, Errno> {
        let name = user_name(name)?;
        let flags = XattrFlags::from_bits(flags).ok_or(Errno::INVAL)?;
        if flags.bits() & !(libc::XATTR_CREATE | libc::XATTR_REPLACE) as u32 != 0 {
            return Err(Errno::INVAL);
        }
        if self.data.len() > VALUE_MAX {
            return Err(Errno::TOOBIG);
        }
        let found = self.find(node)?;
        self.expect_content(&found);
        let path = place::by_descriptor(&found.file);
        rustix::fs::setxattr(path, &name, self.data, flags)?;
        self.after(&found)?;
        Ok(Answer::Done)
    }

    pub(super) fn list_xattr(&mut self, node: &Node) -> Result<Answer, Errno> {
        let found = self.locate(node)?;
        let path = place::by_descriptor(&found.file);
        let mut names = vec![0; VALUE_MAX];
        let length = rustix::fs::listxattr(path, names.as_mut_slice())?;
        let names = names[..length].split_inclusive(|byte| *byte == 0);
        for name in names.filter(|name| name.starts_with(USER)) {
            self.out.extend_from_slice(name);
        }
        Ok(Answer::Done)
    }

    pub(super) fn remove_xattr(&mut self, node: &Node, name: &[u8]) -> Result<Answer, Errno> {
        let name = user_name(name)?;
        let found = self.find(node)?;
        self.expect_content(&found);
        let path = place::by_descriptor(&found.file);
        rustix::fs::removexattr(path, &name)?;
        self.after(&found)?;
        Ok(Answer::Done)
    }
}

fn user_name(name: &[u8]) -> Result<CString, Errno> {
    if !name.starts_with(USER) {
        return Err(Errno::OPNOTSUPP);
    }
    CString::new(name).map_err(|_| Errno::INVAL)
}
