//! One rank's view of its group's health.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use paceline_rendezvous::page::Activity;

use super::culprits::{culprits, is_certain};
use super::*;
use crate::error::OpKind;

fn status() -> Status {
    let page = JobPage::private(3).unwrap();
    let peer = |slot| PeerInfo {
        host: "b".into(),
        pid: 4711,
        slot: Some(slot),
        started: slot,
    };
    let slot = page.slot(0);
    Status::new(0, vec![peer(0), peer(1), peer(2)], page, slot)
}

const OPERATION: Operation = Operation {
    kind: OpKind::AllReduce,
    seq: 5,
    bucket: None,
};

fn wait(status: &Status, timeout: Duration) -> OpWait<'_> {
    OpWait::new(status, OPERATION, Instant::now(), timeout)
}

#[test]
fn a_rank_that_keeps_the_others_waiting_is_to_blame() {
    let check = |answers: [Option<Option<u64>>; 4], missing: &[usize], expect: &[usize]| {
        assert_eq!(
            culprits(missing, 5, |rank| answers[rank]),
            expect,
            "{answers:?}"
        );
    };
    let (silent, elsewhere, here, behind) = (None, Some(None), Some(Some(5)), Some(Some(4)));
    check([here, silent, here, here], &[1, 2], &[1]);
    check([here, elsewhere, here, silent], &[1, 2, 3], &[1, 3]);
    // Rank 1 still waits in the operation before for the one that is silent.
    check([here, behind, silent, here], &[1, 2], &[2]);
    check([here, behind, here, here], &[1, 2], &[1]);
    check([here, here, here, here], &[1, 2], &[1, 2]);
}

#[test]
fn a_rank_that_can_blame_only_waiting_ranks_leaves_the_verdict_to_them() {
    let check = |answers: [Option<Option<u64>>; 3], missing: &[usize], expect: bool| {
        let answer = |rank: usize| answers[rank];
        let blamed = culprits(missing, 5, answer);
        assert_eq!(is_certain(&blamed, answer), expect, "{answers:?}");
    };
    let (silent, elsewhere, here, behind) = (None, Some(None), Some(Some(5)), Some(Some(4)));
    check([here, silent, here], &[1], true);
    check([here, elsewhere, silent], &[1, 2], true);
    check([here, behind, silent], &[1, 2], true);
    check([here, behind, here], &[1], false);
    check([here, here, here], &[1, 2], false);
}

#[test]
fn the_first_failure_stands_and_its_culprit_is_on_the_page() {
    let status = status();
    status.lost(2);
    status.lost(1);
    assert_eq!(status.health().unwrap_err().culprit(), Some(2));
    assert_eq!(status.page().slot(0).victim_of(), Some(2));
}

#[test]
fn who_left_in_order_is_missed_only_by_later_operations() {
    let status = status();
    status.receive(1, Message::Goodbye { after: 5 });
    status.lost(1);
    assert!(status.health().is_ok());
    assert!(
        wait(&status, Duration::MAX)
            .check(|| Missing::not_come(vec![1]))
            .is_ok()
    );
    let later = Operation {
        seq: 6,
        ..OPERATION
    };
    let error = OpWait::new(&status, later, Instant::now(), Duration::MAX)
        .check(|| Missing::not_come(vec![1]))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "rank 1 left the group after operation #5, while all-reduce #6 needs it"
    );
}

#[test]
fn a_deadline_tells_what_the_missing_rank_does() {
    let status = status();
    status.page().slot(1).set_activity(&Activity {
        phase: Phase::DataLoader,
        step: 812,
        op: None,
    });
    let error = wait(&status, Duration::ZERO)
        .check(|| Missing::not_come(vec![1]))
        .unwrap_err();
    assert!(error.is_deadline() && error.culprit() == Some(1));
    let text = error.to_string();
    assert!(
        text.contains("rank 1 (host b, pid 4711) is in the data loader at step 812 since")
            && text.contains(", and does not answer"),
        "{text}"
    );
    assert!(
        text.ends_with("; ranks 0, 2 wait in all-reduce #5"),
        "{text}"
    );
}

