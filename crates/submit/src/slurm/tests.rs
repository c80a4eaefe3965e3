//! Batch scripts: what stands in them, and what the shell makes of them.

use std::process::Command;

use super::*;
use crate::submission::Nodes;

fn job() -> Submission {
    let mut job = Submission::new("train", "./prog");
    job.nodes = Nodes::new(2, 2).expect("a range");
    job.ranks = Ranks::Count(8);
    job
}

fn script(change: impl FnOnce(&mut Submission, &mut Options)) -> String {
    let (mut job, mut options) = (job(), Options::default());
    change(&mut job, &mut options);
    render(&job, &options).expect("a script")
}

fn refused(change: impl FnOnce(&mut Submission, &mut Options)) -> String {
    let (mut job, mut options) = (job(), Options::default());
    change(&mut job, &mut options);
    let error = render(&job, &options).expect_err("refused");
    assert!(matches!(error, SubmitError::Usage { .. }), "{error}");
    error.to_string()
}

fn has(script: &str, line: &str) {
    assert!(
        script.lines().any(|found| found.trim() == line),
        "no line `{line}` in:\n{script}"
    );
}

#[test]
fn the_script_asks_for_one_launcher_on_each_node_and_a_cpu_for_each_rank() {
    let script = script(|_, _| {});
    assert!(script.starts_with("#!/bin/bash\n"));
    has(&script, "#SBATCH --job-name=train");
    has(&script, "#SBATCH --nodes=2");
    has(&script, "#SBATCH --ntasks-per-node=1");
    has(&script, "#SBATCH --cpus-per-task=8");
    has(&script, "#SBATCH --output=train-%j.out");
    has(&script, "#SBATCH --no-requeue");
    has(&script, "--cpus-per-task=8 --cpu-bind=none \\");
    has(&script, "paceline run \\");
    has(&script, "--nnodes 2 \\");
    has(&script, "--nproc-per-node 8 \\");
    has(&script, "./prog");
}

#[test]
fn what_slurm_can_be_told_is_told() {
    let script = script(|job, options| {
        job.cpus_per_rank = Some(4);
        job.gpus_per_node = Some(8);
        job.memory = Some("64G".parse().expect("a size"));
        job.time_limit = Some("90".parse().expect("a time"));
        options.partition = Some("gpu".to_owned());
        options.account = Some("physics".to_owned());
        options.qos = Some("high".to_owned());
        options.constraint = Some("a100&nvlink".to_owned());
        options.chdir = Some("/home/me/my runs".to_owned());
        options.output = Some("logs/%x-%j.out".to_owned());
        options.directives = vec!["--reservation=maint".to_owned()];
        options.setup = vec!["module load cuda".to_owned()];
        job.env = vec![("DATA".to_owned(), "/my data".to_owned())];
    });
    for line in [
        "--cpus-per-task=32",
        "--gpus-per-node=8",
        "--mem=65536M",
        "--time=01:30:00",
        "--partition=gpu",
        "--account=physics",
        "--qos=high",
        "--constraint=a100&nvlink",
        "--chdir=\"/home/me/my runs\"",
        "--output=logs/%x-%j.out",
        "--reservation=maint",
    ] {
        has(&script, &format!("#SBATCH {line}"));
    }
    has(&script, "module load cuda");
    has(&script, "export DATA='/my data'");
}

#[test]
fn no_directive_comes_behind_the_first_command() {
    let script = script(|job, options| {
        options.setup = vec!["true".to_owned()];
        job.args = vec!["\n#SBATCH --nodes=99".to_owned()];
    });
    let first_command = script
        .lines()
        .position(|line| !line.is_empty() && !line.starts_with('#'));
    let head: Vec<_> = script
        .lines()
        .take(first_command.expect("a command"))
        .collect();
    let directives = head.iter().filter(|line| line.starts_with("#SBATCH"));
    assert!(directives.count() > 4);
    assert!(!head.join("\n").contains("99"));
}

#[test]
fn a_whole_node_gives_all_its_cpus() {
    let script = script(|job, options| {
        job.ranks = Ranks::Named("auto".to_owned());
        options.exclusive = true;
    });
    has(&script, "#SBATCH --exclusive");
    assert!(!script.contains("--cpus-per-task"), "{script}");
    has(&script, "--nproc-per-node auto \\");
    let error = refused(|job, _| job.ranks = Ranks::Named("auto".to_owned()));
    assert!(error.contains("--exclusive"), "{error}");
}

