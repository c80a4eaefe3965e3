//! The page between threads, between mappings and against descriptors that are not one.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Barrier;

use super::*;

fn activity(step: u64) -> Activity {
    Activity {
        phase: Phase::Backward,
        step,
        op: Some(OpActivity {
            code: op::ALL_REDUCE,
            seq: step,
            bucket: Some(0),
        }),
    }
}

#[test]
fn a_slot_tells_what_its_rank_is_doing_and_since_when() {
    let page = JobPage::private(3).unwrap();
    let slot = page.slot(2);
    assert_eq!(
        (slot.pid(), slot.rank(), slot.victim_of()),
        (None, None, None)
    );
    assert!(slot.activity().is_none());
    slot.set_pid(4711);
    slot.set_rank(0);
    slot.set_victim_of(7, 0);
    slot.set_activity(&activity(812));
    assert_eq!(
        (slot.pid(), slot.rank(), slot.victim_of()),
        (Some(4711), Some(0), Some(7))
    );
    let (seen, since) = slot.activity().unwrap();
    assert_eq!(seen, activity(812));
    assert!(since < Duration::from_secs(5), "{since:?}");
    let idle = Activity {
        phase: Phase::DataLoader,
        step: 813,
        op: None,
    };
    slot.set_activity(&idle);
    assert_eq!(page.slot(2).activity().unwrap().0, idle);
    assert!(page.slot(1).activity().is_none());
}

#[test]
fn a_slot_tells_where_weights_are_while_they_are_there_and_what_differed_last() {
    let page = JobPage::private(2).unwrap();
    let slot = page.slot(1);
    assert_eq!(slot.weights(), None);
    slot.show_weights(&(4096..8192));
    assert_eq!(page.slot(1).weights(), Some(4096..8192));
    slot.hide_weights();
    assert_eq!(slot.weights(), None);
    assert_eq!(slot.differences(), Differences::default());
    slot.set_differs(7, None);
    slot.set_differs(9, Some(0));
    let last = Differences {
        times: 2,
        step: 9,
        odd: Some(0),
    };
    assert_eq!(page.slot(1).differences(), last);
    assert_eq!(page.slot(0).differences(), Differences::default());
}

