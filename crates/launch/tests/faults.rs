//! Faults that the other tests of nodes leave open: two at once, in the middle of a change of rounds, with clocks that lie;
//! `docs/faults.md` has the whole matrix. Real launchers and real ranks, and in the end nothing of them is left.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use paceline_rendezvous::token::Token;
use rustix::process::{Pid, Signal};
use support::launcher::Launcher;
use support::node::{Fleet, Node, SOON, STAY, up_in_any_order};
use support::{PROBE, Watched, numbers};

/// Says where it stands and which process it is, and stays.
const STAY_BY_NAME: &str =
    "echo pid $$; echo up $RANK of $WORLD_SIZE in $TORCHELASTIC_RESTART_COUNT; exec sleep 100";

/// A fleet whose processes can be told from all others.
fn fleet(nodes: &str) -> Fleet {
    let mut fleet = Fleet::new(nodes);
    fleet.token = Some(Token::generate().expect("randomness").to_hex());
    fleet
}

/// Waits until no process has this fleet's token in its environment.
fn nothing_is_left(fleet: &Fleet) {
    let token = fleet.token.as_ref().expect("it has one").as_bytes();
    let deadline = Instant::now() + SOON;
    loop {
        let left = left_of(token);
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "these are left: {left:?}");
        std::thread::yield_now();
    }
}

fn left_of(token: &[u8]) -> Vec<PathBuf> {
    let has_token = |path: &PathBuf| {
        let environ = std::fs::read(path.join("environ")).unwrap_or_default();
        environ.windows(token.len()).any(|part| part == token)
    };
    let processes = std::fs::read_dir("/proc").expect("a folder").flatten();
    let paths = processes.map(|entry| entry.path());
    paths
        .filter(|path| path.join("environ").exists() && has_token(path))
        .collect()
}

/// The process of the one rank of a node that runs [`STAY_BY_NAME`].
fn rank_of(node: &mut Node) -> Watched {
    let line = node.expect("pid ", SOON);
    Watched::new(numbers(&line).pop().expect("a number"))
}

fn kill(process: &Watched) {
    let pid = Pid::from_raw(process.pid).expect("a pid");
    rustix::process::kill_process(pid, Signal::KILL).expect("it lives");
}

#[test]
fn a_killed_worker_is_the_cause_on_all_nodes() {
    let fleet = fleet("3");
    let mut nodes = fleet.nodes(&["a", "b", "c"], &[], STAY_BY_NAME);
    let ranks: Vec<_> = nodes.iter_mut().map(rank_of).collect();
    let killed = Instant::now();
    kill(&ranks[1]);
    for node in &mut nodes {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(137), "{err}");
        let who = format!("failure: rank 1 (node 1, host b, pid {})", ranks[1].pid);
        assert!(err.contains(&who), "{err}");
        assert!(err.contains("was killed by signal 9 (SIGKILL)"), "{err}");
        assert!(
            !err.contains(") failed "),
            "victims are not in question: {err}"
        );
    }
    eprintln!(
        "all three launchers ended {:?} after a rank was killed",
        killed.elapsed()
    );
    nothing_is_left(&fleet);
}

#[test]
fn of_two_workers_killed_at_once_on_two_nodes_one_is_the_cause_and_the_other_is_named() {
    let fleet = fleet_that_waits();
    let is_named = (0..ATTEMPTS).any(|_| {
        let nodes = fleet.nodes(&["a", "b"], &[], STAY_BY_NAME);
        two_die_at_once(nodes).is_some()
    });
    assert!(is_named);
    nothing_is_left(&fleet);
}

/// On a busy machine the second launcher may hear of the first failure before it has seen its own.
const ATTEMPTS: usize = 5;

/// Two nodes whose launchers may be stopped for a while.
fn fleet_that_waits() -> Fleet {
    let mut fleet = fleet("2");
    fleet.lease_ms = 10_000;
    fleet
}

