//! `paceline submit ray` on a real Ray cluster of several raylets on this machine.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout};
use std::sync::{Mutex, PoisonError};

use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::tempdir;

use super::support::{LIMIT, PACELINE, Running, command, hash_of};

const JOB: &str = "--model tiny --global-batch 16 --shards 8 --epochs";

/// The cluster; its raylets end when it is dropped.
struct Cluster {
    running: Option<Running>,
    requests: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
    folder: PathBuf,
}

/// How a job has ended.
#[derive(Debug, Deserialize)]
struct End {
    status: String,
    code: Option<i32>,
    log: String,
    /// Processes of the job that are still there.
    left: Vec<Vec<String>>,
}

impl Cluster {
    /// A head without CPUs and raylets with so many; nothing where there is no Ray.
    fn start(folder: &Path, cpus: &[&str]) -> Option<Self> {
        let python = paceline_testing::python_with(&["ray.job_submission"])?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/process/ray_cluster.py");
        let words = std::iter::once(script.as_os_str()).chain(cpus.iter().map(AsRef::as_ref));
        let mut command = command(folder, &python, words);
        command.env("RAY_TMPDIR", folder);
        // `python3` and `ray` beside it.
        let own = Path::new(&python).parent().filter(|own| own.is_absolute());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let own = own.map(ToOwned::to_owned);
        let path = own.into_iter().chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(path).expect("a path"));
        // Ray gives its workers little of a busy machine.
        command.env("RAY_worker_niceness", "0");
        let (running, requests, answers) = Running::spoken_with(command);
        let mut cluster = Self {
            running: Some(running),
            requests: Some(requests),
            answers: BufReader::new(answers).lines(),
            folder: folder.to_owned(),
        };
        assert_eq!(cluster.answer(), "ready");
        Some(cluster)
    }

    fn ask(&mut self, words: Value) -> Value {
        let requests = self.requests.as_mut().expect("the cluster runs");
        writeln!(requests, "{words}").expect("the cluster listens");
        self.answer()
    }

    fn answer(&mut self) -> Value {
        let line = self.answers.next().and_then(Result::ok);
        let said = || self.running.as_ref().map(Running::complaints);
        let line = line.unwrap_or_else(|| panic!("the cluster has ended: {:?}", said()));
        serde_json::from_str(&line).expect("JSON")
    }

    /// Submits; returns the job's number.
    fn submit(&mut self, options: &str, program: &[&str]) -> String {
        let file = self.folder.join("job.py");
        let words = ["submit", "ray", "--launcher", PACELINE, "--file"];
        let words = [PACELINE]
            .into_iter()
            .chain(words)
            .chain([file.to_str().expect("a path")]);
        let words: Vec<_> = words
            .chain(options.split_whitespace())
            .chain(program.iter().copied())
            .collect();
        let job = self.ask(json!(["submit", words]));
        let job = job.as_str().expect("a number").to_owned();
        assert!(job.starts_with("raysubmit_"), "{job}");
        job
    }

    /// Submits a training in the test's folder.
    fn train(&mut self, options: &str, line: &str) -> String {
        let options = format!("{options} --chdir {}", self.folder.display());
        let words = format!("{PACELINE} train {line}");
        self.submit(&options, &words.split_whitespace().collect::<Vec<_>>())
    }

    fn has_said(&mut self, job: &str, text: &str) {
        if self.ask(json!(["says", job, text])) != true {
            panic!("it has not said {text:?}: {:?}", self.end(job));
        }
    }

    /// Waits for the job's end, and that it leaves nothing.
    fn end(&mut self, job: &str) -> End {
        let end: End = serde_json::from_value(self.ask(json!(["end", job]))).expect("an end");
        assert!(end.left.is_empty(), "{end:?}");
        end
    }
}

impl End {
    #[track_caller]
    fn check(&self, status: &str, code: Option<i32>, says: &[&str]) {
        assert_eq!((&*self.status, self.code), (status, code), "{}", self.log);
        for text in says {
            assert!(self.log.contains(text), "{text:?} is not in\n{}", self.log);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Some(running) = self.running.take().filter(|_| !std::thread::panicking()) {
            running.ended(LIMIT);
        }
    }
}

/// Two clusters at once would be too slow for Ray's own time limits on two cores.
static TURN: Mutex<()> = Mutex::new(());

#[test]
fn jobs_run_fail_and_stop_on_a_ray_cluster_and_leave_nothing() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempdir().expect("a folder");
    let Some(mut cluster) = Cluster::start(folder.path(), &["2", "2"]) else {
        return;
    };
    let line = format!("train --run-dir whole {JOB} 2 --nproc-per-node 1");
    let hash = hash_of(folder.path(), &line);
    let line = format!("--run-dir run {JOB} 2");
    let job = cluster.train("--nodes 2 --nproc-per-node 2", &line);
    let says = format!("weights sha256: {hash}");
    cluster.end(&job).check("SUCCEEDED", Some(0), &[&says]);

