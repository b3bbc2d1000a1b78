//! A bound, listening socket, made before its address is published to the other ranks.

use crate::error::ChannelError;
use crate::sys::descriptors::ForkTracked;
use rustix::net::{bind, listen, socket_with, sockopt, AddressFamily, SocketFlags, SocketType};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::ops::RangeInclusive;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// A listening socket.
#[derive(Debug)]
pub struct Listener {
    socket: ForkTracked<TcpListener>,
    address: SocketAddr,
}

impl Listener {
    /// Listens on an IPv4 or IPv6 address (a literal; `::` takes IPv4 callers too where the system
    /// does) and the first free port of the range; `0..=0` is any free port.
    ///
    /// # Errors
    /// [`ChannelError::Argument`] when `host` is no address or the range is empty,
    /// [`ChannelError::System`] when no port of the range is free.
    pub fn bind(host: &str, ports: RangeInclusive<u16>) -> Result<Listener, ChannelError> {
        let literal = host.trim_start_matches('[').trim_end_matches(']');
        let ip: IpAddr = literal.parse().map_err(|_| {
            ChannelError::Argument(format!("{host:?} is no IPv4 or IPv6 address to listen on"))
        })?;
        if ports.is_empty() {
            let (low, high) = (ports.start(), ports.end());
            return Err(ChannelError::Argument(format!("the port range {low} to {high} is empty")));
        }
        let mut last_error = None;
        for port in ports.clone() {
            match listen_on(SocketAddr::new(ip, port)) {
                Ok(socket) => {
                    let address = socket
                        .local_addr()
                        .map_err(|error| ChannelError::system("address of a listener", &error))?;
                    return Ok(Listener { socket: ForkTracked::new(socket), address });
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => last_error = Some(error),
                Err(error) => {
                    let what = format!("cannot listen on {}", SocketAddr::new(ip, port));
                    return Err(ChannelError::system(what, &error));
                }
            }
        }
        let reason = last_error.map_or_else(String::new, |error| format!(" ({error})"));
        Err(ChannelError::System(format!(
            "no port from {} to {} is free on {host}{reason}; give another range",
            ports.start(),
            ports.end()
        )))
    }

    /// Returns the address and port.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn into_socket(self) -> ForkTracked<TcpListener> {
        self.socket
    }
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    if address.port() != 0 {
        // A port of a fixed range may still be in TIME_WAIT from the previous run.
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_gives_its_next_free_port_and_then_an_error() {
        let first = Listener::bind("127.0.0.1", 0..=0);
        let Ok(first) = first else { panic!("{first:?}") };
        let port = first.address().port();
        let taken = Listener::bind("127.0.0.1", port..=port);
        assert!(matches!(taken, Err(ChannelError::System(text)) if text.contains("no port")));
        assert!(matches!(Listener::bind("localhost!", 0..=0), Err(ChannelError::Argument(_))));
        #[allow(clippy::reversed_empty_ranges)]
        let empty = Listener::bind("127.0.0.1", 2..=1);
        assert!(matches!(empty, Err(ChannelError::Argument(_))));
    }
}
