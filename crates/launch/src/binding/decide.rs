//! Decides which rank gets which CPUs, from a description of the machine alone.

use std::collections::BTreeMap;

use super::cpus::Cpus;
use super::topology::{Cpu, Topology};
use super::{BindError, Binding};
use crate::devices::Near;

/// The CPUs of each local rank.
///
/// - *node*, *socket*: all of its node or socket, which it may share with other ranks.
/// - *exclusive*: the node's cores are divided among its ranks, in order, the first ones getting one more.
/// - *core complex*: its node's groups of cores with a cache in common are dealt out in turn, the largest first.
/// - *cores*: all cores, in the order of sockets, nodes and caches, are divided among all ranks.
///
/// *Errors*: fewer cores than ranks to divide them among; a GPU near no CPU of ours.
pub(super) fn decide(
    binding: Binding,
    nproc: usize,
    topology: &Topology,
    near: &Near,
) -> Result<Vec<Cpus>, BindError> {
    if binding == Binding::Cores {
        let order = |cpu: &Cpu| (cpu.socket, cpu.node, cpu.complex, cpu.core);
        let cores = grouped(topology.cpus.iter(), order);
        return divide(&cores, nproc, None);
    }
    let homes = homes(nproc, topology, near)?;
    let mut cpus = vec![Cpus::default(); nproc];
    for node in topology.nodes() {
        let ranks: Vec<_> = (0..nproc).filter(|rank| homes[*rank] == node).collect();
        if ranks.is_empty() {
            continue;
        }
        let shares = match binding {
            Binding::Exclusive => {
                let cores = grouped(topology.on(node), |cpu| cpu.core);
                divide(&cores, ranks.len(), Some(node))?
            }
            Binding::CoreComplex => {
                let mut complexes = grouped(topology.on(node), |cpu| cpu.complex);
                complexes.sort_by_key(|cpus| std::cmp::Reverse(cpus.len()));
                let turns = complexes.into_iter().cycle();
                turns.take(ranks.len()).collect()
            }
            Binding::Socket => vec![socket_of(node, topology); ranks.len()],
            Binding::Node | Binding::Cores => {
                vec![topology.on(node).map(|cpu| cpu.number).collect(); ranks.len()]
            }
        };
        for (rank, share) in ranks.into_iter().zip(shares) {
            cpus[rank] = share;
        }
    }
    Ok(cpus)
}

/// The node of each rank: its GPU's, or the nodes in order, as evenly as they can be.
fn homes(nproc: usize, topology: &Topology, near: &Near) -> Result<Vec<usize>, BindError> {
    let nodes = topology.nodes();
    match near {
        Near::Nodes(of_gpus) => {
            let homes = (0..nproc).map(|rank| {
                let gpu = rank % of_gpus.len();
                let node = of_gpus[gpu];
                if nodes.contains(&node) {
                    Ok(node)
                } else {
                    Err(BindError::NoCpuNearGpu { gpu, node })
                }
            });
            homes.collect()
        }
        // With fewer ranks than nodes they stand apart, on different sockets first.
        Near::Unknown(_) => Ok((0..nproc)
            .map(|rank| nodes[rank * nodes.len() / nproc])
            .collect()),
    }
}

/// The CPUs of all nodes that are on a node's socket; a node belongs to the socket of its lowest CPU.
fn socket_of(node: usize, topology: &Topology) -> Cpus {
    let socket = |node| topology.on(node).next().map(|cpu| cpu.socket);
    let nodes = topology.nodes();
    let neighbours = nodes
        .into_iter()
        .filter(|other| socket(*other) == socket(node));
    neighbours
        .flat_map(|node| topology.on(node).map(|cpu| cpu.number))
        .collect()
}

/// The CPUs with the same key together, in the order of the keys.
fn grouped<'a, K: Ord>(cpus: impl Iterator<Item = &'a Cpu>, key: impl Fn(&Cpu) -> K) -> Vec<Cpus> {
    let mut groups = BTreeMap::<K, Cpus>::new();
    for cpu in cpus {
        groups.entry(key(cpu)).or_default().0.insert(cpu.number);
    }
    groups.into_values().collect()
}

/// Neighbouring cores for each rank, as many for all, or one more for the first ones.
fn divide(cores: &[Cpus], ranks: usize, node: Option<usize>) -> Result<Vec<Cpus>, BindError> {
    let (each, more) = (cores.len() / ranks, cores.len() % ranks);
    if each == 0 {
        return Err(BindError::TooFewCores {
            cores: cores.len(),
            ranks,
            node,
        });
    }
    let start = |rank: usize| rank * each + rank.min(more);
    let share = |rank| {
        let own = &cores[start(rank)..start(rank + 1)];
        own.iter().flat_map(Cpus::iter).collect()
    };
    Ok((0..ranks).map(share).collect())
}

#[cfg(test)]
mod tests;
