use paceline_rendezvous::page::{Differences, RunningRank};

use super::super::plan::Moment;
use super::*;

const PAGE: Page = (1, 1);
const NEXT: Page = (1, 2);

/// A job whose ranks have these pids, phases and steps.
fn job(page: Page, generation: u32, ranks: &[(u32, Phase, u64)]) -> RunningJob {
    let rank = |(slot, (pid, phase, step)): (usize, &(u32, Phase, u64))| RunningRank {
        rank: Some(slot),
        pid: (*pid != 0).then_some(*pid),
        activity: Some((
            Activity {
                phase: *phase,
                step: *step,
                op: None,
            },
            Duration::ZERO,
        )),
        victim_of: None,
        stopped: None,
        weights: None,
        differences: Differences::default(),
    };
    RunningJob {
        page,
        launcher: Some(page.1 as u32 + 1000),
        name: None,
        command: String::new(),
        world: None,
        restarts: 0,
        generation,
        stopping: None,
        revocation: None,
        ranks: ranks.iter().enumerate().map(rank).collect(),
    }
}

fn strike(fault: Fault, pick: u64) -> Strike {
    Strike {
        index: 0,
        fault,
        moment: Moment::At(0.0),
        pick,
        hold: Duration::ZERO,
    }
}

fn rules(held: &[u32], leave: usize) -> Rules<'_> {
    Rules {
        held,
        leave,
        resumes: false,
        phase: None,
    }
}

/// A fault in this scene, and what each of the later ones shows.
fn fates(fault: Fault, before: &[RunningJob], later: &[&[RunningJob]]) -> Vec<Option<Fate>> {
    let mut eyes = Eyes::default();
    let scene = eyes.see(before);
    let target = target(&strike(fault, 1), &scene, rules(&[], 1)).expect("a target");
    let mut watch = Watch::new(&scene, &target, fault, false);
    let fate = |jobs: &&[RunningJob]| watch.fate(&eyes.see(jobs), false);
    later.iter().map(fate).collect()
}

use Phase::{Backward, BetweenSteps, DataLoader, Finished, Rendezvous, Starting};

#[test]
fn a_rank_says_how_far_it_is_and_is_remembered() {
    let mut eyes = Eyes::default();
    let mut done = |phase, step| eyes.see(&[job(PAGE, 0, &[(10, phase, step)])]).ranks[0].done;
    assert_eq!(done(Starting, 0), None);
    assert_eq!(done(DataLoader, 4), Some(4));
    assert_eq!(done(BetweenSteps, 4), Some(5));
    assert_eq!(done(Rendezvous, 0), Some(5), "it has not gone back");
    assert_eq!(done(Backward, 3), Some(5), "nor by repeating a step");
}

#[test]
fn a_fault_hits_a_free_rank_and_spares_the_last() {
    let jobs = [job(
        PAGE,
        0,
        &[
            (10, Backward, 1),
            (0, Backward, 1),
            (12, Backward, 1),
            (13, Finished, 0),
        ],
    )];
    let scene = Eyes::default().see(&jobs);
    let check = |fault, pick, held: &[u32], leave, expect: Result<u32, &str>| {
        let target = target(&strike(fault, pick), &scene, rules(held, leave));
        assert_eq!(target.map(|target| target.pid), expect);
    };
    // Rank 1 is dead and rank 3 about to leave.
    check(Fault::Kill, 0, &[], 1, Ok(10));
    check(Fault::Kill, 1, &[], 1, Ok(12));
    check(Fault::Kill, 2, &[], 1, Ok(10));
    check(Fault::Kill, 0, &[], 2, Err("too few ranks were left"));
    check(Fault::Stop, 0, &[], 2, Ok(10));
    check(Fault::Stop, 0, &[10], 2, Ok(12));
    check(
        Fault::Stop,
        0,
        &[10, 12],
        0,
        Err("all ranks were disturbed already"),
    );
    check(Fault::Exit, 0, &[10], 0, Err("too few ranks were left"));
    let joining = [job(PAGE, 0, &[(10, Backward, 1), (11, Starting, 0)])];
    let joining = Eyes::default().see(&joining);
    let exit = target(&strike(Fault::Exit, 0), &joining, rules(&[], 0));
    assert_eq!(exit, Err("too few ranks were left"));
    check(Fault::Memory, 0, &[], 2, Err("too few ranks were left"));
    check(Fault::Agent, 0, &[], 1, Err("there was only one launcher"));
    let resumes = Rules {
        resumes: true,
        ..rules(&[], 2)
    };
    let launcher = target(&strike(Fault::Agent, 0), &scene, resumes);
    assert_eq!(
        launcher.map(|target| (target.pid, target.rank)),
        Ok((1001, None))
    );
    let two = [
        job(PAGE, 0, &[(10, Backward, 1)]),
        job(NEXT, 0, &[(20, Backward, 1)]),
    ];
    let scene = Eyes::default().see(&two);
    let launcher = target(&strike(Fault::Agent, 1), &scene, rules(&[], 1));
    assert_eq!(launcher.map(|target| target.pid), Ok(1002));
}

