//! Who hosts the first store, and under which addresses nodes reach each other: the rendezvous' rules, for a cluster.

use paceline_rendezvous::endpoint;
pub(super) use paceline_rendezvous::endpoint::{everywhere, own_addr, with_port};
pub(super) use paceline_rendezvous::net::join;
use paceline_rendezvous::store::Server;

use crate::error::LaunchError;
use crate::job::Cluster;
use crate::round::Launcher;

/// Hosts the endpoint's store if that is this agent's part.
pub(super) fn host(
    launcher: &Launcher<'_>,
    cluster: &Cluster,
    endpoint: &str,
) -> Result<Option<Server>, LaunchError> {
    let node_rank = cluster.place.as_ref().map(|place| place.node_rank);
    let serve = |addr| launcher.serve(addr);
    Ok(endpoint::host(endpoint, node_rank, &serve)?)
}
