//! TCP connections to the guest's own loopback.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use sandtree_proto::Failure;

use crate::failure::{failure, tolerate};

const PLACES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// A connection that is not yet established: IPv4 first, then IPv6.
#[derive(Debug)]
pub struct Connecting {
    port: u16,
    place: usize,
    socket: OwnedFd,
}

#[derive(Debug)]
pub enum Progress {
    Waiting(Connecting),
    Connected(OwnedFd),
    Failed(Failure),
}

impl Connecting {
    pub fn begin(port: u16) -> Progress {
        Self::attempt(port, 0)
    }

    fn attempt(port: u16, place: usize) -> Progress {
        let address = SocketAddr::new(PLACES[place], port);
        let family = if address.is_ipv4() {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = match rustix::net::socket_with(family, SocketType::STREAM, flags, None) {
            Ok(socket) => socket,
            Err(error) => return Self::refused(port, place, error),
        };
        match rustix::net::connect(&socket, &address) {
            Ok(()) => connected(socket),
            Err(Errno::INPROGRESS) => Progress::Waiting(Self {
                port,
                place,
                socket,
            }),
            Err(error) => Self::refused(port, place, error),
        }
    }

    /// Writable when [`proceed`](Self::proceed) can make progress.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub fn proceed(self) -> Progress {
        match rustix::net::sockopt::socket_error(&self.socket) {
            Ok(Ok(())) => connected(self.socket),
            Ok(Err(error)) | Err(error) => Self::refused(self.port, self.place, error),
        }
    }

    /// The first refusal is reported: without IPv6, the second one would hide it.
    fn refused(port: u16, place: usize, error: Errno) -> Progress {
        let next = (place + 1 < PLACES.len()).then(|| Self::attempt(port, place + 1));
        if let Some(next @ (Progress::Waiting(_) | Progress::Connected(_))) = next {
            return next;
        }
        Progress::Failed(failure(
            &format!("cannot connect to port {port} in the guest"),
            &error.into(),
        ))
    }
}

fn connected(socket: OwnedFd) -> Progress {
    // Delayed small writes would cost a round trip; without the option the connection still works.
    tolerate(rustix::net::sockopt::set_tcp_nodelay(&socket, true));
    Progress::Connected(socket)
}
