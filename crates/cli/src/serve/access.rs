//! Who may see the pages: this machine, or who has the token.

use std::net::{IpAddr, SocketAddr};

use paceline_rendezvous::token::{Token, TokenError};

use crate::http::{Answer, Request};

/// The name of the token in an address.
const PARAMETER: &str = "token";

/// Which requests are answered.
pub(super) enum Access {
    /// Those from this machine, and to it: a page of the web that a browser here shows could have its own name lead here.
    Loopback,
    /// Those with the token, which a cookie of this name keeps. Browsers give cookies to all ports of a host.
    Token(Token, String),
}

impl Access {
    /// For a server at this address.
    ///
    /// *Errors*: the system has no random numbers.
    pub(super) fn of(address: SocketAddr) -> Result<Self, TokenError> {
        match address.ip().is_loopback() {
            true => Ok(Self::Loopback),
            false => {
                let cookie = format!("paceline_token_{}", address.port());
                Token::generate().map(|token| Self::Token(token, cookie))
            }
        }
    }

    /// The address for a browser.
    pub(super) fn url(&self, address: SocketAddr) -> String {
        match self {
            Self::Loopback => format!("http://{address}/"),
            Self::Token(token, _) => {
                let host = match address.ip().is_unspecified() {
                    true => format!("{}:{}", hostname(), address.port()),
                    false => address.to_string(),
                };
                format!("http://{host}/?{PARAMETER}={}", token.to_hex())
            }
        }
    }

    /// The answer to a request that gets no page. The token of an address goes into a cookie, so that it is not on the screen.
    pub(super) fn refusal(&self, request: &Request<'_>) -> Option<Answer> {
        match self {
            Self::Loopback => {
                let is_here = request.header("Host").is_none_or(is_loopback);
                let text = "this server is for its own machine: use 127.0.0.1 or localhost";
                (!is_here).then(|| Answer::text("403 Forbidden", text))
            }
            Self::Token(token, name) => {
                let is_it = |text: &str| Token::from_hex(text).is_ok_and(|own| own == *token);
                if request.parameter(PARAMETER).is_some_and(is_it) {
                    let token = token.to_hex();
                    let cookie = format!("{name}={token}; Path=/; HttpOnly; SameSite=Lax");
                    let answer = Answer::text("303 See Other", "the token is kept in a cookie");
                    // The path alone could begin with two slashes, which would lead to another server.
                    let path = format!("/{}", request.path.trim_start_matches('/'));
                    return Some(answer.with("Location", &path).with("Set-Cookie", &cookie));
                }
                let cookies = request.header("Cookie").unwrap_or_default();
                let mut cookies = cookies
                    .split(';')
                    .filter_map(|pair| pair.trim().split_once('='));
                let is_known = cookies.any(|(other, value)| other == name && is_it(value));
                let text = "the token is missing or wrong: open the address that `paceline serve` has printed";
                (!is_known).then(|| Answer::text("401 Unauthorized", text))
            }
        }
    }
}

/// This machine's name, for other machines.
fn hostname() -> String {
    let system = rustix::system::uname();
    system.nodename().to_string_lossy().into_owned()
}

/// Whether a `Host` header names this machine.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let address = name.parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_this_machine_are_its_own() {
        for host in [
            "localhost",
            "localhost:6500",
            "127.0.0.1:6500",
            "[::1]:6500",
            "[::1]",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            "example.org",
            "127.0.0.1.example.org:6500",
            "10.0.0.5",
            "localhost.x",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