#[test]
fn a_process_finds_its_own_slot_by_its_environment() {
    let page = JobPage::create_memfd(2).unwrap();
    let fd = page.raw_fd().unwrap().to_string();
    let slot = |vars: &[(&str, &str)]| {
        JobPage::own_slot(&|name| {
            let found = vars.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    };
    let fd = ("PACELINE_PAGE_FD", &*fd);
    let own = slot(&[fd, ("LOCAL_RANK", "0"), ("PACELINE_LOCAL_RANK", "1")]).unwrap();
    own.raw().misconfigured.store(1, Ordering::Release);
    assert!(page.slot(1).is_misconfigured() && !page.slot(0).is_misconfigured());
    assert!(slot(&[fd, ("LOCAL_RANK", "0")]).is_some());
    for wrong in [
        &[fd][..],
        &[fd, ("LOCAL_RANK", "2")],
        &[("LOCAL_RANK", "0")],
    ] {
        assert!(slot(wrong).is_none(), "{wrong:?}");
    }
}

#[test]
fn another_mapping_of_the_descriptor_sees_everything_after_the_writer_is_gone() {
    let launcher = JobPage::create_memfd(2).unwrap();
    {
        let rank = JobPage::from_fd(launcher.raw_fd().unwrap()).unwrap();
        rank.slot(1).set_activity(&activity(5));
        assert!(rank.revoke(&Revocation {
            rank: Some(1),
            text: "panicked".into()
        }));
    }
    assert_eq!(launcher.slot(1).activity().unwrap().0, activity(5));
    assert_eq!(
        launcher.revocation(),
        Some(Revocation {
            rank: Some(1),
            text: "panicked".into()
        })
    );
    launcher.slot(0).set_polls_stop();
    let stopped = Stopped {
        signal: StopSignal::new(10).unwrap(),
        step: 7,
    };
    launcher.slot(0).set_stopped(stopped);
    launcher.request_stop(15);
    let late = JobPage::from_fd(launcher.raw_fd().unwrap()).unwrap();
    assert_eq!((late.slots(), late.stop_requested()), (2, Some(15)));
    assert!(late.has_launcher() && !launcher.has_launcher());
    let seen = [0, 1].map(|rank| (late.slot(rank).polls_stop(), late.slot(rank).stopped()));
    assert_eq!(seen, [(true, Some(stopped)), (false, None)]);
}

#[test]
fn of_many_revokers_one_is_first_and_its_whole_cause_stands() {
    let page = JobPage::private(1).unwrap();
    assert_eq!((page.is_revoked(), page.revocation()), (false, None));
    let start = Barrier::new(8);
    let winners: Vec<usize> = std::thread::scope(|scope| {
        let revokers: Vec<_> = (0..8)
            .map(|rank| {
                let (page, start) = (&page, &start);
                scope.spawn(move || {
                    start.wait();
                    let text = format!("{rank}").repeat(900);
                    page.revoke(&Revocation {
                        rank: Some(rank),
                        text,
                    })
                    .then_some(rank)
                })
            })
            .collect();
        revokers
            .into_iter()
            .filter_map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(winners.len(), 1);
    let cause = page.revocation().unwrap();
    assert_eq!(
        cause,
        Revocation {
            rank: Some(winners[0]),
            text: format!("{}", winners[0]).repeat(900)
        }
    );
}

#[test]
fn a_sleeper_wakes_when_the_job_is_revoked_through_another_mapping() {
    let page = JobPage::create_memfd(1).unwrap();
    let other = JobPage::from_fd(page.raw_fd().unwrap()).unwrap();
    assert!(!page.wait_revoked(Duration::from_millis(5)));
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| (page.wait_revoked(Duration::from_secs(20)), Instant::now()));
        other.revoke(&Revocation {
            rank: None,
            text: String::new(),
        });
        let revoked = Instant::now();
        let (woken, at) = sleeper.join().unwrap();
        assert!(woken);
        assert!(at.saturating_duration_since(revoked) < Duration::from_secs(5));
    });
}

#[test]
fn a_revoker_that_dies_while_writing_leaves_a_revoked_job() {
    let page = JobPage::private(1).unwrap();
    page.revoked_word().store(BEING_WRITTEN, Ordering::Release);
    assert!(page.is_revoked());
    assert!(!page.revoke(&Revocation {
        rank: Some(0),
        text: "late".into()
    }));
    assert_eq!(page.revocation().unwrap().rank, None);
}

#[test]
fn a_long_text_is_cut_on_a_character() {
    let page = JobPage::private(1).unwrap();
    page.revoke(&Revocation {
        rank: None,
        text: format!("a{}", "é".repeat(700)),
    });
    assert_eq!(
        page.revocation().unwrap().text,
        format!("a{}", "é".repeat(499))
    );
}

#[test]
fn descriptors_that_are_no_page_are_refused_by_name() {
    let refused = |fd: RawFd| JobPage::from_fd(fd).unwrap_err().to_string();
    assert!(refused(-1).contains("not negative"));
    assert!(refused(1_000_000).contains("not a memfd"));
    let file = File::open("/dev/null").unwrap();
    assert!(refused(file.as_raw_fd()).contains("not a memfd"));

    let loose = rustix::fs::memfd_create("loose", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    assert!(refused(loose.as_raw_fd()).contains("could shrink"));
    let empty = os::memfd("empty", 0).unwrap();
    assert!(refused(empty.as_raw_fd()).contains("0 bytes"));
    let zeros = os::memfd("zeros", layout::page_bytes(2) as u64).unwrap();
    assert!(refused(zeros.as_raw_fd()).contains("0x0000000000000000"));

    let page = JobPage::create_memfd(2).unwrap();
    let fd = page.raw_fd().unwrap();
    let header = page.0.header();
    header.initialise(3);
    assert!(refused(fd).contains("3 slots"));
    assert!(
        JobPage::from_fd(fd)
            .unwrap_err()
            .hint()
            .unwrap()
            .contains("PACELINE_PAGE_FD")
    );
}

#[test]
fn a_worker_maps_its_launchers_page_or_a_private_one() {
    let page = JobPage::create_memfd(2).unwrap();
    let env = WorkerEnv {
        local_world: 2,
        page_fd: page.raw_fd(),
        ..WorkerEnv::alone()
    };
    JobPage::for_worker(&env).unwrap().request_stop(2);
    assert_eq!(page.stop_requested(), Some(2));
    let error = JobPage::for_worker(&WorkerEnv {
        local_world: 3,
        ..env.clone()
    })
    .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("it has 2 slots, LOCAL_WORLD_SIZE is 3"),
        "{error}"
    );
    let alone = JobPage::for_worker(&WorkerEnv {
        page_fd: None,
        ..env
    })
    .unwrap();
    assert_eq!((alone.slots(), alone.raw_fd()), (2, None));
}

#[test]
fn the_number_of_slots_is_bounded() {
    for slots in [0, SLOTS_MAX + 1] {
        assert!(matches!(
            JobPage::private(slots),
            Err(PageError::Slots { .. })
        ));
        assert!(matches!(
            JobPage::create_memfd(slots),
            Err(PageError::Slots { .. })
        ));
    }
    assert_eq!(JobPage::create_memfd(SLOTS_MAX).unwrap().slots(), SLOTS_MAX);
}

#[test]
fn a_child_inherits_the_page_only_when_it_is_allowed_to() {
    let page = JobPage::create_memfd(1).unwrap();
    let fd = page.raw_fd().unwrap();
    let child_sees = || {
        let status = std::process::Command::new("test")
            .args(["-e", &format!("/proc/self/fd/{fd}")])
            .status();
        status.unwrap().success()
    };
    assert!(!child_sees());
    allow_inherit(page.0.fd.as_ref().unwrap().as_fd()).unwrap();
    assert!(child_sees());
}

#[test]
fn what_another_process_writes_is_read_without_trust() {
    let page = JobPage::private(1).unwrap();
    // Every byte 0xff: unknown phase, lengths beyond the text, text that is no UTF-8.
    page.0.header().fill_for_test(0xff);
    page.revoked_word().store(REVOKED, Ordering::Release);
    let cause = page.revocation().unwrap();
    assert_eq!(cause.text.chars().count(), REVOCATION_TEXT_BYTES_MAX);
    page.0.slot(0).fill_for_test();
    assert!(page.slot(0).activity().is_none());
    assert_eq!(page.slot(0).victim_of(), Some(u32::MAX as usize - 1));
}
