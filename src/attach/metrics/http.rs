//! Requests for metrics and answers to them, as bytes.
//!
//! Must not know: sockets, what the metrics are. Invariants: a request is looked at only as far as its head goes,
//! which has a limit; an answer closes its connection, so that nothing of a request's body has to be read.

/// The longest head of a request, in bytes.
pub const LONGEST_HEAD: usize = 8192;
/// The most headers of a request.
const MOST_HEADERS: usize = 64;
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// What was read so far.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// The head is not whole yet.
    More,
    /// The metrics are asked for; with [`Body::No`] only how long they are.
    Metrics(Body),
    Refused(Refusal, Body),
}

/// Whether the answer has its body (not to HEAD).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    Yes,
    No,
}

/// Why a request is not answered with the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    BadRequest,
    NotFound,
    MethodNotAllowed,
    /// A name that is not this host's: a page in the user's browser may have been given our address for it.
    Misdirected,
    HeadTooLarge,
    /// The process is busy, or its run is over.
    Unavailable,
}

impl Refusal {
    fn line(self) -> (&'static str, &'static str) {
        match self {
            Refusal::BadRequest => ("400 Bad Request", "this is no HTTP request"),
            Refusal::NotFound => ("404 Not Found", "there is only /metrics"),
            Refusal::MethodNotAllowed => ("405 Method Not Allowed", "only GET and HEAD"),
            Refusal::Misdirected => ("421 Misdirected Request", "ask for localhost, or by IP address"),
            Refusal::HeadTooLarge => {
                ("431 Request Header Fields Too Large", "at most 8192 bytes, 64 headers")
            }
            Refusal::Unavailable => ("503 Service Unavailable", "the run is over, or the job is busy"),
        }
    }
}

/// Reads a request. `here_only`: the address is not reachable from other hosts, so names of others are not ours.
pub fn read(input: &[u8], here_only: bool) -> Read {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(input) {
        Ok(httparse::Status::Complete(length)) if length <= LONGEST_HEAD => {}
        Ok(httparse::Status::Partial) if input.len() <= LONGEST_HEAD => return Read::More,
        Ok(_) | Err(httparse::Error::TooManyHeaders) => {
            return Read::Refused(Refusal::HeadTooLarge, Body::Yes);
        }
        Err(_) => return Read::Refused(Refusal::BadRequest, Body::Yes),
    }
    let method = request.method.unwrap_or_default();
    let body = if method == "HEAD" { Body::No } else { Body::Yes };
    let (host, path) = parts(request.path.unwrap_or_default());
    let mut named =
        request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("host")).map(|h| h.value);
    let refused = match (named.next(), named.next()) {
        (_, Some(_)) => Some(Refusal::BadRequest),
        // HTTP/1.0 did not ask for one.
        (None, _) if request.version == Some(1) => Some(Refusal::BadRequest),
        (name, _) if here_only && !host.map(str::as_bytes).or(name).is_none_or(is_here) => {
            Some(Refusal::Misdirected)
        }
        _ if path != "/metrics" => Some(Refusal::NotFound),
        _ if !matches!(method, "GET" | "HEAD") => Some(Refusal::MethodNotAllowed),
        _ => None,
    };
    refused.map_or(Read::Metrics(body), |refusal| Read::Refused(refusal, body))
}

