//! `paceline host-agent`: the launcher of one host of a job, started over ssh by `paceline run --hosts` and told by it what to do.
//!
//! It reads lines and bytes on standard input: what to check, then the job's token and this node's place, then signals. The end of
//! its input ends the job here, so that nothing outlives the other side or the connection.

use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use paceline_launch::{ENDS, READY, mark_lines};
use paceline_rendezvous::token::Token;
use paceline_rendezvous::wait::wait_for;
use rustix::event::PollFlags;
use rustix::process::Signal;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::args::RunArgs;
use super::nodes::Nodes;
use super::start::{finished, prepared, several_nodes};
use crate::exit::{Exit, Failure};
use crate::job;

/// The command's name.
pub(crate) const NAME: &str = "host-agent";

/// The version of both sides.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// sshd says in it both addresses of the connection, each with its port.
pub(super) const SSH_CONNECTION: &str = "SSH_CONNECTION";

/// A longer line is refused; arguments of a program have less than that together.
const LINE_BYTES_MAX: usize = 8 << 20;
/// How long the other side may be silent before the job begins: longer than it waits for the slowest host.
const SILENT_MAX: Duration = Duration::from_secs(120);

/// The version of the other side, which is compared before anything else is read.
#[derive(Debug, Deserialize)]
struct Version {
    version: String,
}

/// What a host is to check.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Check {
    /// That of the side that asks.
    pub(super) version: String,
    /// Where the program runs.
    pub(super) folder: String,
    /// Variables for the launcher and its ranks.
    pub(super) variables: Vec<(String, String)>,
    /// Options, the program and its arguments.
    pub(super) words: Vec<String>,
}

/// The answer of a host where all is well.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ready {
    /// How many ranks it starts.
    pub(super) ranks: usize,
    /// The value of [`SSH_CONNECTION`].
    pub(super) connection: Option<String>,
    /// A free port, of which the next one is free too.
    pub(super) port: Option<u16>,
}

/// The start. It comes this way because command lines and, to a lesser degree, environments can be seen by others.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) token: String,
    pub(super) nodes: usize,
    pub(super) node_rank: usize,
    pub(super) master_addr: String,
    pub(super) master_port: u16,
}

/// The command as clap knows it. Without a program it reads what to check, and becomes the command with one.
pub(crate) fn command() -> clap::Command {
    super::command()
        .name(NAME)
        .about("Be the launcher of one host; started by `paceline run --hosts`")
        .hide(true)
}

/// Reads what to check, and becomes the launcher that does it.
///
/// *Errors*: the other side has another version, or this machine has no such folder.
pub(crate) fn begin() -> Result<Exit, Failure> {
    let Some(line) = read_line()? else {
        return Ok(Exit::Done);
    };
    let Version { version } = parsed(&line)?;
    if version != VERSION {
        let hint = "install the same version on all hosts";
        let message = format!(
            "paceline is version {VERSION} here, and version {version} where the job is started"
        );
        return Err(Failure::new(Exit::Environment, message, Some(hint.into())));
    }
    let check: Check = parsed(&line)?;
    std::env::set_current_dir(&check.folder).map_err(|error| {
        let hint =
            "the job runs in the folder where it is started: make it on every host, or share it";
        let message = format!("the folder {} cannot be entered: {error}", check.folder);
        Failure::new(Exit::Environment, message, Some(hint.into()))
    })?;
    let error = Command::new(job::own_program()?)
        .arg(NAME)
        .args(check.words)
        .envs(check.variables)
        .env("PWD", check.folder)
        .exec();
    Err(Failure::environment(format!(
        "the launcher cannot be started: {error}"
    )))
}

/// Checks, says that all is well, waits for the start, and is this node's launcher until the job is over.
///
/// *Errors*: the job cannot run here.
pub(crate) fn serve(args: &RunArgs) -> Result<Exit, Failure> {
    mark_lines();
    // The other side has said those of the options.
    let args = &RunArgs {
        warnings: Vec::new(),
        ..args.clone()
    };
    let mut job = prepared(args, true)?;
    let plan = job.plan().map_err(job::refused)?;
    let ready = Ready {
        ranks: plan.nproc,
        connection: std::env::var(SSH_CONNECTION).ok(),
        port: free_ports(),
    };
    say(READY, &serde_json::to_string(&ready).unwrap_or_default());
    let Some(line) = read_line()? else {
        return Ok(Exit::Done);
    };
    let order: Order = parsed(&line)?;
    // Reads until this process ends: nobody waits for it.
    let listen = std::thread::Builder::new().name("agent/orders".into());
    listen
        .spawn(obey)
        .map_err(|error| Failure::environment(format!("no thread can be started: {error}")))?;
    let ended = token(&order.token).and_then(|token| {
        let args = placed(args, &order);
        several_nodes(&mut job, &args, None, Some(token))?;
        finished(job, &args, true)
    });
    // Said here, so that the code comes last.
    let exit = ended.unwrap_or_else(|failure| failure.report());
    say(ENDS, &exit.code().to_string());
    Ok(exit)
}

