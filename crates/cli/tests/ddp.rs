//! A PyTorch DDP program, `examples/torch/ddp.py`, under this launcher: unchanged, on one node and on two, across a restart.
//! Needs PyTorch.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use support::{End, LAUNCHER, PATIENCE, Run, TOKEN, TORCHRUN, free_port};

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/torch/ddp.py")
}

/// Starts `paceline-launcher run`, or torchrun.
fn start(program: &str, python: &str, flags: &[&str], script_args: &[&str]) -> Run {
    let mut command = Command::new(program);
    match program {
        LAUNCHER => command.arg("run").env("PYTHON_EXEC", python),
        _ => command.args(["-m", "torch.distributed.run"]),
    };
    command
        .args(flags)
        .args(["--log-dir", "/dev/null"])
        .arg(script())
        .args(script_args)
        .env("PACELINE_JOB_TOKEN", TOKEN);
    Run::start(&mut command)
}

/// The lines about the loss, without what the launcher puts before them.
fn losses(end: &End) -> Vec<String> {
    let loss = |line: &str| line.find("step ").map(|at| line[at..].to_owned());
    (end.out
        .lines()
        .filter(|line| line.contains(" loss "))
        .filter_map(loss))
    .collect()
}

fn last_loss(end: &End) -> f64 {
    let losses = losses(end);
    let last = losses.last().and_then(|line| line.rsplit_once(' '));
    last.expect("a loss").1.parse().expect("a number")
}

#[test]
fn a_pytorch_ddp_script_prints_what_it_prints_under_torchrun() {
    let Some(python) = paceline_testing::python_with(TORCHRUN) else {
        return;
    };
    let flags = ["--standalone", "--nproc-per-node", "2"];
    let both = [LAUNCHER, &python].map(|program| {
        let end = start(program, &python, &flags, &[]).end(PATIENCE);
        assert_eq!(end.code, Some(0), "{program}: {}{}", end.out, end.err);
        for rank in 0..2 {
            let done = format!("rank {rank} of 2 is done");
            assert!(end.out.contains(&done), "{program}: {}", end.out);
        }
        losses(&end)
    });
    assert_eq!(both[0].len(), 20);
    assert_eq!(both[0], both[1], "the same to the last digit");
    eprintln!("under both: {} .. {}", both[0][0], both[0][19]);
}

#[test]
fn a_pytorch_ddp_script_runs_on_two_nodes() {
    let Some(python) = paceline_testing::python_with(TORCHRUN) else {
        return;
    };
    let (meet, port) = (
        format!("127.0.0.1:{}", free_port()),
        free_port().to_string(),
    );
    let c10d = ["--rdzv-backend", "c10d", "--rdzv-endpoint", &meet];
    let place = ["--master-addr", "127.0.0.1", "--master-port", &port];
    for kind in [c10d, place] {
        let nodes = ["0", "1"].map(|node| {
            let mut flags = vec!["--nnodes", "2", "--nproc-per-node", "2"];
            flags.extend(kind);
            if kind == place {
                flags.extend(["--node-rank", node]);
            }
            start(LAUNCHER, &python, &flags, &[])
        });
        let ends = nodes.map(|node| node.end(PATIENCE));
        let out: String = ends.iter().map(|end| &*end.out).collect();
        for end in &ends {
            assert_eq!(end.code, Some(0), "{kind:?}: {}{}", end.out, end.err);
        }
        for rank in 0..4 {
            let done = format!("rank {rank} of 4 is done");
            assert!(out.contains(&done), "{kind:?}: {out}");
        }
        let first = ends.iter().find(|end| !losses(end).is_empty());
        let loss = last_loss(first.expect("rank 0 is on one of them"));
        // Four ranks see the samples that two do.
        assert!((loss - 0.034_927).abs() < 1e-4, "{kind:?}: {loss}");
        eprintln!("{}: loss {loss}", kind[0]);
    }
}

#[test]
fn a_pytorch_ddp_script_goes_on_from_its_checkpoint_when_a_rank_was_killed() {
    let Some(python) = paceline_testing::python_with(TORCHRUN) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = folder.path().join("ddp.pt").display().to_string();
    let args = ["--checkpoint", &checkpoint, "--die-at", "12"];
    let meet = format!("127.0.0.1:{}", free_port());
    let flags = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        &meet,
    ];
    let nodes = [(); 2].map(|()| start(LAUNCHER, &python, &flags, &args));
    let ends = nodes.map(|node| node.end(PATIENCE));
    let out: String = ends.iter().map(|end| &*end.out).collect();
    for end in &ends {
        assert_eq!(end.code, Some(0), "{}{}", end.out, end.err);
        let notice = end
            .err
            .lines()
            .find(|line| line.contains("; restart 1 of 1 took "));
        let notice = notice.expect("one line about the restart");
        assert!(notice.starts_with("rank 3 (node 1, host "), "{notice}");
        assert!(
            notice.contains("was killed by signal 9 (SIGKILL)"),
            "{notice}"
        );
        eprintln!("{notice}");
    }
    let first = ends
        .iter()
        .find(|end| !losses(end).is_empty())
        .expect("rank 0");
    assert!(out.contains("rank 3 continues at step 12"), "{out}");
    let steps: Vec<_> = losses(first);
    assert_eq!(steps.len(), 20, "no step is done twice: {steps:?}");
    assert!((last_loss(first) - 0.034_927).abs() < 1e-4, "{steps:?}");
}
