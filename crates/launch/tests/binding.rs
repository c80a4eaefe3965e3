//! Ranks on CPUs of their own, and ranks that see one device each: what the processes find.

mod support;

use std::path::Path;

use paceline_launch::{Binding, Cpus, Job, LaunchError};
use rustix::thread::CpuSet;
use support::{job, lines, log, run, turn};

/// Says where it may run, how many threads it should have and how many cores the ranks have together.
const WHERE: &str = "grep Cpus_allowed_list /proc/self/status; echo ${OMP_NUM_THREADS} ${RAYON_NUM_THREADS}; \
                     echo ${PACELINE_LOCAL_CORES-none}";

/// A job of `nproc` ranks that say where they are, into a folder; what this environment says about threads is left out.
fn bound(binding: Option<Binding>, nproc: usize, folder: &Path) -> Job {
    let mut job = job(WHERE, nproc);
    job.binding = binding;
    job.log_dir = Some(folder.to_owned());
    for name in paceline_launch::THREAD_VARIABLES {
        job.env.push((name.to_owned(), String::new()));
    }
    job
}

/// What the rank said: its CPUs, threads and cores.
fn said(folder: &Path, rank: usize) -> (Cpus, String, String) {
    let lines = lines(&log(folder, rank));
    let (_, cpus) = lines[0].split_once(':').expect("the kernel's line");
    (
        cpus.trim().parse().expect("a list"),
        lines[1].clone(),
        lines[2].clone(),
    )
}

/// The CPUs of this thread.
fn own() -> Cpus {
    let mask = rustix::thread::sched_getaffinity(None).expect("an affinity");
    (0..CpuSet::MAX_CPU)
        .filter(|cpu| mask.is_set(*cpu))
        .collect()
}

#[test]
fn ranks_run_on_cores_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let job = bound(Some(Binding::Cores), 2, folder.path());
    let bound = match job.plan() {
        Ok(plan) => plan.bound.expect("a binding"),
        Err(error) => {
            paceline_testing::skipped(format!("this process may not use two cores: {error}"));
            return;
        }
    };
    let outcome = run(job);
    assert!(outcome.failure.is_none(), "{:?}", outcome.failure);
    for rank in 0..2 {
        let (cpus, threads, cores) = said(folder.path(), rank);
        assert_eq!(cpus, bound.cpus[rank]);
        assert!(cpus.iter().all(|cpu| own().contains(cpu)), "{cpus}");
        assert_eq!(threads, format!("{0} {0}", bound.cores_each));
        assert_eq!(cores, bound.cores.to_string());
    }
    assert!(bound.cpus[0].iter().all(|cpu| !bound.cpus[1].contains(cpu)));
}

#[test]
fn each_way_to_bind_puts_ranks_where_the_plan_says() {
    for binding in Binding::ALL {
        let folder = tempfile::tempdir().unwrap();
        let job = bound(Some(binding), 1, folder.path());
        let plan = job.plan().expect("one rank can always be bound");
        assert!(run(job).failure.is_none());
        let expect = &plan.bound.expect("a binding").cpus[0];
        assert_eq!(&said(folder.path(), 0).0, expect, "{binding:?}");
    }
}

#[test]
fn ranks_that_start_again_are_bound_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = bound(Some(Binding::Cores), 1, folder.path());
    job.args[1] = format!("{WHERE}; [ $TORCHELASTIC_RESTART_COUNT = 1 ]").into();
    job.max_restarts = 1;
    let expect = job.plan().unwrap().bound.expect("a binding").cpus[0].clone();
    assert!(run(job).failure.is_none());
    let again = lines(&folder.path().join("attempt_1/0/stdout.log"));
    assert_eq!(again[0], format!("Cpus_allowed_list:\t{expect}"));
}

#[test]
fn without_a_binding_ranks_run_where_the_launcher_does() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = bound(None, 1, folder.path());
    // As a rank that starts a launcher would hand it on.
    job.env
        .push(("PACELINE_LOCAL_CORES".to_owned(), "7".to_owned()));
    assert!(run(job).failure.is_none());
    let (cpus, _, cores) = said(folder.path(), 0);
    assert_eq!((cpus, cores.as_str()), (own(), "none"));
}

#[test]
fn a_launcher_on_one_cpu_gives_away_no_other() {
    let all = own();
    let last = all.iter().last().expect("a CPU");
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let pinned = scope.spawn(|| {
            let mut mask = CpuSet::new();
            mask.set(last);
            rustix::thread::sched_setaffinity(None, &mask).expect("one of ours");
            let job = bound(Some(Binding::Node), 2, folder.path());
            let text = job.plan().unwrap().to_string();
            assert!(
                text.ends_with(&format!("ranks 0-1 to CPU {last}")),
                "{text}"
            );
            assert!(run(job).failure.is_none());
            let refused = bound(Some(Binding::Cores), 2, folder.path())
                .plan()
                .unwrap_err();
            assert!(matches!(refused, LaunchError::Binding(_)), "{refused:?}");
            assert_eq!(refused.exit_code(), 2);
            let hint = refused.hint().expect("advice");
            assert!(hint.starts_with("start at most 1 rank,"), "{hint}");
        });
        pinned.join().expect("no panic");
    });
    for rank in 0..2 {
        assert_eq!(said(folder.path(), rank).0.to_string(), last.to_string());
    }
}

#[test]
fn ranks_with_a_virtual_local_rank_see_one_device_each() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $CUDA_VISIBLE_DEVICES; exec $PROBE worker own-slot";
    let mut job = job(script, 2);
    job.virtual_local_rank = true;
    job.log_dir = Some(folder.path().to_owned());
    job.env
        .push(("HIP_VISIBLE_DEVICES".to_owned(), String::new()));
    job.env
        .push(("CUDA_VISIBLE_DEVICES".to_owned(), "4, GPU-6".to_owned()));
    let mut too_many = job.clone();
    let outcome = run(job);
    assert!(outcome.failure.is_none(), "{:?}", outcome.failure);
    assert_eq!(lines(&log(folder.path(), 0)), ["0 0 2 4", "slot 0 is mine"]);
    assert_eq!(
        lines(&log(folder.path(), 1)),
        ["1 0 2 GPU-6", "slot 1 is mine"]
    );

    let _turn = turn();
    too_many.nproc = 3;
    let refused = paceline_launch::run(too_many).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "3 ranks with a device each, and CUDA_VISIBLE_DEVICES is `4, GPU-6`"
    );
    assert_eq!(refused.exit_code(), 2);
}
