//! `paceline submit slurm` against a real Slurm of this machine, which `tools/slurm.sh` starts for each test, and the store at which launchers
//! under `paceline submit ray` meet.

#[path = "schedulers/kubernetes.rs"]
mod kubernetes;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const LAUNCHER: &str = env!("CARGO_BIN_EXE_paceline-launcher");

/// Runs a command with a Slurm of its own; nothing where none is installed.
fn with_slurm(folder: &Path, words: &[&str]) -> Option<Output> {
    let slurm = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/slurm.sh");
    let mut command = Command::new("bash");
    command.arg(slurm).args(["--nodes", "2"]).args(words);
    let output = command.current_dir(folder).output().expect("bash runs");
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) && said.contains("is not installed") {
        paceline_testing::skipped(said.trim());
        return None;
    }
    Some(output)
}

/// Submits and waits for the job's end. sbatch's `--wait` makes its exit code the job's.
fn submit(folder: &Path, words: &[&str]) -> Option<Output> {
    let submit = [
        LAUNCHER,
        "submit",
        "slurm",
        "--job-name=job",
        "--sbatch-option=--wait",
    ];
    with_slurm(folder, &[&submit, words].concat())
}

/// What the job printed, after how it was submitted.
fn printed(folder: &Path, output: &Output) -> String {
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        if entry
            .path()
            .extension()
            .is_some_and(|extension| extension == "out")
        {
            text.push_str(&fs::read_to_string(entry.path()).expect("text"));
        }
    }
    text
}

#[test]
fn a_submitted_job_starts_its_ranks_on_all_nodes_with_the_words_as_they_were() {
    let folder = tempfile::tempdir().expect("a folder");
    let show = "echo \"rank $RANK of $WORLD_SIZE: $1\"; test -z \"$(ps ax -o args | grep -F \"$PACELINE_JOB_TOKEN\" | grep -v grep)\"";
    let words = [
        "--nodes=1:2",
        "--nproc-per-node=2",
        "--no-fold",
        "--env",
        "ODD=a b",
        "sh",
        "-c",
        show,
        "sh",
        "it's $HOME",
    ];
    let Some(output) = submit(folder.path(), &words) else {
        return;
    };
    let text = printed(folder.path(), &output);
    assert!(output.status.success(), "{text}");
    for rank in 0..4 {
        assert!(
            text.contains(&format!("rank {rank} of 4: it's $HOME")),
            "{text}"
        );
    }
    assert!(text.contains("Submitted batch job"), "{text}");
    let job = fs::read_dir(folder.path())
        .expect("read")
        .flatten()
        .find(|entry| entry.path().is_dir());
    let nodes = fs::read_dir(job.expect("the ranks' output").path()).expect("read");
    assert_eq!(nodes.count(), 2, "one folder for each node");
}

#[test]
fn a_fixed_number_of_nodes_needs_no_more_than_what_slurm_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let show = "echo \"rank $RANK of $WORLD_SIZE on node $GROUP_RANK\"";
    let words = [
        "--nodes=2",
        "--nproc-per-node=2",
        "--no-fold",
        "sh",
        "-c",
        show,
    ];
    let Some(output) = submit(folder.path(), &words) else {
        return;
    };
    let text = printed(folder.path(), &output);
    assert!(output.status.success(), "{text}");
    for (rank, node) in [(0, 0), (1, 0), (2, 1), (3, 1)] {
        assert!(
            text.contains(&format!("rank {rank} of 4 on node {node}")),
            "{text}"
        );
    }
}

#[test]
fn a_submitted_job_ends_with_the_code_of_the_rank_that_failed() {
    let folder = tempfile::tempdir().expect("a folder");
    let words = [
        "--nodes=1:2",
        "--nproc-per-node=2",
        "sh",
        "-c",
        "test $RANK != 3 || exit 7; exec sleep 60",
    ];
    let Some(output) = submit(folder.path(), &words) else {
        return;
    };
    let text = printed(folder.path(), &output);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains("`sbatch` ended with exit code 7"), "{text}");
    assert!(text.contains("rank 3"), "{text}");
}

#[test]
fn a_job_whose_time_is_nearly_up_goes_on_in_its_next_turn() {
    let folder = tempfile::tempdir().expect("a folder");
    // The rank plays the clock: it has Slurm tell the script, as Slurm does when the time is nearly up.
    let program = "if test -e saved; then echo second turn; exit 0; fi
                   trap 'touch saved; echo saved; exit 0' TERM
                   scancel --batch --signal=USR1 $SLURM_JOB_ID
                   sleep 60 & wait";
    // Slurm lets two minutes pass before the next turn, unless somebody hurries.
    let hurry = "\"$0\" submit slurm --job-name=job --signal=TERM@60 --requeue sh -c \"$1\" || exit
                 for try in {1..600}; do
                     grep -q 'second turn' job-*.out && exit
                     job=$(squeue --noheader --format=%i --states=PENDING)
                     test -z \"$job\" || ! test -e saved || scontrol update JobId=\"$job\" StartTime=now
                     sleep 0.1
                 done
                 exit 1";
    let Some(output) = with_slurm(folder.path(), &["bash", "-c", hurry, LAUNCHER, program]) else {
        return;
    };
    let text = printed(folder.path(), &output);
    assert!(output.status.success(), "{text}");
    let (first, second) = (text.find("saved"), text.find("second turn"));
    assert!(first.is_some() && first < second, "{text}");
}

/// Launchers `a`, `b` and `c` of a job of one or two nodes; `up.c.2` says that the rank of `c` is one of two.
const OUTSIDE: &str = r#"
export PACELINE_JOB_TOKEN=$(printf 5e%.0s {1..32})
coproc store { exec "$0" store-server; }
read -r port <&"${store[0]}"
node() {
    PACELINE_HOST_ID=$1 exec "$0" run --log-dir /dev/null --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint "127.0.0.1:$port" \
        --rdzv-conf lease=1,last_call_timeout=0.2 sh -c '> "up.$PACELINE_HOST_ID.$WORLD_SIZE"; until test -e over; do sleep 0.02; done'
}
is_there() { until test -e "$1"; do sleep 0.02; done; }
node a & a=$!
is_there up.a.1
node b & b=$!
is_there up.b.2
kill -9 $a
is_there up.b.1
node c & c=$!
is_there up.c.2
> over
wait $b && wait $c || exit
eval "exec ${store[1]}>&-"
wait $store_PID
"#;

#[test]
fn a_node_finds_the_job_at_a_store_outside_of_it_when_the_first_node_is_gone() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new("timeout");
    paceline_testing::outside_of_jobs(&mut command);
    let words = ["--kill-after=20", "120", "bash", "-c", OUTSIDE, LAUNCHER];
    let ended = command.args(words).current_dir(folder.path()).output();
    let ended = ended.expect("bash runs");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{}: {said}", ended.status);
}
