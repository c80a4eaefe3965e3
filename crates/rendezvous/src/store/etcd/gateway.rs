//! HTTP to whichever member of etcd answers, with a deadline and a bound for every answer.

use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::Timeout;

use super::error::{EndpointError, EtcdError};
use super::messages::Refusal;
use crate::net::join;

/// etcd's port for clients.
const PORT: u16 = 2379;
/// More than any etcd has members.
const ENDPOINTS_MAX: usize = 16;
/// Longest answer: the pages of a thousand launchers and their proofs, several times.
const ANSWER_BYTES_MAX: u64 = 32 << 20;
/// Longest line of a watch: one event.
const LINE_BYTES_MAX: u64 = 4 << 20;
const LEAST: Duration = Duration::from_millis(1);

/// The members of one etcd. All connections of a process begin with the one that answered last.
#[derive(Debug, Clone)]
pub(super) struct Endpoints {
    names: Arc<[String]>,
    preferred: Arc<AtomicUsize>,
}

impl Endpoints {
    /// Reads `host[:port][,host[:port]...]`; `http://` before a host is allowed.
    pub(super) fn parse(text: &str) -> Result<Self, EndpointError> {
        let names = text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(endpoint)
            .collect::<Result<Vec<_>, _>>()?;
        match names.len() {
            0 => Err(EndpointError::malformed("no etcd endpoint is given".into())),
            1..=ENDPOINTS_MAX => Ok(Self {
                names: names.into(),
                preferred: Arc::default(),
            }),
            count => Err(EndpointError {
                message: format!("{count} etcd endpoints, at most {ENDPOINTS_MAX} are allowed"),
                hint: None,
            }),
        }
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// In the order in which to try them.
    fn in_order(&self) -> impl Iterator<Item = (usize, &str)> {
        let (count, first) = (self.names.len(), self.preferred.load(Ordering::Relaxed));
        (0..count).map(move |offset| {
            let index = (first + offset) % count;
            (index, self.names[index].as_str())
        })
    }

    /// This one did not do its work: the next call begins with the one after it, unless another thread has changed that
    /// already.
    fn blame(&self, index: usize) {
        let next = (index + 1) % self.names.len();
        let _ = self
            .preferred
            .compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn praise(&self, index: usize) {
        self.preferred.store(index, Ordering::Relaxed);
    }
}

fn endpoint(text: &str) -> Result<String, EndpointError> {
    let malformed = || {
        EndpointError::malformed(format!(
            "etcd endpoint `{text}` is malformed, expected HOST[:PORT]"
        ))
    };
    if text.starts_with("https://") {
        let hint = "name a client URL of etcd that speaks HTTP, or a proxy on this machine that speaks TLS with it; every \
                    value is proven with the job's token in either case";
        return Err(EndpointError {
            message: format!("etcd endpoint `{text}`: https is not supported"),
            hint: Some(hint),
        });
    }
    let name = text.strip_prefix("http://").unwrap_or(text);
    let name = name.strip_suffix('/').unwrap_or(name);
    let (host, port) = match name.rsplit_once(':') {
        // An IPv6 address without a port, with brackets or without.
        Some((before, _))
            if name.ends_with(']') || before.contains(':') && !before.ends_with(']') =>
        {
            (name, PORT)
        }
        Some((host, port)) => (host, port.parse().map_err(|_| malformed())?),
        None => (name, PORT),
    };
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-._:[]%".contains(c);
    if host.is_empty() || !host.chars().all(is_name) {
        return Err(malformed());
    }
    Ok(join(host, port))
}

/// Whether a request may be sent again when its outcome is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Again {
    /// Twice is as good as once.
    May,
    MayNot,
}

/// One process's way to etcd.
#[derive(Debug)]
pub(super) struct Gateway {
    agent: ureq::Agent,
    endpoints: Endpoints,
    authorization: Option<String>,
}

impl Gateway {
    pub(super) fn new(endpoints: Endpoints) -> Self {
        // No proxy: what the environment names is for the outside, and etcd is a neighbour.
        let agent = ureq::Agent::config_builder()
            .proxy(None)
            .max_redirects(0)
            .http_status_as_error(false)
            .build()
            .new_agent();
        Self {
            agent,
            endpoints,
            authorization: None,
        }
    }

    /// Sends this with every request from now on.
    pub(super) fn authorize(&mut self, token: String) {
        self.authorization = Some(token);
    }

