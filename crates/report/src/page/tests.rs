//! Pages of small runs, of one with many steps, and of a damaged one.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;

use super::*;

const END: &str = r#"{"kind":"end","step":2,"weights_sha256":"0123456789abcdef0123","usage":{"total_ns":4000000000,"busy_ns":[3000000000,2000000000],"at_once_ns":[0,3000000000,1000000000]},"ranks":[{"waited_for_ranks_ns":1000000000,"waited_for_data_ns":0,"peak_bytes":88000000,"sent_bytes":2000000},{"waited_for_ranks_ns":2000000000,"waited_for_data_ns":5000000,"peak_bytes":null,"sent_bytes":2000000}]}"#;

fn step(step: u64, more: &str) -> String {
    let loss = 2.0 / step as f64;
    format!(
        r#"{{"kind":"step","step":{step},"epoch":1,"loss":{loss},"lr":0.001,"samples":64.0,"seconds":0.01,"waited_seconds":0.002{more}}}"#
    )
}

fn write(folder: &Path, lines: &[String]) {
    fs::create_dir_all(folder).expect("a folder");
    fs::write(folder.join("metrics.jsonl"), lines.join("\n")).expect("a file");
    let settings = "# The settings, each with its source.\nlr = 0.001 # flag --lr\n# data is not set # default\ntask = \"a # b\" # file <x>\n";
    fs::write(folder.join("config.toml"), settings).expect("a file");
}

fn page_of(folders: &[PathBuf], lang: Lang) -> String {
    page(folders, lang).expect("a page")
}

#[test]
fn a_page_has_the_figures_of_the_run_and_what_went_wrong() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = folder.path().join("<run>");
    let epoch = r#"{"kind":"epoch","step":2,"epoch":1,"train_loss":1.5,"held_out_loss":1.25,"accuracy":0.875}"#;
    let lines = [
        step(1, r#","skipped":true"#),
        step(2, r#","back_to":1"#),
        epoch.to_owned(),
        r#"{"kind":"ranks","step":2,"before":4,"now":3}"#.to_owned(),
        "torn".to_owned(),
        END.replacen(
            '{',
            r#"{"best":{"epoch":1,"step":2,"monitor":"accuracy","value":0.875},"classes":[{"name":"<cat>","samples":8,"precision":0.5,"recall":null,"f1":null}],"confusion":[{"of":0,"taken_for":0,"count":8}],"#,
            1,
        ),
    ];
    write(&run, &lines);
    let html = page_of(&[run], Lang::En);
    for part in [
        "<title>&lt;run&gt;</title>",
        "<td>ended</td>",
        "<td>1.5</td><td>1.25</td><td>87.50 %</td><td>0.0 s</td><td>25.0 %</td><td><code>0123456789abcdef</code></td>",
        "<td>1.00 s</td><td>0.00 s</td><td>88 MB</td><td>2 MB</td>",
        "Best epoch: 1, with accuracy 0.875",
        "<td>&lt;cat&gt;</td><td>8</td><td>50.00 %</td><td>–</td><td>–</td>",
        "<h2>Confusion matrix</h2>",
        "<th><span>&lt;cat&gt;</span></th><td class=\"right h9\">8</td>",
        "step 1: skipped: its loss or a gradient was not finite",
        "step 2: all ranks went back to step 1",
        "step 2: the job went on with other ranks: 4 → 3",
        "lines of metrics.jsonl that could not be read: 1",
        "<td>task</td><td>&quot;a # b&quot;</td><td>file &lt;x&gt;</td>",
    ] {
        assert!(html.contains(part), "{part}: {html}");
    }
    assert!(!html.contains("<run>") && !html.contains("http"), "{html}");
}

#[test]
fn korean_pages_have_no_english_label() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), &[step(1, ""), END.to_owned()]);
    let html = page_of(&[folder.path().to_owned()], Lang::Ko);
    let cells = html
        .split("<th>")
        .skip(1)
        .filter_map(|rest| rest.split("</th>").next());
    for cell in cells.filter(|cell| !cell.contains("SHA-256")) {
        assert!(
            !cell.chars().any(|letter| letter.is_ascii_alphabetic()),
            "{cell}"
        );
    }
    assert!(
        html.starts_with("<!DOCTYPE html>\n<html lang=\"ko\">"),
        "{html}"
    );
}

#[test]
fn several_runs_are_compared_by_what_differs() {
    let folder = tempfile::tempdir().expect("a folder");
    let runs = ["one", "two"].map(|name| folder.path().join(name));
    for run in &runs {
        write(run, &[step(1, ""), step(2, ""), END.to_owned()]);
    }
    fs::write(runs[1].join("config.toml"), "lr = 0.002 # default\n").expect("a file");
    let html = page_of(&runs, Lang::En);
    assert!(
        html.contains("All runs ended with the same weights, bit for bit."),
        "{html}"
    );
    assert!(
        html.contains("<tr><td>lr</td><td>0.001</td><td>0.002</td></tr>"),
        "{html}"
    );
    assert!(html.contains("class=\"line c1\""), "{html}");
}

