//! Which processes hold a device: the driver's two lists as one.

use nvml_wrapper::Device;

use crate::snapshot::{Gap, Holder};

use super::now::known;
use super::raw::{self, Process};

/// The processes that hold a device, by pid, as far as the driver knows them.
pub(super) fn processes(device: &Device<'_>) -> Result<Vec<Holder>, Gap> {
    let compute = raw::compute_processes(device)?;
    // Devices without a display may not have this list.
    let graphics = raw::graphics_processes(device).unwrap_or_default();
    Ok(joined(&compute, &graphics))
}

/// One entry for each process: it may be in both lists with the same memory, or in one list once for each MIG instance.
fn joined(compute: &[Process], graphics: &[Process]) -> Vec<Holder> {
    let mut entries: Vec<(u32, bool, u64)> = Vec::with_capacity(compute.len() + graphics.len());
    for (list, is_compute) in [(compute, true), (graphics, false)] {
        let new = list
            .iter()
            .map(|entry| (entry.pid, is_compute, entry.used_bytes));
        entries.extend(new);
    }
    entries.sort_by_key(|(pid, is_compute, _)| (*pid, !*is_compute));
    let same = |a: &(u32, bool, u64), b: &(u32, bool, u64)| a.0 == b.0;
    let held = entries.chunk_by(same).filter_map(|chunk| {
        let (pid, is_compute, _) = *chunk.first()?;
        let of_one_list = chunk.iter().filter(|entry| entry.1 == is_compute);
        let amounts = of_one_list.filter_map(|entry| known(entry.2).ok());
        let sum = amounts.reduce(u64::saturating_add).ok_or(Gap::NotSupported);
        Some(Holder {
            pid,
            memory_bytes: sum.into(),
            is_compute,
            ..Holder::default()
        })
    });
    held.take(raw::PROCESSES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_listed_once() {
        let list = |entries: &[(u32, u64)]| -> Vec<Process> {
            let process = |(pid, used_bytes): &(u32, u64)| Process {
                pid: *pid,
                used_bytes: *used_bytes,
            };
            entries.iter().map(process).collect()
        };
        let check = |compute: &[(u32, u64)], graphics: &[(u32, u64)], expect: &str| {
            let held = joined(&list(compute), &list(graphics));
            let words = held.iter().map(|held| {
                let bytes = held
                    .memory_bytes
                    .known()
                    .map_or("?".to_owned(), u64::to_string);
                let kind = if held.is_compute { "C" } else { "G" };
                format!("{}{kind} {bytes}", held.pid)
            });
            assert_eq!(words.collect::<Vec<_>>().join(", "), expect);
        };
        check(&[], &[], "");
        check(&[(9, 5), (3, 7)], &[], "3C 7, 9C 5");
        check(&[(3, 7)], &[(3, 7), (4, 1)], "3C 7, 4G 1");
        check(&[(3, 7), (3, 8)], &[], "3C 15");
        check(&[(3, u64::MAX), (3, 8)], &[], "3C 8");
        check(&[(3, u64::MAX)], &[(3, 2)], "3C ?");
        check(
            &[(3, u64::MAX - 1), (3, u64::MAX - 1)],
            &[],
            "3C 18446744073709551615",
        );
    }
}