    /// Has a request answered by a member, until `deadline`.
    pub(super) fn call<A: DeserializeOwned>(
        &self,
        path: &str,
        request: &impl Serialize,
        again: Again,
        deadline: Instant,
    ) -> Result<A, EtcdError> {
        let answer = self.over_members(path, request, again, deadline, |mut answer| {
            let body = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX);
            body.read_to_vec().map_err(|error| failure(&error))
        })?;
        // A stream of one answer ends with a line feed, which JSON allows.
        serde_json::from_slice(&answer).map_err(|error| not_etcd(&error))
    }

    /// Sends a request whose answer is a stream of JSON lines, and gives them to `read` until that returns something or the
    /// deadline has passed.
    pub(super) fn stream<L: DeserializeOwned, T>(
        &self,
        path: &str,
        request: &impl Serialize,
        deadline: Instant,
        mut read: impl FnMut(L) -> Result<Option<T>, EtcdError>,
    ) -> Result<T, EtcdError> {
        self.over_members(path, request, Again::MayNot, deadline, |answer| {
            let mut stream = BufReader::new(answer.into_body().into_reader());
            loop {
                let line = line(&mut stream)?;
                let line = serde_json::from_slice(&line).map_err(|error| not_etcd(&error))?;
                if let Some(done) = read(line)? {
                    return Ok(done);
                }
            }
        })
    }

    /// Tries one member after the other.
    fn over_members<T>(
        &self,
        path: &str,
        request: &impl Serialize,
        again: Again,
        deadline: Instant,
        mut read: impl FnMut(ureq::http::Response<ureq::Body>) -> Result<T, EtcdError>,
    ) -> Result<T, EtcdError> {
        let body = serde_json::to_vec(request).map_err(|error| not_etcd(&error))?;
        let mut last = EtcdError::NoAnswer;
        let count = self.endpoints.names.len();
        for (tried, (index, name)) in self.endpoints.in_order().enumerate() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() && tried > 0 {
                break;
            }
            // The others are to have their turn before the deadline.
            let share = (left / (count - tried) as u32).max(LEAST);
            let limit = match again {
                Again::May => share,
                Again::MayNot => left.max(LEAST),
            };
            let sent = self.send(name, path, &body, share, limit);
            match sent.and_then(&mut read) {
                Ok(answer) => {
                    self.endpoints.praise(index);
                    return Ok(answer);
                }
                Err(error) => {
                    let is_next = match &error {
                        EtcdError::Unreachable { .. } => true,
                        EtcdError::NoAnswer | EtcdError::Lost { .. } => again == Again::May,
                        // A member without a leader: another one may have it.
                        EtcdError::Refused { code, .. } => {
                            *code == UNAVAILABLE && again == Again::May
                        }
                        _ => false,
                    };
                    if is_next || matches!(error, EtcdError::NoAnswer | EtcdError::Lost { .. }) {
                        self.endpoints.blame(index);
                    }
                    if !is_next {
                        return Err(error);
                    }
                    last = error;
                }
            }
        }
        Err(last)
    }

    fn send(
        &self,
        name: &str,
        path: &str,
        body: &[u8],
        connect: Duration,
        limit: Duration,
    ) -> Result<ureq::http::Response<ureq::Body>, EtcdError> {
        let request = self
            .agent
            .post(format!("http://{name}{path}"))
            .config()
            .timeout_global(Some(limit))
            .timeout_connect(Some(connect))
            .timeout_resolve(Some(connect))
            .build()
            .header("Content-Type", "application/json");
        let request = match &self.authorization {
            Some(token) => request.header("Authorization", token),
            None => request,
        };
        let mut answer = request.send(body).map_err(|error| failure(&error))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status();
        let text = answer
            .body_mut()
            .with_config()
            .limit(64 << 10)
            .read_to_vec();
        let refusal: Option<Refusal> = text
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok());
        Err(match refusal {
            Some(refusal) if refusal.code != 0 => EtcdError::Refused {
                code: refusal.code,
                message: printable(if refusal.message.is_empty() {
                    &refusal.error
                } else {
                    &refusal.message
                }),
            },
            _ => EtcdError::NotEtcd {
                reason: format!("HTTP status {status}"),
            },
        })
    }
}

/// gRPC's code of a server that cannot serve now.
const UNAVAILABLE: u32 = 14;

fn not_etcd(error: &serde_json::Error) -> EtcdError {
    EtcdError::NotEtcd {
        reason: error.to_string(),
    }
}

