//! Live recovery over two nodes, in network namespaces: a rank, a node or the cable between them is lost, ranks and nodes come, and
//! the others end with the same bits in the same processes.

use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use tempfile::tempdir;

use super::support::{
    Ended, LIMIT, PACELINE, Running, command, hash_of, in_time, metrics, paceline, steps,
};

/// 1437 samples in batches of 16: 90 steps an epoch. The number of epochs follows.
const JOB: &str = "--model tiny --global-batch 16 --shards 8 --epochs";
const EPOCHS: u64 = 3;

/// Two nodes that share a folder. The arguments are the program of both. `a.err`, `b.out` and `b.err` have what they say. A
/// process keeps the network of the second when its launcher is killed. `MEET` runs when both have begun: they are connected when
/// a line is written to `connected`, which may name another folder for the second. `FAULT` strikes when something is written to
/// `strike`. It ends with the code of `SURVIVOR`.
const TWO_NODES: &str = r#"
hostname host-a
ip link set lo up
mkfifo connected strike
node='hostname host-b; ip link set lo up; read folder < connected; ip addr add 10.77.0.2/24 dev pace0
ip link set pace0 up; sleep 300 & echo $! > keeper; exec > b.out 2> b.err; cd "./$folder"; exec "$@"'
unshare --net --uts sh -c "$node" sh "$@" &
b=$!
own=$(readlink /proc/self/ns/net)
until [ "$(readlink /proc/$b/ns/net)" != "$own" ]; do sleep 0.01; done
ip link add pace0 type veth peer name pace0 netns $b
ip addr add 10.77.0.1/24 dev pace0
ip link set pace0 up
"$@" 2> a.err &
a=$!
eval "$MEET"
read _ < strike
eval "$FAULT"
eval "wait \$$SURVIVOR"
code=$?
kill $a $b $(cat keeper) 2> /dev/null
wait
exit $code
"#;

/// Once the first node waits.
const AT_ONCE: &str = r#"until grep -q " joined (" a.err; do sleep 0.05; done; echo > connected"#;

/// A fault and its outcome.
struct Case {
    /// Options of the launchers.
    nodes: &'static str,
    meet: &'static str,
    /// The process of this rank is killed, or stopped.
    rank: Option<(usize, Signal)>,
    /// A command of the shell that has the nodes.
    fault: &'static str,
    survivor: &'static str,
    /// What its launcher says, and after `other: ` what the other one does.
    says: &'static [&'static str],
}

/// The hash of a job of so many epochs without a loss.
fn hash_after(folder: &Path, epochs: u64) -> String {
    let line = format!("train --run-dir whole {JOB} {epochs} --nproc-per-node 1");
    hash_of(folder, &line)
}

/// With the hash after three epochs. Tries longer jobs, if one is done before its case is over.
#[track_caller]
fn check(hash: &str, case: &Case) {
    let mut epochs = 0;
    in_time(|folder| {
        epochs += EPOCHS;
        run(folder, epochs, case)?;
        match epochs {
            EPOCHS => assert_whole(folder, epochs, hash),
            _ => assert_whole(folder, epochs, &hash_after(folder, epochs)),
        }
        Ok(())
    });
}

/// *Errors*: the job ended well before all was said.
#[track_caller]
fn run(folder: &Path, epochs: u64, case: &Case) -> Result<(), Ended> {
    let run = format!(
        "{PACELINE} run --nnodes {} --rdzv-backend c10d --rdzv-endpoint 10.77.0.1 --nproc-per-node 2 --recovery live \
         {PACELINE} train --run-dir run {JOB} {epochs} --evaluate-every 1 --recovery live --timeout-seconds 6",
        case.nodes
    );
    let namespaces = ["--user", "--map-root-user", "--net", "--uts"];
    let words = namespaces.into_iter().chain(["sh", "-c", TWO_NODES, "sh"]);
    let mut command = command(folder, "unshare", words.chain(run.split_whitespace()));
    command
        .env("PACELINE_JOB_TOKEN", "5e".repeat(32))
        .env("MEET", case.meet)
        .env("FAULT", case.fault)
        .env("SURVIVOR", case.survivor);
    let job = Running::start(command);
    job.has_printed("[rank 0] epoch ");
    if let Some((rank, signal)) = case.rank {
        job.hits(&[rank], signal);
    }
    std::fs::write(folder.join("strike"), "\n").expect("the shell reads");
    let ended = job.ended(LIMIT);
    let told = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    let (out, err) = match case.survivor {
        "a" => (ended.out, told("a.err")),
        _ => (told("b.out"), told("b.err")),
    };
    assert_eq!(ended.code, Some(0), "{out}{err}\nb: {}", told("b.err"));
    let other = told(if case.survivor == "b" {
        "a.err"
    } else {
        "b.err"
    });
    for part in case.says {
        let has = match part.strip_prefix("other: ") {
            Some(part) => other.contains(part),
            None => err.contains(part),
        };
        if !has {
            let err = format!("no {part:?} in {err}\nother: {other}");
            return Err(Ended { out, err, ..ended });
        }
    }
    // All goes on from memory: no round has started ranks again.
    assert!(!out.contains("resumed"), "{out}");
    Ok(())
}

