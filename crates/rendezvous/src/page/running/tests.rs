//! A launcher in a process of its own, whose page is found and read from outside.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::fs::{MemfdFlags, SealFlags};

use super::*;
use crate::env::names;
use crate::page::{Phase, allow_inherit};

/// Set in the process that plays the launcher.
const LAUNCHER: &str = "PACELINE_TEST_LAUNCHER";

/// A launcher that obeys lines; it and its ranks end with it.
struct Launcher {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Launcher {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "page::running::tests::launcher", "--nocapture"])
            .env(LAUNCHER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Self {
            child,
            orders,
            answers,
        }
    }

    /// Has an order carried out, and waits until it is.
    fn obey(&mut self, order: &str) -> String {
        let orders = self.orders.as_mut().expect("open");
        writeln!(orders, "{order}").expect("it reads");
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(
                self.answers.read_line(&mut line).expect("it writes"),
                0,
                "it ended"
            );
            // The test harness prints lines of its own.
            if let Some((_, answer)) = line.split_once("answer: ") {
                return answer.trim().to_owned();
            }
        }
    }

    /// The job, as seen from here; searched for anew.
    fn seen(&self, running: &mut Running) -> Vec<RunningJob> {
        let later = Instant::now() + Duration::from_secs(3600);
        running.search_again_at = None;
        let mut jobs = running.look(later);
        jobs.retain(|job| job.launcher == Some(self.child.id()));
        jobs
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

/// Not a test: what [`Launcher`] starts.
#[test]
fn launcher() {
    if std::env::var_os(LAUNCHER).is_none() {
        return;
    }
    let mut rounds: Vec<(JobPage, Vec<Child>)> = Vec::new();
    for line in std::io::stdin().lines() {
        let line = line.expect("text");
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[..] {
            ["round", restarts] => {
                rounds.push(round(restarts));
                let pids = rounds.last().expect("one").1.iter().map(Child::id);
                pids.map(|pid| pid.to_string())
                    .collect::<Vec<_>>()
                    .join(" ")
            }
            // Rank 1 says nothing, as a program that does not know pages.
            ["step", step] => {
                let (page, ranks) = rounds.last().expect("a round");
                let slot = page.slot(0);
                slot.set_pid(ranks[0].id());
                slot.set_rank(4);
                slot.set_activity(&backward(step.parse().expect("a number")));
                String::new()
            }
            ["kill", rank] => {
                let (_, ranks) = rounds.last_mut().expect("a round");
                end(&mut ranks[rank.parse::<usize>().expect("a number")]);
                String::new()
            }
            ref other => panic!("{other:?}"),
        };
        println!("answer: {answer}");
    }
    rounds.iter_mut().flat_map(|(_, ranks)| ranks).for_each(end);
}

fn end(rank: &mut Child) {
    let _ = rank.kill();
    let _ = rank.wait();
}

fn backward(step: u64) -> Activity {
    Activity {
        phase: Phase::Backward,
        step,
        op: None,
    }
}

/// Two ranks that live until they are killed, or their launcher ends and with it what they read. The second one has started
/// another process, as a loader of data; the first one none, which would outlive it and be taken for the rank.
fn round(restarts: &str) -> (JobPage, Vec<Child>) {
    let page = JobPage::create_memfd(2).expect("a page");
    let fd = page.raw_fd().expect("a memfd");
    let start = |local_rank: usize| {
        let script = ["read _", "cat <&0 | cat"][local_rank];
        let mut command = Command::new("sh");
        command
            .args(["-c", script, "train.py"])
            .env(names::PACELINE_PAGE_FD, fd.to_string())
            .env(names::LOCAL_RANK, local_rank.to_string())
            .env(names::RANK, (4 + local_rank).to_string())
            .env(names::WORLD_SIZE, "8")
            .env(names::TORCHELASTIC_RUN_ID, "digits")
            .env(names::TORCHELASTIC_RESTART_COUNT, restarts)
            .stdin(Stdio::piped());
        // SAFETY: the page is open until all ranks are started, and one system call is made.
        unsafe { command.pre_exec(move || allow_inherit(BorrowedFd::borrow_raw(fd))) };
        command.spawn().expect("sh")
    };
    let ranks = vec![start(0), start(1)];
    (page, ranks)
}

#[test]
fn a_job_is_found_with_its_ranks_and_what_they_do() {
    let mut launcher = Launcher::start();
    let mut running = Running::new(Path::new("/"));
    let pids = launcher.obey("round 0");
    launcher.obey("step 812");
    let jobs = launcher.seen(&mut running);
    let [job] = &jobs[..] else { panic!("{jobs:?}") };
    assert_eq!(
        (job.name.as_deref(), job.world, job.restarts),
        (Some("digits"), Some(8), 0)
    );
    assert_eq!(job.command, "sh -c read _ train.py");
    assert_eq!((job.stopping, &job.revocation), (None, &None));
    let seen: Vec<String> = job
        .ranks
        .iter()
        .filter_map(|r| r.pid)
        .map(|p| p.to_string())
        .collect();
    assert_eq!(seen.join(" "), pids);
    assert_eq!([job.ranks[0].rank, job.ranks[1].rank], [Some(4), Some(5)]);
    let activity = |job: &RunningJob, rank: usize| job.ranks[rank].activity.map(|(a, _)| a);
    assert_eq!(
        (activity(job, 0), activity(job, 1)),
        (Some(backward(812)), None)
    );

    // Between two searches what is known is read again.
    launcher.obey("step 813");
    let again = running.look(Instant::now());
    let again = again
        .iter()
        .find(|j| j.page == job.page)
        .expect("the same page");
    assert_eq!(activity(again, 0), Some(backward(813)));

    launcher.obey("kill 0");
    let jobs = running.look(Instant::now());
    let job = jobs
        .iter()
        .find(|j| j.page == job.page)
        .expect("the same page");
    assert_eq!(job.ranks[0].pid, None);
    assert!(job.ranks[1].pid.is_some());
    assert_eq!(activity(job, 0), Some(backward(813)), "its last words stay");
}

#[test]
fn of_a_job_that_was_started_again_the_round_with_ranks_is_shown() {
    let mut launcher = Launcher::start();
    let mut running = Running::new(Path::new("/"));
    launcher.obey("round 0");
    let first = launcher.seen(&mut running)[0].page;
    launcher.obey("kill 0");
    launcher.obey("kill 1");
    launcher.obey("round 1");
    let jobs = launcher.seen(&mut running);
    assert_eq!(jobs.len(), 1, "{jobs:?}");
    assert_eq!(jobs[0].restarts, 1);
    assert_ne!(jobs[0].page, first);
    let own = launcher.child.id();
    drop(launcher);
    let left = running.look(Instant::now());
    assert!(left.iter().all(|job| job.launcher != Some(own)), "{left:?}");
}

#[test]
fn a_page_is_mapped_so_that_it_cannot_be_written() {
    let mut launcher = Launcher::start();
    let mut running = Running::new(Path::new("/"));
    launcher.obey("round 0");
    let (_, inode) = launcher.seen(&mut running)[0].page;
    let maps = fs::read_to_string("/proc/self/maps").expect("maps");
    let of_page = |line: &&str| line.split_whitespace().nth(4) == Some(&*inode.to_string());
    let rights: Vec<&str> = maps
        .lines()
        .filter(of_page)
        .filter_map(|line| line.split_whitespace().nth(1))
        .collect();
    // Other tests of this process have found it too.
    assert!(
        !rights.is_empty() && rights.iter().all(|r| *r == "r--s"),
        "{rights:?}"
    );
}

#[test]
fn what_only_looks_like_a_page_is_left_alone() {
    let unsealed = rustix::fs::memfd_create("paceline-page", MemfdFlags::CLOEXEC).expect("memfd");
    rustix::fs::ftruncate(&unsealed, 1280 + 256).expect("size");
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let sealed = |bytes| {
        let fd = rustix::fs::memfd_create("paceline-page", flags).expect("memfd");
        rustix::fs::ftruncate(&fd, bytes).expect("size");
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).expect("sealed");
        fd
    };
    let fds = [
        unsealed,
        sealed(1280 + 256),
        sealed(1 << 40),
        sealed(0),
        sealed(7),
    ];
    let strange: Vec<u64> = fds
        .iter()
        .map(|fd| rustix::fs::fstat(fd).expect("open").st_ino)
        .collect();
    let mut running = Running::new(Path::new("/"));
    running.look(Instant::now());
    let known: Vec<u64> = running.pages.iter().map(|known| known.identity.1).collect();
    assert!(
        strange.iter().all(|inode| !known.contains(inode)),
        "{strange:?} in {known:?}"
    );
}

#[test]
fn rubbish_in_a_page_is_no_reason_to_fail() {
    let page = JobPage::create_memfd(2).expect("a page");
    page.0.header().fill_for_test(0xff);
    page.0.slot(0).fill_for_test();
    let fd = page.raw_fd().expect("a memfd");
    let identity = Found::at(Path::new(&format!("/proc/self/fd/{fd}")))
        .expect("held")
        .identity;
    let mut running = Running::new(Path::new("/"));
    running.look(Instant::now());
    let known = running
        .pages
        .iter()
        .find(|known| known.identity == identity)
        .expect("found");
    for process in [None, Some(0), Some(u32::MAX)] {
        assert!(known.process(0, process).is_none());
    }
    assert_eq!(known.rank(0).0.pid, None);
}

#[test]
fn a_machine_without_proc_has_no_jobs() {
    let folder = tempfile::tempdir().expect("a folder");
    assert_eq!(Running::new(folder.path()).look(Instant::now()), []);
}
