//! Metrics over HTTP, where they are asked for: `http://ADDR:PORT/metrics`, the text of `report::openmetrics`.
//!
//! | file | job |
//! |---|---|
//! | `metrics.rs` | where to listen |
//! | [`http`] | requests and answers as bytes |
//! | [`server`] | the thread that listens |
//!
//! Must not know what the metrics are. Invariants: nothing listens unless asked to, and beyond this host only where
//! an address says so; who asks cannot make a report, a dump or the job wait.

pub mod http;
pub mod server;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

/// An address to listen at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen(SocketAddr);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Listen, String> {
        let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let port = text.strip_prefix("localhost:").unwrap_or(text);
        if let Ok(port) = port.parse() {
            return Ok(Listen(SocketAddr::new(here, port)));
        }
        text.parse().map(Listen).map_err(|_| {
            format!(
                "'{text}' is no address to listen at; write a port (9400: this host only) or an IP address and a port \
                 (0.0.0.0:9400, [::]:9400)"
            )
        })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Listen {
    /// The address of one of several processes on this host: each has the port of its number. Any free port (0) is
    /// that for all of them. Nothing if there is no such port.
    pub fn of_rank(self, local_rank: u16) -> Option<SocketAddr> {
        let port = if self.0.port() == 0 { 0 } else { self.0.port().checked_add(local_rank)? };
        Some(SocketAddr::new(self.0.ip(), port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_of_this_host() {
        for (text, address) in [
            ("9400", "127.0.0.1:9400"),
            ("0", "127.0.0.1:0"),
            ("localhost:9400", "127.0.0.1:9400"),
            ("0.0.0.0:9400", "0.0.0.0:9400"),
            ("[::1]:9400", "[::1]:9400"),
        ] {
            assert_eq!(text.parse::<Listen>().map(|listen| listen.to_string()), Ok(address.to_owned()));
        }
        for text in ["", "65536", "-1", ":9400", "host:9400", "127.0.0.1", "localhost", "::1:x", "1.2.3:4"] {
            let said = text.parse::<Listen>().expect_err(text);
            assert!(said.contains(text) && said.contains("0.0.0.0:9400"), "{said}");
        }
    }

    #[test]
    fn each_process_of_a_host_has_a_port_of_its_own() {
        let of = |text: &str, rank| text.parse::<Listen>().ok()?.of_rank(rank).map(|at| at.port());
        assert_eq!(of("9400", 0), Some(9400));
        assert_eq!(of("9400", 7), Some(9407));
        assert_eq!(of("0", 7), Some(0));
        assert_eq!(of("65535", 1), None);
    }
}