/// The job has a record of each step and ended with these weights.
#[track_caller]
fn assert_whole(folder: &Path, epochs: u64, hash: &str) {
    let records = metrics(&folder.join("run"));
    let all: Vec<u64> = (1..=90 * epochs).collect();
    assert_eq!(steps(&records, "step"), all);
    let end = records.last().map(|record| &record["weights_sha256"]);
    assert_eq!(end, Some(&hash.into()));
    let proof = format!("epochs    1 to {epochs}: each of 1437 samples was used exactly once");
    let ledger = paceline(folder, "ledger verify run");
    assert!(ledger.is_well().out.contains(&proof), "{}", ledger.out);
}

#[test]
fn two_nodes_go_on_without_what_was_lost() {
    let namespaces = ["--user", "--map-root-user", "--net", "--uts"];
    let can = Command::new("unshare")
        .args(namespaces)
        .args(["ip", "link", "set", "lo", "up"])
        .output();
    if !can.is_ok_and(|output| output.status.success()) {
        paceline_testing::skipped("network namespaces cannot be made here, or `ip` is missing");
        return;
    }
    const TWO: &str = "2 --rdzv-conf lease=1.5,last_call_timeout=30";
    const ONE: &str = "1:2 --rdzv-conf lease=1.5,last_call_timeout=30";
    let folder = tempdir().expect("a folder");
    let hash = hash_after(folder.path(), EPOCHS);
    for case in [
        // Rank 0, whose node has the store.
        Case {
            nodes: TWO,
            meet: AT_ONCE,
            rank: Some((0, Signal::KILL)),
            fault: ":",
            survivor: "b",
            says: &[
                "rank 0 (node 0, host host-a",
                "(SIGKILL)",
                "; 3 ranks go on",
            ],
        },
        // A rank of the second node is replaced.
        Case {
            nodes: "2 --max-restarts 1 --rdzv-conf lease=1.5,last_call_timeout=30",
            meet: AT_ONCE,
            rank: Some((3, Signal::KILL)),
            fault: ":",
            survivor: "a",
            says: &[
                "rank 3 (node 1, host host-b",
                "(SIGKILL)",
                "; 3 ranks go on",
                "rank 3 (node 1, host host-b, pid ",
                ") joins as a replacement; 4 ranks go on",
            ],
        },
        // A node comes late; a node is lost and comes back.
        Case {
            nodes: "1:2 --rdzv-conf lease=1.5,last_call_timeout=1",
            meet: ":",
            rank: None,
            fault: "echo > connected",
            survivor: "a",
            says: &["node 1 (host host-b) joins with 2 ranks; 4 ranks go on"],
        },
        Case {
            nodes: ONE,
            meet: AT_ONCE,
            rank: None,
            fault: r#"kill -9 $b; nsenter --net --uts --target $(cat keeper) "$@" > b.out 2> b.err & b=$!"#,
            survivor: "a",
            says: &[
                "; 2 ranks go on",
                "node 1 (host host-b) joins with 2 ranks; 4 ranks go on",
            ],
        },
        // Too few nodes are left, until one comes back; the same where the store is lost with the other.
        Case {
            nodes: TWO,
            meet: AT_ONCE,
            rank: None,
            fault: r#"kill -9 $b; until grep -q "2 ranks wait for more nodes" a.err || ! kill -0 $a; do sleep 0.05; done
nsenter --net --uts --target $(cat keeper) "$@" > b.out 2> b.err & b=$!"#,
            survivor: "a",
            says: &["node 1 (host host-b) joins with 2 ranks; 4 ranks go on"],
        },
        Case {
            nodes: TWO,
            meet: AT_ONCE,
            rank: None,
            fault: r#"kill -9 $a; until grep -q "2 ranks wait for more nodes" b.err || ! kill -0 $b; do sleep 0.05; done
"$@" 2> a.err & a=$!"#,
            survivor: "b",
            says: &[
                "store was lost",
                "node 1 (host host-a) joins with 2 ranks; 4 ranks go on",
            ],
        },
        // Ranks that cannot join disturb nobody, and their node starts no others.
        Case {
            nodes: "1:2 --rdzv-conf lease=1.5,last_call_timeout=1",
            meet: ":",
            rank: None,
            fault: "mkdir other; echo other > connected",
            survivor: "a",
            says: &[
                "other: before it had joined\n  its error: run holds no run: it has no config.toml\n  hint: a rank that joins",
            ],
        },
        // A rank that is stopped.
        Case {
            nodes: TWO,
            meet: AT_ONCE,
            rank: Some((3, Signal::STOP)),
            fault: ":",
            survivor: "a",
            says: &["rank 3 ", "; 3 ranks go on"],
        },
        // The node with the store.
        Case {
            nodes: ONE,
            meet: AT_ONCE,
            rank: None,
            fault: "kill -9 $a",
            survivor: "b",
            says: &["store was lost", "; 2 ranks go on"],
        },
        // The node without the store is cut off, and ends its ranks.
        Case {
            nodes: ONE,
            meet: AT_ONCE,
            rank: None,
            fault: "ip link set pace0 down",
            survivor: "a",
            says: &["host-b has given no sign of life", "; 2 ranks go on"],
        },
    ] {
        check(&hash, &case);
    }
}
