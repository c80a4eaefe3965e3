//! Whether what a command line says of nodes fits together, decided before anything is started.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};

use super::nodes::{NodesArgs, RdzvBackend};
use crate::exit::{Exit, Failure};
use paceline_words::counted;

/// The warnings to print before the job starts.
///
/// *Errors*: a contradiction, or a value that is missing and cannot be guessed.
pub(crate) fn check(args: &NodesArgs) -> Result<Vec<String>, Failure> {
    if args.standalone {
        return alone(args);
    }
    let mut warnings = Vec::new();
    let mut unused = |option: &str, why: &str| warnings.push(without_effect(option, why));
    let (min, max) = (args.nodes.min, args.nodes.max);
    match args.backend {
        RdzvBackend::Static => {
            if args.node_rank >= max {
                let (rank, nodes) = (args.node_rank, counted(max, "node"));
                return Err(usage(
                    format!("--node-rank is {rank}, and the job has {nodes}"),
                    "give --nnodes the number of nodes; node ranks count from 0",
                ));
            }
            if min < max {
                let why = format!(
                    "all {max} nodes have to come; --rdzv-backend c10d lets them come and go"
                );
                unused(&format!("MIN of --nnodes {min}:{max}"), &why);
            }
        }
        RdzvBackend::C10d | RdzvBackend::Etcd => {
            let why = match args.backend {
                RdzvBackend::Etcd => "with --rdzv-backend etcd",
                _ => "with --rdzv-backend c10d",
            };
            if args.node_rank != 0 {
                unused("--node-rank", why);
            }
            if max > 1 && args.master_port.is_some() {
                unused("--master-port", why);
            }
            if max > 1 && args.master_addr.is_some() && args.endpoint.is_some() {
                unused("--master-addr", "with --rdzv-endpoint");
            }
        }
    }
    if max == 1 {
        return Ok(warnings);
    }
    let Some(host) = meeting_host(args) else {
        return Err(no_address(args));
    };
    if is_loopback(host) && args.backend != RdzvBackend::Etcd {
        warnings.push(format!(
            "the nodes meet at {host}, which only this machine reaches: name node 0's host unless all launchers run here"
        ));
    }
    Ok(warnings)
}

fn alone(args: &NodesArgs) -> Result<Vec<String>, Failure> {
    if args.nodes.max > 1 {
        let nodes = args.nodes;
        return Err(usage(
            format!("--standalone is one node, and --nnodes says {nodes}"),
            "leave --standalone out, or --nnodes",
        ));
    }
    let given = [
        ("--rdzv-endpoint", args.endpoint.is_some()),
        ("--node-rank", args.node_rank != 0),
        ("--master-addr", args.master_addr.is_some()),
        ("--master-port", args.master_port.is_some()),
        ("--local-addr", args.local_addr.is_some()),
    ];
    let given = given.iter().filter(|(_, is_given)| *is_given);
    Ok(given
        .map(|(option, _)| without_effect(option, "with --standalone"))
        .collect())
}

fn without_effect(option: &str, why: &str) -> String {
    format!("{option} has no effect: {why}")
}

pub(super) fn usage(message: String, hint: &str) -> Failure {
    Failure::new(Exit::Usage, message, Some(hint.to_owned()))
}

fn no_address(args: &NodesArgs) -> Failure {
    let nodes = args.nodes;
    let (option, example) = match args.backend {
        RdzvBackend::Static => ("--master-addr HOST", "that of the node with --node-rank 0"),
        RdzvBackend::C10d => ("--rdzv-endpoint HOST", "one of the nodes"),
        RdzvBackend::Etcd => ("--rdzv-endpoint HOST[:PORT],...", "the members of etcd"),
    };
    usage(
        format!("--nnodes {nodes} needs a rendezvous address"),
        &format!(
            "give every node the same {option}, {example}; 127.0.0.1 if all of them run on this machine"
        ),
    )
}

/// The host where several launchers meet, if one is named.
fn meeting_host(args: &NodesArgs) -> Option<&str> {
    let endpoint = args.endpoint.as_deref();
    match args.backend {
        RdzvBackend::Static => args.master_addr.as_deref().or(endpoint),
        RdzvBackend::C10d => endpoint.or(args.master_addr.as_deref()),
        RdzvBackend::Etcd => endpoint,
    }
}

fn is_loopback(host: &str) -> bool {
    host.starts_with("localhost") || host.starts_with("[::1]")
}

/// Whether a host is another machine. A name that cannot be resolved is not: it may get an address while the job waits, and
/// the launcher tells of it.
pub(super) fn is_elsewhere(host: &str) -> bool {
    let is_own = |addr: SocketAddr| TcpListener::bind((addr.ip(), 0)).is_ok();
    let addrs = (host, 0).to_socket_addrs();
    addrs.is_ok_and(|mut addrs| !addrs.any(is_own))
}

/// The warning for a node 0 that has another machine's address. It is no error: a port forwarder may lead here.
pub(crate) fn not_here(host: &str) -> Option<String> {
    is_elsewhere(host).then(|| {
        format!(
            "{host} is not an address of this machine, which is node 0: give every node the address of node 0 as \
             --master-addr, or this one its own --node-rank"
        )
    })
}