#[test]
fn a_fixed_job_is_ended_by_its_launchers_and_slurm_only_sees_to_what_is_left() {
    let script = script(|_, _| {});
    has(&script, "--kill-on-bad-exit=0 --wait=60 \\");
    assert!(!script.contains("--no-kill"), "{script}");
}

#[test]
fn an_elastic_job_outlives_its_nodes_and_waits_for_none_that_slurm_did_not_give() {
    let script = script(|job, _| job.nodes = Nodes::new(2, 4).expect("a range"));
    has(&script, "#SBATCH --nodes=2-4");
    // Slurm 22.05 gives no more than the least number of nodes beside it.
    assert!(!script.contains("#SBATCH --ntasks-per-node"), "{script}");
    has(&script, "#SBATCH --no-kill");
    has(&script, "--kill-on-bad-exit=0 --wait=0 --no-kill \\");
    assert!(
        script.contains("--nnodes 2:\"$SLURM_JOB_NUM_NODES\" --rdzv-backend c10d"),
        "{script}"
    );
}

#[test]
fn a_notice_goes_to_the_ranks_and_leaves_them_most_of_its_time() {
    let script = script(|_, options| options.notice = "TERM@120".parse().ok());
    has(&script, "#SBATCH --signal=TERM@120");
    has(&script, "--nproc-per-node 8 --shutdown-timeout 110 \\");
    assert!(!script.contains("trap"), "{script}");
}

#[test]
fn a_job_that_is_queued_again_is_told_through_its_script() {
    let script = script(|_, options| {
        options.notice = "SIGUSR1@90".parse().ok();
        options.requeue = true;
    });
    has(&script, "#SBATCH --signal=B:USR1@90");
    has(&script, "#SBATCH --requeue");
    has(&script, "#SBATCH --open-mode=append");
    has(
        &script,
        "trap 'asked=1; scancel --signal=USR1 \"$SLURM_JOB_ID\"' USR1",
    );
    has(&script, "if [[ $asked && $status == 138 ]]; then");
}

#[test]
fn ranks_must_be_able_to_stop_within_the_notice() {
    let error = refused(|job, options| {
        options.notice = "TERM@60".parse().ok();
        job.shutdown_timeout = Some(60);
    });
    assert_eq!(
        error,
        "ranks may take 60 s to stop, and the scheduler kills them after 60 s"
    );
    let script = script(|job, options| {
        options.notice = "TERM@60".parse().ok();
        job.shutdown_timeout = Some(59);
    });
    assert!(script.contains("--shutdown-timeout 59"));
}

#[test]
fn notices_are_written_as_for_sbatch() {
    for (text, expect) in [("TERM@120", "TERM@120"), ("SIGUSR1@1", "USR1@1")] {
        let notice: Notice = text.parse().expect(text);
        assert_eq!(notice.to_string(), expect);
    }
    for text in [
        "",
        "TERM",
        "@60",
        "TERM@",
        "TERM@0",
        "TERM@65536",
        "KILL@60",
        "B:USR1@60",
        "TERM@-1",
    ] {
        assert!(text.parse::<Notice>().is_err(), "{text}");
    }
}

#[test]
fn what_would_break_a_directive_is_refused() {
    for value in ["", "a\nb", "a\"b", "a'b", "a\\b", "a\tb"] {
        let error = refused(|_, options| options.partition = Some(value.to_owned()));
        assert!(error.starts_with("--partition is `"), "{error}");
    }
    for name in ["", "a b", "-a", "a/b", "a\n", "ä"] {
        let error = refused(|job, _| job.name = name.to_owned());
        assert!(error.contains("cannot be the job's name"), "{error}");
    }
    for directive in ["", "reservation", "--a\n#SBATCH --b"] {
        let error = refused(|_, options| options.directives = vec![directive.to_owned()]);
        assert!(error.starts_with("--sbatch-option"), "{error}");
    }
}

/// The script with Slurm's programs played by functions: `srun` prints its words between NUL bytes.
fn played(script: &str, before: &str) -> std::process::Output {
    let slurm = r#"srun() { printf '%s\0' "$@"; }
                   scontrol() { echo first; }
                   export SLURM_JOB_NUM_NODES=3 SLURM_JOB_ID=123456 SLURM_JOB_NODELIST='first,second'"#;
    Command::new("bash")
        .args(["-c", &format!("{slurm}\n{before}\n{script}")])
        .output()
        .expect("bash runs")
}

