//! Nodes in network namespaces that come and go while they train: more of them than the job takes, and cables that are cut and
//! mended. The job ends with the same bits, and every sample was used once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use tempfile::{TempDir, tempdir};

use super::support::{LIMIT, PACELINE, Running, command, hash_of, paceline};

/// Before the hash of the weights, at the end of a job.
const HASH: &str = "weights sha256: ";
const NAMESPACES: [&str; 4] = ["--user", "--map-root-user", "--net", "--uts"];
/// Epochs of the first job that is tried.
const EPOCHS: usize = 15;
/// Jobs that are tried, each twice as long as the one before.
const TRIES: usize = 4;

/// A bridge, and hosts `a` to `d` with one cable to it each, `ca` to `cd`. `launch a` starts the program of the arguments on a host, as
/// `$la`; `a.out` and `a.err` have what it says, and `a.keeper` a process that keeps the host. Then come commands, one on each line
/// of `strike`, until `end a`: the shell ends with the code of that launcher.
const HOSTS: &str = r#"
own=$(readlink /proc/self/ns/net)
ip link add br0 type bridge
ip link set br0 up
number=0
for host in a b c d; do
    number=$((number + 1))
    unshare --net --uts sh -c "hostname host-$host; ip link set lo up; exec sleep 1000" &
    keeper=$!
    until [ "$(readlink /proc/$keeper/ns/net)" != "$own" ]; do sleep 0.01; done
    ip link add c$host type veth peer name eth0 netns $keeper
    ip link set c$host master br0 up
    nsenter --target $keeper --net ip addr add 10.77.0.$number/24 dev eth0
    nsenter --target $keeper --net ip link set eth0 up
    echo $keeper > $host.keeper
    eval "k$host=$keeper"
done
launch() {
    eval "keeper=\$k$1"
    nsenter --target $keeper --net --uts $PROGRAM >> $1.out 2>> $1.err &
    eval "l$1=$!"
}
end() {
    eval "wait \$l$1"
    code=$?
    kill $ka $kb $kc $kd $la $lb $lc $ld 2> /dev/null
    wait
    exit $code
}
mkfifo strike
exec 3<> strike
echo ready
while read -r line <&3; do eval "$line"; done
"#;

/// The job ended well before all had happened.
#[derive(Debug)]
struct Over;

/// Hosts, of which none has a launcher yet.
struct Hosts {
    folder: TempDir,
    shell: Running,
    epochs: usize,
}

