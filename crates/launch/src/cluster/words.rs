//! What people are told about rounds.

use paceline_words::{Lang, count, say};

use crate::elastic::decide::listed;
use crate::elastic::record::{Record, Why};
use crate::report::ranks_go_on;

/// Why a round was begun, for people.
pub(super) fn describe(record: &Record, is_outside: bool, lang: Lang) -> Option<String> {
    Some(match &record.why {
        Why::Start => return None,
        Why::Failure(report) => report.failure.headline(lang),
        Why::Hung(complaint) => {
            let (of, by) = (complaint.of, complaint.by);
            say!(
                lang,
                "rank {of} hangs, as rank {by} reports, and was killed",
                "랭크 {of}: 랭크 {by}에서 멈췄다고 알려 강제 종료함"
            )
        }
        Why::Cut(complaint) => {
            let (of, by) = (complaint.of, complaint.by);
            say!(
                lang,
                "rank {by} lost rank {of}, which lives",
                "랭크 {by}: 랭크 {of} 쪽 연결이 끊김, 상대는 살아 있음"
            )
        }
        Why::Lost(names) => listed(names, lang),
        Why::Joined(1) => say!(lang, "a node has joined", "노드 1개 합류"),
        Why::Joined(nodes) => say!(lang, "{nodes} nodes have joined", "노드 {nodes}개 합류"),
        Why::Admission => say!(
            lang,
            "too few nodes have ranks",
            "랭크가 있는 노드가 너무 적음"
        ),
        Why::StoreLost if is_outside => say!(
            lang,
            "the job's record in etcd was lost",
            "etcd에 있던 작업의 기록이 사라짐"
        ),
        Why::StoreLost => say!(
            lang,
            "the node with the job's store was lost, and another took over",
            "작업의 스토어가 있던 노드를 잃어 다른 노드가 넘겨받음"
        ),
    })
}

/// The newcomers of a round, each in a line for people.
pub(super) fn joins(record: &Record, is_held: bool, lang: Lang) -> Vec<String> {
    let now = ranks_go_on(record.world(), is_held, lang);
    let mut lines = Vec::new();
    for (node, member) in record.members.iter().enumerate() {
        let host = &member.host;
        if member.newcomers.len() == member.slots.len() {
            let ranks = count(lang, member.slots.len(), "rank", "랭크");
            lines.push(say!(
                lang,
                "node {node} (host {host}) joins with {ranks}; {now}",
                "노드 {node}(호스트 {host}): {ranks}와 함께 합류; {now}"
            ));
            continue;
        }
        for newcomer in &member.newcomers {
            let (rank, pid) = (member.first + newcomer.slot, newcomer.pid);
            lines.push(say!(
                lang,
                "rank {rank} (node {node}, host {host}, pid {pid}) joins as a replacement; {now}",
                "랭크 {rank}(노드 {node}, 호스트 {host}, pid {pid}): 대체 랭크로 합류; {now}"
            ));
        }
    }
    lines
}
