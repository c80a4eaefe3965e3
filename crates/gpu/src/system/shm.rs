//! Shared memory for processes: the size of `/dev/shm`, and how much of it is in use.

use super::text;
use crate::host::{Host, kib};
use crate::snapshot::{Gap, Memory, Reading};

const FOLDER: &str = "/dev/shm";
const MOUNTS_BYTES_MAX: u64 = 4 << 20;

pub(super) fn read(host: &Host<'_>) -> Reading<Memory> {
    match host.is_this_one() {
        true => ask(host),
        false => recorded(host),
    }
    .into()
}

/// What the file system itself says.
fn ask(host: &Host<'_>) -> Result<Memory, Gap> {
    let found =
        rustix::fs::statvfs(host.path(FOLDER)).map_err(|error| super::gap(&error.into()))?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Ok(Memory {
        used_bytes: bytes(found.f_blocks.saturating_sub(found.f_bfree)),
        total_bytes: bytes(found.f_blocks),
    })
}

/// The size that it was mounted with. How much is in use is not recorded, and taken to be nothing.
fn recorded(host: &Host<'_>) -> Result<Memory, Gap> {
    let mounts = text(host, "/proc/self/mountinfo", MOUNTS_BYTES_MAX)
        .or_else(|_| text(host, "/proc/mounts", MOUNTS_BYTES_MAX))?;
    // Both tables have the folder as a field of its own, and the options of the file system as the last. Of several
    // mounts upon each other the last one is seen.
    let is_it = |line: &&str| line.split(' ').any(|field| field == FOLDER);
    let mount = mounts.lines().rfind(is_it).ok_or(Gap::NotSupported)?;
    let fields = mount.split(' ');
    let size = fields
        .flat_map(|field| field.split(','))
        .filter_map(|option| size(option.strip_prefix("size=")?))
        .next_back();
    let total_bytes = match size {
        Some(bytes) => bytes,
        // The kernel's own choice is half of the memory.
        None => memory(host).ok_or(Gap::NotSupported)? / 2,
    };
    Ok(Memory {
        used_bytes: 0,
        total_bytes,
    })
}

/// `65536k`
fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "k" | "K" => 1 << 10,
        "m" | "M" => 1 << 20,
        "g" | "G" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

fn memory(host: &Host<'_>) -> Option<u64> {
    kib(&text(host, "/proc/meminfo", 64 << 10).ok()?, "MemTotal:")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    fn check(files: &[(&str, &str)], expect: Result<u64, Gap>) {
        let shm = read(&Recorded::new(files).host());
        assert_eq!(
            shm.map(|memory| memory.total_bytes),
            expect.into(),
            "{files:?}"
        );
    }

    #[test]
    fn a_recorded_size_is_that_of_the_mount() {
        let info = "20 1 0:19 / /dev rw - tmpfs tmpfs rw,size=4096k\n\
                    21 20 0:20 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k,inode64\n";
        check(&[("/proc/self/mountinfo", info)], Ok(64 << 20));
        let mounts = "shm /dev/shm tmpfs rw,nosuid,size=2g 0 0\n";
        check(&[("/proc/mounts", mounts)], Ok(2 << 30));
        let twice = "a /dev/shm tmpfs rw,size=64m 0 0\nb /dev/shm tmpfs rw,size=8m 0 0\n";
        check(&[("/proc/mounts", twice)], Ok(8 << 20));
    }

    #[test]
    fn without_a_size_it_is_half_of_the_memory() {
        let mounts = ("/proc/mounts", "tmpfs /dev/shm tmpfs rw 0 0\n");
        check(
            &[mounts, ("/proc/meminfo", "MemTotal:  1000 kB\n")],
            Ok(512_000),
        );
        check(&[mounts], Err(Gap::NotSupported));
        check(
            &[("/proc/mounts", "tmpfs /dev tmpfs rw 0 0\n")],
            Err(Gap::NotSupported),
        );
        check(&[], Err(Gap::NotSupported));
    }

    #[test]
    fn sizes_have_units() {
        for (text, expect) in [
            ("4096", Some(4096)),
            ("1k", Some(1024)),
            ("50%", None),
            ("", None),
            ("k", None),
            ("99999999999999999g", None),
            ("ä", None),
        ] {
            assert_eq!(size(text), expect, "{text:?}");
        }
    }

    #[test]
    fn this_machine_is_asked() {
        let shm = read(&Host::new("/", &|_| None));
        assert!(
            shm.known()
                .is_none_or(|shm| shm.used_bytes <= shm.total_bytes)
        );
    }
}
