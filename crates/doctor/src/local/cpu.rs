//! Cores: those there are, those this process may use, and those its container's quota pays for.

use paceline_words::{count, say};

use crate::checks;
use crate::finding::Notes;
use crate::options::Options;
use paceline_gpu::cgroup::{self, Folders};
use paceline_gpu::host::Host;

/// What was read.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Cpu {
    /// Cores of the machine.
    pub(crate) online: usize,
    /// Cores that this process may run on.
    pub(crate) allowed: usize,
    /// Cores' worth of time that the container may use.
    pub(crate) quota: Option<f64>,
}

pub(crate) fn read(host: &Host<'_>) -> Cpu {
    let online = host.text("/sys/devices/system/cpu/online");
    let online = online.and_then(|ranges| in_ranges(ranges.trim()));
    let allowed = rustix::thread::sched_getaffinity(None)
        .ok()
        .map(|set| set.count() as usize);
    let allowed = allowed.filter(|cores| *cores > 0);
    Cpu {
        online: online.or(allowed).unwrap_or(1),
        allowed: allowed.or(online).unwrap_or(1),
        quota: quota(host),
    }
}

impl Cpu {
    /// Cores that threads can really run on, as the launcher counts them: a part of a core does not count.
    pub(crate) fn usable(&self) -> usize {
        let quota = self.quota.map_or(usize::MAX, |quota| quota as usize);
        self.allowed.min(quota).max(1)
    }

    /// Compute threads of a rank.
    pub(crate) fn threads(&self, options: &Options) -> usize {
        let shared = || (self.usable() / options.ranks.max(1)).max(1);
        options.threads_per_rank.unwrap_or_else(shared)
    }
}

/// "0-3,8" has five.
fn in_ranges(text: &str) -> Option<usize> {
    let mut cores: usize = 0;
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        cores = cores.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    (1..=1 << 20).contains(&cores).then_some(cores)
}

fn quota(host: &Host<'_>) -> Option<f64> {
    let per = |quota: &str, period: &str| {
        let (quota, period): (f64, f64) = (quota.trim().parse().ok()?, period.trim().parse().ok()?);
        (quota > 0.0 && period > 0.0).then_some(quota / period)
    };
    match cgroup::folders(host, "cpu") {
        Folders::V2(folders) => cgroup::smallest(&folders, |folder| {
            let text = host.text(&format!("{folder}/cpu.max"))?;
            let (quota, period) = text.trim().split_once(' ')?;
            per(quota, period)
        }),
        Folders::V1(folders) => cgroup::smallest(&folders, |folder| {
            let quota = host.text(&format!("{folder}/cpu.cfs_quota_us"))?;
            let period = host.text(&format!("{folder}/cpu.cfs_period_us"))?;
            per(&quota, &period)
        }),
    }
}

