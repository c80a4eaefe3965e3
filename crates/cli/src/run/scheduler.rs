//! Completes a command line's nodes and ranks from the scheduler that started this launcher.
//!
//! An option, or torchrun's variable for it, comes before what the scheduler says, value by value. `--standalone` and
//! `--nnodes 1` say that there is nothing to ask about other nodes.

use paceline_rendezvous::net;
use paceline_rendezvous::scheduler::{
    Found, Pod, Scheduler, SchedulerError, detect, ranks_per_node,
};

use super::args::RunArgs;
use super::nodes::{Nodes, RdzvBackend};
use super::ranks::Processes;
use paceline_words::counted;

/// A command line, and what the scheduler says where it says nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Completed {
    pub(super) args: RunArgs,
    /// The scheduler that was asked.
    pub(super) scheduler: Option<Scheduler>,
    /// How often the scheduler has started the job before.
    pub(super) restart_count: u32,
    /// Where this node is and who says it, for people.
    pub(super) summary: Option<String>,
    /// What the person may have forgotten.
    pub(super) advice: Option<String>,
}

/// Completes a command line.
///
/// *Errors*: the scheduler started several launchers on one node, or does not say what is needed.
pub(super) fn complete(
    args: &RunArgs,
    get: &dyn Fn(&str) -> Option<String>,
    pod: &dyn Fn() -> Pod,
) -> Result<Completed, SchedulerError> {
    let mut completed = Completed {
        args: args.clone(),
        scheduler: None,
        restart_count: 0,
        summary: None,
        advice: None,
    };
    if args.nodes.standalone {
        return Ok(completed);
    }
    let is_placed = is_placed(args);
    let found = match detect(get, pod) {
        // Nothing is asked of it.
        Err(_) if is_placed => None,
        found => found?,
    };
    let Some(found) = found else {
        return Ok(completed);
    };
    completed.scheduler = Some(found.scheduler);
    completed.restart_count = found.restart_count;
    let gpus = ranks_per_node(get).filter(|_| !args.given.processes);
    if let Some((count, _)) = gpus {
        completed.args.processes = Processes::Count(count);
    }
    if !is_placed {
        completed.advice = place(&mut completed.args, &found)?;
    }
    completed.summary = summary(&completed.args, &found, gpus, is_placed);
    Ok(completed)
}

/// Whether the command line alone says what this node's launcher has to know about the others.
fn is_placed(args: &RunArgs) -> bool {
    let nodes = &args.nodes;
    let is_numbered = nodes.backend == RdzvBackend::C10d || args.given.node_rank;
    let has_address = nodes.endpoint.is_some() || nodes.master_addr.is_some();
    args.given.nodes && (nodes.nodes.max == 1 || (is_numbered && has_address))
}

/// The pods of the Job are not known.
fn no_nodes(index: usize) -> SchedulerError {
    SchedulerError::new(
        format!("this is pod {index} of an indexed Job, but the number of its pods is not set"),
        "set PET_NNODES to the Job's completions in the pod template; with --standalone each pod has a job of its own",
    )
}

/// Puts in what is open, and says what the person who started the job may have forgotten.
fn place(args: &mut RunArgs, found: &Found) -> Result<Option<String>, SchedulerError> {
    let nodes = &mut args.nodes;
    let mut advice = found.advice.clone();
    if !args.given.nodes {
        let count = match (found.nodes, found.node_rank) {
            (Some(count), _) => count,
            // A Job of one pod is common, and has no need to say so.
            (None, 0) => {
                advice = Some(
                    "nothing says how many pods are one job, so this one is alone: set PET_NNODES in the pod template if \
                     there are more"
                        .to_owned(),
                );
                1
            }
            (None, index) => return Err(no_nodes(index)),
        };
        nodes.nodes = Nodes {
            min: count,
            max: count,
        };
    }
    if !args.given.id {
        nodes.id.clone_from(&found.run_id);
    }
    if nodes.nodes.max == 1 {
        return Ok(advice);
    }
    if !args.given.node_rank {
        nodes.node_rank = found.node_rank;
    }
    if nodes.endpoint.is_none() {
        if nodes.master_addr.is_none() {
            nodes.master_addr = Some(found.master_addr.clone()?);
        }
        let port = *nodes.master_port.get_or_insert(found.master_port);
        if nodes.backend == RdzvBackend::C10d {
            let host = nodes.master_addr.clone().unwrap_or_default();
            nodes.endpoint = Some(meeting_point(&host, port));
        }
    }
    match found.nodes {
        Some(granted) if nodes.nodes.min > granted => {
            let asked = nodes.nodes.min;
            Ok(Some(format!(
                "{asked} nodes are asked for, and {} has {granted}",
                found.job
            )))
        }
        _ => Ok(advice),
    }
}

