//! The options of `paceline run` about several nodes, their rendezvous and restarts: torchrun's names and meanings.

use std::fmt;
use std::time::Duration;

use clap::Args;
use paceline_launch::{NotARecovery, Recovery};
use paceline_rendezvous::nodes::{self, NODES_MAX};

use crate::flags::whole;

/// The options about nodes and restarts.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[command(next_help_heading = "Nodes")]
pub struct NodesArgs {
    /// Nodes of the job; run the same command on each of them
    #[arg(id = "nnodes", long = "nnodes", value_name = "N|MIN:MAX", value_parser = Nodes::parse)]
    #[arg(default_value = "1")]
    pub nodes: Nodes,
    /// Number of this node, with --rdzv-backend static
    #[arg(long, value_name = "N", value_parser = whole::<usize>(0..=NODES_MAX as u64 - 1), default_value = "0")]
    pub node_rank: usize,
    /// Host of node 0, with --rdzv-backend static [default on several nodes: MASTER_ADDR; on one: 127.0.0.1]
    #[arg(long, value_name = "HOST")]
    pub master_addr: Option<String>,
    /// Port on that host for the program; the launchers meet at the next one [default on several nodes: MASTER_PORT,
    /// else 29500; on one: a free one]
    #[arg(long, value_name = "PORT", value_parser = whole::<u16>(1..=65_534))]
    pub master_port: Option<u16>,
    /// Address under which the other nodes reach this one [default: found by itself]
    #[arg(long, value_name = "HOST")]
    pub local_addr: Option<String>,
    /// This node alone, whatever a scheduler says, on a free port and with a --rdzv-id of its own
    #[arg(long)]
    pub standalone: bool,
    /// How nodes find each other: static gives each its --node-rank, c10d lets them come and go, etcd too
    #[arg(id = "rdzv_backend", long = "rdzv-backend", value_name = "NAME", value_parser = RdzvBackend::parse)]
    #[arg(default_value = "static", help_heading = "Rendezvous")]
    pub backend: RdzvBackend,
    /// Where the launchers meet: a host that runs one of them [port: 29400, static: the master's plus 1], or etcd's members, with
    /// commas between them [port: 2379]
    #[arg(id = "rdzv_endpoint", long = "rdzv-endpoint", value_name = "HOST[:PORT]", value_parser = endpoint)]
    #[arg(help_heading = "Rendezvous")]
    pub endpoint: Option<String>,
    /// Name of the job, TORCHELASTIC_RUN_ID
    #[arg(id = "rdzv_id", long = "rdzv-id", value_name = "NAME")]
    #[arg(default_value = "none")]
    #[arg(help_heading = "Rendezvous")]
    pub id: String,
    /// Seconds: join_timeout (600), last_call_timeout (5), close_timeout (30), lease (3) after which a silent node is left out,
    /// outage_timeout (60) after which ranks are ended when etcd is away
    #[arg(id = "rdzv_conf", long = "rdzv-conf", value_name = "K=V,...", value_parser = Conf::parse)]
    #[arg(default_value = "", hide_default_value = true)]
    #[arg(help_heading = "Rendezvous")]
    pub conf: Conf,
    /// How often the job is started again after a failed rank, counted over all nodes
    #[arg(long, value_name = "N", value_parser = whole::<u32>(0..=u64::from(u32::MAX)), default_value = "0")]
    #[arg(help_heading = "Failures")]
    pub max_restarts: u32,
    /// When ranks are lost: live has the others go on, if the program can, and on one node replaces the lost ones up to
    /// --max-restarts times (else as restart); restart starts all again up to --max-restarts times; none ends the job; auto is
    /// live without a word where the program cannot
    #[arg(long, value_name = "HOW", value_parser = recovery, default_value = "auto")]
    #[arg(help_heading = "Failures")]
    pub recovery: Recovery,
    /// Role of the ranks, ROLE_NAME
    #[arg(long, value_name = "NAME", default_value = "default")]
    #[arg(help_heading = "Ranks")]
    pub role: String,
}

/// How many nodes: at least, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// At least.
    pub min: usize,
    /// At most.
    pub max: usize,
}

/// How nodes find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdzvBackend {
    /// Each node is given its number.
    Static,
    /// Nodes come and go.
    C10d,
    /// The same, and the launchers meet in etcd.
    Etcd,
}

/// Times of the rendezvous; the launcher's own where none is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conf {
    /// How long the fewest nodes are waited for.
    pub join_timeout: Option<Duration>,
    /// How long more than the fewest are waited for.
    pub last_call: Option<Duration>,
    /// How long a silent node counts as there.
    pub lease: Option<Duration>,
    /// How long nodes wait for one another at the end.
    pub close: Option<Duration>,
    /// How long ranks run on without etcd.
    pub outage: Option<Duration>,
    /// Keys of torchrun's that there is nothing here to set by.
    pub unused: Vec<String>,
}

/// Keys of torchrun's for what is not polled, pickled or chosen here.
const UNUSED: [&str; 6] = [
    "read_timeout",
    "heartbeat_timeout",
    "is_host",
    "store_type",
    "cas_backoff_max_seconds",
    "rank",
];

impl Default for NodesArgs {
    fn default() -> Self {
        Self {
            nodes: Nodes { min: 1, max: 1 },
            node_rank: 0,
            master_addr: None,
            master_port: None,
            standalone: false,
            backend: RdzvBackend::Static,
            endpoint: None,
            id: "none".to_owned(),
            conf: Conf::default(),
            max_restarts: 0,
            recovery: Recovery::default(),
            local_addr: None,
            role: "default".to_owned(),
        }
    }
}

fn recovery(text: &str) -> Result<Recovery, String> {
    text.parse()
        .map_err(|error: NotARecovery| error.to_string())
}

