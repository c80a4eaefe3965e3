//! A launcher of one node that was told where nodes meet: most likely its `--nnodes` is wrong.

use paceline_launch::{Job, is_job_at, shared_token};
use paceline_rendezvous::endpoint::with_port;

use super::nodes::{NodesArgs, RdzvBackend};
use super::sense::{self, usage};
use super::start::{cluster, take_master};
use crate::exit::{Failure, warn};
use crate::job;

/// Makes this node one of the job that waits at the address, if there is one: then all its nodes say that their settings
/// differ, and end. Warns if `MASTER_ADDR` is another machine's.
///
/// *Errors*: an option has another machine's address, and no job waits there.
pub(super) fn finds_others(
    job: &mut Job,
    args: &NodesArgs,
    is_given: bool,
    get: &dyn Fn(&str) -> Option<String>,
) -> Result<bool, Failure> {
    let Some((option, args)) = told(args, is_given, get) else {
        return Ok(false);
    };
    let mut cluster = cluster(&args);
    if let Ok(token) = shared_token() {
        let own = std::mem::replace(&mut job.token, token);
        if is_job_at(&cluster.endpoint, job).map_err(job::refused)? {
            // It has no place there.
            cluster.place = None;
            job.cluster = Some(cluster);
            return Ok(true);
        }
        job.token = own;
    }
    let endpoint = with_port(&cluster.endpoint);
    let (host, _) = endpoint.rsplit_once(':').unwrap_or((&endpoint, ""));
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if !sense::is_elsewhere(host) {
        return Ok(false);
    }
    if option == MASTER {
        warn(&format!(
            "--nnodes is 1, and {option} is {host}, another machine: this node is a job of its own"
        ));
        return Ok(false);
    }
    let default = if is_given { "" } else { " by default" };
    Err(usage(
        format!("--nnodes is 1{default}, and {option} names {host}, another machine"),
        &format!(
            "give --nnodes the number of the job's nodes, the same on each; for a job on this machine alone leave {option} out"
        ),
    ))
}

const MASTER: &str = "MASTER_ADDR";

/// Where this node was told to meet others: the name of the option or variable, and the arguments with the address.
fn told(
    args: &NodesArgs,
    is_given: bool,
    get: &dyn Fn(&str) -> Option<String>,
) -> Option<(&'static str, NodesArgs)> {
    let mut args = args.clone();
    let option = match args.backend {
        // Its members are other machines in any case.
        RdzvBackend::Etcd => return None,
        RdzvBackend::Static if args.master_addr.is_some() => "--master-addr",
        _ if args.endpoint.is_some() => "--rdzv-endpoint",
        _ if args.master_addr.is_some() => "--master-addr",
        // A rank of another job has that job's address.
        _ if is_given && get("RANK").is_none() => take_master(&mut args, get)
            .is_ok_and(|took| took)
            .then_some(MASTER)?,
        _ => return None,
    };
    Some((option, args))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_an_option_or_that_of_the_environment_beside_nnodes() {
        let check = |change: &dyn Fn(&mut NodesArgs), is_given, rank: Option<&str>, expect| {
            let mut args = NodesArgs::default();
            change(&mut args);
            let get = |name: &str| match name {
                "MASTER_ADDR" => Some("node0".to_owned()),
                "RANK" => rank.map(str::to_owned),
                _ => None,
            };
            let found = told(&args, is_given, &get);
            let found = found.map(|(option, args)| (option, cluster(&args).endpoint));
            let found = found.as_ref().map(|(option, at)| (*option, &**at));
            assert_eq!(found, expect);
        };
        let none = |_: &mut NodesArgs| {};
        check(&none, false, None, None);
        check(&none, true, Some("0"), None);
        check(&none, true, None, Some((MASTER, "node0:29501")));
        let master = |args: &mut NodesArgs| args.master_addr = Some("a".to_owned());
        check(&master, false, None, Some(("--master-addr", "a:29501")));
        let endpoint = |backend| {
            move |args: &mut NodesArgs| {
                args.backend = backend;
                args.endpoint = Some("a:1".to_owned());
            }
        };
        let option = "--rdzv-endpoint";
        check(
            &endpoint(RdzvBackend::Static),
            false,
            None,
            Some((option, "a:2")),
        );
        check(
            &endpoint(RdzvBackend::C10d),
            false,
            None,
            Some((option, "a:1")),
        );
        check(&endpoint(RdzvBackend::Etcd), true, None, None);
    }
}