/// Whether the program can listen at the port that was chosen for it.
///
/// *Errors*: another program does.
pub(crate) fn check_port(port: u16) -> Result<(), Failure> {
    match TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            let hint = format!(
                "choose another --master-port, or leave it out on one node to get a free one; `ss -tlnp sport = :{port}` \
                 shows whose it is"
            );
            let message = format!("port {port} is used by another program");
            Err(Failure::new(Exit::Environment, message, Some(hint)))
        }
        // Whatever else is wrong is for the program to find: it may listen elsewhere, or not at all.
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Nodes;

    fn several(backend: RdzvBackend, min: usize, max: usize, endpoint: Option<&str>) -> NodesArgs {
        NodesArgs {
            nodes: Nodes { min, max },
            backend,
            endpoint: endpoint.map(str::to_owned),
            ..NodesArgs::default()
        }
    }

    #[track_caller]
    fn warns(args: &NodesArgs, expect: &[&str]) {
        let warnings = check(args).expect("nothing is refused");
        assert_eq!(warnings.len(), expect.len(), "{warnings:?}");
        for (warning, text) in warnings.iter().zip(expect) {
            assert!(warning.contains(text), "{text:?} is not in {warning:?}");
        }
    }

    #[track_caller]
    fn refuses(args: &NodesArgs, message: &str, hint: &str) {
        let failure = Failure::new(Exit::Usage, message, Some(hint.to_owned()));
        assert_eq!(check(args), Err(failure));
    }

    #[test]
    fn one_node_or_several_with_an_address_are_in_order() {
        warns(&NodesArgs::default(), &[]);
        warns(&several(RdzvBackend::C10d, 1, 1, None), &[]);
        warns(&several(RdzvBackend::C10d, 1, 4, Some("node1")), &[]);
        warns(
            &several(RdzvBackend::Static, 2, 2, Some("10.0.0.1:29500")),
            &[],
        );
        let master = NodesArgs {
            master_addr: Some("127.0.0.1".to_owned()),
            ..several(RdzvBackend::Static, 2, 2, None)
        };
        warns(&master, &[]);
    }

    #[test]
    fn standalone_is_one_node_and_needs_no_address() {
        let standalone = |args| NodesArgs {
            standalone: true,
            ..args
        };
        warns(&standalone(NodesArgs::default()), &[]);
        let all = NodesArgs {
            node_rank: 1,
            master_addr: Some("node1".to_owned()),
            master_port: Some(29_500),
            local_addr: Some("node2".to_owned()),
            ..several(RdzvBackend::Static, 1, 1, Some("node1"))
        };
        let names = [
            "--rdzv-endpoint has no effect: with --standalone",
            "--node-rank",
            "--master-addr",
            "--master-port",
            "--local-addr",
        ];
        warns(&standalone(all), &names);
        refuses(
            &standalone(several(RdzvBackend::Static, 2, 2, None)),
            "--standalone is one node, and --nnodes says 2",
            "leave --standalone out, or --nnodes",
        );
        refuses(
            &standalone(several(RdzvBackend::Static, 1, 2, None)),
            "--standalone is one node, and --nnodes says 1:2",
            "leave --standalone out, or --nnodes",
        );
    }

    #[test]
    fn several_nodes_have_to_be_told_where_they_meet() {
        refuses(
            &several(RdzvBackend::Static, 2, 2, None),
            "--nnodes 2 needs a rendezvous address",
            "give every node the same --master-addr HOST, that of the node with --node-rank 0; 127.0.0.1 if all of them \
             run on this machine",
        );
        refuses(
            &several(RdzvBackend::C10d, 1, 4, None),
            "--nnodes 1:4 needs a rendezvous address",
            "give every node the same --rdzv-endpoint HOST, one of the nodes; 127.0.0.1 if all of them run on this machine",
        );
        for host in ["localhost", "localhost:29400", "[::1]:29400"] {
            warns(
                &several(RdzvBackend::C10d, 2, 2, Some(host)),
                &["only this machine"],
            );
        }
    }

    #[test]
    fn what_the_rendezvous_does_not_use_is_said() {
        warns(
            &several(RdzvBackend::Static, 1, 4, Some("node1")),
            &["MIN of --nnodes 1:4 has no effect: all 4 nodes have to come"],
        );
        let elastic = NodesArgs {
            node_rank: 1,
            master_addr: Some("node1".to_owned()),
            master_port: Some(29_500),
            ..several(RdzvBackend::C10d, 2, 2, Some("node1"))
        };
        warns(&elastic, &["--node-rank", "--master-port", "--master-addr"]);
    }

    #[test]
    fn a_node_rank_that_does_not_exist_is_refused() {
        let hint = "give --nnodes the number of nodes; node ranks count from 0";
        let with_rank = |node_rank, args| NodesArgs { node_rank, ..args };
        refuses(
            &with_rank(1, NodesArgs::default()),
            "--node-rank is 1, and the job has 1 node",
            hint,
        );
        refuses(
            &with_rank(2, several(RdzvBackend::Static, 2, 2, Some("node1"))),
            "--node-rank is 2, and the job has 2 nodes",
            hint,
        );
    }

    #[test]
    fn a_node_0_with_the_address_of_another_machine_is_told() {
        // `.invalid` is reserved for names that do not exist.
        for host in ["127.0.0.1", "localhost", "node.invalid"] {
            assert_eq!(not_here(host), None, "{host}");
        }
        // A documentation address, which no machine has.
        let why = not_here("192.0.2.1").expect("another machine's");
        let expect = "192.0.2.1 is not an address of this machine, which is node 0: ";
        assert!(why.starts_with(expect), "{why}");
    }

    #[test]
    fn a_port_that_another_program_has_is_refused_before_anything_starts() {
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = other.local_addr().expect("bound").port();
        let refused = check_port(port).expect_err("it is taken");
        assert_eq!(refused.exit(), Exit::Environment);
        drop(other);
        assert_eq!(check_port(port), Ok(()));
    }
}