/// Both launchers learn of their own rank's end in the same moment. Says what they say of the rank that is not the
/// cause, unless its launcher knew of the other.
fn two_die_at_once(mut nodes: Vec<Node>) -> Option<String> {
    let ranks: Vec<_> = nodes.iter_mut().map(rank_of).collect();
    for node in &nodes {
        node.signal(Signal::STOP);
    }
    ranks.iter().for_each(kill);
    for node in &nodes {
        node.signal(Signal::CONT);
    }
    let said = nodes.iter_mut().map(|node| {
        let (code, err) = node.end(SOON);
        assert_eq!(code, Some(137), "{err}");
        let line = |what: &str| {
            err.lines()
                .find(|line| line.contains(what))
                .map(str::to_owned)
        };
        (line("failure: rank ").expect("a cause"), line(") failed "))
    });
    let said: Vec<_> = said.collect();
    assert_eq!(said[0], said[1], "one cause on both nodes");
    let (cause, also) = said.into_iter().next().expect("two nodes");
    let also = also?;
    let rank = |line: &str| numbers(line.split('(').next().unwrap_or_default());
    let mut both = [rank(&cause), rank(&also)].concat();
    both.sort_unstable();
    assert_eq!(both, [0, 1], "{cause} and {also}");
    // Milliseconds apart, and known to milliseconds: not the days by which clocks may differ.
    let (number, _) = also.split_once(" ms").expect("milliseconds");
    let number = number.rsplit(' ').next().expect("a word");
    let millis: f64 = number.parse().expect("a number");
    assert!(millis < 2000.0, "{also}");
    eprintln!("{}", also.trim());
    Some(also)
}

#[test]
fn the_stores_agent_and_a_worker_die_at_once_and_the_rest_goes_on() {
    let fleet = fleet("1:3");
    let mut nodes = fleet.nodes(&["a", "b", "c"], &[], STAY_BY_NAME);
    let ranks: Vec<_> = nodes.iter_mut().map(rank_of).collect();
    let killed = Instant::now();
    nodes[0].signal(Signal::KILL);
    kill(&ranks[2]);
    // Who fails in the moment in which a node is lost costs no restart: it may have failed because of that.
    up_in_any_order_in(&mut nodes[1..], "of 2 in 0");
    eprintln!(
        "two nodes went on {:?} after the store's agent and a worker died",
        killed.elapsed()
    );
    assert!(ranks[0].ends_within(SOON), "the dead agent's rank is gone");
    drop(nodes);
    nothing_is_left(&fleet);
}

fn up_in_any_order_in(nodes: &mut [Node], end: &str) {
    let mut lines: Vec<_> = nodes
        .iter_mut()
        .map(|node| node.expect(end, SOON))
        .collect();
    lines.sort();
    for (rank, line) in lines.iter().enumerate() {
        assert!(line.contains(&format!("up {rank} {end}")), "{lines:?}");
    }
}

#[test]
fn an_agent_and_a_worker_of_another_node_die_at_once_and_the_rest_goes_on() {
    let fleet = fleet("1:3");
    let mut nodes = fleet.nodes(&["a", "b", "c"], &["--max-restarts", "1"], STAY_BY_NAME);
    let ranks: Vec<_> = nodes.iter_mut().map(rank_of).collect();
    nodes[2].signal(Signal::KILL);
    kill(&ranks[1]);
    let killed = Instant::now();
    // Who falls silent when a rank fails is perhaps the cause, so its lease decides, and a lost node costs no restart.
    up_in_any_order_in(&mut nodes[..2], "of 2 in 0");
    eprintln!(
        "two nodes went on {:?} after an agent and a worker died",
        killed.elapsed()
    );
    nodes[0].expect_err("host c has given no sign of life for ", SOON);
    drop(nodes);
    nothing_is_left(&fleet);
}

