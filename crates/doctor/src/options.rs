//! What a person says about the job that is to begin.

use std::path::PathBuf;
use std::time::Duration;

use paceline_rendezvous::token::Token;
use paceline_words::Lang;

/// The job that is to begin, and how to look at it.
#[derive(Debug, Clone)]
pub struct Options {
    /// Ranks on this node.
    pub ranks: usize,
    /// Compute threads of a rank; cores divided by ranks if not given.
    pub threads_per_rank: Option<usize>,
    /// Where the job's logs will go; a folder of the user's state if not given.
    pub log_dir: Option<PathBuf>,
    /// Fewest nodes that are enough.
    pub nodes_min: usize,
    /// Nodes that are waited for.
    pub nodes_max: usize,
    /// This node's number, where nodes are numbered beforehand.
    pub node_rank: Option<usize>,
    /// Where nodes meet, `host[:port]`.
    pub endpoint: String,
    /// The port for the program on node 0, where it was named.
    pub master_port: Option<u16>,
    /// Address under which the other nodes are to reach this one; found by itself if not given.
    pub local_addr: Option<String>,
    /// What this node is called; the machine's name if not given.
    pub host: Option<String>,
    /// How long to wait until all nodes have come.
    pub timeout: Duration,
    /// What all nodes know; needed for several.
    pub token: Option<Token>,
    /// The language of the report.
    pub lang: Lang,
}

impl Options {
    /// One node with so many ranks.
    pub fn new(ranks: usize) -> Self {
        Self {
            ranks,
            threads_per_rank: None,
            log_dir: None,
            nodes_min: 1,
            nodes_max: 1,
            node_rank: None,
            endpoint: "127.0.0.1".to_owned(),
            master_port: None,
            local_addr: None,
            host: None,
            timeout: Duration::from_secs(60),
            token: None,
            lang: Lang::En,
        }
    }

    pub(crate) fn has_several_nodes(&self) -> bool {
        self.nodes_max > 1
    }
}