    let stays = ["sh", "-c", "echo up $RANK; exec sleep 300"];
    let job = cluster.submit("--nodes 2 --nproc-per-node 2 --no-fold", &stays);
    for rank in 0..4 {
        cluster.has_said(&job, &format!("up {rank}"));
    }
    cluster.ask(json!(["hit", 3]));
    let says = ["error: rank 3", "SIGKILL"];
    cluster.end(&job).check("FAILED", Some(137), &says);

    let job = cluster.submit("--nodes 2 --nproc-per-node 1 --no-fold", &stays);
    cluster.has_said(&job, "up 0");
    cluster.has_said(&job, "up 1");
    cluster.ask(json!(["hit_process", "python3 -m paceline_driver"]));
    cluster.end(&job).check("FAILED", Some(137), &[]);

    let job = cluster.submit("--nodes 1:4 --nproc-per-node 1 --no-fold", &stays);
    cluster.has_said(&job, "up 1");
    cluster.ask(json!(["hit_process", "ray::Agent.run"]));
    cluster.has_said(&job, "starts again");
    cluster.has_said(&job, "joined; round");
    cluster.ask(json!(["stop", job]));
    let end = cluster.end(&job);
    end.check("STOPPED", None, &[]);
    // There is room for two launchers on each node.
    assert!(!end.log.contains("up 2"), "{}", end.log);

    // Ray itself would kill them after 3 s.
    let saves =
        "trap 'sleep 4; echo saved $RANK; exit 0' TERM; echo up $RANK; while :; do sleep 0.1; done";
    for nodes in ["2", "1:2"] {
        let options = format!("--nodes {nodes} --nproc-per-node 1 --no-fold");
        let job = cluster.submit(&options, &["sh", "-c", saves]);
        cluster.has_said(&job, "up 0");
        cluster.has_said(&job, "up 1");
        cluster.ask(json!(["stop", job]));
        cluster
            .end(&job)
            .check("STOPPED", None, &["saved 0", "saved 1"]);
    }

    for (options, wanted) in [
        (
            "--nodes 3 --nproc-per-node 2",
            "3 nodes with 2 CPUs each: 2 of the cluster's 3 nodes",
        ),
        (
            "--nproc-per-node 1 --gpus-per-node 8",
            "1 node with 1 CPU, 8 GPUs: 0 of the cluster's 3 nodes",
        ),
    ] {
        let options = format!("{options} --rdzv-conf join_timeout=3");
        let job = cluster.submit(&options, &stays);
        cluster
            .end(&job)
            .check("FAILED", Some(4), &["no room within 3 s", wanted]);
    }

    cluster.ask(json!(["add", 1, 2]));
    let shows = ["sh", "-c", "echo gpus $CUDA_VISIBLE_DEVICES of $WORLD_SIZE"];
    let job = cluster.submit("--gpus-per-node 1 --no-fold", &shows);
    cluster.end(&job).check("SUCCEEDED", Some(0), &[" of 1\n"]);
    let job = cluster.submit("--gpus-per-node 2 --nproc-per-node 1", &shows);
    cluster
        .end(&job)
        .check("SUCCEEDED", Some(0), &["gpus 0,1 of 1\n"]);
}

#[test]
fn jobs_lose_and_gain_ray_nodes() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempdir().expect("a folder");
    let Some(mut cluster) = Cluster::start(folder.path(), &["2", "2"]) else {
        return;
    };
    let stays = ["sh", "-c", "echo up $RANK; exec sleep 300"];
    let job = cluster.submit("--nodes 2 --nproc-per-node 2 --no-fold", &stays);
    cluster.has_said(&job, "up 3");
    cluster.ask(json!(["kill", 1]));
    let says = ["has left the job: Ray has lost it"];
    cluster.end(&job).check("FAILED", Some(1), &says);

    cluster.ask(json!(["add", 2]));
    let epochs = 30;
    let line = format!("train --run-dir whole {JOB} {epochs} --nproc-per-node 1");
    let hash = hash_of(folder.path(), &line);
    let options = "--nodes 1:3 --nproc-per-node 2 --recovery live --rdzv-conf last_call_timeout=2";
    let line = format!("--run-dir run {JOB} {epochs} --evaluate-every 1");
    let job = cluster.train(options, &line);
    cluster.has_said(&job, "[rank 0] step ");
    cluster.ask(json!(["add", 2]));
    cluster.has_said(&job, "joins with 2 ranks");
    // That of rank 0.
    cluster.ask(json!(["kill", 0]));
    cluster.has_said(&job, "; 4 ranks go on");
    let says = format!("weights sha256: {hash}");
    cluster.end(&job).check("SUCCEEDED", Some(0), &[&says]);
}