/// The text without control characters, which could change a terminal, and cut.
fn printable(text: &str) -> String {
    let text = text.chars().take(300);
    text.map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn failure(error: &ureq::Error) -> EtcdError {
    use std::io::ErrorKind;
    match error {
        ureq::Error::Timeout(Timeout::Connect | Timeout::Resolve) => EtcdError::Unreachable {
            reason: "no connection came about in time".to_owned(),
        },
        ureq::Error::Timeout(_) => EtcdError::NoAnswer,
        ureq::Error::HostNotFound => EtcdError::Unreachable {
            reason: "no such host".to_owned(),
        },
        ureq::Error::ConnectionFailed => EtcdError::Unreachable {
            reason: "no connection came about".to_owned(),
        },
        ureq::Error::Io(error)
            if matches!(
                error.kind(),
                ErrorKind::ConnectionRefused
                    | ErrorKind::HostUnreachable
                    | ErrorKind::NetworkUnreachable
                    | ErrorKind::AddrNotAvailable
            ) =>
        {
            EtcdError::Unreachable {
                reason: error.kind().to_string(),
            }
        }
        ureq::Error::Io(error) if error.kind() == ErrorKind::TimedOut => EtcdError::NoAnswer,
        ureq::Error::Io(error) => EtcdError::Lost {
            reason: error.to_string(),
        },
        error => EtcdError::NotEtcd {
            reason: printable(&error.to_string()),
        },
    }
}

/// The next line of a stream, of bounded length.
fn line(stream: &mut impl BufRead) -> Result<Vec<u8>, EtcdError> {
    let mut line = Vec::new();
    let read = stream.take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
    read.map_err(|error| failure(&ureq::Error::from(error)))?;
    match line.last() {
        Some(b'\n') => Ok(line),
        _ if line.len() as u64 == LINE_BYTES_MAX => Err(EtcdError::NotEtcd {
            reason: format!("a line of more than {LINE_BYTES_MAX} bytes"),
        }),
        _ => Err(EtcdError::Lost {
            reason: "the stream ended".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_get_etcds_port() {
        for (text, expect) in [
            ("node1", "node1:2379"),
            ("node1:5000", "node1:5000"),
            ("http://node1:5000/", "node1:5000"),
            ("::1", "[::1]:2379"),
            ("[::1]", "[::1]:2379"),
            ("[::1]:5000", "[::1]:5000"),
            (" a , b:1 ,", "a:2379 b:1"),
        ] {
            let endpoints = Endpoints::parse(text).unwrap();
            assert_eq!(endpoints.names().join(" "), expect, "{text}");
        }
    }

    #[test]
    fn endpoints_that_cannot_be_used_are_named() {
        let https = Endpoints::parse("a,https://b:2379").unwrap_err();
        assert_eq!(
            https.to_string(),
            "etcd endpoint `https://b:2379`: https is not supported"
        );
        assert!(https.hint().unwrap().contains("HTTP"));
        for text in ["a:port", "a/b", "a:70000", "user@a", ":2379", "ftp://a"] {
            let error = Endpoints::parse(text).unwrap_err();
            let expected = format!("etcd endpoint `{text}` is malformed, expected HOST[:PORT]");
            assert_eq!(error.to_string(), expected);
        }
        let none = Endpoints::parse(" , ").unwrap_err();
        assert_eq!(none.to_string(), "no etcd endpoint is given");
        let many = vec!["a"; 17].join(",");
        let many = Endpoints::parse(&many).unwrap_err();
        assert!(many.to_string().starts_with("17 etcd endpoints"), "{many}");
    }

    #[test]
    fn who_failed_comes_last_and_who_answered_first() {
        let endpoints = Endpoints::parse("a,b,c").unwrap();
        let order = |endpoints: &Endpoints| -> Vec<usize> {
            endpoints.in_order().map(|(index, _)| index).collect()
        };
        assert_eq!(order(&endpoints), [0, 1, 2]);
        endpoints.blame(0);
        endpoints.blame(0);
        assert_eq!(order(&endpoints), [1, 2, 0]);
        endpoints.clone().praise(2);
        assert_eq!(order(&endpoints), [2, 0, 1]);
    }

    #[test]
    fn lines_are_cut_wherever_reads_end_and_bounded() {
        let mut stream = BufReader::with_capacity(2, &b"one\ntwo\nhalf"[..]);
        assert_eq!(line(&mut stream).unwrap(), b"one\n");
        assert_eq!(line(&mut stream).unwrap(), b"two\n");
        assert!(matches!(line(&mut stream), Err(EtcdError::Lost { .. })));
        let mut endless = BufReader::new(std::io::repeat(b'x'));
        assert!(matches!(line(&mut endless), Err(EtcdError::NotEtcd { .. })));
    }

    #[test]
    fn a_peers_text_cannot_control_a_terminal() {
        assert_eq!(printable("a\x1b[2Jb"), "a?[2Jb");
        assert_eq!(printable(&"x".repeat(1000)).len(), 300);
    }
}