fn words(output: &std::process::Output) -> Vec<String> {
    let text = String::from_utf8(output.stdout.clone()).expect("text");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text.split_terminator('\0').map(str::to_owned).collect()
}

#[test]
fn the_shell_hands_on_every_word_as_it_was() {
    let odd = [
        "",
        " ",
        "it's",
        "\"x\"",
        "$HOME",
        "`id`",
        "a\nb",
        "\\",
        "!x",
        "*",
        "#no",
        "~",
        "ü",
        "-n",
        "a;b&c|d>e",
        "\t",
        "\r",
    ];
    let script = script(|job, _| {
        job.program = "./my prog".to_owned();
        job.launcher = "/opt/pace line/paceline".to_owned();
        job.run_options = vec!["--role=it's $ROLE".to_owned()];
        job.args = odd.map(str::to_owned).into();
    });
    let words = words(&played(&script, ""));
    let launcher = words
        .iter()
        .position(|word| word == "/opt/pace line/paceline")
        .expect("the launcher");
    assert_eq!(
        words[launcher + 1..launcher + 10],
        [
            "run",
            "--nnodes",
            "2",
            "--log-dir",
            "train-123456",
            "--nproc-per-node",
            "8",
            "--role=it's $ROLE",
            "./my prog"
        ]
    );
    assert_eq!(words[launcher + 10..], odd);
}

#[test]
fn the_shell_keeps_every_value_of_a_variable() {
    let value = "a'b\"c$HOME`id`\nd\\e  f";
    let script = script(|job, _| job.env = vec![("ODD".to_owned(), value.to_owned())]);
    let output = played(&script, "srun() { printf '%s' \"$ODD\"; }");
    assert_eq!(String::from_utf8_lossy(&output.stdout), value);
}

#[test]
fn every_start_makes_a_new_token_that_is_in_no_command_line() {
    let script = script(|_, _| {});
    let show = "srun() { printf '%s' \"$PACELINE_JOB_TOKEN\"; }";
    let token = || String::from_utf8(played(&script, show).stdout).expect("text");
    let first = token();
    paceline_rendezvous::token::Token::from_hex(&first).expect("a token");
    assert_ne!(first, token());
    assert!(
        !words(&played(&script, ""))
            .iter()
            .any(|word| word.len() == 64)
    );
}

#[test]
fn the_shell_knows_the_meeting_point_of_an_elastic_job() {
    let script = script(|job, _| job.nodes = Nodes::new(1, 4).expect("a range"));
    let words = words(&played(&script, ""));
    for word in ["1:3", "first:23456", "123456"] {
        assert!(
            words.iter().any(|found| found == word),
            "{word} in {words:?}"
        );
    }
}

#[test]
fn the_script_ends_as_the_launchers_do() {
    let plain = script(|_, _| {});
    let notified = script(|_, options| {
        options.notice = "TERM@60".parse().ok();
        options.requeue = true;
    });
    for script in [&plain, &notified] {
        for code in [0, 7, 143] {
            let output = played(script, &format!("srun() {{ return {code}; }}"));
            assert_eq!(output.status.code(), Some(code));
            assert_eq!(String::from_utf8_lossy(&output.stdout), "");
        }
    }
}

#[test]
fn the_job_is_queued_again_only_when_its_ranks_stopped_because_they_were_asked_to() {
    let script = script(|_, options| {
        options.notice = "TERM@60".parse().ok();
        options.requeue = true;
    });
    // Slurm's signal comes while the launchers run; they end once they are asked to.
    let playing = |code: i32| {
        format!(
            "scontrol() {{ echo \"scontrol $*\"; }}
             fifo=$(mktemp -u) && mkfifo \"$fifo\" && exec 9<>\"$fifo\" && rm \"$fifo\"
             scancel() {{ echo \"scancel $*\"; echo asked >&9; }}
             srun() {{ kill -USR1 $$; read -r <&9; return {code}; }}"
        )
    };
    let output = played(&script, &playing(143));
    let said = "scancel --signal=TERM 123456\nscontrol requeue 123456\n";
    assert_eq!(String::from_utf8_lossy(&output.stdout), said);
    assert_eq!(output.status.code(), Some(143));
    for code in [0, 1, 137] {
        let output = played(&script, &playing(code));
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "scancel --signal=TERM 123456\n"
        );
        assert_eq!(output.status.code(), Some(code));
    }
}
