//! The options of `paceline run` about several nodes, their rendezvous and restarts: torchrun's names and meanings.

use std::time::Duration;

use clap::{ArgMatches, value_parser};

/// What the command line says about nodes and restarts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodesArgs {
    /// Fewest and most nodes.
    pub(crate) nodes: Nodes,
    /// Number of this node; static only.
    pub(crate) node_rank: usize,
    /// Host of node 0; static only.
    pub(crate) master_addr: Option<String>,
    /// Port on that host for the program; static only.
    pub(crate) master_port: Option<u16>,
    /// How the nodes find each other.
    pub(crate) backend: Backend,
    /// Where the launchers meet.
    pub(crate) endpoint: Option<String>,
    /// The job's name.
    pub(crate) id: String,
    /// Times of the rendezvous.
    pub(crate) conf: Conf,
    /// Restarts of the whole job.
    pub(crate) max_restarts: u32,
    /// Address of this node for the others.
    pub(crate) local_addr: Option<String>,
    /// Role of the ranks.
    pub(crate) role: String,
}

/// How many nodes: at least, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Nodes {
    pub(crate) min: usize,
    pub(crate) max: usize,
}

/// How nodes find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    /// Each node is given its number.
    Static,
    /// Nodes come and go.
    Elastic,
}

/// Times of the rendezvous; the launcher's own where none is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Conf {
    pub(crate) join_timeout: Option<Duration>,
    pub(crate) last_call: Option<Duration>,
    pub(crate) lease: Option<Duration>,
    pub(crate) close: Option<Duration>,
    /// Keys of torchrun's that there is nothing here to set by.
    pub(crate) unused: Vec<String>,
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
            backend: Backend::Static,
            endpoint: None,
            id: "none".to_owned(),
            conf: Conf::default(),
            max_restarts: 0,
            local_addr: None,
            role: "default".to_owned(),
        }
    }
}

const NODES_MAX: usize = 1024;

impl Nodes {
    fn parse(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            let number = text.parse().ok();
            number.filter(|nodes| (1..=NODES_MAX).contains(nodes))
        };
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        match (number(min), number(max)) {
            (Some(min), Some(max)) if min <= max => Ok(Self { min, max }),
            _ => Err(format!(
                "expected N or MIN:MAX, whole numbers from 1 to {NODES_MAX}"
            )),
        }
    }
}

impl Backend {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "static" => Ok(Self::Static),
            "c10d" => Ok(Self::Elastic),
            _ => Err("expected static or c10d".to_owned()),
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
                "lease" => conf.lease = seconds,
                "keep_alive_interval" => (interval, has_lease) = (number, true),
                "keep_alive_max_attempt" => (attempts, has_lease) = (number, true),
                _ => {
                    return Err(format!(
                        "{key:?} sets nothing here, expected join_timeout, last_call_timeout, close_timeout, lease, or \
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

pub(super) fn add_to(command: clap::Command) -> clap::Command {
    let seconds = |text: &str| match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 => Ok(seconds),
        _ => Err("expected seconds above 0"),
    };
    command
        .arg(
            super::valued("nnodes", "N|MIN:MAX", Nodes::parse)
                .default_value("1")
                .help("Nodes of the job; run the same command on each of them"),
        )
        .arg(
            super::valued("rdzv_backend", "NAME", Backend::parse)
                .default_value("static")
                .help(
                    "How nodes find each other: static gives each its --node-rank, c10d lets them come and go",
                ),
        )
        .arg(
            super::valued("rdzv_endpoint", "HOST[:PORT]", value_parser!(String)).help(
                "Where the launchers meet: a host that runs one of them [port: 29400, static: the master's plus 1]",
            ),
        )
        .arg(
            super::valued("rdzv_id", "NAME", value_parser!(String))
                .default_value("none")
                .help("Name of the job, TORCHELASTIC_RUN_ID"),
        )
        .arg(
            super::valued("rdzv_conf", "K=V,...", Conf::parse)
                .default_value("")
                .hide_default_value(true)
                .help(
                    "Seconds: join_timeout (600), last_call_timeout (5), close_timeout (30), lease (3) after which a silent node is left out",
                ),
        )
        .arg(
            super::valued("node_rank", "N", value_parser!(u64).range(0..NODES_MAX as u64))
                .default_value("0")
                .help("Number of this node, with static"),
        )
        .arg(
            super::valued("master_addr", "HOST", value_parser!(String))
                .help("Host of node 0, with static [default: 127.0.0.1]"),
        )
        .arg(
            super::valued("master_port", "PORT", value_parser!(u16).range(1..=65_534)).help(
                "Port on that host for the program; the launchers meet at the next one [default: 29500, a free one on \
                 one node]",
            ),
        )
        .arg(
            super::valued("local_addr", "HOST", value_parser!(String))
                .help("Address under which the other nodes reach this one [default: found by itself]"),
        )
        .arg(
            super::valued("max_restarts", "N", value_parser!(u32))
                .default_value("0")
                .help("How often the job is started again after a failed rank, counted over all nodes"),
        )
        .arg(
            super::valued("monitor_interval", "SECONDS", seconds)
                .help("Understood for torchrun's sake: failures are noticed at once, nothing is polled"),
        )
        .arg(
            super::valued("role", "NAME", value_parser!(String))
                .default_value("default")
                .help("Role of the ranks, ROLE_NAME"),
        )
}

pub(super) fn read(matches: &ArgMatches) -> NodesArgs {
    let text = |name| matches.get_one::<String>(name).cloned();
    NodesArgs {
        nodes: super::required(matches, "nnodes"),
        node_rank: super::required::<u64>(matches, "node_rank") as usize,
        master_addr: text("master_addr"),
        master_port: matches.get_one("master_port").copied(),
        backend: super::required(matches, "rdzv_backend"),
        endpoint: text("rdzv_endpoint"),
        id: super::required(matches, "rdzv_id"),
        conf: super::required(matches, "rdzv_conf"),
        max_restarts: super::required(matches, "max_restarts"),
        local_addr: text("local_addr"),
        role: super::required(matches, "role"),
    }
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