#[test]
fn a_failed_and_a_stopped_run_say_why_they_are_over() {
    let folder = tempfile::tempdir().expect("a folder");
    let runs = ["failed", "stopped"].map(|name| folder.path().join(name));
    let stopped = r#"{"kind":"stopped","step":1,"signal":"SIGTERM"}"#;
    write(&runs[0], &[step(1, "")]);
    write(&runs[1], &[step(1, ""), stopped.to_owned()]);
    fs::create_dir(runs[0].join("logs")).expect("a folder");
    let error = r#"{"cause":"rank 1 (pid 7) was killed","rank":1,"host":"node1","signal":9,"signal_name":"SIGKILL","hint":"see <dmesg>","log":"logs/1"}"#;
    fs::write(runs[0].join("logs/error.json"), error).expect("a file");
    let html = page_of(&runs, Lang::En);
    for part in [
        "<td>failed</td>",
        "<td>stopped by SIGTERM</td>",
        "<li class=\"failed\">failed: the job failed: rank 1 on node1 was killed by signal 9 (SIGKILL)<p>what to do: see &lt;dmesg&gt;</p><p>its output: logs/1</p></li>",
        "<li>stopped: step 1: stopped by SIGTERM</li>",
    ] {
        assert!(html.contains(part), "{part}: {html}");
    }
}

#[test]
fn the_environment_is_a_table_with_a_column_for_each_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let runs = ["new", "old"].map(|name| folder.path().join(name));
    let start =
        |more: &str| format!(r#"{{"kind":"start","step":0,"world":2,"epochs":1,"steps":2{more}}}"#);
    let environment =
        r#","environment":{"host":"<a>","cores":16,"memory_bytes":137438953472,"version":"0.1.0"}"#;
    write(&runs[0], &[start(environment), step(1, "")]);
    write(&runs[1], &[start(""), step(1, "")]);
    let html = page_of(&runs[..1], Lang::En);
    for part in [
        "<h2>Environment</h2>",
        "<td>host</td><td>&lt;a&gt;</td>",
        "<td>cores</td><td>16</td>",
        "<td>memory</td><td>128.0 GiB</td>",
        "<td>version of Paceline</td><td>0.1.0</td>",
    ] {
        assert!(html.contains(part), "{part}: {html}");
    }
    assert!(!html.contains("operating system"), "{html}");
    let html = page_of(&runs, Lang::En);
    assert!(
        html.contains("<td>cores</td><td>16</td><td>–</td>"),
        "{html}"
    );
    assert!(!page_of(&runs[1..], Lang::En).contains("Environment"));
}

#[test]
fn a_run_of_a_million_steps_has_a_small_page() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("metrics.jsonl");
    let mut file = BufWriter::new(fs::File::create(path).expect("a file"));
    for number in 1..=1_000_000 {
        writeln!(file, "{}", step(number, "")).expect("written");
        if number % 500 == 0 {
            let evaluation = format!(
                r#"{{"kind":"evaluation","step":{number},"held_out_loss":{},"accuracy":0.5}}"#,
                1.0 / number as f64
            );
            writeln!(file, "{evaluation}").expect("written");
        }
    }
    file.flush().expect("written");
    let html = page_of(&[folder.path().to_owned()], Lang::En);
    assert!(html.contains("<td>1,000,000</td>"));
    assert!(html.len() < 700_000, "{} bytes", html.len());
}

#[test]
fn a_folder_without_a_run_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let error = page(&[folder.path().to_owned()], Lang::En).expect_err("no run");
    assert!(
        error
            .to_string()
            .ends_with("holds no run: it has no metrics.jsonl"),
        "{error}"
    );
}

#[test]
fn a_run_of_ten_thousand_ranks_has_a_page() {
    const RANKS: usize = 10_000;
    let folder = tempfile::tempdir().expect("a folder");
    let spans = |rank: usize| {
        let late = rank as f64 * 1e-6;
        serde_json::json!([["backward", 0.0, late], ["wait", late, 0.01]])
    };
    let spans: Vec<_> = (0..RANKS).map(spans).collect();
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            serde_json::json!({
                "waited_for_ranks_ns": 10_000_000 - 1_000 * rank,
                "waited_for_data_ns": 0,
                "peak_bytes": 80_000_000,
                "sent_bytes": 2_000_000,
            })
        })
        .collect();
    let usage = serde_json::json!({
        "total_ns": 20_000_000,
        "busy_ns": (0..RANKS).map(|rank| 10_000_000 + 1_000 * rank).collect::<Vec<_>>(),
        "at_once_ns": (0..=RANKS).map(|ranks| 2_000 * (ranks % 2)).collect::<Vec<_>>(),
    });
    let lines = [
        step(1, ""),
        serde_json::json!({ "kind": "spans", "step": 1, "ranks": spans }).to_string(),
        serde_json::json!({ "kind": "end", "step": 1, "weights_sha256": "0123456789abcdef", "usage": usage, "ranks": ranks }).to_string(),
    ];
    write(folder.path(), &lines);
    let html = page_of(&[folder.path().to_owned()], Lang::En);
    for part in [
        "<td>ended</td>",
        "rank 9999",
        "<td>9999</td>",
        "<td>31</td>",
    ] {
        assert!(html.contains(part), "{part}");
    }
    let left_out =
        "Of 10000 ranks, the 32 that worked longest and the 32 that worked least are shown.";
    assert!(html.contains(left_out) && !html.contains("<td>32</td>"));
    assert!(html.len() < 100_000, "{} bytes", html.len());
}
