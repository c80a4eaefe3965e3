//! Variables of the environment that would surprise the job.

use paceline_words::{count, say};

use crate::checks;
use crate::finding::{Notes, plain};
use crate::options::Options;
use paceline_gpu::host::Host;

/// Variables of a rank: a shell that has them was started by a launcher, or they were exported.
const OF_A_RANK: [&str; 4] = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"];
const THREADS: [&str; 2] = ["OMP_NUM_THREADS", "RAYON_NUM_THREADS"];
const DEVICES: [&str; 3] = [
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
];

pub(crate) fn judge(host: &Host<'_>, options: &Options, cores: usize, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::VARIABLES);
    let ours = |name: &&str| host.variable(name).is_some();
    let all = OF_A_RANK.iter().chain(&THREADS).chain(&DEVICES);
    let all = all.chain(&["MASTER_ADDR", "MASTER_PORT"]).copied();
    let seen: Vec<&str> = all.filter(ours).collect();
    let list = seen.join(", ");
    sheet.fact(match seen.is_empty() {
        true => say!(
            lang,
            "none is set that changes the job",
            "작업에 영향을 주는 변수 없음"
        ),
        false => say!(lang, "set here: {list}", "설정된 변수: {list}"),
    });

    let ranks = count(lang, options.ranks, "rank", "랭크");
    for name in THREADS {
        let Some(value) = host.variable(name) else {
            continue;
        };
        let unset = say!(lang, "`unset {name}`", "`unset {name}`를 실행하세요");
        match value.trim().parse::<usize>() {
            Ok(threads) if threads * options.ranks > cores.max(options.ranks) => {
                let wanted = threads * options.ranks;
                sheet.warning(
                    say!(
                        lang,
                        "{name} is {threads}: {ranks} want {wanted} cores, but there are {cores}",
                        "{name} 값이 {threads}: {ranks}에 코어 {wanted}개가 필요한데 {cores}개뿐임"
                    ),
                    say!(
                        lang,
                        "the launcher leaves a value that you have set as it is",
                        "런처는 직접 설정한 값을 바꾸지 않습니다"
                    ),
                    say!(
                        lang,
                        "`unset {name}`: ranks then get cores divided by ranks, or what --threads-per-rank says",
                        "`unset {name}`를 실행하세요. 그러면 랭크마다 코어를 나눠 갖거나 --threads-per-rank 값을 씁니다"
                    ),
                );
            }
            Ok(threads)
                if options
                    .threads_per_rank
                    .is_some_and(|asked| asked != threads) =>
            {
                sheet.note(
                    say!(lang, "{name} is {threads}", "{name} 값이 {threads}"),
                    say!(
                        lang,
                        "a value of your own wins over --threads-per-rank",
                        "직접 설정한 값이 --threads-per-rank보다 우선합니다"
                    ),
                    unset,
                )
            }
            Ok(_) => {}
            Err(_) => {
                let value = plain(&value);
                sheet.warning(
                    say!(
                        lang,
                        "{name} is {value:?}, which is no number of threads",
                        "{name} 값 {value:?}: 스레드 수가 아님"
                    ),
                    say!(
                        lang,
                        "the launcher passes it on as it is, and libraries ignore it or fail",
                        "런처는 이 값을 그대로 넘깁니다. 라이브러리는 이를 무시하거나 실패합니다"
                    ),
                    unset,
                );
            }
        }
    }
    for name in DEVICES {
        let Some(value) = host.variable(name) else {
            continue;
        };
        let devices = value.split(',');
        let devices = devices.filter(|device| !device.trim().is_empty()).count();
        if devices < options.ranks {
            let value = plain(&value);
            let found = count(lang, devices, "device", "장치");
            sheet.warning(
                say!(
                    lang,
                    "{name} is {value:?}: {found} for {ranks}",
                    "{name} 값 {value:?}: {ranks}에 {found}"
                ),
                say!(
                    lang,
                    "ranks that choose the device of their LOCAL_RANK find none; harmless for a job that uses no GPU",
                    "LOCAL_RANK로 장치를 고르는 랭크가 장치를 찾지 못합니다. GPU를 쓰지 않는 작업이라면 문제가 없습니다"
                ),
                say!(
                    lang,
                    "name {devices} ranks, or more devices, or `unset {name}`",
                    "랭크를 {devices}개로 줄이거나, 장치를 더 지정하거나, `unset {name}`를 실행하세요"
                ),
            );
        }
    }
    let of_a_rank = OF_A_RANK.iter().copied();
    let of_a_rank: Vec<&str> = of_a_rank.filter(ours).collect();
    if !of_a_rank.is_empty() {
        let (names, to_unset) = (of_a_rank.join(", "), of_a_rank.join(" "));
        let are = if of_a_rank.len() == 1 { "is" } else { "are" };
        sheet.note(
            say!(
                lang,
                "{names} {are} set already",
                "이미 설정되어 있음: {names}"
            ),
            say!(
                lang,
                "`paceline run` sets them anew for its ranks, but a program that is started without it takes itself for a rank of a job",
                "`paceline run`은 랭크에 새 값을 주지만, 그것 없이 시작한 프로그램은 자신을 어떤 작업의 랭크로 여깁니다"
            ),
            say!(
                lang,
                "`unset {to_unset}` if you do not mean that",
                "의도한 것이 아니라면 `unset {to_unset}` 명령을 실행하세요"
            ),
        );
    }
    if options.has_several_nodes()
        && let Some(addr) = host.variable("MASTER_ADDR")
        && (addr.trim() == "localhost" || addr.trim().starts_with("127."))
    {
        let addr = plain(&addr);
        sheet.note(
            say!(
                lang,
                "MASTER_ADDR is {addr}, which every node takes for itself",
                "MASTER_ADDR 값 {addr}: 노드마다 자기 자신을 가리킴"
            ),
            say!(
                lang,
                "`paceline run` sets it anew; a program that is started without it waits for ranks that look elsewhere",
                "`paceline run`은 새 값을 주지만, 그것 없이 시작한 프로그램은 다른 곳을 보는 랭크를 계속 기다립니다"
            ),
            say!(
                lang,
                "`unset MASTER_ADDR`",
                "`unset MASTER_ADDR` 명령을 실행하세요"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, job, noted};
    use paceline_gpu::host::recorded::Recorded;

    fn check(variables: &[(&str, &str)], options: Options, expect: &[&str]) {
        let recorded = Recorded::new(&[]);
        let get = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let host = recorded.host_with(&get);
        let notes = noted(|notes| judge(&host, &options, 8, notes));
        assert_eq!(found(&notes), expect, "{variables:?}");
    }

    #[test]
    fn threads_are_held_against_the_cores() {
        check(&[], job(4, 1), &[]);
        check(&[("OMP_NUM_THREADS", "2")], job(4, 1), &[]);
        check(&[("OMP_NUM_THREADS", "1")], job(16, 1), &[]);
        let unset = "warning: variables: `unset OMP_NUM_THREADS`";
        check(&[("OMP_NUM_THREADS", "8")], job(4, 1), &[unset]);
        check(&[("OMP_NUM_THREADS", "many")], job(4, 1), &[unset]);
        let asked = Options {
            threads_per_rank: Some(1),
            ..job(4, 1)
        };
        let note = "note: variables: `unset RAYON_NUM_THREADS`";
        check(&[("RAYON_NUM_THREADS", "2")], asked, &[note]);
    }

    #[test]
    fn fewer_devices_than_ranks_are_said() {
        check(&[("CUDA_VISIBLE_DEVICES", "0,1")], job(2, 1), &[]);
        check(
            &[("CUDA_VISIBLE_DEVICES", "0,")],
            job(2, 1),
            &["warning: variables: name 1 ranks"],
        );
    }

    #[test]
    fn variables_of_another_job_are_said() {
        check(
            &[("RANK", "0"), ("WORLD_SIZE", "2")],
            job(2, 1),
            &["note: variables: `unset RANK WORLD_SIZE`"],
        );
        check(&[("MASTER_ADDR", "127.0.0.1")], job(2, 1), &[]);
        check(
            &[("MASTER_ADDR", "127.0.0.1")],
            job(2, 2),
            &["note: variables: `unset MASTER_ADDR`"],
        );
    }
}
