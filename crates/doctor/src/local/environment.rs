//! Variables of the environment that would surprise the job.

use crate::finding::{Notes, count, plain};
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
    let mut sheet = notes.sheet("variables");
    let ours = |name: &&str| host.variable(name).is_some();
    let all = OF_A_RANK.iter().chain(&THREADS).chain(&DEVICES);
    let all = all.chain(&["MASTER_ADDR", "MASTER_PORT"]).copied();
    let seen: Vec<&str> = all.filter(ours).collect();
    sheet.fact(match seen.is_empty() {
        true => "none is set that changes the job".to_owned(),
        false => format!("set here: {}", seen.join(", ")),
    });

    for name in THREADS {
        let Some(value) = host.variable(name) else {
            continue;
        };
        match value.trim().parse::<usize>() {
            Ok(threads) if threads * options.ranks > cores.max(options.ranks) => sheet.warning(
                format!(
                    "{name} is {threads}: {} want {} cores, but there are {cores}",
                    count(options.ranks, "rank"),
                    threads * options.ranks
                ),
                "the launcher leaves a value that you have set as it is",
                format!("`unset {name}`: ranks then get cores divided by ranks, or what --threads-per-rank says"),
            ),
            Ok(threads) if options.threads_per_rank.is_some_and(|asked| asked != threads) => sheet.note(
                format!("{name} is {threads}"),
                "a value that you have set counts before --threads-per-rank",
                format!("`unset {name}`"),
            ),
            Ok(_) => {}
            Err(_) => sheet.warning(
                format!("{name} is {:?}, which is no number of threads", plain(&value)),
                "the launcher passes it on as it is, and libraries ignore it or fail",
                format!("`unset {name}`"),
            ),
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
            let found = count(devices, "device");
            let ranks = count(options.ranks, "rank");
            sheet.warning(
                format!("{name} is {value:?}: {found} for {ranks}"),
                "ranks that choose the device of their LOCAL_RANK find none; harmless for a job that uses no GPU",
                format!("name {devices} ranks, or more devices, or `unset {name}`"),
            );
        }
    }
    let of_a_rank = OF_A_RANK.iter().copied();
    let of_a_rank: Vec<&str> = of_a_rank.filter(ours).collect();
    if !of_a_rank.is_empty() {
        let names = of_a_rank.join(", ");
        sheet.note(
            format!("{names} {} set already", if of_a_rank.len() == 1 { "is" } else { "are" }),
            "`paceline run` sets them anew for its ranks, but a program that is started without it takes itself for a rank of a job",
            format!("`unset {}` if you do not mean that", of_a_rank.join(" ")),
        );
    }
    if options.has_several_nodes()
        && let Some(addr) = host.variable("MASTER_ADDR")
        && (addr.trim() == "localhost" || addr.trim().starts_with("127."))
    {
        sheet.note(
            format!("MASTER_ADDR is {}, which every node takes for itself", plain(&addr)),
            "`paceline run` sets it anew; a program that is started without it waits for ranks that look elsewhere",
            "`unset MASTER_ADDR`",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, job};
    use paceline_gpu::host::recorded::Recorded;

    fn check(variables: &[(&str, &str)], options: Options, expect: &[&str]) {
        let recorded = Recorded::new(&[]);
        let get = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let mut notes = Notes::default();
        judge(&recorded.host_with(&get), &options, 8, &mut notes);
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