/// A wire on which these ranks answer that they wait in the operation, and others say nothing.
#[derive(Debug)]
struct Waiting(Weak<Status>, &'static [usize]);

impl Courier for Waiting {
    fn send(&self, to: usize, message: &Message) {
        if *message == Message::Ask && self.1.contains(&to) {
            let answer = Answer {
                seq: Some(OPERATION.seq),
                text: "is waiting".into(),
            };
            self.0.upgrade().unwrap().receive(to, Message::Tell(answer));
        }
    }
}

fn with_waiting(ranks: &'static [usize]) -> Arc<Status> {
    let status = Arc::new(status());
    status.set_courier(Box::new(Waiting(Arc::downgrade(&status), ranks)));
    status
}

#[test]
fn a_missing_rank_that_waits_itself_is_not_to_blame() {
    let status = with_waiting(&[2]);
    let error = wait(&status, Duration::ZERO)
        .check(|| Missing::not_come(vec![1, 2]))
        .unwrap_err();
    assert!(
        matches!(&error, Error::Deadline { culprits, .. } if *culprits == [1]),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .ends_with("; ranks 0, 2 wait in all-reduce #5"),
        "{error}"
    );
    for (waiting, culprit) in [(&[2][..], Some(1)), (&[1, 2], None)] {
        let error = wait(&with_waiting(waiting), Duration::ZERO)
            .check(|| Missing::not_come(vec![2]))
            .unwrap_err();
        let reason = "it waits for the one that says nothing, or all wait";
        assert_eq!(error.culprit(), culprit, "{reason}: {error}");
    }
    let error = wait(&with_waiting(&[1, 2]), Duration::ZERO).check_alone(&[2]);
    assert_eq!(error.unwrap_err().culprit(), Some(2), "a sender is known");
}

#[test]
fn the_network_is_to_blame_for_what_ranks_that_have_come_and_answer_have_sent() {
    let error = |waiting: &'static [usize]| {
        let missing = || Missing {
            ranks: vec![1],
            have_come: true,
            are_heard: false,
        };
        let error = wait(&with_waiting(waiting), Duration::ZERO).check(missing);
        error.unwrap_err()
    };
    let network = error(&[1, 2]);
    assert!(network.is_deadline() && network.culprit().is_none());
    assert!(
        network
            .to_string()
            .contains(": all ranks have come, and data last moved here 0."),
        "{network}"
    );
    assert!(network.hint().unwrap().contains("look at the network"));
    // One that says nothing may be gone, whether this rank waits for it or another one does.
    assert_eq!(error(&[2]).culprit(), Some(1));
    assert_eq!(error(&[1]).culprit(), Some(2));
    // Unless it still sends.
    let missing = || Missing {
        ranks: vec![1],
        have_come: true,
        are_heard: true,
    };
    let error = wait(&with_waiting(&[]), Duration::ZERO).check(missing);
    assert_eq!(error.unwrap_err().culprit(), None);
}

#[test]
fn data_that_moves_is_progress_on_the_page() {
    let status = status();
    let wait = wait(&status, Duration::MAX);
    wait.publish();
    let since = || status.board.slot.activity().unwrap().1;
    let stamp = || Instant::now() - since();
    let first = stamp();
    let pause = Duration::from_millis(20);
    while since() < pause {
        std::thread::yield_now();
    }
    wait.moved(wait.started);
    assert!(stamp() < first + pause / 2, "not for every packet");
    wait.moved(wait.started + Duration::from_secs(1));
    assert!(stamp() > first + pause / 2);
}

#[test]
fn answers_may_take_a_part_of_the_deadline() {
    for (deadline, answer) in [
        (0, 250),
        (2_000, 250),
        (15_000, 500),
        (60_000, 2_000),
        (600_000, 5_000),
    ] {
        let answers = answer_timeout(Duration::from_millis(deadline));
        assert_eq!(answers, Duration::from_millis(answer), "{deadline}");
    }
}

#[test]
fn a_rank_that_waits_in_another_group_says_so() {
    #[derive(Debug)]
    struct Sent(Arc<Mutex<Vec<Message>>>);
    impl Courier for Sent {
        fn send(&self, _: usize, message: &Message) {
            self.0.lock().push(message.clone());
        }
    }
    let world = status();
    let child = world.child(0, &[0, 2], "dp1");
    let sent = Arc::default();
    child.set_courier(Box::new(Sent(Arc::clone(&sent))));
    let answers = || {
        child.receive(1, Message::Ask);
        match sent.lock().pop() {
            Some(Message::Tell(answer)) => answer.seq,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(answers(), None);
    world.set_operation(Some(OPERATION));
    assert_eq!(answers(), Some(ELSEWHERE));
    child.set_operation(Some(OPERATION));
    assert_eq!(answers(), Some(OPERATION.seq));
    let is_certain_of = |answer| is_certain(&[1], |_| Some(answer));
    assert!(is_certain_of(None) && !is_certain_of(Some(ELSEWHERE)));
}

#[test]
fn an_operation_does_not_disturb_the_phase() {
    let status = status();
    status.set_phase(Phase::Backward, 7);
    status.set_operation(Some(OPERATION));
    assert_eq!(
        activity(&status.board.slot),
        "is in the backward pass at step 7, waiting in all-reduce #5 since 0.0 s"
    );
    status.set_operation(None);
    assert_eq!(
        activity(&status.board.slot),
        "is in the backward pass at step 7 since 0.0 s"
    );
}

#[test]
fn a_sub_group_fails_alone_and_blames_in_the_jobs_numbers() {
    let world = status();
    let child = world.child(0, &[0, 2], "dp1");
    child.lost(1);
    assert_eq!(
        child.health().unwrap_err().to_string(),
        "rank 1 (dp1, rank 2 of the job, host b, pid 4711) died"
    );
    assert_eq!(child.page().slot(0).victim_of(), Some(2));
    assert!(world.health().is_ok());
    child.page().revoke(&paceline_rendezvous::page::Revocation {
        rank: Some(2),
        text: "killed".into(),
    });
    let other = world.child(0, &[0, 2], "dp1").health().unwrap_err();
    assert_eq!(other.culprit(), Some(1), "{other}");
}

#[test]
fn the_launchers_word_counts() {
    let status = status();
    status
        .page()
        .revoke(&paceline_rendezvous::page::Revocation {
            rank: Some(2),
            text: "killed".into(),
        });
    let error = status.health().unwrap_err();
    assert_eq!(
        (error.culprit(), error.to_string().as_str()),
        (Some(2), "the launcher ended the job: killed")
    );
}
