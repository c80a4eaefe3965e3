//! Where the agents of a job's nodes meet.

use std::io;
use std::net::Ipv4Addr;

use paceline_rendezvous::endpoint::{self, everywhere, own_addr, with_port};
use paceline_rendezvous::net::join;
use paceline_rendezvous::store::{Etcd, Server, StoreError};

use crate::elastic::link::Stores;
use crate::error::LaunchError;
use crate::job::{Cluster, Job};
use crate::round::Launcher;

/// Where the agents meet, and what this one brings along.
pub(super) struct Meeting {
    pub(super) endpoint: String,
    pub(super) stores: Stores,
    /// The other nodes reach this one by this address or host name.
    pub(super) addr: String,
    /// The store that it hosts or keeps ready, and where that is.
    pub(super) server: Option<Server>,
    pub(super) standby: String,
}

impl Meeting {
    pub(super) fn hosted(launcher: &Launcher<'_>, cluster: &Cluster) -> Result<Self, LaunchError> {
        let endpoint = with_port(&cluster.endpoint);
        let node_rank = cluster.place.as_ref().map(|place| place.node_rank);
        let hosted = endpoint::host(&endpoint, node_rank, &|addr| launcher.serve(addr));
        let hosted = hosted.map_err(|error| match &error {
            StoreError::Bind { source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
                let hint = "most likely it is another launcher of this job with --node-rank 0: give every node a \
                            --node-rank of its own; otherwise choose another --master-port";
                LaunchError::Machine {
                    message: format!(
                        "{endpoint}, where the launchers meet, is in use by another program"
                    ),
                    hint: Some(hint.into()),
                    source: None,
                }
            }
            _ => error.into(),
        })?;
        let is_host = hosted.is_some();
        let local = cluster.local_addr.clone();
        let addr = local.unwrap_or_else(|| own_addr(&endpoint, is_host));
        let (server, standby) = match hosted {
            Some(server) => (server, endpoint.clone()),
            None => {
                let server = serve(launcher, &addr)?;
                let standby = join(&addr, server.addr().port());
                (server, standby)
            }
        };
        let stores = Stores::Hosted {
            token: launcher.job.token.clone(),
            tls: launcher.tls,
            run_id: launcher.job.run_id.clone(),
        };
        Ok(Self {
            endpoint,
            stores,
            addr,
            server: Some(server),
            standby,
        })
    }

    pub(super) fn etcd(job: &Job, cluster: &Cluster) -> Result<Self, LaunchError> {
        // Keys outlive every outage that ranks outlive.
        let mut etcd = Etcd::new(
            &cluster.endpoint,
            &job.run_id,
            &job.token,
            (cluster.outage + cluster.lease) * 2,
        )?;
        let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        if let Some(name) = variable("ETCD_USERNAME") {
            etcd = etcd.with_user(name, variable("ETCD_PASSWORD").unwrap_or_default());
        }
        let first = etcd.endpoints().first().map_or("", String::as_str);
        let local = cluster.local_addr.clone();
        let addr = local.unwrap_or_else(|| own_addr(first, false));
        Ok(Self {
            endpoint: etcd.name(),
            addr,
            stores: Stores::Etcd(etcd),
            server: None,
            standby: String::new(),
        })
    }
}

/// A store at a free port that the others reach at `addr`.
pub(super) fn serve(launcher: &Launcher<'_>, addr: &str) -> Result<Server, LaunchError> {
    let server = (launcher.serve(everywhere(addr)))
        .or_else(|_| launcher.serve((Ipv4Addr::UNSPECIFIED, 0).into()))?;
    Ok(server)
}
