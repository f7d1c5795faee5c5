//! The wait of a guest that has no root yet: the host captures it in this state, and every machine
//! of the same shape boots from there, each on its own disk.
//!
//! ```text
//!   modules -> disks released -> initramfs freed -> (waits: hello) -> Boot -> disks bound -> root
//!                                                       ^ captured here
//! ```
//!
//! Always: the kernel has forgotten every disk, so that the next one may have another size and
//! content. Nothing has read the boot's id, which the kernel makes when it is first read. After the
//! wait, entropy and clock come first.

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use sandtree_proto::{AgentMessage, Boot, HostMessage, Reply, Request};

use super::BootError;
use crate::failure::refusal;
use crate::link::{Event, Link};

const BUS: &str = "/sys/bus/virtio";
/// While the host is away, the port is also checked without an edge: a restored guest may have
/// missed one.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A request to boot, which is answered when the guest has its root.
#[derive(Debug)]
pub struct Asked {
    pub boot: Boot,
    id: u32,
}

impl Asked {
    /// Queues the answer. The loop that serves the link sends it.
    pub fn answer(&self, link: &mut Link) {
        let reply = Ok(Reply::Done);
        link.send(&AgentMessage::Reply { id: self.id, reply });
    }
}

/// Takes the driver off every virtio disk, and so makes the kernel forget the disks.
pub fn release_disks() -> Result<(), BootError> {
    let driver = Path::new(BUS).join("drivers/virtio_blk");
    let released = devices(&driver).and_then(|bound| {
        bound
            .iter()
            .try_for_each(|device| fs::write(driver.join("unbind"), device))
    });
    released.map_err(BootError::DiskInUse)
}

/// Lets the driver find the disks.
pub fn bind_disks() -> Result<(), BootError> {
    let all = Path::new(BUS).join("devices");
    let bound = devices(&all).and_then(|found| {
        found
            .iter()
            .filter(|device| !all.join(device).join("driver").exists())
            .try_for_each(|device| fs::write(Path::new(BUS).join("drivers_probe"), device))
    });
    bound.map_err(BootError::Disks)
}

/// The virtio devices below a directory of sysfs, in the order of the bus, which gives disks their
/// letters.
fn devices(dir: &Path) -> io::Result<Vec<String>> {
    let mut found: Vec<(u32, String)> = Vec::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let number = name
            .strip_prefix("virtio")
            .and_then(|number| number.parse().ok());
        found.extend(number.map(|number| (number, name)));
    }
    found.sort();
    Ok(found.into_iter().map(|(_, name)| name).collect())
}

/// Serves the link until the host asks for the boot.
pub fn for_boot(link: &mut Link) -> rustix::io::Result<Asked> {
    loop {
        while let Some(event) = link.next() {
            if let Some(asked) = answered(link, event) {
                return Ok(asked);
            }
        }
        link.flush();
        pause(link)?;
    }
}

/// Answers an event, unless it asks for the boot.
fn answered(link: &mut Link, event: Event) -> Option<Asked> {
    match event {
        Event::Message(HostMessage::Hello(host)) => link.greet(&host, Vec::new()),
        Event::Message(HostMessage::Request { id, request }) => {
            let reply = match request {
                Request::Boot(boot) => return Some(Asked { boot, id }),
                Request::Ping => Ok(Reply::Done),
                _ => Err(refusal(Errno::AGAIN, "the guest has no root yet")),
            };
            link.send(&AgentMessage::Reply { id, reply });
        }
        Event::Restarted => {}
        _ => link.fault("a channel before the guest has a root"),
    }
    None
}

fn pause(link: &mut Link) -> rustix::io::Result<()> {
    if link.is_busy() {
        return Ok(());
    }
    let look_again = Timespec {
        tv_sec: 0,
        tv_nsec: LOOK_AGAIN.as_nanos() as i64,
    };
    let timeout = link.is_away().then_some(&look_again);
    let edges = PollFd::from_borrowed_fd(link.edges(), PollFlags::IN);
    match poll(&mut [edges], timeout) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error),
    }
    link.absorb_edges()?;
    if link.is_away() {
        link.look_again();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use sandtree_proto::message::{self, from_bytes};
    use sandtree_proto::{Decoded, Decoder, Frame, HostHello, Nonce, frame};

    use super::*;

    fn sent(host: &mut UnixStream, message: &HostMessage) {
        let mut bytes = Vec::new();
        message::to_frame(message).unwrap().encode(&mut bytes);
        host.write_all(&bytes).unwrap();
    }

    fn asked(id: u32, request: Request) -> HostMessage {
        HostMessage::Request { id, request }
    }

    /// The next message of the agent.
    fn received(host: &mut UnixStream, decoder: &mut Decoder) -> AgentMessage {
        let mut bytes = [0; 4096];
        loop {
            match decoder.next() {
                Some(Ok(Decoded::Frame(Frame::Message(message)))) => {
                    return from_bytes(&message).unwrap();
                }
                Some(other) => assert!(matches!(other, Ok(Decoded::Preamble(_))), "{other:?}"),
                None => {
                    let count = host.read(&mut bytes).unwrap();
                    decoder.feed(&bytes[..count]);
                }
            }
        }
    }

    #[test]
    fn a_waiting_guest_greets_refuses_other_requests_and_boots_when_asked() {
        let (mut host, port) = UnixStream::pair().unwrap();
        let waiting = std::thread::spawn(move || {
            let mut link = Link::new(port.into()).unwrap();
            let asked = for_boot(&mut link).unwrap();
            asked.answer(&mut link);
            assert!(link.flush());
            asked.boot
        });
        let mut preamble = Vec::new();
        frame::encode_host_preamble(&mut preamble, Nonce([7; 16]));
        host.write_all(&preamble).unwrap();
        sent(
            &mut host,
            &HostMessage::Hello(HostHello {
                version_min: 1,
                version_max: 4,
            }),
        );
        sent(&mut host, &asked(1, Request::Settle));
        let boot = Boot {
            unix_time_ns: 7,
            entropy: vec![1, 2],
            options: "sandtree.init=image".into(),
        };
        sent(&mut host, &asked(2, Request::Boot(boot.clone())));
        let mut decoder = Decoder::new();
        let hello = received(&mut host, &mut decoder);
        assert!(
            matches!(&hello, AgentMessage::Hello(hello) if hello.version == 4),
            "{hello:?}"
        );
        let AgentMessage::Reply {
            id: 1,
            reply: Err(failure),
        } = received(&mut host, &mut decoder)
        else {
            panic!("a guest without a root has settled")
        };
        assert_eq!(failure.errno, libc::EAGAIN);
        let done = received(&mut host, &mut decoder);
        let reply = Ok(Reply::Done);
        assert_eq!(done, AgentMessage::Reply { id: 2, reply });
        assert_eq!(waiting.join().unwrap(), boot);
    }

    #[test]
    fn virtio_devices_are_in_the_order_of_the_bus() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["virtio10", "virtio2", "module", "unbind"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert_eq!(devices(dir.path()).unwrap(), ["virtio2", "virtio10"]);
    }
}