/// Launchers meet beside the port that is the program's.
fn meeting_point(host: &str, port: u16) -> String {
    net::join(host, port.saturating_add(1))
}

/// One line that says where this node is, and which values are the command line's.
fn summary(
    args: &RunArgs,
    found: &Found,
    gpus: Option<(usize, &str)>,
    is_placed: bool,
) -> Option<String> {
    let ranks = gpus.map(|(count, name)| {
        let ranks = counted(count, "rank");
        format!("{ranks} on this node, as {name} says")
    });
    let nodes = &args.nodes;
    if is_placed || nodes.nodes.max == 1 {
        return ranks.map(|ranks| format!("{}: {ranks}", found.job));
    }
    let given = |is_given| if is_given { " as given" } else { "" };
    let count = match nodes.nodes {
        Nodes { min, max } if min < max => format!("{min} to {max} nodes"),
        Nodes { max, .. } => counted(max, "node"),
    };
    let mut text = format!("{}: {count}", found.job);
    text.push_str(given(args.given.nodes));
    if nodes.backend == RdzvBackend::Static {
        text.push_str(&format!(", this is node {}", nodes.node_rank));
        text.push_str(given(args.given.node_rank));
    }
    if let Some(host) = &found.host {
        text.push_str(&format!(" ({host})"));
    }
    let port = nodes.master_port.unwrap_or(found.master_port);
    let meet = match (&nodes.endpoint, &nodes.master_addr) {
        (Some(endpoint), _) => endpoint.clone(),
        (None, addr) => meeting_point(addr.as_deref().unwrap_or_default(), port),
    };
    text.push_str(&format!(", meeting at {meet}"));
    if let Some(ranks) = ranks {
        text.push_str(&format!("; {ranks}"));
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::{command, read};

    const STEP: &[(&str, &str)] = &[
        ("SLURM_JOB_ID", "812"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_NODES", "2"),
        ("SLURM_NODEID", "1"),
        ("SLURM_STEP_NODELIST", "gpu[01-02]"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
        ("SLURM_RESTART_COUNT", "3"),
    ];

    fn completed(
        line: &str,
        vars: &[(&str, &str)],
        more: &[(&str, &str)],
    ) -> Result<Completed, SchedulerError> {
        let words = ["run"].into_iter().chain(line.split_whitespace());
        let matches = command().get_matches_from(words);
        let args = read(&matches).expect("a program");
        let get = |name: &str| {
            let all = more.iter().chain(vars);
            all.clone()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        };
        let pod = || Pod {
            host: "resnet-1".to_owned(),
            hosts: "10.1.2.3 resnet-1.resnet.ml.svc resnet-1".to_owned(),
        };
        complete(&args, &get, &pod)
    }

    fn summary_of(line: &str, vars: &[(&str, &str)], more: &[(&str, &str)]) -> String {
        let completed = completed(line, vars, more).expect("complete");
        completed.summary.unwrap_or_default()
    }

    #[test]
    fn a_command_line_without_options_is_completed() {
        let completed = completed("prog", STEP, &[]).expect("complete");
        let nodes = &completed.args.nodes;
        assert_eq!(nodes.nodes, Nodes { min: 2, max: 2 });
        assert_eq!((nodes.node_rank, nodes.master_port), (1, Some(11_624)));
        assert_eq!(nodes.master_addr.as_deref(), Some("gpu01"));
        assert_eq!(nodes.id, "slurm-812.0");
        assert_eq!(completed.restart_count, 3);
        assert_eq!(completed.args.processes, Processes::Count(1));
        assert_eq!(
            completed.summary.as_deref(),
            Some("Slurm step 812.0: 2 nodes, this is node 1 (gpu02), meeting at gpu01:11625")
        );
    }

    #[test]
    fn options_come_first_value_by_value() {
        let gpus = [("SLURM_GPUS_ON_NODE", "8")];
        for (line, expected) in [
            (
                "prog",
                "2 nodes, this is node 1 (gpu02), meeting at gpu01:11625; 8 ranks on this node, as SLURM_GPUS_ON_NODE says",
            ),
            (
                "--nproc-per-node 4 --node-rank 0 prog",
                "2 nodes, this is node 0 as given (gpu02), meeting at gpu01:11625",
            ),
            (
                "--nproc-per-node 4 --master-addr head --master-port 4000 prog",
                "2 nodes, this is node 1 (gpu02), meeting at head:4001",
            ),
            (
                "--nproc-per-node 4 --nnodes 1:2 --rdzv-backend c10d prog",
                "1 to 2 nodes as given (gpu02), meeting at gpu01:11625",
            ),
            (
                "--nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint head:5000 prog",
                "2 nodes (gpu02), meeting at head:5000",
            ),
        ] {
            let summary = summary_of(line, STEP, &gpus);
            assert_eq!(summary, format!("Slurm step 812.0: {expected}"), "{line}");
        }
        let lines = ["--rdzv-id mine --nnodes 2 prog", "--rdzv-id mine prog"];
        for line in lines {
            let completed = completed(line, STEP, &[]).expect("complete");
            assert_eq!(completed.args.nodes.id, "mine");
        }
    }

    #[test]
    fn a_command_line_that_says_everything_stays_as_it_is() {
        let twice = [("SLURM_STEP_TASKS_PER_NODE", "2(x2)")];
        for line in [
            "--standalone prog",
            "--nnodes 1 prog",
            "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint head prog",
            "--nnodes 2 --node-rank 1 --master-addr head prog",
        ] {
            for more in [&twice[..], &[]] {
                let completed = completed(line, STEP, more).expect("complete");
                let words = ["run"].into_iter().chain(line.split_whitespace());
                let args = read(&command().get_matches_from(words)).expect("a program");
                assert_eq!((completed.args, completed.summary), (args, None), "{line}");
            }
        }
        let error = completed("prog", STEP, &twice).expect_err("two launchers on a node");
        let launchers = "Slurm started 2 launchers on one node";
        assert!(error.to_string().starts_with(launchers), "{error}");
    }

    #[test]
    fn one_node_says_only_where_its_ranks_come_from() {
        let batch = [("SLURM_JOB_ID", "812"), ("SLURM_JOB_NUM_NODES", "2")];
        let gpus = [("SLURM_GPUS_ON_NODE", "1")];
        let alone = completed("prog", &batch, &gpus).expect("complete");
        assert_eq!(
            alone.summary.as_deref(),
            Some("Slurm job 812: 1 rank on this node, as SLURM_GPUS_ON_NODE says")
        );
        assert!(alone.advice.is_some_and(|advice| advice.contains("srun")));
        assert_eq!(alone.args.nodes.nodes.max, 1);
        assert_eq!(summary_of("prog", &batch, &[]), "");
    }

    #[test]
    fn more_nodes_than_there_are_is_worth_a_word() {
        let completed = completed("--nnodes 4 prog", STEP, &[]).expect("complete");
        let advice = "4 nodes are asked for, and Slurm step 812.0 has 2";
        assert_eq!(completed.advice.as_deref(), Some(advice));
    }

    #[test]
    fn a_pod_is_told_how_many_there_are() {
        let pod = |index| [("JOB_COMPLETION_INDEX", index)];
        let summary = summary_of("--nnodes 4 prog", &pod("1"), &[]);
        assert_eq!(
            summary,
            "Kubernetes Job resnet: 4 nodes as given, this is node 1 (resnet-1), meeting at resnet-0.resnet.ml.svc:29501"
        );
        let error = completed("prog", &pod("1"), &[]).expect_err("of how many");
        assert_eq!(error, no_nodes(1));
        let first = completed("prog", &pod("0"), &[]).expect("alone");
        assert!(
            first
                .advice
                .is_some_and(|advice| advice.contains("PET_NNODES"))
        );
        assert_eq!(first.args.nodes.nodes.max, 1);
    }

    #[test]
    fn without_a_scheduler_nothing_changes() {
        let completed = completed("prog", &[], &[("SLURM_GPUS_ON_NODE", "8")]).expect("complete");
        assert_eq!((completed.scheduler, completed.summary), (None, None));
        assert_eq!(completed.args.processes, Processes::Count(1));
    }
}
