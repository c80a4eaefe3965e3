use paceline_gpu::sample::DeviceSample;

use super::*;

fn replay(text: &str) -> Result<Replay, RecordingError> {
    Replay::new(io::Cursor::new(text.to_owned()))
}

fn at(second: u64) -> Duration {
    Duration::from_secs(second)
}

#[test]
fn a_sample_as_json_on_each_line_is_a_recording_too() {
    let sample = |second: u64, percent: u32| Sample {
        at: at(second),
        devices: vec![DeviceSample {
            utilization_percent: percent.into(),
            ..DeviceSample::default()
        }],
        ranks: Vec::new(),
    };
    let samples = [sample(0, 0), sample(1, 90), sample(2, 0)];
    let lines = samples
        .iter()
        .map(|s| serde_json::to_string(s).expect("encodes") + "\n\n");
    let text: String = lines.collect();
    let back: Vec<Sample> = replay(&text)
        .expect("lines")
        .map(|s| s.expect("a sample"))
        .collect();
    assert_eq!(back, samples);
    let report = replay(&text)
        .expect("lines")
        .report(Rules::default())
        .expect("samples");
    assert_eq!(report.gpus_at_once.expect("a device").at_once_s, [1.0, 1.0]);
}

#[test]
fn what_is_no_recording_is_refused_with_its_line() {
    let check = |text: &str, expect: &str| {
        let error = match replay(text).map(|replay| replay.report(Rules::default())) {
            Ok(Ok(_)) => panic!("{text} is taken"),
            Ok(Err(error)) | Err(error) => error,
        };
        assert_eq!(error.to_string(), expect);
    };
    check("", "the recording has no samples");
    check("\n \n", "the recording has no samples");
    check("at_s,kind,index\n", "the recording has no samples");
    check(
        "some words",
        "line 1 of the recording is wrong: there is no column `at_s`",
    );
    let wrong = |line: &str, why: &str| {
        let text = format!("at_s,kind,index,power_mw,throttles,processes,cpu_s\n{line}\n");
        check(&text, &format!("line 2 of the recording is wrong: {why}"));
    };
    wrong("1,tpu,0,,,", "`tpu` is no kind of line");
    wrong("-1,gpu,0,,,", "`-1` is no time");
    wrong("NaN,gpu,0,,,", "`NaN` is no time");
    wrong("soon,gpu,0,,,", "`soon` cannot be `at_s`");
    wrong("1,gpu,-3,,,", "`-3` cannot be `index`");
    wrong("1,gpu", "`` cannot be `index`");
    wrong("1,gpu,0,lots,,", "`lots` cannot be `power_mw`");
    wrong("1,gpu,0,,tired,", "`tired` cannot be `throttles`");
    wrong("1,gpu,0,,,7:x", "`7:x` cannot be `processes`");
    wrong("1,rank,0,,,,1e300", "`1e300` is no time");
    check(
        "{}\n{\"at\": 7}\n",
        "line 2 of the recording is wrong: invalid type: integer `7`, expected struct Duration at line 2 column 9",
    );
}

#[test]
fn crowds_and_endless_lines_are_refused() {
    let crowd = "1,gpu,0\n".repeat(DEVICES_MAX + 1);
    let replay = Replay::new(io::Cursor::new(format!("at_s,kind,index\n{crowd}")));
    let error = replay
        .expect("a header")
        .next()
        .expect("something")
        .expect_err("a crowd");
    assert!(
        error
            .to_string()
            .ends_with("too many devices or ranks at one moment"),
        "{error}"
    );
    let endless = io::BufReader::new(io::repeat(b'x'));
    let error = Replay::new(endless).err().expect("an endless line");
    assert_eq!(
        error.to_string(),
        "the recording cannot be read: a line is too long"
    );
}

#[test]
fn nothing_follows_the_first_error() {
    let mut samples = replay("at_s,kind,index\n1,gpu,0\n2,cat,0\n3,gpu,0\n").expect("a header");
    // The line after a moment's last one is read with it.
    assert!(samples.next().is_some_and(|sample| sample.is_err()));
    assert!(samples.next().is_none());
}
