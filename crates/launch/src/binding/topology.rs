//! Which of the CPUs that this process may use share a core, a cache, a NUMA node and a socket, from `/sys/devices/system`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::BindError;
use super::cpus::Cpus;
use super::files;

/// A CPU has four caches or so; a bound on looking for more.
const CACHES_MAX: usize = 16;

/// The CPUs that this process may use, by number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Topology {
    pub(super) cpus: Vec<Cpu>,
}

/// One CPU as the scheduler counts them: a hardware thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cpu {
    pub(super) number: usize,
    /// The lowest hardware thread of its core.
    pub(super) core: usize,
    /// The lowest CPU that shares its last cache.
    pub(super) complex: usize,
    pub(super) node: usize,
    pub(super) socket: usize,
}

impl Topology {
    /// Reads what there is to know about `allowed`, with `root` for `/`.
    ///
    /// Machines, mostly virtual ones, that leave something out are taken at their word: a CPU without siblings is a core,
    /// cores without a cache in common share their node's, a machine without nodes is one, a CPU without a socket is in the
    /// first.
    ///
    /// *Errors*: a file that cannot be read or makes no sense.
    pub(super) fn read(root: &Path, allowed: &Cpus) -> Result<Self, BindError> {
        let system = root.join("sys/devices/system");
        let nodes = nodes(&system.join("node"), allowed)?;
        let cpus = allowed.iter().map(|number| {
            let folder = system.join(format!("cpu/cpu{number}"));
            let siblings = files::cpus(&folder.join("topology/thread_siblings_list"))?;
            // Unknown is -1.
            let socket = files::number(&folder.join("topology/physical_package_id"))?;
            let node = nodes[&number];
            Ok(Cpu {
                number,
                core: lowest(siblings, number).unwrap_or(number),
                complex: complex(&folder.join("cache"), number)?.unwrap_or_else(|| {
                    nodes
                        .iter()
                        .find(|(_, one)| **one == node)
                        .map_or(number, |(cpu, _)| *cpu)
                }),
                node,
                socket: usize::try_from(socket.unwrap_or(0)).unwrap_or(0),
            })
        });
        Ok(Self {
            cpus: cpus.collect::<Result<_, BindError>>()?,
        })
    }

    /// The nodes that have CPUs for us.
    pub(super) fn nodes(&self) -> Vec<usize> {
        let nodes: BTreeSet<_> = self.cpus.iter().map(|cpu| cpu.node).collect();
        nodes.into_iter().collect()
    }

    /// The CPUs of a node.
    pub(super) fn on(&self, node: usize) -> impl Iterator<Item = &Cpu> {
        self.cpus.iter().filter(move |cpu| cpu.node == node)
    }

    /// How many cores a set of our CPUs is on.
    pub(super) fn cores(&self, cpus: &Cpus) -> BTreeSet<usize> {
        let among = self.cpus.iter().filter(|cpu| cpus.contains(cpu.number));
        among.map(|cpu| cpu.core).collect()
    }
}

/// The node of each CPU.
fn nodes(folder: &Path, allowed: &Cpus) -> Result<BTreeMap<usize, usize>, BindError> {
    let online = folder.join("online");
    let Some(nodes) = files::cpus(&online)? else {
        return Ok(allowed.iter().map(|cpu| (cpu, 0)).collect());
    };
    let mut found = BTreeMap::new();
    for node in nodes.iter() {
        let cpus = files::cpus(&folder.join(format!("node{node}/cpulist")))?.unwrap_or_default();
        found.extend(
            cpus.iter()
                .filter(|cpu| allowed.contains(*cpu))
                .map(|cpu| (cpu, node)),
        );
    }
    match allowed.iter().find(|cpu| !found.contains_key(cpu)) {
        None => Ok(found),
        Some(homeless) => Err(BindError::Malformed {
            path: folder.join("node*/cpulist"),
            found: format!("nothing about CPU {homeless}"),
            expected: "each CPU on one of the nodes",
        }),
    }
}

/// The lowest CPU that shares the largest cache which is not for instructions alone.
fn complex(folder: &Path, number: usize) -> Result<Option<usize>, BindError> {
    let mut last = None;
    for index in 0..CACHES_MAX {
        let folder = folder.join(format!("index{index}"));
        let Some(kind) = files::text(&folder.join("type"))? else {
            break;
        };
        if !matches!(kind.trim(), "Unified" | "Data") {
            continue;
        }
        let level = files::number(&folder.join("level"))?.unwrap_or(0);
        if last.as_ref().is_none_or(|(so_far, _)| level > *so_far) {
            let sharing = files::cpus(&folder.join("shared_cpu_list"))?;
            last = Some((level, sharing));
        }
    }
    Ok(last.and_then(|(_, sharing)| lowest(sharing, number)))
}

