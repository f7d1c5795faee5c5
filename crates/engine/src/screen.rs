//! The guest's screen: pictures of it, and connections of viewers.
//!
//! Always: a picture is taken by QEMU, whatever the guest does, and whether it runs or is stopped.
//! QEMU gets descriptors and no paths. When it fails: nothing stays open.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};
use tokio::net::UnixStream;

use crate::error::Error;
use crate::fdset::{self, FdSets, reopen};
use crate::probe::socketpair;
use crate::qmp::{AddClient, GetFd, Qmp, ScreenDump};

const PICTURE: &str = "a picture of the screen";

/// More than the largest screen has. QEMU is not trusted to keep to that.
const PICTURE_BYTES_MAX: u64 = 64 << 20;

/// Of an image as QEMU writes it: `P6`, width, height and the largest value, each ended by white
/// space.
const HEADER_BYTES_MAX: usize = 64;

/// What a screen shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    pub width: u32,
    pub height: u32,
    /// Red, green and blue of each pixel, line by line.
    pub rgb: Vec<u8>,
}

pub(crate) async fn picture(qmp: &Qmp, sets: &FdSets) -> Result<Picture, Error> {
    let file = memfd_create("picture", MemfdFlags::CLOEXEC);
    let file = File::from(file.map_err(|errno| Error::io("keep", PICTURE)(errno.into()))?);
    let set = sets
        .add(reopen(&file, File::options().write(true))?.into())
        .await?;
    let filename = fdset::path(set);
    let taken = qmp.run(ScreenDump {
        filename: &filename,
    });
    let taken = taken.await;
    sets.release(set).await;
    taken?;
    parse(read(&file)?)
}

fn read(file: &File) -> Result<Vec<u8>, Error> {
    let failed = || Error::io("read", PICTURE);
    let length = file.metadata().map_err(failed())?.len();
    if length > PICTURE_BYTES_MAX {
        return Err(broken(format!("{length} bytes are too many")));
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, 0).map_err(failed())?;
    Ok(bytes)
}

fn parse(mut bytes: Vec<u8>) -> Result<Picture, Error> {
    let header = &bytes[..bytes.len().min(HEADER_BYTES_MAX)];
    let mut words = header.split(u8::is_ascii_whitespace);
    let mut length = 0;
    let mut word = || {
        let word = words.next().unwrap_or_default();
        length += word.len() + 1;
        std::str::from_utf8(word).unwrap_or_default()
    };
    let kind = word();
    let width: u32 = word().parse().unwrap_or_default();
    let height: u32 = word().parse().unwrap_or_default();
    let most = word();
    let pixels = u128::from(width) * u128::from(height);
    let is_whole = pixels > 0 && bytes.len() as u128 == length as u128 + pixels * 3;
    if kind != "P6" || most != "255" || !is_whole {
        return Err(broken("it is not an image of 8 bits a colour".into()));
    }
    bytes.drain(..length);
    Ok(Picture {
        width,
        height,
        rgb: bytes,
    })
}

fn broken(detail: String) -> Error {
    Error::Protocol {
        detail: format!("{PICTURE}: {detail}"),
    }
}

/// Connects a viewer. The other end speaks RFB 3.8, and asks for no password.
pub(crate) async fn view(qmp: &Qmp, sets: &FdSets) -> Result<UnixStream, Error> {
    let (ours, theirs) = socketpair()?;
    let fdname = &format!("view{}", sets.number());
    qmp.run_with_fd(GetFd { fdname }, theirs).await?;
    qmp.run(AddClient {
        protocol: "vnc",
        fdname,
        skipauth: true,
    })
    .await?;
    Ok(ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_is_parsed_whole_or_not_at_all() {
        let image = |header: &str, bytes: usize| {
            let mut image = header.as_bytes().to_vec();
            image.extend(vec![7; bytes]);
            image
        };
        let picture = parse(image("P6\n2 3\n255\n", 18)).unwrap();
        assert_eq!((picture.width, picture.height), (2, 3));
        assert_eq!(picture.rgb, [7; 18]);
        for (header, bytes) in [
            ("", 0),
            ("P6\n", 0),
            ("P5\n2 3\n255\n", 18),
            ("P6\n2 3\n65535\n", 18),
            ("P6\n2 3\n255\n", 17),
            ("P6\n2 3\n255\n", 19),
            ("P6\n0 3\n255\n", 0),
            ("P6\n-2 3\n255\n", 18),
            ("P6\n4294967295 4294967295\n255\n", 18),
        ] {
            let refused = parse(image(header, bytes));
            assert!(matches!(refused, Err(Error::Protocol { .. })), "{header:?}");
        }
    }
}