pub(crate) fn judge(cpu: &Cpu, options: &Options, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::CORES);
    let (ranks, usable, threads) = (options.ranks, cpu.usable(), cpu.threads(options));
    let (wanted, allowed) = (ranks * threads, cpu.allowed);
    let counted_ranks = |number| count(lang, number, "rank", "랭크");
    let counted_cores = |number| count(lang, number, "core", "코어");
    let counted_threads = count(lang, threads, "thread", "스레드");
    let mut text = counted_cores(cpu.online);
    if allowed < cpu.online {
        text += &say!(
            lang,
            ", this process may run on {allowed}",
            ", 이 프로세스가 쓸 수 있는 코어 {allowed}개"
        );
    }
    if let Some(quota) = cpu.quota {
        text += &say!(
            lang,
            ", its container may use the time of {quota:.1}",
            ", 컨테이너 할당량은 코어 {quota:.1}개"
        );
    }
    let all_ranks = counted_ranks(ranks);
    sheet.fact(say!(
        lang,
        "{text}; {all_ranks} with {counted_threads}",
        "{text}; {all_ranks}, 랭크마다 {counted_threads}"
    ));
    if ranks > usable {
        let (cores, most) = (counted_cores(usable), counted_ranks(usable));
        sheet.warning(
            say!(lang, "{all_ranks} on {cores}", "{cores}에 {all_ranks}"),
            say!(
                lang,
                "ranks that wait for one another take turns on a core, and every step is as slow as the last to have had its turn; \
                 it works, but it says nothing about speed",
                "서로 기다리는 랭크들이 코어를 번갈아 쓰므로, 스텝마다 마지막 차례가 올 때까지 느려집니다. 동작은 하지만 속도 측정에는 의미가 없습니다"
            ),
            say!(
                lang,
                "start at most {most}: --nproc-per-node {usable}",
                "{most}까지만 시작하세요: --nproc-per-node {usable}"
            ),
        );
    } else if wanted > usable {
        let each = (usable / ranks.max(1)).max(1);
        sheet.warning(
            say!(
                lang,
                "{all_ranks} with {counted_threads} each want {wanted} cores, but there are {usable}",
                "{all_ranks}에 각각 {counted_threads}이면 코어 {wanted}개가 필요한데 {usable}개뿐임"
            ),
            say!(
                lang,
                "threads that take turns on a core finish later than fewer threads would",
                "스레드가 코어를 번갈아 쓰면 스레드가 적을 때보다 늦게 끝납니다"
            ),
            say!(
                lang,
                "--threads-per-rank {each}",
                "다음 옵션을 주세요: --threads-per-rank {each}"
            ),
        );
    }
    if let Some(quota) = cpu.quota
        && quota < cpu.allowed as f64
    {
        sheet.note(
            say!(
                lang,
                "this container may use the time of {quota:.1} cores, but programs see {allowed}",
                "컨테이너 할당량은 코어 {quota:.1}개인데 프로그램에는 {allowed}개가 보임"
            ),
            say!(
                lang,
                "a program that starts a thread for each core it sees is stopped again and again when the quota is used up; `paceline \
                 run` counts by the quota and tells the ranks so in OMP_NUM_THREADS and RAYON_NUM_THREADS",
                "보이는 코어마다 스레드를 띄우는 프로그램은 할당량을 다 쓸 때마다 멈춥니다. `paceline run`은 할당량을 기준으로 계산하고, OMP_NUM_THREADS와 \
                 RAYON_NUM_THREADS로 랭크에 알려 줍니다"
            ),
            say!(
                lang,
                "for other libraries set their number of threads yourself, or raise the quota (`docker run --cpus`)",
                "다른 라이브러리는 스레드 수를 직접 설정하거나, 할당량을 늘리세요(`docker run --cpus`)"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, job, noted};
    use paceline_gpu::host::recorded::Recorded;

    #[test]
    fn ranges_of_cores_are_counted() {
        for (text, expect) in [
            ("0", Some(1)),
            ("0-3", Some(4)),
            ("0-3,8,10-11", Some(7)),
            ("", None),
            ("3-1", None),
            ("0-18446744073709551615", None),
            ("a-b", None),
        ] {
            assert_eq!(in_ranges(text), expect, "{text:?}");
        }
    }

    #[test]
    fn a_quota_of_either_version_is_read_and_nonsense_is_none() {
        for (files, expect) in [
            (
                &[("/sys/fs/cgroup/cpu.max", "150000 100000\n")][..],
                Some(1.5),
            ),
            (&[("/sys/fs/cgroup/cpu.max", "max 100000\n")], None),
            (&[("/sys/fs/cgroup/cpu.max", "5")], None),
            (&[("/sys/fs/cgroup/cpu.max", "5 0")], None),
            (
                &[
                    ("/proc/self/cgroup", "2:cpu,cpuacct:/d\n"),
                    ("/sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_quota_us", "-1\n"),
                    ("/sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_period_us", "100000\n"),
                    ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "400000\n"),
                    ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
                ],
                Some(4.0),
            ),
        ] {
            let recorded = Recorded::new(files);
            assert_eq!(quota(&recorded.host()), expect, "{files:?}");
        }
    }

    #[test]
    fn ranks_and_threads_are_held_against_the_cores() {
        let check = |allowed, quota, ranks, threads: Option<usize>, expect: &[&str]| {
            let cpu = Cpu {
                online: 64,
                allowed,
                quota,
            };
            let options = Options {
                threads_per_rank: threads,
                ..job(ranks, 1)
            };
            let notes = noted(|notes| judge(&cpu, &options, notes));
            assert_eq!(found(&notes), expect, "{cpu:?} {ranks} {threads:?}");
        };
        check(64, None, 8, None, &[]);
        check(64, None, 8, Some(8), &[]);
        check(
            64,
            None,
            8,
            Some(9),
            &["warning: cores: --threads-per-rank 8"],
        );
        check(4, None, 8, None, &["warning: cores: start at most 4 ranks"]);
        let quota = "note: cores: for other libraries set";
        check(64, Some(4.5), 4, None, &[quota]);
        check(
            64,
            Some(0.5),
            2,
            None,
            &["warning: cores: start at most 1 rank", quota],
        );
    }
}