#[test]
fn a_fault_waits_for_a_rank_in_its_phase() {
    let jobs = [job(PAGE, 0, &[(10, Backward, 1), (11, DataLoader, 1)])];
    let scene = Eyes::default().see(&jobs);
    for (phase, expect) in [
        (None, Ok(10)),
        (Some(DataLoader), Ok(11)),
        (Some(Rendezvous), Err("no rank did what it should")),
    ] {
        let rules = Rules {
            phase,
            ..rules(&[], 1)
        };
        let target = target(&strike(Fault::Stop, 0), &scene, rules);
        assert_eq!(target.map(|target| target.pid), expect, "{phase:?}");
    }
}

#[test]
fn the_others_went_on_once_all_of_them_have_done_the_step_again() {
    let before = [job(
        PAGE,
        0,
        &[(10, Backward, 5), (11, Backward, 5), (12, Backward, 5)],
    )];
    let fates = fates(
        Fault::Kill,
        &before,
        &[
            &[job(
                PAGE,
                0,
                &[(10, Backward, 5), (0, Backward, 5), (12, Backward, 5)],
            )],
            // One had all of the lost rank's gradients and has done the step.
            &[job(
                PAGE,
                0,
                &[(10, BetweenSteps, 5), (0, Backward, 5), (12, Backward, 5)],
            )],
            &[job(
                PAGE,
                1,
                &[(10, Rendezvous, 0), (0, Backward, 5), (12, Rendezvous, 0)],
            )],
            &[job(
                PAGE,
                1,
                &[(10, BetweenSteps, 6), (0, Backward, 5), (12, Backward, 6)],
            )],
            &[job(
                PAGE,
                1,
                &[
                    (10, BetweenSteps, 6),
                    (0, Backward, 5),
                    (12, BetweenSteps, 6),
                ],
            )],
        ],
    );
    assert_eq!(fates, [None, None, None, None, Some(Fate::WentOn)]);
}

#[test]
fn a_rank_that_joins_meanwhile_is_not_waited_for() {
    let before = [job(PAGE, 3, &[(10, Backward, 5), (11, Backward, 5)])];
    let joins = (21, Starting, 0);
    let fates = fates(
        Fault::Abort,
        &before,
        &[
            &[job(PAGE, 4, &[(10, Backward, 5), joins])],
            &[job(PAGE, 4, &[(10, BetweenSteps, 5), joins])],
        ],
    );
    assert_eq!(fates, [None, Some(Fate::WentOn)]);
}

#[test]
fn a_job_is_started_again_once_every_new_rank_has_done_a_step() {
    let before = [job(PAGE, 0, &[(10, Backward, 50), (11, Backward, 50)])];
    let gone = job(PAGE, 0, &[(0, Backward, 50), (0, Backward, 50)]);
    let fates = fates(
        Fault::Kill,
        &before,
        &[
            std::slice::from_ref(&gone),
            &[job(NEXT, 0, &[(20, Starting, 0), (21, Starting, 0)])],
            // It begins at the checkpoint of step 40.
            &[job(NEXT, 0, &[(20, Backward, 40), (21, DataLoader, 40)])],
            &[job(NEXT, 0, &[(20, BetweenSteps, 40), (21, Backward, 40)])],
            &[job(
                NEXT,
                0,
                &[(20, BetweenSteps, 40), (21, BetweenSteps, 40)],
            )],
        ],
    );
    assert_eq!(fates, [None, None, None, None, Some(Fate::Restarted)]);
}

#[test]
fn a_job_whose_rank_stood_still_continues() {
    let before = [job(PAGE, 0, &[(10, Backward, 5), (11, Backward, 5)])];
    let later = [job(
        PAGE,
        0,
        &[(10, BetweenSteps, 5), (11, BetweenSteps, 5)],
    )];
    assert_eq!(
        fates(Fault::Stop, &before, &[&before, &later]),
        [None, Some(Fate::Continued)]
    );
    // A broken connection may show in the next step only.
    assert_eq!(fates(Fault::Cut, &before, &[&later]), [None]);
    let mut eyes = Eyes::default();
    let scene = eyes.see(&before);
    let target = target(&strike(Fault::Stop, 0), &scene, rules(&[], 0)).expect("a target");
    let mut watch = Watch::new(&scene, &target, Fault::Stop, false);
    let is_held = watch.fate(&eyes.see(&later), true);
    assert_eq!(is_held, None);
}

