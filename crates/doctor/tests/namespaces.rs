//! Nodes in network namespaces, one of which may call but not be called. Needs the right to make namespaces, and `nft`.

mod support;

use std::process::{Command, Stdio};

use support::{Fleet, Node, PROBE};

/// Two hosts with a cable between them, 10.78.0.1 and 10.78.0.2. Gone when dropped.
struct Network {
    prefix: String,
}

fn run(words: &str) -> bool {
    let (program, args) = words.split_once(' ').expect("a program and words");
    let status = Command::new(program)
        .args(args.split_whitespace())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

impl Network {
    /// `None` where this user may not, or the kernel cannot.
    fn new(name: &str) -> Option<Self> {
        let prefix = format!("pd{name}{}", std::process::id());
        let network = Self { prefix };
        let p = &network.prefix;
        let mut done = run(&format!("ip netns add {p}h0"))
            && run(&format!("ip netns add {p}h1"))
            && run(&format!(
                "ip link add eth0 netns {p}h0 type veth peer name eth0 netns {p}h1"
            ));
        for host in 0..2 {
            done = done
                && run(&format!("ip -n {p}h{host} link set lo up"))
                && run(&format!(
                    "ip -n {p}h{host} addr add 10.78.0.{}/24 dev eth0",
                    host + 1
                ))
                && run(&format!("ip -n {p}h{host} link set eth0 up"));
        }
        done.then_some(network)
    }

    /// A node of its own name, as in its namespace.
    fn node(&self, fleet: &Fleet, host: usize, words: &[&str]) -> Node {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}h{host}", self.prefix), PROBE]);
        fleet.node_under(command, &format!("h{host}"), words)
    }

    /// Drops what would begin a connection to `host`, except to the meeting itself.
    fn shut(&self, host: usize) -> bool {
        let nft = format!("ip netns exec {}h{host} nft", self.prefix);
        run(&format!("{nft} add table inet doctor"))
            && run(&format!(
                "{nft} add chain inet doctor in {{ type filter hook input priority 0 ; }}"
            ))
            && run(&format!(
                "{nft} add rule inet doctor in tcp flags & (syn|ack) == syn tcp dport != 29400 drop"
            ))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in 0..2 {
            run(&format!("ip netns del {}h{host}", self.prefix));
        }
    }
}

fn fleet() -> Fleet {
    Fleet {
        endpoint: "10.78.0.1:29400".to_owned(),
        ..Fleet::new(2)
    }
}

const NO_NAMESPACES: &str =
    "this user may not make network namespaces, or `ip` (package iproute2) is missing";

#[test]
fn a_direction_that_a_firewall_drops_is_named_with_the_one_that_works() {
    let Some(network) = Network::new("f") else {
        paceline_testing::skipped(NO_NAMESPACES);
        return;
    };
    if !network.shut(0) {
        paceline_testing::skipped("no packet filter: install `nft` (package nftables), as root");
        return;
    }
    let fleet = fleet();
    let nodes = [0, 1].map(|host| network.node(&fleet, host, &[]));
    let answers = nodes.map(Node::end);
    for answer in &answers {
        assert_eq!(answer.code, 1, "{answer:?}");
        let sentence = answer
            .out
            .lines()
            .find(|line| line.starts_with("error: "))
            .unwrap_or_default();
        assert!(
            sentence.starts_with("error: node 1 (h1) does not reach node 0 (h0) at 10.78.0.1:"),
            "{answer:?}"
        );
        assert!(
            sentence.ends_with(": no answer within 3 s; the other way, from node 0 (h0), works"),
            "{answer:?}"
        );
        assert!(
            answer.out.contains("fix: let node 0 (h0) accept TCP ports"),
            "{answer:?}"
        );
    }
    assert!(answers[0].out.contains("FAILS: no answer"), "{answers:?}");
}

#[test]
fn nodes_of_two_networks_reach_each_other_at_their_addresses() {
    let Some(network) = Network::new("o") else {
        paceline_testing::skipped(NO_NAMESPACES);
        return;
    };
    let fleet = fleet();
    let nodes = [0, 1].map(|host| network.node(&fleet, host, &["json"]));
    for answer in nodes.map(Node::end) {
        let json: serde_json::Value = serde_json::from_str(&answer.out).expect("JSON");
        let nodes = &json["nodes"];
        assert_eq!(
            nodes["cards"]["0"]["addrs"],
            serde_json::json!(["10.78.0.1"])
        );
        assert_eq!(
            nodes["cards"]["1"]["addrs"],
            serde_json::json!(["10.78.0.2"])
        );
        for (from, to) in [("0", 1), ("1", 0)] {
            let reach = &nodes["rows"][from]["reaches"][0];
            assert_eq!(reach["to"], to, "{reach}");
            assert!(reach["reached"]["bytes_per_second"].is_u64(), "{reach}");
        }
    }
}
