//! `paceline submit kubernetes` against real etcd, API server, controllers and scheduler, with nodes that are played: `tools/kubernetes/cluster.sh`
//! starts them for each test.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// What all scripts use. A job's manifest is `NAME.yaml`, and a pod's output in a folder of `$PODS`.
const PRELUDE: &str = r#"
set -euo pipefail
submit() { paceline submit kubernetes --image none --rdzv-conf last_call_timeout=0.2 "$@"; }
pod() { kubectl get pods --field-selector status.phase=Running --selector "batch.kubernetes.io/job-completion-index=$1" -o jsonpath='{.items[0].metadata.name}'; }
job() { kubectl get "job/$1" -o jsonpath="{$2}"; }
is() { until kubectl wait --timeout 100s --for "condition=$1" "$2" || test $? -ne 1; do sleep 0.1; done; }
printed() { until (($(cat "$PODS"/*/log | grep -cE "$2") >= $1)); do sleep 0.05; done; }
gone() { until test -z "$(kubectl get "$1" -o name)"; do sleep 0.1; done; }
"#;

/// Runs a script with a cluster of its own in a new folder, and gives what it printed; nothing where there is no Kubernetes.
#[track_caller]
fn with_kubernetes(nodes: &str, script: &str) -> Option<String> {
    let folder = tempfile::tempdir().expect("a folder");
    let output = cluster(&folder, nodes, script);
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) && said.contains("is not installed") {
        paceline_testing::skipped(said.trim());
        return None;
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &said;
    assert!(output.status.success(), "{}: {text}", output.status);
    assert!(!text.contains("Warning:"), "{text}");
    Some(text)
}

fn cluster(folder: &TempDir, nodes: &str, script: &str) -> std::process::Output {
    let programs = folder.path().join("bin");
    std::fs::create_dir(&programs).expect("a folder");
    let launcher = env!("CARGO_BIN_EXE_paceline-launcher");
    symlink(launcher, programs.join("paceline")).expect("a link");
    let path = std::env::var("PATH").expect("a PATH");
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/kubernetes/cluster.sh");
    let mut command = Command::new("timeout");
    let programs_of_kubernetes = std::env::var_os("PACELINE_TEST_KUBERNETES");
    paceline_testing::outside_of_jobs(&mut command)
        .args(["--kill-after=20", "180"])
        .arg(tool)
        .args(["--nodes", nodes, "bash", "-c"])
        .arg(format!("{PRELUDE}\n{script}"))
        .env("PATH", format!("{}:{path}", programs.display()))
        .envs(programs_of_kubernetes.map(|folder| ("PACELINE_TEST_KUBERNETES", folder)))
        .current_dir(folder.path());
    command.output().expect("timeout(1) starts")
}

#[test]
fn the_api_server_accepts_every_manifest_and_deleting_it_leaves_nothing() {
    let script = r#"
        # No machine is like this: the pods wait.
        submit --job-name all --namespace research --nodes 2:4 --nproc-per-node 8 --cpus-per-rank 4 --gpus-per-node 8 --mem 64G --time 90 \
            --env 'ODD=$(HOME) $$' --service-account trainer --node-selector pool=gpu --toleration nvidia.com/gpu --toleration team=ml:NoSchedule \
            --image-pull-secret registry --pvc data:/data:ro --pvc runs:/runs --chdir /runs --shm-size 8G --backoff-limit 1 \
            --ttl-seconds-after-finished 3600 --grace-period 120 python train.py '$(HOME)' '' "it's" $'a\nb' '- a' 010 yes 2> refused && exit 9
        grep -q 'namespaces "research" not found' refused
        kubectl create namespace research
        kubectl --namespace research create serviceaccount trainer
        kubectl create -f all.yaml
        until test "$(kubectl --namespace research get pods -o name | wc -l)" = 4; do sleep 0.1; done
        kubectl --namespace research get pods -o jsonpath='{.items[0].spec.containers[0].args}'
        kubectl delete -f all.yaml
        until test "$(kubectl --namespace research get pods,jobs,services,secrets -o name)" = ''; do sleep 0.1; done
    "#;
    let Some(text) = with_kubernetes("1", script) else {
        return;
    };
    let args = r#","$$(HOME)","","it's","a\nb","- a","010","yes"]"#;
    assert!(text.contains(args), "{text}");
}

#[test]
fn a_job_on_kubernetes_runs_to_its_end_on_as_many_nodes_as_there_are() {
    let script = r#"
        show='echo "rank $RANK of $WORLD_SIZE on node $GROUP_RANK: $1 $ODD $(($(df --output=size -B1M /dev/shm | tail -n 1)))"'
        submit --job-name fixed --nodes 2 --nproc-per-node 2 --shm-size 8M --env 'ODD=$(HOME)' sh -c "$show" sh '$$ it'\''s'
        is Complete job/fixed
        cat "$PODS"/*/log
        kubectl get jobs,pods -o json > all
        token=$(kubectl get secret/fixed-token -o jsonpath='{.data.*}' | base64 --decode)
        grep -q fixed-token all
        if grep -q "$token" all; then exit 9; fi
        kubectl delete -f fixed.yaml
        gone pods
        submit --job-name range --grace-period 15 --nodes 2:3 --nproc-per-node 1 sh -c 'echo "range: $RANK of $WORLD_SIZE"'
        is Complete job/range
        cat "$PODS"/*.range*/log
        job range .status.conditions
    "#;
    let Some(text) = with_kubernetes("2", script) else {
        return;
    };
    for (rank, node) in [(0, 0), (1, 0), (2, 1), (3, 1)] {
        let line = format!("rank {rank} of 4 on node {node}: $$ it's $(HOME) 8\n");
        assert!(text.contains(&line), "no {line} in {text}");
    }
    for line in ["range: 0 of 2", "range: 1 of 2", "SuccessPolicy"] {
        assert!(text.contains(line), "no {line} in {text}");
    }
}

#[test]
fn kubernetes_makes_an_evicted_or_killed_pod_again_and_the_job_goes_on() {
    let script = r#"
        submit --job-name train --nodes 2 --nproc-per-node 1 --max-restarts 0 sh -c 'echo "rank $RANK of $WORLD_SIZE"; until test -e "$1"; do sleep 0.05; done' sh "$PWD/over"
        evict() {
            local name=$(pod "$1")
            echo '{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"'"$name"'"}}' |
                kubectl create --raw "/api/v1/namespaces/default/pods/$name/eviction" -f - > /dev/null
        }
        printed 2 'rank . of 2'
        evict 1
        printed 4 'rank . of 2'
        evict 0
        printed 6 'rank . of 2'
        job train .status.failed
        # As the kernel does when memory is short.
        kill -9 $(cat "$PODS"/*."$(pod 1)"/pid)
        printed 8 'rank . of 2'
        > over
        is Complete job/train
        echo "failed: $(job train .status.failed), ended: $(job train .status.conditions[*].reason)"
    "#;
    let Some(text) = with_kubernetes("2", script) else {
        return;
    };
    assert!(
        text.contains("failed: 1, ended: CompletionsReached"),
        "{text}"
    );
}

#[test]
fn a_launcher_that_fails_ends_the_job_on_kubernetes_at_once_and_deleting_one_stops_its_ranks() {
    let script = r#"
        submit --job-name bad --nodes 2 --nproc-per-node 1 sh -c 'test $RANK != 1 || exit 7; exec sleep 600'
        is Failed job/bad
        job bad '.status.conditions[?(@.type=="Failed")].reason'
        job bad '.status.conditions[?(@.type=="Failed")].message'
        kubectl delete -f bad.yaml
        gone pods
        submit --job-name ended --nodes 2 --nproc-per-node 1 sh -c 'trap "echo saved; exit" TERM; echo up; sleep 600 & wait'
        printed 2 'up$'
        kubectl delete -f ended.yaml
        gone pods,jobs,secrets
        printed 2 saved
        test -z "$(pgrep --exact sleep)"
    "#;
    let Some(text) = with_kubernetes("2", script) else {
        return;
    };
    assert!(text.contains("PodFailurePolicy"), "{text}");
    assert!(text.contains("exit code 7"), "{text}");
}

#[test]
fn jobset_runs_a_job_and_ends_with_it() {
    let script = r#"
        if ! kubectl get crd jobsets.jobset.x-k8s.io; then echo 'jobset is not installed: see tools/kubernetes/build.sh' >&2; exit 3; fi
        kubectl create serviceaccount trainer
        submit --jobset --job-name all --nodes 2:4 --nproc-per-node 8 --cpus-per-rank 4 --gpus-per-node 8 --mem 64G --time 90 --env 'ODD=$(HOME) $$' \
            --service-account trainer --node-selector pool=gpu --toleration nvidia.com/gpu --pvc data:/data:ro --chdir /runs --shm-size 8G \
            --backoff-limit 1 --ttl-seconds-after-finished 3600 --grace-period 120 --queue gpus python train.py '$(HOME)' '' "it's"
        until test "$(kubectl get pods -o name | wc -l)" = 4; do sleep 0.1; done
        kubectl delete -f all.yaml
        gone pods,jobs,secrets
        submit --jobset --job-name set --nodes 2 --nproc-per-node 2 sh -c 'echo "rank $RANK of $WORLD_SIZE"'
        is Completed jobset/set
        cat "$PODS"/*.set*/log
        submit --jobset --job-name bad --nodes 2 --nproc-per-node 1 sh -c 'test $RANK != 1 || exit 7; exec sleep 600'
        is Failed jobset/bad
    "#;
    let Some(text) = with_kubernetes("4", script) else {
        return;
    };
    for rank in 0..4 {
        assert!(text.contains(&format!("rank {rank} of 4")), "{text}");
    }
}
