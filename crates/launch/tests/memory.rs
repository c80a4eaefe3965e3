//! A rank that uses up the memory of its control group, with a real group.

mod support;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use support::PROBE;
use support::launcher::Launcher;

/// A control group with 64 MiB, removed at the end.
struct Group(PathBuf);

impl Group {
    fn new() -> std::io::Result<Self> {
        let name = format!("paceline-test-{}", std::process::id());
        let version_1 = PathBuf::from("/sys/fs/cgroup/memory");
        let (parent, limit) = match version_1.is_dir() {
            true => (version_1, "memory.limit_in_bytes"),
            false => (PathBuf::from("/sys/fs/cgroup"), "memory.max"),
        };
        let group = Self(parent.join(name));
        fs::create_dir(&group.0)?;
        fs::write(group.0.join(limit), (64 << 20).to_string())?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_rank_that_the_kernel_kills_for_memory_is_told_from_one_that_a_person_kills() {
    let group = match Group::new() {
        Ok(group) => group,
        Err(error) => {
            return paceline_testing::skipped(format!("no control group can be made: {error}"));
        }
    };
    let run = |script: &str| {
        let enter = format!(
            "echo $$ > {}/cgroup.procs && exec \"$@\"",
            group.0.display()
        );
        let mut command = Command::new("sh");
        command.args(["-c", &enter, "sh", PROBE, "launch"]);
        let mut launcher = Launcher::start_command(command, &["--nproc", "2"], script);
        let (status, _, errors) = launcher.end(Duration::from_secs(60));
        (status.code(), errors)
    };
    // It keeps all that it has read, for want of a line's end.
    let (code, errors) = run("[ $RANK = 0 ] || exec tail /dev/zero; exec sleep 60");
    assert_eq!(code, Some(137), "{errors}");
    let note =
        "the kernel killed 1 process of this job's control group, because its memory was used up";
    assert!(errors.contains(note), "{errors}");
    let (code, errors) = run("[ $RANK = 0 ] || kill -9 $$; exec sleep 60");
    assert_eq!(code, Some(137), "{errors}");
    assert!(!errors.contains("the kernel killed"), "{errors}");
}
