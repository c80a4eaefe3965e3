//! How nodes meet before a job: in a store at the endpoint, which one of them hosts, and which everybody leaves together.
//!
//! | key, after `doctor/1/` | set by | says |
//! |---|---|---|
//! | `host` | the node with the store, number 0 | that this is a doctor's meeting and no job's store |
//! | `come` | the others add 1, unless they are numbered | their number |
//! | `owner/N` | whoever takes number N first | its id |
//! | `card/N` | node N | who it is |
//! | `roster` | node 0, when all have come or time is up | the numbers of the nodes that take part |
//! | `row/N` | node N | whom it reaches |
//! | `over` | node 0, when it has all rows or time is up | no node is probed any more |
//! | `bye/N` | node N | that it needs the store no longer |
//!
//! Every wait has a deadline, and node 0 alone decides which nodes take part: all others learn it from `roster`.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use paceline_rendezvous::endpoint;
use paceline_rendezvous::store::{Client, Server, ServerOptions, Store as _, StoreError};
use paceline_words::{Text, count, say};

use super::card::{ADDRESSES_MAX, Card, Row};
use super::not_met::{self, NotMet};
use super::probe::{Listener, Speech, Target, reach};
use super::{Nodes, Outcome};
use crate::error::DoctorError;
use crate::finding::{Finding, Severity};
use crate::local::Summary;
use crate::options::Options;

/// What came of meeting.
#[derive(Debug)]
pub(crate) enum Met {
    /// The nodes that came.
    Nodes(Nodes),
    /// They did not meet; whether because time was up.
    Not { finding: Finding, is_late: bool },
}

const PREFIX: &str = "doctor/1/";
/// A doctor's meeting says what it is as soon as it listens.
const HOST_TIMEOUT: Duration = Duration::from_secs(10);
/// What the others wait longer than node 0, which has to tell them.
const SLACK: Duration = Duration::from_secs(5);
/// For trying out all connections.
const PROBES_TIMEOUT: Duration = Duration::from_secs(60);
/// For everybody to read what there is.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Nodes that a node tries to reach at a time.
const PROBES_AT_ONCE: usize = 4;
/// With more nodes only node 0 reads everybody's row.
const ROWS_FOR_ALL_MAX: usize = 64;
/// Between two messages about missing nodes.
const NOTICE_EVERY: Duration = Duration::from_secs(10);
const FINDINGS_MAX: usize = 32;

/// Why a meeting ends early.
enum End {
    Cannot(DoctorError),
    NotMet(NotMet),
}

impl From<StoreError> for End {
    fn from(error: StoreError) -> Self {
        Self::NotMet(NotMet::Store(error))
    }
}

/// Meets the other nodes of the job, and tries out all connections with them. `told` is what this node found on itself, in English
/// and Korean.
///
/// *Blocks*: for `options.timeout` at most until all have come, and about a minute more.
pub(crate) fn meet(
    options: &Options,
    speech: &Speech,
    host: &str,
    summary: &Summary,
    told: &[Vec<Finding>; 2],
    notice: &dyn Fn(&str),
) -> Result<Met, DoctorError> {
    let endpoint = endpoint::with_port(&options.endpoint);
    let meeting = Meeting {
        options,
        speech,
        host,
        endpoint: &endpoint,
        notice,
    };
    match meeting.hold(summary, told) {
        Ok(nodes) => Ok(Met::Nodes(nodes)),
        Err(End::Cannot(error)) => Err(error),
        Err(End::NotMet(trouble)) => Ok(Met::Not {
            is_late: trouble.is_late(),
            finding: not_met::judge(&trouble, &endpoint, options.nodes_max, options.lang),
        }),
    }
}

struct Meeting<'a> {
    options: &'a Options,
    speech: &'a Speech,
    host: &'a str,
    endpoint: &'a str,
    notice: &'a dyn Fn(&str),
}