#[test]
fn a_node_that_dies_while_a_round_forms_is_left_out() {
    let fleet = fleet("1:3");
    // The last rank does not end, so the next round cannot begin before its launcher is killed.
    let script = "trap 'echo asked to end' TERM; echo pid $$; echo up $RANK of $WORLD_SIZE in $TORCHELASTIC_RESTART_COUNT
        [ $RANK = 2 ] || exec sleep 100
        while :; do sleep 0.02; done";
    let mut nodes = fleet.nodes(&["a", "b", "c"], &["--max-restarts", "1"], script);
    let ranks: Vec<_> = nodes.iter_mut().map(rank_of).collect();
    kill(&ranks[0]);
    nodes[2].expect("asked to end", SOON);
    nodes[2].signal(Signal::KILL);
    let killed = Instant::now();
    up_in_any_order_in(&mut nodes[..2], "of 2 in 1");
    eprintln!(
        "two nodes went on {:?} after the third died in between",
        killed.elapsed()
    );
    assert!(ranks[2].ends_within(SOON), "the dead agent's rank is gone");
    drop(nodes);
    nothing_is_left(&fleet);
}

#[test]
fn the_stores_agent_dies_before_the_job_begins_and_another_takes_its_place() {
    let fleet = fleet("3");
    let mut nodes = fleet.nodes(&["a", "b"], &[], STAY);
    nodes[1].waits_for_others();
    nodes[0].signal(Signal::KILL);
    nodes[0] = fleet.node("a", &[], STAY);
    nodes.push(fleet.node("c", &[], STAY));
    up_in_any_order(&mut nodes.iter_mut().collect::<Vec<_>>(), 3);
    drop(nodes);
    nothing_is_left(&fleet);
}

#[test]
fn fifty_nodes_storm_a_running_job_and_all_are_let_in() {
    const NODES: usize = 50;
    let mut fleet = fleet("1:50");
    // Fifty launchers on a few cores have no second to spare.
    fleet.lease_ms = 10_000;
    let script = "echo up $RANK of $WORLD_SIZE; [ $WORLD_SIZE = 50 ] || exec sleep 100";
    let mut nodes = vec![fleet.node("n0", &[], script)];
    nodes[0].expect("up 0 of 1", SOON);
    let storm = Instant::now();
    nodes.extend((1..NODES).map(|node| fleet.node(&format!("n{node}"), &[], script)));
    for node in &mut nodes {
        let (code, err) = node.end(Duration::from_secs(60));
        assert_eq!(code, Some(0), "{err}");
    }
    eprintln!(
        "49 nodes joined a job and it was done {:?} later",
        storm.elapsed()
    );
    nothing_is_left(&fleet);
}

#[test]
fn launchers_that_are_killed_leave_not_even_daemons() {
    let fleet = fleet("2");
    // The second is what a daemon is: in a session of its own, and the process that started it is gone.
    let script = "setsid sleep 100 & a=$!
        daemon=$(setsid sh -c 'sleep 100 >/dev/null 2>&1 & echo $!')
        echo pids $$ $a $daemon; exec sleep 100";
    let mut nodes = fleet.nodes(&["a", "b"], &["--nproc", "2"], script);
    let mut all = Vec::new();
    for node in &mut nodes {
        for _ in 0..2 {
            let line = node.expect("pids ", SOON);
            let (_, pids) = line.split_once("pids").expect("it says so");
            all.extend(numbers(pids).into_iter().map(Watched::new));
        }
    }
    assert_eq!(all.len(), 12);
    assert!(all.iter().all(Watched::is_alive));
    for node in &nodes {
        node.signal(Signal::KILL);
    }
    let killed = Instant::now();
    assert!(all.iter().all(|process| process.ends_within(SOON)));
    eprintln!(
        "12 processes of two killed launchers were gone after {:?}",
        killed.elapsed()
    );
    nothing_is_left(&fleet);
}

