//! What people are told about rounds.

use crate::elastic::record::{Record, Why};
use crate::report::count;

/// Why a round was begun, for people.
pub(super) fn describe(record: &Record, is_outside: bool) -> Option<String> {
    Some(match &record.why {
        Why::Start => return None,
        Why::Failure(report) => report.failure.headline(),
        Why::Hung(complaint) => format!(
            "rank {} hangs, as rank {} reports, and was killed",
            complaint.of, complaint.by
        ),
        Why::Cut(complaint) => format!(
            "rank {} lost rank {}, which lives",
            complaint.by, complaint.of
        ),
        Why::Lost(names) => names.join(", "),
        Why::Joined(1) => "a node has joined".to_owned(),
        Why::Joined(nodes) => format!("{nodes} nodes have joined"),
        Why::Admission => "too few nodes have ranks".to_owned(),
        Why::StoreLost if is_outside => "the job's record in etcd was lost".to_owned(),
        Why::StoreLost => {
            "the node with the job's store was lost, and another took over".to_owned()
        }
    })
}

/// The newcomers of a round, each in a line for people.
pub(super) fn joins(record: &Record, is_held: bool) -> Vec<String> {
    let what = if is_held {
        "wait for more nodes"
    } else {
        "go on"
    };
    let now = format!("{} {what}", count(record.world(), "rank"));
    let mut lines = Vec::new();
    for (node, member) in record.members.iter().enumerate() {
        if member.newcomers.len() == member.slots.len() {
            let (host, ranks) = (&member.host, count(member.slots.len(), "rank"));
            lines.push(format!(
                "node {node} (host {host}) joins with {ranks}; {now}"
            ));
            continue;
        }
        for newcomer in &member.newcomers {
            let (rank, pid, host) = (member.first + newcomer.slot, newcomer.pid, &member.host);
            lines.push(format!(
                "rank {rank} (node {node}, host {host}, pid {pid}) joins as a replacement; {now}"
            ));
        }
    }
    lines
}
