//! NUMA nodes: their CPUs, and how far they are from each other.

use super::{LINE_BYTES_MAX, list, text};
use crate::host::Host;
use crate::snapshot::{Gap, NumaNode};

const FOLDER: &str = "/sys/devices/system/node";
/// The kernel has 1024 at most.
const NODES_MAX: usize = 1024;

/// Nodes with memory or CPUs, ascending.
pub(super) fn read(host: &Host<'_>) -> Vec<NumaNode> {
    let names = host.names(FOLDER, 2 * NODES_MAX).unwrap_or_default();
    let mut indices: Vec<u32> = names
        .iter()
        .filter_map(|name| name.strip_prefix("node")?.parse().ok())
        .take(NODES_MAX)
        .collect();
    indices.sort_unstable();
    let with_memory = nodes_with_memory(host);
    let nodes: Vec<NumaNode> = indices.iter().map(|index| node(host, *index)).collect();
    let is_used = |node: &NumaNode| {
        let memory = with_memory.as_ref();
        !node.cpus.is_empty() || memory.is_none_or(|memory| memory.contains(&node.index))
    };
    let used: Vec<bool> = nodes.iter().map(is_used).collect();
    nodes
        .into_iter()
        .zip(&used)
        .filter(|(_, is_used)| **is_used)
        .map(|(mut node, _)| {
            // One column for each node, in the order of their numbers; columns of those that are left out go too.
            let mut columns = used.iter();
            node.distances.truncate(used.len());
            node.distances.retain(|_| columns.next() == Some(&true));
            node
        })
        .collect()
}

fn nodes_with_memory(host: &Host<'_>) -> Option<Vec<u32>> {
    let text = ["has_memory", "has_normal_memory"]
        .iter()
        .find_map(|name| host.text(&format!("{FOLDER}/{name}")))?;
    list::parse(&text)
}

fn node(host: &Host<'_>, index: u32) -> NumaNode {
    let folder = format!("{FOLDER}/node{index}");
    let text = host.text(&format!("{folder}/cpulist"));
    let cpus = text.and_then(|text| list::parse(&text));
    let distances = host.text(&format!("{folder}/distance")).unwrap_or_default();
    NumaNode {
        index,
        cpus: cpus.unwrap_or_default(),
        distances: distances
            .split_whitespace()
            .map_while(|distance| distance.parse().ok())
            .take(NODES_MAX)
            .collect(),
    }
}

/// CPUs near a device.
pub(super) fn cpus_near(host: &Host<'_>, folder: &str) -> Result<Vec<u32>, Gap> {
    let text = text(host, &format!("{folder}/local_cpulist"), LINE_BYTES_MAX)?;
    list::parse(&text).ok_or_else(|| Gap::other("its list of CPUs makes no sense"))
}

/// CPUs that this process may run on.
pub(super) fn cpus_allowed(host: &Host<'_>) -> Result<Vec<u32>, Gap> {
    let status = text(host, "/proc/self/status", 16 << 10)?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list::parse(line.ok_or(Gap::NotSupported)?)
        .ok_or_else(|| Gap::other("the list of its CPUs makes no sense"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    fn check(files: &[(&str, &str)], expect: &[(u32, &[u32], &[u32])]) {
        let files: Vec<(String, &str)> = files
            .iter()
            .map(|(path, text)| (format!("{FOLDER}/{path}"), *text))
            .collect();
        let files: Vec<(&str, &str)> = files.iter().map(|(p, t)| (p.as_str(), *t)).collect();
        let nodes = read(&Recorded::new(&files).host());
        let found: Vec<(u32, &[u32], &[u32])> = nodes
            .iter()
            .map(|node| (node.index, &node.cpus[..], &node.distances[..]))
            .collect();
        assert_eq!(found, expect);
    }

    #[test]
    fn two_sockets_have_their_cpus_and_distances() {
        check(
            &[
                ("node0/cpulist", "0-1,4\n"),
                ("node0/distance", "10 21\n"),
                ("node1/cpulist", "2-3\n"),
                ("node1/distance", "21 10\n"),
                ("has_memory", "0-1\n"),
                ("online", "0-1\n"),
            ],
            &[(0, &[0, 1, 4], &[10, 21]), (1, &[2, 3], &[21, 10])],
        );
    }

    #[test]
    fn nodes_without_memory_and_cpus_are_left_out_with_their_distances() {
        check(
            &[
                ("node0/cpulist", "0-1\n"),
                ("node0/distance", "10 20 80\n"),
                ("node2/cpulist", "\n"),
                ("node2/distance", "20 10 40\n"),
                ("node10/cpulist", "\n"),
                ("node10/distance", "80 40 10\n"),
                ("has_normal_memory", "0,10\n"),
            ],
            &[(0, &[0, 1], &[10, 80]), (10, &[], &[80, 10])],
        );
    }

    #[test]
    fn the_cpus_of_this_process_are_those_that_it_may_use() {
        let check = |status: &str, expect: Result<Vec<u32>, Gap>| {
            let recorded = Recorded::new(&[("/proc/self/status", status)]);
            assert_eq!(cpus_allowed(&recorded.host()), expect);
        };
        check(
            "Cpus_allowed:\t15\nCpus_allowed_list:\t0,2-4\n",
            Ok(vec![0, 2, 3, 4]),
        );
        check("Name:\tx\n", Err(Gap::NotSupported));
    }

    #[test]
    fn a_node_that_makes_no_sense_is_still_a_node() {
        check(
            &[
                ("node0/cpulist", "x"),
                ("node0/distance", "10 far 7"),
                ("node/cpulist", "1"),
            ],
            &[(0, &[], &[10])],
        );
    }
}