/// The host that a target names, if it does, and its path without a query.
fn parts(target: &str) -> (Option<&str>, &str) {
    let (host, path) = match target.strip_prefix("http://") {
        Some(rest) => {
            let (host, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
            (Some(host), path)
        }
        None => (None, target),
    };
    (host, path.split('?').next().unwrap_or_default())
}

/// Whether a Host header names this host: localhost, or an address.
fn is_here(host: &[u8]) -> bool {
    let Ok(host) = std::str::from_utf8(host) else { return false };
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => return address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::Ipv4Addr>().is_ok()
}

/// The answer with the metrics.
pub fn metrics(text: &str, body: Body) -> Vec<u8> {
    answer("200 OK", OPENMETRICS, "", text, body)
}

/// The answer to a request that is refused.
pub fn refusal(refusal: Refusal, body: Body) -> Vec<u8> {
    let (status, why) = refusal.line();
    let more = match refusal {
        Refusal::MethodNotAllowed => "Allow: GET, HEAD\r\n",
        Refusal::Unavailable => "Retry-After: 5\r\n",
        _ => "",
    };
    answer(status, PLAIN, more, &format!("{why}\n"), body)
}

fn answer(status: &str, kind: &str, more: &str, text: &str, body: Body) -> Vec<u8> {
    let mut out = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{more}Cache-Control: no-store\r\n\
         Connection: close\r\n\r\n",
        text.len()
    )
    .into_bytes();
    if body == Body::Yes {
        out.extend_from_slice(text.as_bytes());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Read {
        read(text.as_bytes(), true)
    }

    #[test]
    fn the_metrics_are_at_one_path() {
        for text in [
            "GET /metrics HTTP/1.1\r\nHost: localhost:9400\r\n\r\n",
            "GET /metrics?x=1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            "GET http://localhost:1/metrics HTTP/1.1\r\nhost: [::1]:9400\r\n\r\n",
            "GET /metrics HTTP/1.0\r\n\r\n",
            "GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc",
        ] {
            assert_eq!(of(text), Read::Metrics(Body::Yes), "{text}");
        }
        assert_eq!(of("HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"), Read::Metrics(Body::No));
    }

    #[test]
    fn a_head_is_waited_for_until_it_is_whole_and_no_longer_than_it_may_be() {
        let whole = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(of(&whole[..end]), Read::More, "{end}");
        }
        let long = format!("GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: {}", "y".repeat(LONGEST_HEAD));
        assert_eq!(of(&long), Read::Refused(Refusal::HeadTooLarge, Body::Yes));
        assert_eq!(of(&(long + "\r\n\r\n")), Read::Refused(Refusal::HeadTooLarge, Body::Yes));
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(MOST_HEADERS + 1));
        assert_eq!(of(&many), Read::Refused(Refusal::HeadTooLarge, Body::Yes));
    }

    #[test]
    fn what_else_is_asked_is_refused_with_its_reason() {
        let host = "Host: localhost\r\n\r\n";
        for (text, refusal) in [
            (format!("GET / HTTP/1.1\r\n{host}"), Refusal::NotFound),
            (format!("GET /metrics/ HTTP/1.1\r\n{host}"), Refusal::NotFound),
            (format!("POST /metrics HTTP/1.1\r\n{host}"), Refusal::MethodNotAllowed),
            ("GET /metrics HTTP/1.1\r\n\r\n".into(), Refusal::BadRequest),
            (format!("GET /metrics HTTP/1.1\r\nHost: a\r\n{host}"), Refusal::BadRequest),
            ("GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n".into(), Refusal::Misdirected),
            (format!("GET http://evil.example/metrics HTTP/1.1\r\n{host}"), Refusal::Misdirected),
            ("\x16\x03\x01\x02".into(), Refusal::BadRequest),
            ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".into(), Refusal::BadRequest),
            ("GET\r\n\r\n".into(), Refusal::BadRequest),
        ] {
            assert_eq!(of(&text), Read::Refused(refusal, Body::Yes), "{text}");
        }
        let other = b"GET /metrics HTTP/1.1\r\nHost: node7:9400\r\n\r\n";
        assert_eq!(read(other, false), Read::Metrics(Body::Yes), "on an address that others reach");
    }

    #[test]
    fn an_answer_says_how_long_it_is_and_has_no_body_for_head() {
        let text = String::from_utf8(metrics("# EOF\n", Body::Yes)).unwrap_or_default();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\n# EOF\n"), "{text}");
        assert!(text.contains("Content-Length: 6\r\n") && text.contains(OPENMETRICS), "{text}");
        let head = String::from_utf8(metrics("# EOF\n", Body::No)).unwrap_or_default();
        assert!(head.contains("Content-Length: 6\r\n") && head.ends_with("\r\n\r\n"), "{head}");
        let refused = String::from_utf8(refusal(Refusal::MethodNotAllowed, Body::Yes)).unwrap_or_default();
        assert!(refused.contains("405 ") && refused.contains("Allow: GET, HEAD\r\n"), "{refused}");
    }
}
