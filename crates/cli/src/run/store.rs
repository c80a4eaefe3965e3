//! `paceline store-server`: a store for the launchers of a job whose nodes all may go, outside of these nodes. Started by the driver of a
//! Ray job.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};

use paceline_launch::shared_token;
use paceline_rendezvous::env;
use paceline_rendezvous::store::{Server, ServerOptions};

use crate::exit::{Exit, Failure};
use crate::job;

/// The command's name.
pub(crate) const NAME: &str = "store-server";

/// The command as clap knows it.
pub(crate) fn command() -> clap::Command {
    clap::Command::new(NAME)
        .about("Host a store for the launchers of a job; started by the driver of `paceline submit ray`")
        .hide(true)
}

/// Prints the store's port, and serves until standard input ends.
///
/// *Errors*: no token, or no port.
pub(crate) fn serve() -> Result<Exit, Failure> {
    let token = shared_token().map_err(job::refused)?;
    let tls = env::asks_for_tls(&|name| std::env::var(name).ok());
    let options = ServerOptions {
        tls: tls.map_err(Failure::usage)?,
        ..ServerOptions::default()
    };
    let everywhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let server = Server::bind_with(everywhere, &token, options).map_err(Failure::environment)?;
    let mut out = io::stdout();
    let told = writeln!(out, "{}", server.addr().port()).and_then(|()| out.flush());
    if told.is_ok() {
        // Nothing is expected: it ends when its other side does.
        let _ = io::stdin().read(&mut [0]);
    }
    Ok(Exit::Done)
}
