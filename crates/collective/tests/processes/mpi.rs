//! Ranks that a real MPI launcher starts, with data over its library. Without one, what is said of that.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use paceline_rendezvous::token::Token;

use super::common::job::{Job, MARK, ROLE};
use super::{LEN, PATIENCE, checksum, noise, played, reference};

/// No test takes as long, on a busy machine neither; what still runs then is killed.
const LIMIT: &str = "120";
/// What an operation may take.
const DEADLINE: Duration = Duration::from_secs(3);
/// A launcher, the package that has it, its library, and its way to let ranks live on when one has died.
const OPEN_MPI: [&str; 4] = [
    "mpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none",
    "openmpi-bin",
    "libmpi.so.40",
    "--enable-recovery",
];
const HYDRA: [&str; 4] = [
    "mpiexec.hydra",
    "mpich",
    "libmpich.so.12",
    "-disable-auto-cleanup",
];
/// Has `PER` ranks on each host, as far as they say.
const SHIM: &str =
    "export PACELINE_HOST_ID=host$((${OMPI_COMM_WORLD_RANK:-$PMI_RANK} / PER)); exec \"$0\" \"$@\"";

/// What the ranks told the test, in order, and all that was written.
struct Told {
    lines: Vec<String>,
    output: Output,
}

/// Whether a launcher is there; says how to get it otherwise.
fn has([line, package, ..]: [&str; 4]) -> bool {
    let program = line.split(' ').next().unwrap_or_default();
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        paceline_testing::skipped(format!(
            "{program} is not installed: apt-get install --no-install-recommends {package}"
        ));
    }
    found
}

/// Has a launcher run the test called `test` as `world` ranks, of which `per` are on each host.
fn launched(
    launcher: [&str; 4],
    options: &str,
    (test, role): (&str, &str),
    (world, per): (usize, usize),
) -> Told {
    let [line, _, library, _] = launcher;
    let mut command = Command::new("timeout");
    let output = paceline_testing::outside_of_jobs(&mut command)
        .args(["--kill-after=20", LIMIT])
        .args(line.split(' ').chain(options.split_whitespace()))
        .args(["-n", &world.to_string(), "bash", "-c", SHIM])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env("PER", per.to_string())
        .env("PACELINE_TRANSPORT", "mpi")
        .env("PACELINE_MPI_LIBRARY", library)
        .env("PACELINE_JOB_TOKEN", Token::generate().unwrap().to_hex())
        .env("MASTER_PORT", paceline_testing::free_ports(1).to_string())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines: Vec<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix(MARK).map(str::to_owned))
        .collect();
    lines.sort_unstable();
    Told { lines, output }
}

#[test]
fn ranks_get_the_bytes_of_the_tree_and_leave_in_order() {
    if played(PATIENCE) {
        return;
    }
    let test = "mpi::ranks_get_the_bytes_of_the_tree_and_leave_in_order";
    for launcher in [OPEN_MPI, HYDRA].into_iter().filter(|one| has(*one)) {
        for (world, per) in [(2, 1), (4, 1), (4, 2)] {
            let told = launched(launcher, "", (test, "once"), (world, per));
            let inputs: Vec<Vec<f32>> = (0..world).map(|rank| noise(rank, LEN)).collect();
            let expected = checksum(&reference(&inputs, &|left, right| left + right));
            assert_eq!(
                told.lines,
                vec![format!("ready mpi {expected}"); world],
                "{:?}",
                told.output
            );
            // Its launcher says with an error if a process ends without `MPI_Finalize`.
            assert!(told.output.status.success(), "{:?}", told.output);
        }
    }
}

#[test]
fn a_rank_that_dies_or_stalls_is_named_by_all_others() {
    if played(DEADLINE) {
        return;
    }
    let test = "mpi::a_rank_that_dies_or_stalls_is_named_by_all_others";
    // Hydra ends all ranks when one dies, before they can tell.
    for (launcher, role, words) in [
        (OPEN_MPI, "die", "rank 1 (host"),
        (OPEN_MPI, "stall", "timed out after"),
        (HYDRA, "stall", "timed out after"),
    ] {
        if !has(launcher) {
            continue;
        }
        let told = launched(launcher, launcher[3], (test, role), (3, 1));
        let named = told.lines.iter().filter(|line| {
            line.starts_with("culprit Some(1) victim of Some(1): ") && line.contains(words)
        });
        assert_eq!(named.count(), 2, "{role}: {:?}", told.output);
    }
}

#[test]
fn a_library_of_another_launcher_is_refused() {
    if played(PATIENCE) {
        return;
    }
    let test = "mpi::a_library_of_another_launcher_is_refused";
    for (launcher, other) in [(OPEN_MPI, HYDRA), (HYDRA, OPEN_MPI)] {
        if !has(launcher) || !has(other) {
            continue;
        }
        let mixed = [launcher[0], launcher[1], other[2], launcher[3]];
        let told = launched(mixed, "", (test, "once"), (2, 1));
        assert_eq!(told.lines.len(), 2, "{:?}", told.output);
        for line in &told.lines {
            assert!(
                line.starts_with("no group: ") && line.contains("finds this process alone"),
                "{line}"
            );
        }
    }
}

#[test]
fn ranks_that_no_mpi_launcher_has_started_are_refused_before_mpi_is_loaded() {
    if played(PATIENCE) {
        return;
    }
    let test = "mpi::ranks_that_no_mpi_launcher_has_started_are_refused_before_mpi_is_loaded";
    let job = Job::start(test, "mpi", 2, "once", true);
    for line in job.all_ready() {
        assert_eq!(
            line,
            "no group: transport \"mpi\" was asked for but cannot be used: rank 0 cannot: Paceline's launcher started it, \
             and only MPI's own makes an MPI job of processes"
        );
    }
}
