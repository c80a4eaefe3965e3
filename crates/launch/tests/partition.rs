//! Nodes in network namespaces, cut off from each other and joined again. Needs the right to make namespaces.

mod support;

use std::process::{Command, Stdio};

use support::PROBE;
use support::node::{Fleet, Node, SOON, STAY, up_in_any_order};

/// A bridge in a namespace of its own, and hosts with one cable each. Gone when dropped.
struct Network {
    prefix: String,
    hosts: usize,
}

fn ip(words: &str) -> bool {
    let status = Command::new("ip")
        .args(words.split_whitespace())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

impl Network {
    /// `None` where this user may not, or the kernel cannot.
    fn new(hosts: usize) -> Option<Self> {
        let prefix = format!("pl{}", std::process::id());
        let network = Self { prefix, hosts };
        let p = &network.prefix;
        let mut done = ip(&format!("netns add {p}s"))
            && ip(&format!("-n {p}s link add br0 type bridge"))
            && ip(&format!("-n {p}s link set br0 up"));
        for host in 0..hosts {
            done = done
                && ip(&format!("netns add {p}h{host}"))
                && ip(&format!(
                    "link add c{host} netns {p}s type veth peer name eth0 netns {p}h{host}"
                ))
                && ip(&format!("-n {p}s link set c{host} master br0 up"))
                && ip(&format!("-n {p}h{host} link set lo up"))
                && ip(&format!(
                    "-n {p}h{host} addr add 10.77.0.{}/24 dev eth0",
                    host + 1
                ))
                && ip(&format!("-n {p}h{host} link set eth0 up"));
        }
        done.then_some(network)
    }

    fn node(&self, fleet: &Fleet, host: usize) -> Node {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}h{host}", self.prefix), PROBE]);
        fleet.node_under(command, &format!("h{host}"), &[], STAY)
    }

    fn cable(&self, host: usize, state: &str) {
        assert!(ip(&format!("-n {}s link set c{host} {state}", self.prefix)));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in 0..self.hosts {
            ip(&format!("netns del {}h{host}", self.prefix));
        }
        ip(&format!("netns del {}s", self.prefix));
    }
}

#[test]
fn a_node_that_is_cut_off_ends_its_ranks_and_comes_back_when_healed() {
    let Some(network) = Network::new(3) else {
        paceline_testing::skipped("this user may not make network namespaces, or `ip` is missing");
        return;
    };
    let mut fleet = Fleet::new("1:3");
    fleet.endpoint = "10.77.0.1:29400".to_owned();
    let mut nodes: Vec<_> = (0..3).map(|host| network.node(&fleet, host)).collect();
    up_in_any_order(&mut nodes.iter_mut().collect::<Vec<_>>(), 3);

    // One without the store.
    network.cable(2, "down");
    up_in_any_order(&mut nodes[..2].iter_mut().collect::<Vec<_>>(), 2);
    nodes[2].expect_err("this node has lost the others: its ranks are ended", SOON);
    network.cable(2, "up");
    up_in_any_order(&mut nodes.iter_mut().collect::<Vec<_>>(), 3);

    // The one with the store: the others are more.
    network.cable(0, "down");
    up_in_any_order(&mut nodes[1..].iter_mut().collect::<Vec<_>>(), 2);
    nodes[0].expect_err(
        "most nodes of the round are out of sight: its ranks are ended",
        SOON,
    );
    network.cable(0, "up");
    up_in_any_order(&mut nodes.iter_mut().collect::<Vec<_>>(), 3);
}