impl Hosts {
    /// `None` where namespaces cannot be made. So many nodes take part in a job of so many epochs.
    fn new(nodes: &str, epochs: usize) -> Option<Self> {
        let can = Command::new("unshare")
            .args(NAMESPACES)
            .args(["ip", "link", "add", "br0", "type", "bridge"])
            .output();
        if !can.is_ok_and(|output| output.status.success()) {
            paceline_testing::skipped("network namespaces cannot be made here, or `ip` is missing");
            return None;
        }
        let folder = tempdir().expect("a folder");
        let program = format!(
            "{PACELINE} run --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint 10.77.0.1 --rdzv-conf \
             lease=1.5,last_call_timeout=30 --nproc-per-node 2 --recovery live --max-restarts 3 {PACELINE} train {} --run-dir run \
             --resume auto --save-every 50 --recovery live --timeout-seconds 3",
            job(epochs)
        );
        let words = NAMESPACES.into_iter().chain(["sh", "-c", HOSTS]);
        let mut command = command(folder.path(), "unshare", words);
        command
            .env("PACELINE_JOB_TOKEN", "5e".repeat(32))
            .env("PROGRAM", program);
        let shell = Running::start(command);
        shell.has_printed("ready");
        Some(Self {
            folder,
            shell,
            epochs,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Has the shell do something.
    fn strike(&self, line: &str) {
        fs::write(self.path("strike"), format!("{line}\n")).expect("the shell reads");
    }

    fn wait_until(&self, what: &str, holds: impl Fn() -> bool) -> Result<(), Over> {
        let deadline = Instant::now() + LIMIT;
        while !holds() {
            if of_hosts(self.folder.path(), "out").contains(HASH) {
                return Err(Over);
            }
            let said = || of_hosts(self.folder.path(), "err");
            assert!(Instant::now() < deadline, "not {what}: {}", said());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Waits until a launcher has said so, so many times.
    fn says(&self, host: &str, words: &str, times: usize) -> Result<(), Over> {
        let said = || self.text(&format!("{host}.err")).matches(words).count() >= times;
        self.wait_until(&format!("{words:?} on {host}"), said)
    }

    /// How many ranks are on a host.
    fn ranks_on(&self, host: &str) -> usize {
        let keeper = self.text(&format!("{host}.keeper"));
        let network = network(Path::new(&format!("/proc/{}", keeper.trim())));
        assert!(network.is_some(), "host {host} is there");
        let is_rank = |process: &PathBuf| {
            let environment = fs::read(process.join("environ")).unwrap_or_default();
            let mut variables = environment.split(|byte| *byte == 0);
            variables.any(|one| one.starts_with(b"RANK="))
        };
        let processes = fs::read_dir("/proc").expect("/proc").flatten();
        let here = processes
            .map(|process| process.path())
            .filter(|process| self::network(process) == network);
        here.filter(is_rank).count()
    }

    /// Waits until so many ranks are on a host.
    fn has_ranks(&self, host: &str, count: usize) -> Result<(), Over> {
        let has = || self.ranks_on(host) == count;
        self.wait_until(&format!("{count} ranks on {host}"), has)
    }

    /// Waits until some rank 0 has printed the end of an epoch after those that were printed before.
    fn trains_on(&self) -> Result<(), Over> {
        let epochs = || {
            of_hosts(self.folder.path(), "out")
                .matches("] epoch ")
                .count()
        };
        let before = epochs();
        self.wait_until("a further epoch", || epochs() > before)
    }

    /// The job ends well on this host, with the weights of one that nothing disturbs.
    #[track_caller]
    fn ends(self, host: &str) {
        self.strike(&format!("end {host}"));
        let (folder, epochs) = (self.folder.path(), self.epochs);
        let ended = self.shell.ended(LIMIT);
        let [printed, said] = ["out", "err"].map(|stream| of_hosts(folder, stream));
        assert_eq!(ended.code, Some(0), "{said}");
        let hashes = printed.lines().filter_map(|line| line.split_once(HASH));
        let hashes: Vec<&str> = hashes.map(|(_, hash)| hash).collect();
        let line = format!("train --run-dir whole {} --nproc-per-node 1", job(epochs));
        let whole = hash_of(folder, &line);
        assert_eq!(hashes, [whole], "{said}");
        let proof = format!("epochs    1 to {epochs}: each of 1437 samples was used exactly once");
        let ledger = paceline(folder, "ledger verify run");
        assert!(ledger.is_well().out.contains(&proof), "{}", ledger.out);
    }
}

/// What all hosts have written to this stream.
fn of_hosts(folder: &Path, stream: &str) -> String {
    let files = ["a", "b", "c", "d"].map(|host| folder.join(format!("{host}.{stream}")));
    let texts = files.map(|file| fs::read_to_string(file).unwrap_or_default());
    texts.concat()
}

/// The network of a process.
fn network(process: &Path) -> Option<PathBuf> {
    fs::read_link(process.join("ns/net")).ok()
}

fn job(epochs: usize) -> String {
    format!("--model tiny --global-batch 16 --shards 8 --epochs {epochs}")
}

/// Has nodes come and go, and the job end well on `last`.
fn check(nodes: &str, last: &str, events: impl Fn(&Hosts) -> Result<(), Over>) {
    for attempt in 0..TRIES {
        let Some(hosts) = Hosts::new(nodes, EPOCHS << attempt) else {
            return;
        };
        if events(&hosts).is_ok() {
            return hosts.ends(last);
        }
    }
    panic!("the job was always over before all had happened");
}

#[test]
fn more_spares_than_the_job_takes_wait_until_they_are_needed() {
    check("1:2", "c", |hosts| {
        for host in ["a", "b"] {
            hosts.strike(&format!("launch {host}"));
        }
        hosts.has_ranks("a", 2)?;
        hosts.trains_on()?;
        for host in ["c", "d"] {
            hosts.strike(&format!("launch {host}"));
        }
        for host in ["c", "d"] {
            hosts.says(host, "waiting: the job runs on 2 of at most 2 nodes", 1)?;
            hosts.has_ranks(host, 0)?;
        }
        // Each spare takes a lost node's place, that of the node with the store too.
        hosts.strike("kill -9 $lb");
        hosts.has_ranks("b", 0)?;
        let spares = ["c", "d"];
        hosts.wait_until("a spare in the place of b", || {
            spares.into_iter().any(|host| hosts.ranks_on(host) == 2)
        })?;
        hosts.says("a", "joins with 2 ranks; 4 ranks go on", 1)?;
        hosts.trains_on()?;
        hosts.strike("kill -9 $la");
        for host in spares {
            hosts.has_ranks(host, 2)?;
        }
        Ok(())
    });
}

#[test]
fn nodes_that_are_cut_off_end_their_ranks_and_come_back_whichever_side_has_the_store() {
    check("1:3", "b", |hosts| {
        for host in ["a", "b", "c"] {
            hosts.strike(&format!("launch {host}"));
        }
        for host in ["a", "b", "c"] {
            hosts.has_ranks(host, 2)?;
        }
        hosts.trains_on()?;
        // One without the store: the others go on.
        hosts.strike("ip link set cc down");
        hosts.has_ranks("c", 0)?;
        hosts.says("a", "; 4 ranks go on", 1)?;
        hosts.trains_on()?;
        hosts.strike("ip link set cc up");
        hosts.says("a", "joins with 2 ranks; 6 ranks go on", 1)?;
        hosts.trains_on()?;
        // The one with the store: the others are more.
        hosts.strike("ip link set ca down");
        hosts.has_ranks("a", 0)?;
        hosts.trains_on()?;
        hosts.strike("ip link set ca up");
        hosts.has_ranks("a", 2)
    });
}
