//! Whether the kernel has killed processes of this job's control group because its memory was used up.

use std::fs;
use std::path::Path;

/// The count of such kills so far; `None` where the system does not tell.
///
/// All ranks are in the launcher's group or below it, unless they have moved themselves.
pub(crate) fn kills() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    kills_below(Path::new("/sys/fs/cgroup"), &groups)
}

/// The note for a job in which this count has grown.
pub(crate) fn note(before: Option<u64>, now: Option<u64>) -> Option<String> {
    let count = now?.checked_sub(before?).filter(|count| *count > 0)?;
    let what = if count == 1 { "process" } else { "processes" };
    Some(format!(
        "the kernel killed {count} {what} of this job's control group, because its memory was used up: make the batch \
         smaller, start fewer ranks, or raise the limit"
    ))
}

/// Version 2 has one hierarchy and counts in `memory.events`; version 1 has one for memory, and `memory.oom_control`. In a
/// container, the path that the process sees may not be where its group is mounted.
fn kills_below(root: &Path, groups: &str) -> Option<u64> {
    let candidates = groups.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let path = path.trim_start_matches('/');
        if controllers.is_empty() {
            Some((root.to_owned(), path, "memory.events"))
        } else {
            let has_memory = controllers.split(',').any(|name| name == "memory");
            has_memory.then(|| (root.join("memory"), path, "memory.oom_control"))
        }
    });
    let mut files = candidates.flat_map(|(mount, path, file)| {
        [mount.join(path).join(file), mount.join(file)].into_iter()
    });
    files.find_map(|file| {
        let text = fs::read_to_string(file).ok()?;
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count?.trim().parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_in_both_versions_of_control_groups() {
        let check = |groups: &str, file: &str, text: &str, expect: Option<u64>| {
            let root = tempfile::tempdir().unwrap();
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, text).unwrap();
            assert_eq!(kills_below(root.path(), groups), expect, "{groups}");
        };
        let events = "low 0\nhigh 7\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n";
        check("0::/job/a\n", "job/a/memory.events", events, Some(2));
        check("0::/elsewhere\n", "memory.events", events, Some(2));
        let control = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n";
        let groups = "5:cpu,cpuacct:/x\n4:memory:/job/b\n0::/\n";
        check(groups, "memory/job/b/memory.oom_control", control, Some(5));
        check(groups, "memory/memory.oom_control", control, Some(5));
        check(
            groups,
            "memory/job/b/memory.oom_control",
            "under_oom 0\n",
            None,
        );
        check("", "memory.events", events, None);
        check("nonsense\n0\n", "memory.events", events, None);
    }

    #[test]
    fn only_new_kills_are_told() {
        assert_eq!(note(Some(2), Some(2)), None);
        assert_eq!(note(None, Some(2)), None);
        assert_eq!(note(Some(2), None), None);
        assert_eq!(note(Some(3), Some(2)), None);
        let told = note(Some(2), Some(3)).unwrap();
        assert!(
            told.starts_with("the kernel killed 1 process of this job's"),
            "{told}"
        );
        let told = note(Some(2), Some(4)).unwrap();
        assert!(
            told.starts_with("the kernel killed 2 processes of"),
            "{told}"
        );
    }
}
