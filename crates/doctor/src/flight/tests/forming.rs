//! Groups that did not come about.

use super::*;
use paceline_collective::flight::Forming;

/// Dumps of ranks that could not form the group of all; each with whom it missed.
fn unformed(world: usize, kind: FailureKind, missed: &[(usize, &[usize])]) -> Vec<Dump> {
    let ranks: Vec<usize> = (0..world).collect();
    let of = |(rank, missed): &(usize, &[usize])| {
        let mut group = group("world", &ranks, vec![]);
        group.forming = Some(Forming {
            phase: "report in".into(),
            arrived: ranks
                .iter()
                .copied()
                .filter(|rank| !missed.contains(rank))
                .collect(),
            waited_ns: 60 * SECOND,
        });
        group.failure = Some(Failure {
            kind,
            text: format!("rank {rank} says so"),
            culprits: missed.to_vec(),
            at_ns: TAKEN,
        });
        dump(*rank, world, vec![group])
    };
    missed.iter().map(of).collect()
}

#[test]
fn a_rank_that_did_not_come_is_named() {
    let diagnosis = check(
        &unformed(3, FailureKind::Deadline, &[(0, &[2]), (1, &[2])]),
        Cause::NeverFormed,
        &[2],
        "rank 2 (no record) did not come to the group of all ranks: ranks 0, 1 waited 60 s for all to report in",
    );
    detail(
        &diagnosis,
        "rank 1 (host b, pid 4711) could not report in; ranks 0, 1 had come",
    );
}

#[test]
fn a_rank_that_had_come_and_is_gone_is_told_from_one_that_never_came() {
    let mut dumps = unformed(3, FailureKind::Deadline, &[(0, &[2]), (1, &[2])]);
    for dump in &mut dumps {
        let forming = dump.groups[0].forming.as_mut().unwrap();
        (forming.phase, forming.arrived) = ("connect to all ranks".into(), vec![0, 1, 2]);
    }
    check(
        &dumps,
        Cause::NeverFormed,
        &[2],
        "rank 2 (no record) reported in, and then was gone or not to be reached: ranks 0, 1 waited 60 s for the group of \
         all ranks to connect to all ranks",
    );
}

#[test]
fn whoever_waited_too_is_not_who_did_not_come() {
    // Rank 0 missed both, of whom rank 1 waited for the other one itself.
    let dumps = unformed(3, FailureKind::Deadline, &[(0, &[1, 2]), (1, &[2])]);
    let diagnosis = diagnose(&dumps, Lang::En);
    assert_eq!(diagnosis.findings[0].culprits, [2]);
    // Rank 2 has formed the group, and is not reached by the others.
    let mut dumps = unformed(3, FailureKind::Deadline, &[(0, &[1, 2]), (1, &[0, 2])]);
    dumps.push(dump(2, 3, vec![group("world", &[0, 1, 2], vec![])]));
    assert_eq!(diagnose(&dumps, Lang::En).findings[0].culprits, [2]);
}

#[test]
fn ranks_that_do_not_fit_together_are_told_in_their_words() {
    let mut dumps = unformed(2, FailureKind::Other, &[(0, &[1]), (1, &[1])]);
    for dump in &mut dumps {
        dump.groups[0].failure.as_mut().unwrap().text =
            "rank 0 asks for 1 socket, rank 1 for 2".into();
    }
    check(
        &dumps,
        Cause::NeverFormed,
        &[1],
        "the group of all ranks was not formed: rank 0 asks for 1 socket, rank 1 for 2",
    );
    // What only one rank has seen, and blames nobody for.
    dumps[0].groups[0].failure.as_mut().unwrap().culprits = vec![];
    check(
        &dumps,
        Cause::NeverFormed,
        &[],
        "the group of all ranks was not formed: rank 0 asks for 1 socket, rank 1 for 2 (in the words of rank 0)",
    );
}