/// As it is written on the command line.
impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.min, self.max) {
            (min, max) if min == max => write!(f, "{max}"),
            (min, max) => write!(f, "{min}:{max}"),
        }
    }
}

impl Nodes {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        nodes::parse(text).map(|(min, max)| Self { min, max })
    }
}

impl RdzvBackend {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "static" => Ok(Self::Static),
            "c10d" => Ok(Self::C10d),
            "etcd" => Ok(Self::Etcd),
            "etcd-v2" => Err(
                "etcd's API v2 is not spoken, and etcd 3.4 and later have it off; `etcd` speaks its API v3".to_owned(),
            ),
            _ => Err("expected static, c10d or etcd".to_owned()),
        }
    }
}

impl Conf {
    /// `KEY=VALUE,...` with torchrun's keys, as far as there is something for them to set.
    fn parse(text: &str) -> Result<Self, String> {
        let mut conf = Self::default();
        let (mut interval, mut attempts) = (5.0, 3.0);
        let mut has_lease = false;
        for entry in text.split(',').filter(|entry| !entry.trim().is_empty()) {
            let (key, value) = entry
                .split_once('=')
                .ok_or_else(|| format!("expected KEY=VALUE, got {entry:?}"))?;
            if UNUSED.contains(&key.trim()) {
                conf.unused.push(key.trim().to_owned());
                continue;
            }
            let number: f64 = value
                .trim()
                .parse()
                .ok()
                .filter(|number| (0.01..=1e6).contains(number))
                .ok_or_else(|| format!("{key} is {value:?}, expected a number above 0"))?;
            let seconds = Some(Duration::from_secs_f64(number));
            match key.trim() {
                "join_timeout" | "timeout" => conf.join_timeout = seconds,
                "last_call_timeout" => conf.last_call = seconds,
                "close_timeout" => conf.close = seconds,
                "outage_timeout" => conf.outage = seconds,
                "lease" => conf.lease = seconds,
                "keep_alive_interval" => (interval, has_lease) = (number, true),
                "keep_alive_max_attempt" => (attempts, has_lease) = (number, true),
                _ => {
                    return Err(format!(
                        "{key:?} sets nothing here, expected join_timeout, last_call_timeout, close_timeout, outage_timeout, lease, or \
                         keep_alive_interval and keep_alive_max_attempt, whose product is the lease"
                    ));
                }
            }
        }
        if has_lease && conf.lease.is_none() {
            conf.lease = Some(Duration::from_secs_f64(interval * attempts));
        }
        Ok(conf)
    }
}

/// A host, or a host and a port.
fn endpoint(text: &str) -> Result<String, String> {
    let port = match text.rsplit_once(':') {
        // An IPv6 address has colons of its own, unless it stands in brackets.
        Some((host, _)) if host.contains(':') && !host.ends_with(']') => None,
        Some((_, port)) => Some(port),
        None => None,
    };
    let is_port = |port: &str| port.parse::<u16>().is_ok();
    let has_host = !text.is_empty() && !text.starts_with(':');
    if has_host && port.is_none_or(is_port) && !text.contains("://") {
        return Ok(text.to_owned());
    }
    Err("expected HOST or HOST:PORT, such as node1:29400".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_a_number_or_a_range() {
        for (text, expect) in [("3", Some((3, 3))), ("1:4", Some((1, 4))), ("4:1", None)] {
            let nodes = Nodes::parse(text).ok().map(|nodes| (nodes.min, nodes.max));
            assert_eq!(nodes, expect, "{text}");
        }
        for text in ["0", "0:2", "a", "1:", "2000"] {
            assert!(Nodes::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_endpoint_is_a_host_with_or_without_a_port() {
        for text in [
            "node1",
            "node1:29400",
            "10.0.0.1:0",
            "[::1]:29400",
            "fe80::1",
            "[::1]",
        ] {
            assert_eq!(endpoint(text), Ok(text.to_owned()));
        }
        for text in [
            "",
            ":29400",
            "node1:",
            "node1:port",
            "node1:99999",
            "tcp://node1:29400",
        ] {
            assert!(endpoint(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_lease_is_given_or_torchruns_product() {
        let lease = |text| Conf::parse(text).map(|conf| conf.lease);
        assert_eq!(lease(""), Ok(None));
        assert_eq!(lease("lease=1.5"), Ok(Some(Duration::from_millis(1500))));
        assert_eq!(
            lease("keep_alive_interval=2"),
            Ok(Some(Duration::from_secs(6)))
        );
        let both = lease("lease=1,join_timeout=60,keep_alive_max_attempt=9");
        assert_eq!(both, Ok(Some(Duration::from_secs(1))));
    }

    #[test]
    fn etcd_is_its_third_version() {
        assert_eq!(RdzvBackend::parse("etcd"), Ok(RdzvBackend::Etcd));
        let refused = RdzvBackend::parse("etcd-v2").unwrap_err();
        assert!(refused.contains("API v3"), "{refused}");
        let conf = Conf::parse("outage_timeout=120").expect("understood");
        assert_eq!(conf.outage, Some(Duration::from_secs(120)));
    }

    #[test]
    fn a_key_of_torchruns_without_a_use_is_remembered_for_a_warning() {
        let conf = Conf::parse("is_host=true,close_timeout=9").expect("understood");
        assert_eq!(conf.unused, ["is_host"]);
        assert_eq!(conf.close, Some(Duration::from_secs(9)));
    }

    #[test]
    fn a_key_that_sets_nothing_is_refused() {
        for text in ["linger=60", "lease", "lease=x", "lease=0"] {
            assert!(Conf::parse(text).is_err(), "{text}");
        }
    }
}