#[test]
fn many_ranks_of_a_program_that_does_nothing_start_and_end() {
    let mut launcher = Launcher::start(&["--nproc", "256"], "exec /bin/true");
    let (status, out, err) = launcher.end(Duration::from_secs(30));
    assert_eq!((status.code(), &*out), (Some(0), ""), "{err}");
    assert!(err.contains("left behind: []"), "{err}");
    let took = launcher.started.elapsed();
    eprintln!("256 ranks of /bin/true started and ended in {took:?}");
}

/// A launcher whose monotonic clock is ahead of the others' by so many seconds; `None` where that cannot be had.
fn node_ahead(fleet: &Fleet, host: &str, seconds: u32, script: &str) -> Option<Node> {
    let clock = |command: &mut Command| {
        let seconds = seconds.to_string();
        command.args(["-T", "--monotonic", &seconds, "--boottime", &seconds]);
    };
    let mut test = Command::new("unshare");
    clock(&mut test);
    let can = test
        .arg("true")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !can.is_ok_and(|status| status.success()) {
        paceline_testing::skipped(
            "this user may not make time namespaces, or `unshare -T` is missing: run it as root",
        );
        return None;
    }
    let mut command = Command::new("unshare");
    clock(&mut command);
    command.arg(PROBE);
    Some(fleet.node_under(command, host, &[], script))
}

const DAY: u32 = 86_400;

#[test]
fn clocks_that_are_days_apart_change_nothing() {
    let fleet = fleet("1:3");
    let mut nodes = vec![fleet.node("a", &[], STAY)];
    nodes[0].expect("up 0 of 1", SOON);
    for (host, days) in [("b", 1), ("c", 10)] {
        let Some(node) = node_ahead(&fleet, host, days * DAY, STAY) else {
            return;
        };
        nodes.push(node);
    }
    let [a, b, c] = &mut nodes[..] else {
        unreachable!("three nodes");
    };
    up_in_any_order(&mut [a, b, c], 3);
    // A silent one is left out after a lease, not after days and not at once; then the store moves.
    c.signal(Signal::STOP);
    let stopped = Instant::now();
    up_in_any_order(&mut [a, b], 2);
    assert!(stopped.elapsed() > Duration::from_millis(fleet.lease_ms / 2));
    c.signal(Signal::CONT);
    up_in_any_order(&mut [a, b, c], 3);
    a.signal(Signal::KILL);
    up_in_any_order(&mut [b, c], 2);
    drop(nodes);
    nothing_is_left(&fleet);
}

#[test]
fn failures_are_put_in_order_by_clocks_that_are_days_apart() {
    let fleet = fleet_that_waits();
    let mut is_named = false;
    for _ in 0..ATTEMPTS {
        let a = fleet.node("a", &[], STAY_BY_NAME);
        a.waits_for_others();
        let Some(b) = node_ahead(&fleet, "b", 10 * DAY, STAY_BY_NAME) else {
            return;
        };
        is_named = two_die_at_once(vec![a, b]).is_some();
        if is_named {
            break;
        }
    }
    assert!(is_named);
    nothing_is_left(&fleet);
}

/// Nobody can set the wall clock for one process, so this looks at who reads it at all.
#[test]
fn no_decision_reads_the_wall_clock() {
    // What people and files are told.
    let may = [
        "error_file.rs",
        "output/console.rs",
        "output/fold.rs",
        "output/folder.rs",
        "output/format.rs",
        "output/reader.rs",
        "time.rs",
    ];
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let (mut folders, mut files) = (vec![source.clone()], 0);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            files += 1;
            let text = std::fs::read_to_string(&path).expect("text");
            let name = path
                .strip_prefix(&source)
                .expect("below it")
                .to_str()
                .expect("text");
            let reads = [
                "SystemTime",
                "UNIX_EPOCH",
                "Realtime",
                "CLOCK_REALTIME",
                "gettimeofday",
            ];
            let found = reads.iter().find(|word| text.contains(**word));
            assert!(
                found.is_none() || may.contains(&name),
                "src/{name} reads the wall clock ({}): a jump of it must not decide anything",
                found.expect("checked")
            );
        }
    }
    assert!(files > 40, "{files} files");
}
