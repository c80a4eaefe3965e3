//! The limits that a container or a batch system sets: control groups of both versions.

use crate::host::Host;

/// Deepest nesting that is looked through.
const DEPTH_MAX: usize = 32;
const MOUNT: &str = "/sys/fs/cgroup";

/// Where one controller's files for this process may lie, the innermost first. Those that are not there are skipped by
/// whoever reads them: inside of a container the path that the kernel tells need not be the one that is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Folders {
    /// One tree for all controllers.
    V2(Vec<String>),
    /// A tree for each.
    V1(Vec<String>),
}

/// The folders of `controller` (`cpu`, `memory`, `pids`).
pub fn folders(host: &Host<'_>, controller: &str) -> Folders {
    let table = host.text("/proc/self/cgroup").unwrap_or_default();
    let mut unified = None;
    for line in table.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(names), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        if !path.starts_with('/') {
            continue;
        }
        if names.split(',').any(|name| name == controller) {
            return Folders::V1(upwards(&format!("{MOUNT}/{names}"), path));
        }
        if names.is_empty() {
            unified = Some(path.to_owned());
        }
    }
    Folders::V2(upwards(MOUNT, unified.as_deref().unwrap_or("/")))
}

/// The smallest value that any level sets; `None` where none does.
pub fn smallest<T: PartialOrd>(folders: &[String], read: impl Fn(&str) -> Option<T>) -> Option<T> {
    let found = folders.iter().filter_map(|folder| read(folder));
    found.reduce(|least, value| if value < least { value } else { least })
}

fn upwards(mount: &str, path: &str) -> Vec<String> {
    let names: Vec<&str> = path
        .split('/')
        .filter(|name| !name.is_empty())
        .take(DEPTH_MAX)
        .collect();
    // Of a group outside of what this container sees; only what is mounted can be read.
    let names = if names.contains(&"..") {
        Vec::new()
    } else {
        names
    };
    (0..=names.len())
        .rev()
        .map(|depth| {
            let mut folder = mount.to_owned();
            for name in &names[..depth] {
                folder.push('/');
                folder.push_str(name);
            }
            folder
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    #[test]
    fn both_versions_are_found_from_the_inside_out() {
        let v2 = |folders: &[&str]| Folders::V2(folders.iter().map(|&f| f.into()).collect());
        let v1 = |folders: &[&str]| Folders::V1(folders.iter().map(|&f| f.into()).collect());
        for (table, expect) in [
            ("0::/\n", v2(&["/sys/fs/cgroup"])),
            (
                "0::/a.slice/b\n",
                v2(&[
                    "/sys/fs/cgroup/a.slice/b",
                    "/sys/fs/cgroup/a.slice",
                    "/sys/fs/cgroup",
                ]),
            ),
            (
                "12:pids:/x\n4:cpu,cpuacct:/docker/7\n0::/y\n",
                v1(&[
                    "/sys/fs/cgroup/cpu,cpuacct/docker/7",
                    "/sys/fs/cgroup/cpu,cpuacct/docker",
                    "/sys/fs/cgroup/cpu,cpuacct",
                ]),
            ),
            ("0::/../../other\n", v2(&["/sys/fs/cgroup"])),
            ("", v2(&["/sys/fs/cgroup"])),
            ("nonsense\n:::\n4:cpuset:/\n", v2(&["/sys/fs/cgroup"])),
        ] {
            let recorded = Recorded::new(&[("/proc/self/cgroup", table)]);
            assert_eq!(folders(&recorded.host(), "cpu"), expect, "{table:?}");
        }
    }

    #[test]
    fn the_smallest_of_nested_limits_holds() {
        let folders = ["/in".to_owned(), "/mid".into(), "/out".into()];
        let value = |folder: &str| match folder {
            "/in" => Some(8),
            "/out" => Some(3),
            _ => None,
        };
        assert_eq!(smallest(&folders, value), Some(3));
        assert_eq!(smallest(&folders, |_| None::<u64>), None);
    }
}