fn token(hex: &str) -> Result<Token, Failure> {
    Token::from_hex(hex).map_err(|error| Failure::usage(format!("not an order: {error}")))
}

/// The arguments with this node's place. One host is a job of its own.
fn placed(args: &RunArgs, order: &Order) -> RunArgs {
    let mut args = args.clone();
    let (min, max) = (order.nodes, order.nodes);
    args.given.nodes = true;
    args.nodes.nodes = Nodes { min, max };
    args.nodes.node_rank = order.node_rank;
    if max == 1 {
        args.nodes.standalone = true;
    } else {
        args.nodes.master_addr = Some(order.master_addr.clone());
        args.nodes.master_port = Some(order.master_port);
    }
    args
}

/// Two free ports in a row: for the program, and for the launchers.
fn free_ports() -> Option<u16> {
    let bind = |port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).ok();
    let pair = |_| {
        let first = bind(0)?;
        let port = first.local_addr().ok()?.port();
        bind(port.checked_add(1)?).map(|_| port)
    };
    (0..32).find_map(pair)
}

/// Passes signals on to this process; SIGTERM when the other side is gone.
fn obey() {
    let process = rustix::process::getpid();
    loop {
        let mut byte = [0];
        let signal = match rustix::io::read(io::stdin(), &mut byte) {
            Ok(1) => Signal::from_named_raw(byte[0].into()),
            Err(rustix::io::Errno::INTR) => None,
            _ => {
                let _ = rustix::process::kill_process(process, Signal::TERM);
                return;
            }
        };
        if let Some(signal) = signal {
            let _ = rustix::process::kill_process(process, signal);
        }
    }
}

/// A line of standard input; none if that ends. Nothing behind it is read, as a program that this one becomes reads on.
///
/// *Errors*: it does not come, or has no end.
fn read_line() -> Result<Option<Vec<u8>>, Failure> {
    let stdin = io::stdin();
    let deadline = Instant::now() + SILENT_MAX;
    let silent = || Failure::new(Exit::Deadline, "no order has come", None);
    let mut line = Vec::new();
    while line.len() < LINE_BYTES_MAX {
        let mut byte = [0];
        let has_come = wait_for(stdin.as_fd(), PollFlags::IN, deadline);
        if !has_come.map_err(|_| silent())? {
            return Err(silent());
        }
        match rustix::io::read(&stdin, &mut byte) {
            Ok(1) if byte == *b"\n" => return Ok(Some(line)),
            Ok(1) => line.push(byte[0]),
            Err(rustix::io::Errno::INTR) => {}
            _ => return Ok(None),
        }
    }
    Err(Failure::usage("an order without an end"))
}

fn parsed<T: DeserializeOwned>(line: &[u8]) -> Result<T, Failure> {
    let hint = "`paceline run --hosts` gives this command its orders";
    serde_json::from_slice(line).map_err(|error| {
        Failure::new(
            Exit::Usage,
            format!("not an order: {error}"),
            Some(hint.to_owned()),
        )
    })
}

/// A line for the other side. If it is gone, this process is about to hear it.
fn say(what: &str, text: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{what}{text}").and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_of_a_host_is_that_of_run_with_a_place() {
        let matches =
            command().get_matches_from(["host-agent", "--max-restarts", "2", "prog", "--x"]);
        let args = super::super::read(&matches).expect("a program");
        let order = |nodes| Order {
            token: String::new(),
            nodes,
            node_rank: nodes - 1,
            master_addr: "a".into(),
            master_port: 5,
        };
        let alone = placed(&args, &order(1)).nodes;
        assert!(alone.standalone && alone.master_addr.is_none(), "{alone:?}");
        let placed = placed(&args, &order(2));
        assert_eq!((placed.nodes.max_restarts, placed.nodes.node_rank), (2, 1));
        assert_eq!(placed.nodes.nodes, Nodes { min: 2, max: 2 });
        assert_eq!(placed.nodes.master_addr.as_deref(), Some("a"));
    }

    #[test]
    fn two_ports_in_a_row_are_free() {
        let port = free_ports().expect("ports");
        assert!(port < u16::MAX);
    }
}
