//! Shared by the tests of several crates: reporting a skipped test, ranks as threads, examples, programs outside of jobs, a Python, free
//! ports, an object store, a tracking server, waits that end.

pub mod bucket;
mod http;
pub mod tracking;
mod waits;

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

pub use self::waits::{Meeting, seconds_after, wait_until};

/// The variable that names the file for collecting skipped tests; `.ci/run` sets it and lists them at the end.
pub const SKIPPED_VARIABLE: &str = "PACELINE_TEST_SKIPPED";

/// Runs `run` on each item in a thread of its own, such as a rank on its side of a group. Returns the results in the order of
/// the items.
///
/// *Panics*: if a thread does.
pub fn on_threads<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    run: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let run = &run;
        let items = items.into_iter();
        let threads: Vec<_> = items.map(|item| scope.spawn(move || run(item))).collect();
        let threads = threads.into_iter();
        threads
            .map(|thread| thread.join().expect("no thread panics"))
            .collect()
    })
}

/// The program of an example, which Cargo builds with the tests of its package unless it is told to build one test only.
///
/// *Panics*: if it is not built.
pub fn example(package: &str, name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("this program has a file");
    let profile = own.parent().and_then(Path::parent);
    let profile = profile.expect("target/PROFILE/deps");
    let path = profile.join("examples").join(name);
    let hint = format!("run `cargo build -p {package} --examples` first");
    assert!(path.exists(), "{hint}");
    path
}

/// Takes the variables of a job or scheduler, under which the tests may run, and settings of theirs out of a program's
/// environment. Variables that the test itself sets come afterwards.
pub fn outside_of_jobs(command: &mut Command) -> &mut Command {
    let prefixes = [
        "PACELINE_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "GROUP_",
        "MASTER_",
        "PET_",
        "TORCH",
        "SLURM",
        "OMPI_",
        "PMI",
        "MPI_",
        "RAY_",
        "OMP_",
        "RAYON_",
        "PYTHON",
        "RUST_BACKTRACE",
    ];
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if prefixes.iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
    command
}

/// The first of `count` ports in a row on which a program may listen. Each call gets other ones.
///
/// They lie below the range from which Linux by default takes the ports of outgoing connections: those of other tests do not
/// take a port before the program listens on it.
///
/// *Panics*: if there are no such ports.
pub fn free_ports(count: u16) -> u16 {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    let ports = 20_000..30_000; // `tools/slurm.sh` takes higher ones
    // Test programs that run at the same time begin in different places.
    let begin = std::process::id().wrapping_mul(101);
    for _ in 0..1000 {
        let taken = TAKEN.fetch_add(count.into(), Ordering::Relaxed);
        let place = begin.wrapping_add(taken) % (ports.end - ports.start - u32::from(count));
        let first = u16::try_from(ports.start + place).expect("a port");
        if (first..first + count).all(|port| TcpListener::bind(("0.0.0.0", port)).is_ok()) {
            return first;
        }
    }
    panic!("no {count} free ports in a row");
}

/// A Python that can import these modules: `PACELINE_TEST_PYTHON`, or else `python3`. If there is none, [`skipped`] says what to install.
pub fn python_with(modules: &[&str]) -> Option<String> {
    let python = std::env::var("PACELINE_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let import = format!("import {}", modules.join(", "));
    let found = Command::new(&python).args(["-c", &import]).output();
    if found.is_ok_and(|found| found.status.success()) {
        return Some(python);
    }
    let packages = modules.iter().filter_map(|module| module.split('.').next());
    let packages = packages.collect::<Vec<_>>().join(" ");
    skipped(format!(
        "{python} lacks a package; `pip install {packages}` into a virtual environment and set PACELINE_TEST_PYTHON to its bin/python"
    ));
    None
}

/// Reports that the calling test cannot run on this machine, and why. The test returns right afterwards.
///
/// The harness counts such a test as passed and captures its output, so the line goes directly to stderr and to the file in
/// [`SKIPPED_VARIABLE`].
///
/// *Panics*: if that file cannot be written, because a skipped test would then look like a passed one.
pub fn skipped(reason: impl Display) {
    let program = std::env::args().next().unwrap_or_default();
    let program = program.rsplit('/').next().unwrap_or_default();
    // Cargo appends a hash to the name of a test binary.
    let program = program.rsplit_once('-').map_or(program, |(name, _)| name);
    let thread = std::thread::current();
    let line = format!(
        "{program}: {}: {reason}\n",
        thread.name().unwrap_or("unnamed thread")
    );
    // Not `eprint!`, which the harness captures.
    let _ = write!(std::io::stderr(), "SKIPPED {line}");
    if let Some(file) = std::env::var_os(SKIPPED_VARIABLE) {
        // A single write, because tests in several processes append concurrently.
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(&file)
            .and_then(|mut file| file.write_all(line.as_bytes()))
            .unwrap_or_else(|error| panic!("cannot write {}: {error}", file.display()));
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Runs this test again with the variable set, in which case it acts as a skipped test.
    #[test]
    fn a_skipped_test_is_collected_with_its_name_and_reason() {
        let name = "tests::a_skipped_test_is_collected_with_its_name_and_reason";
        if std::env::var_os("PACELINE_TEST_PLAYED").is_some() {
            skipped("there is no mandoc");
            return;
        }
        let file = std::env::temp_dir().join(format!("paceline-skipped-{}", std::process::id()));
        let output = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", name])
            .env("PACELINE_TEST_PLAYED", "1")
            .env(SKIPPED_VARIABLE, &file)
            .output()
            .expect("it runs");
        let collected = std::fs::read_to_string(&file).expect("the file");
        std::fs::remove_file(&file).expect("the file goes");
        let expected = format!("paceline_testing: {name}: there is no mandoc\n");
        assert_eq!(collected, expected);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(&format!("SKIPPED {expected}")), "{said}");
    }
}
