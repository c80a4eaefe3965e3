//! A Slurm step's variables, read into torchrun's names.
//!
//! Source: the "OUTPUT ENVIRONMENT VARIABLES" of srun(1). Only a step counts (`SLURM_STEP_ID` is set): in a batch script
//! outside `srun`, `SLURM_PROCID` and `SLURM_NTASKS` are set too, and a program that believed them would wait for ranks
//! that nobody starts. Written from the manual and tested with tables; it has not been run on a Slurm cluster yet.

use super::variables::names;

/// What the step says for one of torchrun's variables; `None` outside a step and for variables Slurm knows nothing of.
pub(super) fn value(name: &str, get: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let step = get("SLURM_STEP_ID")?;
    match name {
        names::RANK => get("SLURM_PROCID"),
        names::WORLD_SIZE => get("SLURM_STEP_NUM_TASKS").or_else(|| get("SLURM_NTASKS")),
        names::LOCAL_RANK => get("SLURM_LOCALID"),
        names::LOCAL_WORLD_SIZE => {
            let node = get("SLURM_NODEID").and_then(|node| node.parse().ok());
            let counts = get("SLURM_STEP_TASKS_PER_NODE").or_else(|| get("SLURM_TASKS_PER_NODE"));
            node.zip(counts)
                .and_then(|(node, counts)| tasks_on_node(&counts, node))
                .map(|count| count.to_string())
                .or_else(|| get("SLURM_NTASKS_PER_NODE"))
        }
        names::GROUP_RANK => get("SLURM_NODEID"),
        names::GROUP_WORLD_SIZE => get("SLURM_STEP_NUM_NODES").or_else(|| get("SLURM_NNODES")),
        names::MASTER_ADDR => get("SLURM_STEP_NODELIST")
            .or_else(|| get("SLURM_JOB_NODELIST"))
            .map(|list| first_host(&list)),
        names::MASTER_PORT => {
            let job: u64 = get("SLURM_JOB_ID")?.parse().ok()?;
            // Below Linux's range of ephemeral ports (32768 and up), so that no connection occupies it by chance.
            Some((10_000 + job % 20_000).to_string())
        }
        names::TORCHELASTIC_RUN_ID => Some(format!("slurm-{}.{step}", get("SLURM_JOB_ID")?)),
        names::TORCHELASTIC_RESTART_COUNT => get("SLURM_RESTART_COUNT"),
        _ => None,
    }
}

/// Node `node`'s count in a list such as `2(x3),1`.
fn tasks_on_node(counts: &str, node: usize) -> Option<usize> {
    let mut first = 0_usize;
    for part in counts.split(',') {
        let (count, times) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1_usize),
        };
        first = first.checked_add(times)?;
        if node < first {
            return count.trim().parse().ok();
        }
    }
    None
}

/// The first host of a list such as `gpu[03-05,9],login` or `rack[1-2]n[01-16]`.
fn first_host(list: &str) -> String {
    let mut host = String::new();
    let mut characters = list.chars();
    while let Some(character) = characters.next() {
        match character {
            ',' => break,
            '[' => {
                let inside: String = characters.by_ref().take_while(|c| *c != ']').collect();
                host.push_str(inside.split([',', '-']).next().unwrap_or_default());
            }
            _ => host.push(character),
        }
    }
    host
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nodes_share_is_read_from_the_compressed_list() {
        for (counts, node, expected) in [
            ("4", 0, Some(4)),
            ("2(x3),1", 0, Some(2)),
            ("2(x3),1", 2, Some(2)),
            ("2(x3),1", 3, Some(1)),
            ("2(x3),1", 4, None),
            ("", 0, None),
            ("2(x", 0, None),
            ("2(x99999999999999999999)", 0, None),
        ] {
            assert_eq!(tasks_on_node(counts, node), expected, "{counts} {node}");
        }
    }

    #[test]
    fn the_first_host_of_a_list_is_expanded() {
        for (list, expected) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("gpu[03-05,9],login", "gpu03"),
            ("rack[1-2]n[01-16]", "rack1n01"),
            ("gpu[7]", "gpu7"),
            ("gpu[", "gpu"),
        ] {
            assert_eq!(first_host(list), expected);
        }
    }
}