#[test]
fn a_bit_flips_where_a_rank_shows_its_weights_and_is_repaired_once_the_step_that_found_it_is_done()
{
    let all = |steps: [u64; 2], times: u32| {
        let ranks = [(10, Backward, steps[0]), (11, BetweenSteps, steps[1])];
        let mut job = job(PAGE, 0, &ranks);
        for rank in &mut job.ranks {
            rank.differences = Differences {
                times,
                step: 8,
                odd: Some(1),
            };
        }
        job
    };
    let mut before = all([5, 4], 1);
    let corrupt = |jobs: &RunningJob| {
        let scene = Eyes::default().see(std::slice::from_ref(jobs));
        target(&strike(Fault::Corrupt, 0), &scene, rules(&[], 0)).map(|target| target.pid)
    };
    assert_eq!(corrupt(&before), Err("no rank showed its weights"));
    before.ranks[1].weights = Some(4096..8192);
    assert_eq!(corrupt(&before), Ok(11));
    let fates = |later: &[RunningJob]| {
        let mut eyes = Eyes::default();
        let scene = eyes.see(std::slice::from_ref(&before));
        let target = target(&strike(Fault::Corrupt, 0), &scene, rules(&[], 0));
        let mut watch = Watch::new(&scene, &target.expect("rank 1"), Fault::Corrupt, true);
        let fate = |job: &RunningJob| watch.fate(&eyes.see(std::slice::from_ref(job)), false);
        let fates: Vec<_> = later.iter().map(fate).collect();
        (fates, watch.found)
    };
    // They go on, find it in step 8, go back to step 3, and have all done step 8 again.
    let steps = [[6, 5], [9, 8]].map(|steps| all(steps, 1));
    assert_eq!(fates(&steps), (vec![None; 2], None));
    let again = [[8, 7], [3, 3], [8, 8], [9, 8]].map(|steps| all(steps, 2));
    let found = Found {
        after_steps: 4,
        named: Some(1),
    };
    let repaired = vec![None, None, None, Some(Fate::Repaired)];
    assert_eq!(fates(&again), (repaired, Some(found)));
    // What is found once its rank is lost is another bit.
    let mut lost = all([8, 8], 1);
    lost.ranks[1].pid = None;
    let later = [lost, all([8, 8], 2), all([9, 9], 2)];
    assert_eq!(fates(&later), (vec![None; 3], None));
    // Without a state to go back to, no rank is left.
    let mut gone = all([8, 8], 2);
    gone.ranks.iter_mut().for_each(|rank| rank.pid = None);
    assert_eq!(fates(&[gone]), (vec![None], Some(found)));
}

#[test]
fn a_job_that_is_hit_before_its_first_step_has_to_do_one() {
    let starting = |page, pids: [u32; 2]| job(page, 0, &pids.map(|pid| (pid, Starting, 0)));
    let mut eyes = Eyes::default();
    let scene = eyes.see(&[starting(PAGE, [10, 11])]);
    let target = target(&strike(Fault::Kill, 0), &scene, rules(&[], 1)).expect("a target");
    let mut watch = Watch::new(&scene, &target, Fault::Kill, true);
    let stepped = job(NEXT, 0, &[(20, BetweenSteps, 0), (21, BetweenSteps, 0)]);
    for (jobs, expect) in [
        // It takes a moment to die.
        (starting(PAGE, [10, 11]), None),
        (starting(NEXT, [20, 21]), None),
        (job(NEXT, 0, &[(20, Backward, 0), (21, Backward, 0)]), None),
        (stepped, Some(Fate::Restarted)),
    ] {
        assert_eq!(watch.fate(&eyes.see(&[jobs]), false), expect);
    }
}

#[test]
fn a_program_without_steps_is_followed_by_its_processes() {
    let silent = |page, generation, pids: &[u32]| {
        let ranks: Vec<_> = pids.iter().map(|pid| (*pid, Starting, 0)).collect();
        job(page, generation, &ranks)
    };
    let before = [silent(PAGE, 0, &[10, 11])];
    let live: &[&[RunningJob]] = &[&[silent(PAGE, 0, &[10, 0])], &[silent(PAGE, 1, &[10, 0])]];
    assert_eq!(
        fates(Fault::Kill, &before, live),
        [None, Some(Fate::WentOn)]
    );
    let again: &[&[RunningJob]] = &[&[silent(PAGE, 0, &[0, 0])], &[silent(NEXT, 0, &[20, 21])]];
    assert_eq!(
        fates(Fault::Kill, &before, again),
        [None, Some(Fate::Restarted)]
    );
}

#[test]
fn a_share_of_a_run_is_a_step_and_a_moment_in_it() {
    let steps = Extent::Steps(100, Duration::from_millis(40));
    assert_eq!(steps.place(0.5), (50, Duration::ZERO));
    assert_eq!(steps.place(0.125), (12, Duration::from_millis(20)));
    let time = Extent::Time(Duration::from_secs(8));
    assert_eq!(time.place(0.25), (0, Duration::from_secs(2)));
}
