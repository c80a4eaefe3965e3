//! Records as people read them: nccl-tests' columns.

use paceline_words::counted;

use super::record::{Record, Run, Streaming, Timing};
use super::sizes::bytes_text;

/// Widths of the columns; the first is aligned to the left.
const COLUMNS: [(&str, usize); 13] = [
    ("operation", 14),
    ("bytes", 12),
    ("elements", 11),
    ("type", 5),
    ("reduction", 9),
    ("root", 4),
    ("algorithm", 16),
    ("memory", 8),
    ("p50 us", 11),
    ("p99 us", 11),
    ("algbw", 8),
    ("busbw", 8),
    ("wrong", 7),
];

/// A record as one line or several. Lines that are no rows begin with `#`.
///
/// *Units*: times in microseconds, bandwidths in 1e9 bytes a second.
pub(super) fn line(record: &Record) -> String {
    match record {
        Record::Run(run) => heading(run),
        Record::Timing(timing) => row(&cells(timing)),
        Record::Streaming(streaming) => footing(streaming),
    }
}

fn heading(run: &Run) -> String {
    let commit = run
        .commit
        .map_or_else(String::new, |commit| format!(" ({commit})"));
    let names = COLUMNS.map(|(name, _)| name.to_owned());
    format!(
        "# paceline {}{commit}, {}, {} cores, {}\n\
         # {} on {}, transport {}; times of the slowest rank, bandwidths in GB/s of 1e9 bytes\n\
         # {}",
        run.version,
        run.cpu,
        run.cores,
        run.system,
        counted(run.world, "rank"),
        counted(run.hosts, "host"),
        run.transport,
        row(&names).split_at(2).1,
    )
}

fn cells(timing: &Timing) -> [String; COLUMNS.len()] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let bandwidth = |value: Option<f64>| or_dash(value.map(|value| format!("{value:.2}")));
    [
        timing.operation.into(),
        timing.bytes.to_string(),
        timing.elements.to_string(),
        or_dash(timing.dtype.clone()),
        or_dash(timing.reduction.clone()),
        or_dash(timing.root.map(|root| root.to_string())),
        timing.algorithm.clone().unwrap_or_else(|| "-".into()),
        or_dash(timing.memory.map(str::to_owned)),
        format!("{:.2}", timing.p50_us),
        format!("{:.2}", timing.p99_us),
        bandwidth(timing.algbw_gb_s),
        bandwidth(timing.busbw_gb_s),
        or_dash(timing.wrong.map(|wrong| wrong.to_string())),
    ]
}

/// Cells under one another; the first two columns' room is that of `# ` and a name.
fn row(cells: &[String; COLUMNS.len()]) -> String {
    let mut line = String::from("  ");
    for (index, (cell, (_, width))) in cells.iter().zip(COLUMNS).enumerate() {
        match index {
            0 => line.push_str(&format!("{cell:<width$}")),
            _ => line.push_str(&format!(" {cell:>width$}")),
        }
    }
    line
}

fn footing(streaming: &Streaming) -> String {
    let stores = match streaming.non_temporal_gb_s {
        Some(rate) if rate >= streaming.ordinary_gb_s => "non-temporal",
        _ => "ordinary",
    };
    let mut text = format!(
        "# streaming: {:.2} GB/s by {} at once, each on {} of its own (two reads, two {stores} writes)",
        streaming.gb_s,
        counted(streaming.world, "rank"),
        bytes_text(streaming.bytes),
    );
    for share in &streaming.shares {
        text.push_str(&format!(
            "; all-reduce of {} reaches {:.0}%",
            bytes_text(share.bytes),
            100.0 * share.share
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::record::Share;
    use super::super::record::tests::{streaming, timing};
    use super::*;

    #[test]
    fn rows_stand_under_their_names() {
        let run = Run {
            library: "paceline",
            version: "1.2.3",
            commit: Some("abc"),
            cpu: "Some CPU".into(),
            cores: 2,
            system: "Linux 6".into(),
            world: 2,
            hosts: 1,
            transport: "shm",
            memory: "arena",
        };
        let heading = line(&Record::Run(run));
        let row = line(&Record::Timing(timing(64 << 20, 5120.25)));
        let lines: Vec<&str> = heading.lines().collect();
        assert_eq!(
            lines[..2],
            [
                "# paceline 1.2.3 (abc), Some CPU, 2 cores, Linux 6",
                "# 2 ranks on 1 host, transport shm; times of the slowest rank, bandwidths in GB/s of 1e9 bytes",
            ]
        );
        assert_eq!(lines[2].len(), row.len(), "{heading}\n{row}");
        let cells: Vec<&str> = row.split_whitespace().collect();
        let expect = [
            "all-reduce",
            "67108864",
            "16777216",
            "f32",
            "sum",
            "-",
            "direct",
            "arena",
            "5120.25",
            "10240.50",
            "13.11",
            "13.11",
            "0",
        ];
        assert_eq!(cells, expect);
    }

    #[test]
    fn what_an_operation_does_not_have_is_a_dash() {
        let barrier = Timing {
            operation: "barrier",
            memory: None,
            dtype: None,
            reduction: None,
            algbw_gb_s: None,
            busbw_gb_s: None,
            wrong: None,
            algorithm: None,
            ..timing(0, 1.0)
        };
        let row = line(&Record::Timing(barrier));
        let cells: Vec<&str> = row.split_whitespace().collect();
        let expect = [
            "barrier", "0", "0", "-", "-", "-", "-", "-", "1.00", "2.00", "-", "-", "-",
        ];
        assert_eq!(cells, expect);
    }

    #[test]
    fn the_last_line_tells_the_bound_and_how_near_it_is() {
        let share = Share {
            bytes: 64 << 20,
            moved_bytes: 256 << 20,
            gb_s: 38.0,
            share: 0.95,
        };
        let streaming = Streaming {
            shares: vec![share],
            ..streaming()
        };
        assert_eq!(
            line(&Record::Streaming(streaming)),
            "# streaming: 40.00 GB/s by 2 ranks at once, each on 64 MiB of its own (two reads, two non-temporal \
             writes); all-reduce of 64 MiB reaches 95%"
        );
    }
}