/// The lowest CPU of a list, that names the group; a list that leaves out the CPU it is about says nothing.
fn lowest(cpus: Option<Cpus>, about: usize) -> Option<usize> {
    cpus.filter(|cpus| cpus.contains(about))?.iter().next()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A machine's files below a folder, and what reading them about `allowed` gives: `number/core/complex/node/socket`.
    fn check(tree: &[(&str, &str)], allowed: &str, expect: &str) {
        let root = tempfile::tempdir().unwrap();
        for (file, text) in tree {
            let path = root.path().join("sys/devices/system").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let got = match Topology::read(root.path(), &allowed.parse().unwrap()) {
            Ok(topology) => {
                let cpus = topology.cpus.iter().map(|cpu| {
                    let Cpu {
                        number,
                        core,
                        complex,
                        node,
                        socket,
                    } = cpu;
                    format!("{number}/{core}/{complex}/{node}/{socket}")
                });
                cpus.collect::<Vec<_>>().join(" ")
            }
            Err(error) => error.to_string().replace(root.path().to_str().unwrap(), ""),
        };
        assert_eq!(got, expect);
    }

    /// CPUs 0 to 3: two cores with two threads each, a cache each, node and socket 1 for the second.
    fn two_cores() -> Vec<(String, &'static str)> {
        let mut tree = Vec::new();
        for cpu in 0..4 {
            let (threads, socket) = if cpu % 2 == 0 {
                ("0,2\n", "0\n")
            } else {
                ("1,3\n", "1\n")
            };
            for (file, text) in [
                ("topology/thread_siblings_list", threads),
                ("topology/physical_package_id", socket),
                ("cache/index0/type", "Instruction\n"),
                ("cache/index1/type", "Data\n"),
                ("cache/index1/level", "1\n"),
                ("cache/index1/shared_cpu_list", threads),
                ("cache/index2/type", "Unified\n"),
                ("cache/index2/level", "3\n"),
                ("cache/index2/shared_cpu_list", threads),
            ] {
                tree.push((format!("cpu/cpu{cpu}/{file}"), text));
            }
        }
        for (file, text) in [
            ("online", "0-1\n"),
            ("node0/cpulist", "0,2\n"),
            ("node1/cpulist", "1,3\n"),
        ] {
            tree.push((format!("node/{file}"), text));
        }
        tree
    }

    fn with(change: &[(&str, &str)], allowed: &str, expect: &str) {
        let tree = two_cores();
        let mut tree: Vec<_> = tree
            .iter()
            .map(|(file, text)| (file.as_str(), *text))
            .collect();
        tree.extend(change);
        check(&tree, allowed, expect);
    }

    #[test]
    fn a_machine_is_read() {
        with(&[], "0-3", "0/0/0/0/0 1/1/1/1/1 2/0/0/0/0 3/1/1/1/1");
        // The core is named by its lowest thread, even if that one is not ours.
        with(&[], "2-3", "2/0/0/0/0 3/1/1/1/1");
    }

    #[test]
    fn what_a_virtual_machine_leaves_out_is_assumed() {
        check(&[], "0,4", "0/0/0/0/0 4/4/0/0/0");
        let nodes = [
            ("node/online", "0-1"),
            ("node/node0/cpulist", "0-1"),
            ("node/node1/cpulist", "2-3"),
        ];
        check(&nodes, "1-3", "1/1/1/0/0 2/2/2/1/0 3/3/2/1/0");
        with(
            &[("cpu/cpu0/topology/physical_package_id", "-1")],
            "0",
            "0/0/0/0/0",
        );
        with(
            &[("cpu/cpu1/topology/thread_siblings_list", "")],
            "1",
            "1/1/1/1/1",
        );
    }

    #[test]
    fn a_file_that_makes_no_sense_is_named() {
        with(
            &[("cpu/cpu1/topology/thread_siblings_list", "x\n")],
            "0-3",
            "`/sys/devices/system/cpu/cpu1/topology/thread_siblings_list` says `x`, expected a list as `0-3,8`",
        );
        with(
            &[("cpu/cpu0/cache/index2/level", "high\n")],
            "0-3",
            "`/sys/devices/system/cpu/cpu0/cache/index2/level` says `high`, expected a whole number",
        );
        with(
            &[("node/online", "0\n")],
            "0-3",
            "`/sys/devices/system/node/node*/cpulist` says `nothing about CPU 1`, expected each CPU on one of the nodes",
        );
    }

    #[test]
    fn this_machine_is_read() {
        let allowed = super::super::allowed().unwrap();
        let topology = Topology::read(Path::new("/"), &allowed).unwrap();
        assert_eq!(topology.cpus.len(), allowed.len());
        assert!(!topology.nodes().is_empty());
    }
}