impl Meeting<'_> {
    fn hold(&self, summary: &Summary, told: &[Vec<Finding>; 2]) -> Result<Nodes, End> {
        let server = self.serve()?;
        let id = RandomState::new().hash_one(std::process::id());
        let first = (self.options.local_addr.clone())
            .unwrap_or_else(|| endpoint::own_addr(self.endpoint, server.is_some()));
        let listener = Listener::start(endpoint::everywhere(&first), self.speech, id)
            .map_err(DoctorError::system("listen at a free port"))
            .map_err(End::Cannot)?;

        let (lang, endpoint) = (self.options.lang, self.endpoint);
        let others = self.options.nodes_max - 1;
        let others = count(lang, others, "other node", "다른 노드");
        (self.notice)(&say!(
            lang,
            "meeting {others} at {endpoint} ...",
            "{endpoint}에서 {others}를 기다리는 중 ..."
        ));
        let client = self.enter(server.as_ref())?;
        let met_at = Instant::now();
        let card = self.card(id, first, listener.port(), summary, told);
        let me = self.number(&client, server.is_some(), id)?;
        client.set(&key(&format!("card/{me}")), &card.encode())?;

        let roster = match me {
            0 => self.gather(&client, met_at)?,
            _ => self.roster(&client, me)?,
        };
        let cards = self.cards(&client, &roster)?;
        let row = probe_all(me, &cards, self.speech);
        client.set(&key(&format!("row/{me}")), &row.encode())?;
        let rows = self.rows(&client, me, &roster, row)?;
        drop(listener);
        self.leave(&client, me, &roster, server.is_some());
        Ok(Nodes {
            min: self.options.nodes_min,
            expected: self.options.nodes_max,
            me,
            cards,
            rows,
            turned_away: server.as_ref().map_or(0, Server::refused),
        })
    }

    fn serve(&self) -> Result<Option<Server>, End> {
        let serve = |addr: SocketAddr| {
            let options = ServerOptions {
                tls: self.speech.tls,
                ..ServerOptions::default()
            };
            Server::bind_with(addr, &self.speech.token, options)
        };
        Ok(endpoint::host(
            self.endpoint,
            self.options.node_rank,
            &serve,
        )?)
    }

    /// A connection to the meeting, and the certainty that it is one.
    fn enter(&self, server: Option<&Server>) -> Result<Client, End> {
        let Speech { token, tls } = self.speech;
        // The host reaches its own store whatever the endpoint's name leads to.
        let near = server.map(|server| {
            let addr = server.addr();
            match addr.ip().is_unspecified() {
                true => SocketAddr::from((Ipv4Addr::LOCALHOST, addr.port())).to_string(),
                false => addr.to_string(),
            }
        });
        let at = near.as_deref().unwrap_or(self.endpoint);
        let client = Client::connect_as(at, token, *tls, self.options.timeout)?;
        if server.is_some() {
            client.set(&key("host"), self.host.as_bytes())?;
        } else if let Err(error) = client.wait(&[&key("host")], HOST_TIMEOUT) {
            return Err(match error {
                StoreError::TimedOut { .. } => End::NotMet(NotMet::NotADoctor),
                error => error.into(),
            });
        }
        Ok(client)
    }

    fn number(&self, client: &Client, is_host: bool, id: u64) -> Result<usize, End> {
        let number = match (self.options.node_rank, is_host) {
            (Some(number), _) => number,
            (None, true) => 0,
            (None, false) => usize::try_from(client.add(&key("come"), 1)?).unwrap_or(usize::MAX),
        };
        if number >= self.options.nodes_max {
            return Err(End::NotMet(NotMet::TooMany));
        }
        let id = id.to_string();
        let owner = client.compare_set(&key(&format!("owner/{number}")), b"", id.as_bytes())?;
        match owner == id.as_bytes() {
            true => Ok(number),
            false => Err(End::NotMet(NotMet::Twice(number))),
        }
    }

    fn card(
        &self,
        id: u64,
        first: String,
        port: u16,
        summary: &Summary,
        told: &[Vec<Finding>; 2],
    ) -> Card {
        let own = summary.addrs.iter().map(ToString::to_string);
        let mut addrs = vec![first];
        // A meeting on the loopback address is one of this machine: no other address is used.
        if !endpoint::everywhere(&addrs[0]).ip().is_loopback() {
            for addr in own {
                if !addrs.contains(&addr) {
                    addrs.push(addr);
                }
            }
        }
        addrs.truncate(ADDRESSES_MAX);
        let [findings, korean] = told.each_ref().map(|findings| {
            let findings = findings.iter();
            let weighty = findings.filter(|finding| finding.severity != Severity::Note);
            weighty.take(FINDINGS_MAX).cloned().collect()
        });
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        Card {
            id,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            host: self.host.to_owned(),
            boot: boot.unwrap_or_default().trim().to_owned(),
            addrs,
            port,
            kernel: summary.kernel.clone(),
            arch: summary.arch.clone(),
            cores: summary.cores,
            memory_bytes: summary.memory_bytes,
            files: summary.files,
            ranks: self.options.ranks,
            firewall: summary.firewall.map(str::to_owned),
            ports: summary.ports,
            findings,
            korean,
        }
    }

    /// Waits for all nodes, and says which take part.
    fn gather(&self, client: &Client, met_at: Instant) -> Result<Vec<usize>, End> {
        let deadline = met_at + self.options.timeout;
        let mut here: Vec<usize> = vec![0];
        let mut missing: Vec<usize> = (1..self.options.nodes_max).collect();
        while !missing.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let keys = missing.iter().map(|node| key(&format!("card/{node}")));
            let keys: Vec<String> = keys.collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let outcome = client.wait(&keys, left.min(NOTICE_EVERY));
            match outcome {
                Ok(()) | Err(StoreError::TimedOut { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            let mut still = Vec::new();
            for node in missing {
                match client.check(&[&key(&format!("card/{node}"))])? {
                    true => here.push(node),
                    false => still.push(node),
                }
            }
            missing = still;
            if left.is_zero() {
                break;
            }
            if !missing.is_empty() {
                let left = deadline.saturating_duration_since(Instant::now());
                let (come, all, left) = (here.len(), self.options.nodes_max, left.as_secs_f64());
                (self.notice)(&say!(
                    self.options.lang,
                    "{come} of {all} nodes are here, waiting {left:.0} s more",
                    "노드 {all}개 중 {come}개가 왔고 {left:.0}초 더 기다림"
                ));
            }
        }
        here.sort_unstable();
        let text: Vec<String> = here.iter().map(usize::to_string).collect();
        client.set(&key("roster"), text.join(" ").as_bytes())?;
        Ok(here)
    }

    fn roster(&self, client: &Client, me: usize) -> Result<Vec<usize>, End> {
        let text = client.get(&key("roster"), self.options.timeout + SLACK)?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let number = |word: &str| {
            let node = word.parse().ok();
            node.filter(|node| *node < self.options.nodes_max)
        };
        let roster: Option<Vec<usize>> = text.split_whitespace().map(number).collect();
        match roster {
            Some(roster) if roster.contains(&me) => Ok(roster),
            Some(_) => Err(End::NotMet(NotMet::TooLate)),
            None => Err(End::NotMet(NotMet::Odd(Text::new(|lang| {
                say!(
                    lang,
                    "the list of nodes makes no sense, as if another number of nodes had been asked for there",
                    "노드 목록이 맞지 않음. 다른 --nnodes로 시작한 노드가 있는 것으로 보임"
                )
            })))),
        }
    }

    fn cards(&self, client: &Client, roster: &[usize]) -> Result<BTreeMap<usize, Card>, End> {
        let mut cards = BTreeMap::new();
        for node in roster {
            let bytes = client.get(&key(&format!("card/{node}")), SLACK)?;
            let card = Card::decode(&bytes).map_err(|error| {
                let said =
                    Text::new(|lang| say!(lang, "node {node}: {error}", "노드 {node}: {error}"));
                End::NotMet(NotMet::Odd(said))
            })?;
            cards.insert(*node, card);
        }
        Ok(cards)
    }

    /// The rows of all nodes that come in time; then no node is probed any more.
    fn rows(
        &self,
        client: &Client,
        me: usize,
        roster: &[usize],
        own: Row,
    ) -> Result<BTreeMap<usize, Row>, End> {
        if me != 0 {
            match client.wait(&[&key("over")], PROBES_TIMEOUT + 2 * SLACK) {
                Ok(()) | Err(StoreError::TimedOut { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let deadline = match me {
            0 => Instant::now() + PROBES_TIMEOUT + SLACK,
            _ => Instant::now(),
        };
        let mut rows = BTreeMap::from([(me, own)]);
        let others = roster.iter().filter(|node| **node != me);
        if me == 0 || roster.len() <= ROWS_FOR_ALL_MAX {
            for node in others {
                let left = deadline.saturating_duration_since(Instant::now());
                match client.get(&key(&format!("row/{node}")), left) {
                    Ok(bytes) => rows.extend(Row::decode(&bytes).ok().map(|row| (*node, row))),
                    Err(StoreError::TimedOut { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        if me == 0 {
            client.set(&key("over"), b"")?;
        }
        Ok(rows)
    }

    /// The host stays until all have read what they need. What fails here no longer changes the report.
    fn leave(&self, client: &Client, me: usize, roster: &[usize], is_host: bool) {
        let _ = client.set(&key(&format!("bye/{me}")), b"");
        if is_host {
            let keys = roster.iter().map(|node| key(&format!("bye/{node}")));
            let keys: Vec<String> = keys.collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let _ = client.wait(&keys, LEAVE_TIMEOUT);
        }
    }
}

fn key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// Tries all other nodes, each node beginning with the one behind it, so that not all try the same one at once.
fn probe_all(me: usize, cards: &BTreeMap<usize, Card>, speech: &Speech) -> Row {
    let deadline = Instant::now() + PROBES_TIMEOUT;
    let target = |(node, card): (&usize, &Card)| Target {
        node: *node,
        id: card.id,
        addrs: card.addrs.clone(),
        port: card.port,
    };
    let behind = cards.range(me + 1..).chain(cards.range(..me));
    let targets: Vec<Target> = behind.map(target).collect();
    let next = AtomicUsize::new(0);
    let reaches = Mutex::new(Vec::new());
    let work = || {
        while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
            let found = reach(target, speech, deadline);
            reaches
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .extend(found);
        }
    };
    thread::scope(|scope| {
        for number in 1..PROBES_AT_ONCE.min(targets.len()) {
            let name = format!("doctor/probe{number}");
            // Fewer do it as well, only later.
            let _ = thread::Builder::new().name(name).spawn_scoped(scope, work);
        }
        work();
    });
    let mut reaches = reaches
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    // Stable: the addresses of a node stay in their order.
    reaches.sort_by_key(|reach| reach.to);
    Row { reaches }
}

/// Whether any attempt worked.
pub(crate) fn is_reached(row: &Row, node: usize) -> bool {
    row.to(node)
        .any(|reach| matches!(reach.outcome, Outcome::Reached(_)))
}
