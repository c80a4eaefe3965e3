//! Command lines of `bench` and what they come to.

use std::io::Write;

use paceline_collective::{DType, ReduceOp};

use super::measurement::Memory;
use super::op::Op;
use super::*;
use crate::Command;
use crate::exit::Exit;
use crate::tests::{parsed, stopped};

fn bench(line: &str) -> BenchArgs {
    match parsed(line) {
        Command::Bench(args) => *args,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn bench_has_defaults() {
    let expect = BenchArgs {
        settings: Settings::default(),
        processes: None,
        transport: None,
        algorithm: None,
        json: false,
    };
    assert_eq!(bench("bench"), expect);
}

#[test]
fn bench_measures_what_it_is_told() {
    let args = bench(
        "bench all-gather barrier --nproc-per-node 4 --transport tcp --min-bytes 1KiB --max-bytes 8K --factor 2 \
         --dtype f64 --reduction max --root 3 --algorithm ring --memory ordinary --iterations 9 --warmup 0 --no-check --json",
    );
    let settings = Settings {
        ops: vec![Op::AllGather, Op::Barrier],
        sizes: vec![1024, 2048, 4096, 8192],
        dtype: DType::F64,
        reduction: ReduceOp::Max,
        root: 3,
        memory: Memory::Ordinary,
        amount: Amount::Iterations(9),
        warmup: 0,
        check: false,
        ..Settings::default()
    };
    let expect = BenchArgs {
        settings,
        processes: Some(Processes::Count(4)),
        transport: Some(Transport::Tcp),
        algorithm: Some("ring".into()),
        json: true,
    };
    assert_eq!(args, expect);
}

#[test]
fn operations_are_known_without_hyphens_too() {
    for name in ["reduce-scatter", "reducescatter", "reduce_scatter"] {
        let ops = bench(&format!("bench {name}")).settings.ops;
        assert_eq!(ops, [Op::ReduceScatter], "{name}");
    }
}

#[test]
fn bench_takes_a_list_of_sizes_and_a_time() {
    let settings = bench("bench --sizes 8,1KiB,64MiB --seconds 0.25").settings;
    assert_eq!(settings.sizes, [8, 1 << 10, 64 << 20]);
    assert_eq!(settings.amount, Amount::Time(Duration::from_millis(250)));
    let checks = |line: &str| bench(line).settings.check;
    assert!(checks("bench --no-check --check"));
    assert!(!checks("bench --check --no-check"));
}

fn timing(round: u32, library: &str, transport: &str, bytes: usize, p50_us: f64) -> String {
    let memory = if library == "paceline" {
        "\"arena\""
    } else {
        "null"
    };
    format!(
        "{{\"round\":{round},\"record\":\"timing\",\"library\":\"{library}\",\"operation\":\"all-reduce\",\
         \"transport\":\"{transport}\",\"memory\":{memory},\"world\":2,\"bytes\":{bytes},\"p50_us\":{p50_us},\
         \"wrong\":0,\"anything\":\"else\"}}\n"
    )
}

#[test]
fn raw_results_become_tables_of_medians_spreads_and_ratios() {
    let raw = [
        timing(1, "paceline", "shm", 8, 2.0),
        timing(1, "mpi", "shm", 8, 1.0),
        timing(1, "mpi", "tcp", 8, 50.0),
        timing(1, "gloo", "tcp", 8, 100.0),
        timing(2, "paceline", "shm", 8, 4.0),
        timing(2, "mpi", "shm", 8, 1.0),
        timing(2, "gloo", "tcp", 8, 100.0),
        timing(3, "paceline", "shm", 8, 2.5),
        timing(3, "gloo", "tcp", 8, 1000.0),
        timing(1, "paceline", "shm", 1 << 20, 123.4),
        "{\"record\":\"run\",\"library\":\"paceline\",\"round\":1}\n".into(),
    ]
    .concat();
    let expect = "\
### all-reduce, 2 ranks, shm, arena memory

| size | paceline, us | gloo (tcp), us | gloo / paceline | mpi (shm), us | mpi / paceline |
|---:|---:|---:|---:|---:|---:|
| 8 B | 2.50 (2.00 to 4.00) | 100 (100 to 1000) | 50.0 (25.0 to 400) | 1.00 (1.00 to 1.00) | 0.375 (0.250 to 0.500) |
| 1 MiB | 123 | - | - | - | - |

";
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(raw.as_bytes()).expect("written");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/tables.py");
    let made = std::process::Command::new("python3")
        .arg(script)
        .arg(file.path())
        .output();
    match made {
        Ok(made) => assert_eq!(String::from_utf8_lossy(&made.stdout), expect),
        Err(error) => paceline_testing::skipped(format!("python3 cannot be run: {error}")),
    }
}

#[test]
fn a_rank_of_a_bench_understands_what_bench_does() {
    let options = "reduce --nproc-per-node 2 --sizes 8,16 --json";
    let Command::BenchRank(rank) = parsed(&format!("bench-rank {options}")) else {
        panic!("another command");
    };
    assert_eq!(*rank, bench(&format!("bench {options}")));
    assert!(!stopped("--help").0.to_string().contains("bench-rank"));
}

#[test]
fn mistakes_end_with_code_2_and_say_what_was_meant() {
    let check = |line: &str, parts: &[&str]| {
        let stop = stopped(line);
        let text = stop.0.to_string();
        assert_eq!(stop.exit(), Exit::Usage, "{line}");
        for part in parts {
            assert!(text.contains(part), "{line}: {part} in\n{text}");
        }
    };
    check(
        "bench all-reduse",
        &[
            "'all-reduse'",
            "all-reduce, reduce,",
            "tip: ",
            "'all-reduce'",
        ],
    );
    check("bench --transport rdma", &["'rdma'", "auto, shm, tcp"]);
    check("bench --min-bytes 8X", &["\"8X\" is not a size"]);
    check(
        "bench --min-bytes 16 --max-bytes 8",
        &[
            "no size is at least 16 and at most 8 bytes",
            "Usage: paceline bench",
        ],
    );
    check(
        "bench --sizes 8 --factor 2",
        &["'--sizes <SIZE,...>'", "'--factor <N>'"],
    );
    check("bench --iterations 3 --seconds 1", &["cannot be used with"]);
    check("bench --algorithm butterfly", &["butterfly"]);
    check(
        "bench --seconds 0",
        &["expected seconds from 0.001 to 3600"],
    );
}
