//! The guest's network: fixed addresses, so that nothing waits for DHCP.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use sandtree_proto::{Failure, Network};

use crate::failure::{OrFailure, refusal, tolerate};
use crate::{names, sys};

const ADDRESS: [u8; 4] = [10, 0, 2, 15];
const NETMASK: [u8; 4] = [255, 255, 255, 0];
const GATEWAY: [u8; 4] = [10, 0, 2, 2];
const NAME_SERVER: &str = "nameserver 10.0.2.3";
/// How long the interface may take to appear: a thread loads its driver, which takes seconds under
/// emulation on a busy host.
const APPEARS_WITHIN: Duration = Duration::from_secs(20);

pub fn configure(network: Network) -> Result<(), Failure> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)
        .or_failure(|| "cannot open a socket to configure the network".into())?;
    sys::bring_up(&socket, "lo").or_failure(|| "cannot bring up the loopback interface".into())?;
    if network == Network::None {
        return Ok(());
    }
    let name = interface()?;
    if network == Network::Isolated {
        silence(&name);
    }
    let message = || format!("cannot configure interface {name}");
    sys::set_interface_address(&socket, &name, libc::SIOCSIFADDR, ADDRESS).or_failure(message)?;
    sys::set_interface_address(&socket, &name, libc::SIOCSIFNETMASK, NETMASK)
        .or_failure(message)?;
    sys::bring_up(&socket, &name).or_failure(message)?;
    if network == Network::Full {
        sys::add_default_route(&socket, GATEWAY)
            .or_failure(|| "cannot add the default route".into())?;
        names::write_line("/etc/resolv.conf", NAME_SERVER)?;
    }
    Ok(())
}

/// Nothing answers on an isolated interface. Without these, the kernel looks for routers, for other
/// owners of its addresses and for listeners, for seconds after it boots and so after each restore
/// of a guest that had just booted.
fn silence(name: &str) {
    let settings = [
        (format!("conf/{name}/router_solicitations"), "0"),
        (format!("conf/{name}/accept_dad"), "0"),
        ("mld_qrv".to_owned(), "1"),
    ];
    for (setting, value) in settings {
        // A kernel without IPv6 has none of them, and sends nothing either.
        tolerate(fs::write(format!("/proc/sys/net/ipv6/{setting}"), value));
    }
}

/// The first interface that is a device; it may not exist yet.
fn interface() -> Result<String, Failure> {
    let deadline = Instant::now() + APPEARS_WITHIN;
    loop {
        if let Some(name) =
            first_device().or_failure(|| "cannot list the network interfaces".into())?
        {
            return Ok(name);
        }
        if Instant::now() >= deadline {
            return Err(refusal(Errno::NODEV, "the guest has no network interface"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn first_device() -> io::Result<Option<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir("/sys/class/net")? {
        let entry = entry?;
        if entry.path().join("device").exists() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(names.into_iter().min())
}
