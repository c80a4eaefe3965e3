//! Manifests, against Kubernetes' own schemas and the rules that no schema says.

use self::odd::ODD;
use super::*;
use crate::submission::{Nodes, Ranks};

#[path = "../../tests/support/odd.rs"]
mod odd;
mod schema;

fn job() -> Submission {
    let mut job = Submission::new("train", "./prog");
    job.nodes = Nodes::new(2, 2).expect("a range");
    job.ranks = Ranks::Count(8);
    job
}

/// The manifests by kind, as data and as they are read back from the YAML, all of them checked.
fn made(change: impl FnOnce(&mut Submission, &mut Options)) -> BTreeMap<String, Value> {
    let (mut job, mut options) = (job(), Options::new("image:1"));
    change(&mut job, &mut options);
    let token = Token::derived("test");
    let manifests = manifests(&job, &options, Some(&token)).expect("manifests");
    let text = render(&job, &options, Some(&token)).expect("text");
    let read = serde_saphyr::from_multiple::<Value>(&text).expect("YAML");
    assert_eq!(read, manifests, "{text}");
    let kind = |manifest: &Value| manifest["kind"].as_str().expect("a kind").to_owned();
    for manifest in &manifests {
        schema::check(manifest).unwrap_or_else(|error| panic!("{error} in {text}"));
    }
    manifests
        .into_iter()
        .map(|manifest| (kind(&manifest), manifest))
        .collect()
}

fn refused(change: impl FnOnce(&mut Submission, &mut Options)) -> String {
    let (mut job, mut options) = (job(), Options::new("image:1"));
    change(&mut job, &mut options);
    let error = manifests(&job, &options, None).expect_err("refused");
    assert!(matches!(error, SubmitError::Usage { .. }), "{error}");
    error.to_string()
}

fn pod(made: &BTreeMap<String, Value>) -> &Value {
    &made["Job"]["spec"]["template"]["spec"]
}

fn words(list: &Value) -> Vec<String> {
    serde_json::from_value(list.clone()).expect("words")
}

fn args(made: &BTreeMap<String, Value>) -> Vec<String> {
    words(&pod(made)["containers"][0]["args"])
}

fn everything(job: &mut Submission, options: &mut Options) {
    job.nodes = Nodes::new(2, 4).expect("a range");
    job.cpus_per_rank = Some(4);
    job.gpus_per_node = Some(8);
    job.memory = "64G".parse().ok();
    job.time_limit = "90".parse().ok();
    job.env = vec![("DATA".to_owned(), "/data".to_owned())];
    job.run_options = vec!["--max-restarts".to_owned(), "3".to_owned()];
    options.namespace = Some("research".to_owned());
    options.service_account = Some("trainer".to_owned());
    options.node_selector = vec!["pool=gpu".parse().expect("a label")];
    options.tolerations = ["nvidia.com/gpu", "team=ml:NoSchedule"]
        .map(|text| text.parse().expect(text))
        .into();
    options.image_pull_secrets = vec!["registry".to_owned()];
    options.claims = ["data:/data:ro", "runs:/runs"]
        .map(|text| text.parse().expect(text))
        .into();
    options.chdir = Some("/runs".to_owned());
    options.shm_size = "8G".parse().ok();
    options.backoff_limit = Some(1);
    options.ttl_seconds = Some(3600);
    options.grace_seconds = Some(120);
}

#[test]
fn the_least_job_is_a_secret_a_service_and_an_indexed_job() {
    let made = made(|_, _| {});
    assert_eq!(
        made.keys().collect::<Vec<_>>(),
        ["Job", "Secret", "Service"]
    );
    let spec = &made["Job"]["spec"];
    for (field, expect) in [
        ("completionMode", json!("Indexed")),
        ("completions", json!(2)),
        ("parallelism", json!(2)),
        ("backoffLimit", json!(6)),
    ] {
        assert_eq!(spec[field], expect, "{field}");
    }
    assert_eq!(spec.get("successPolicy"), None);
    assert_eq!(pod(&made)["restartPolicy"], "Never");
    assert_eq!(pod(&made)["automountServiceAccountToken"], false);
}

#[test]
fn every_setting_reaches_the_manifest_and_fits_the_schema() {
    let made = made(everything);
    let spec = &made["Job"]["spec"];
    let pod = pod(&made);
    let container = &pod["containers"][0];
    assert_eq!(spec["activeDeadlineSeconds"], 5400);
    assert_eq!(spec["ttlSecondsAfterFinished"], 3600);
    assert_eq!(spec["backoffLimit"], 1);
    assert_eq!(spec["successPolicy"]["rules"][0]["succeededCount"], 2);
    assert_eq!(pod["serviceAccountName"], "trainer");
    assert_eq!(pod["nodeSelector"], json!({ "pool": "gpu" }));
    assert_eq!(pod["imagePullSecrets"], json!([{ "name": "registry" }]));
    assert_eq!(pod["terminationGracePeriodSeconds"], 120);
    assert_eq!(
        pod["tolerations"],
        json!([
            { "key": "nvidia.com/gpu", "operator": "Exists" },
            { "key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule" },
        ])
    );
    assert_eq!(
        container["resources"]["limits"],
        json!({ "cpu": "32", "memory": "65536Mi", "nvidia.com/gpu": "8" })
    );
    assert_eq!(
        container["resources"]["limits"],
        container["resources"]["requests"]
    );
    assert_eq!(container["workingDir"], "/runs");
    assert_eq!(
        pod["volumes"][0]["emptyDir"],
        json!({ "medium": "Memory", "sizeLimit": "8192Mi" })
    );
    assert_eq!(container["volumeMounts"][1]["readOnly"], true);
    assert!(
        made.values()
            .all(|manifest| manifest["metadata"]["namespace"] == "research")
    );
}

#[test]
fn a_jobset_holds_the_same_job_and_needs_no_service() {
    let made = made(|job, options| {
        everything(job, options);
        options.jobset = true;
    });
    assert_eq!(made.keys().collect::<Vec<_>>(), ["JobSet", "Secret"]);
    let spec = &made["JobSet"]["spec"];
    assert_eq!(spec["ttlSecondsAfterFinished"], 3600);
    let work = &spec["replicatedJobs"][0]["template"]["spec"];
    assert_eq!(
        work.get("ttlSecondsAfterFinished"),
        None,
        "JobSet refuses it there"
    );
    assert_eq!(work["completions"], 4);
    let args = words(&work["template"]["spec"]["containers"][0]["args"]);
    let endpoint = "train-nodes-0-0.train.$(PACELINE_POD_NAMESPACE).svc.cluster.local:29400";
    assert!(args.contains(&endpoint.to_owned()), "{args:?}");
}

#[test]
fn the_job_or_jobset_alone_waits_in_a_queue() {
    for jobset in [false, true] {
        let made = made(|_, options| {
            options.jobset = jobset;
            options.queue = Some("gpus".to_owned());
        });
        for (kind, manifest) in &made {
            let queue = manifest["metadata"]["labels"].get("kueue.x-k8s.io/queue-name");
            let expect = kind.starts_with("Job").then(|| json!("gpus"));
            assert_eq!(queue, expect.as_ref(), "{kind}");
        }
    }
}

#[test]
fn pods_of_a_group_are_placed_by_its_scheduler() {
    for jobset in [false, true] {
        let made = made(|job, options| {
            everything(job, options);
            options.jobset = jobset;
            options.pod_group = Some("coscheduler".to_owned());
        });
        let group = &made["PodGroup"];
        assert_eq!(group["spec"], json!({ "minMember": 2 }));
        let template = match jobset {
            true => &made["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"],
            false => &made["Job"]["spec"]["template"],
        };
        assert_eq!(template["spec"]["schedulerName"], "coscheduler");
        let label = &template["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"];
        assert_eq!(*label, group["metadata"]["name"]);
    }
    let refusal = refused(|_, options| options.pod_group = Some("Co Scheduler".to_owned()));
    assert!(refusal.contains("--pod-group"), "{refusal}");
}

#[test]
fn launchers_meet_at_the_first_pod_by_its_full_name() {
    let expect = "run --nnodes 2:2 --rdzv-backend c10d --rdzv-endpoint \
                  train-0.train.$(PACELINE_POD_NAMESPACE).svc.cluster.local:29400 --rdzv-id train --nproc-per-node 8 \
                  --shutdown-timeout 50 ./prog";
    let two = made(|_, _| {});
    assert_eq!(args(&two).join(" "), expect);
    assert_eq!(pod(&two)["subdomain"], two["Service"]["metadata"]["name"]);
    let one = made(|job, _| job.nodes = Nodes::new(1, 1).expect("a range"));
    assert_eq!(
        args(&one).join(" "),
        "run --nnodes 1 --nproc-per-node 8 --shutdown-timeout 50 ./prog"
    );
}

#[test]
fn the_service_finds_the_pods_before_they_are_ready() {
    let made = made(|_, _| {});
    let spec = &made["Service"]["spec"];
    assert_eq!(spec["clusterIP"], "None");
    assert_eq!(spec["publishNotReadyAddresses"], true);
    assert_eq!(
        spec["selector"],
        json!({ "batch.kubernetes.io/job-name": "train" })
    );
}

#[test]
fn evicted_pods_come_again_for_nothing_and_a_launchers_own_end_is_the_jobs() {
    let made = made(|_, _| {});
    let rules = &made["Job"]["spec"]["podFailurePolicy"]["rules"];
    assert_eq!(rules[0]["action"], "Ignore");
    assert_eq!(rules[0]["onPodConditions"][0]["type"], "DisruptionTarget");
    assert_eq!(rules[1]["action"], "FailJob");
    let codes = &rules[1]["onExitCodes"];
    assert_eq!(codes["containerName"], pod(&made)["containers"][0]["name"]);
    assert_eq!(
        (&codes["operator"], &codes["values"]),
        (&json!("NotIn"), &json!([137, 143]))
    );
}

#[test]
fn the_token_is_in_the_secret_alone() {
    let token = Token::derived("test").to_hex();
    let made = made(|_, _| {});
    for (kind, manifest) in &made {
        assert_eq!(
            manifest.to_string().contains(&token),
            kind == "Secret",
            "{kind}"
        );
    }
    assert_eq!(made["Secret"]["stringData"][TOKEN_VARIABLE], token);
    let reference = &pod(&made)["containers"][0]["env"][0]["valueFrom"]["secretKeyRef"];
    assert_eq!(reference["name"], made["Secret"]["metadata"]["name"]);
    assert!(
        made["Secret"]["stringData"]
            .get(reference["key"].as_str().expect("a key"))
            .is_some()
    );
}

#[test]
fn what_is_only_shown_has_no_token() {
    let text = render(&job(), &Options::new("image:1"), None).expect("text");
    assert!(text.contains("Not to be applied"), "{text}");
    assert!(text.contains(PLACEHOLDER));
}

#[test]
fn every_word_and_value_survives_yaml_and_kubernetes() {
    let made = made(|job, _| {
        job.args = ODD.map(str::to_owned).into();
        job.env = ODD.map(|value| ("ODD".to_owned(), value.to_owned())).into();
    });
    let args = args(&made);
    assert_eq!(args[args.len() - ODD.len()..], ODD);
    let env = pod(&made)["containers"][0]["env"]
        .as_array()
        .expect("a list");
    let values: Vec<_> = env
        .iter()
        .filter_map(|variable| variable["value"].as_str())
        .collect();
    assert_eq!(values, ODD);
}

#[test]
fn kubernetes_replaces_nothing_in_what_belongs_to_the_program() {
    // As its documentation says: $$ is one sign, $(NAME) a variable, and anything else itself.
    let replaced = |text: &str| {
        text.replace("$$", "\0")
            .replace("$(", "REPLACED(")
            .replace('\0', "$")
    };
    for text in ["$(HOME)", "$$(HOME)", "$HOME", "$", "$$", "$$$(A)", "a$"] {
        let made = made(|job, _| {
            job.args = vec![text.to_owned()];
            job.env = vec![("A".to_owned(), text.to_owned())];
        });
        assert_eq!(replaced(args(&made).last().expect("a word")), text);
        let value = &pod(&made)["containers"][0]["env"][2]["value"];
        assert_eq!(replaced(value.as_str().expect("a value")), text);
    }
}

#[test]
fn a_pod_is_killed_later_than_its_ranks() {
    let grace = |pod_grace, ranks| {
        let made = made(|job, options| {
            options.grace_seconds = pod_grace;
            job.shutdown_timeout = ranks;
        });
        let args = args(&made);
        let at = args
            .iter()
            .position(|word| word == "--shutdown-timeout")
            .expect("it is said");
        (
            pod(&made)["terminationGracePeriodSeconds"].as_u64(),
            args[at + 1].clone(),
        )
    };
    assert_eq!(grace(None, None), (Some(60), "50".to_owned()));
    assert_eq!(grace(Some(300), None), (Some(300), "290".to_owned()));
    assert_eq!(grace(None, Some(300)), (Some(310), "300".to_owned()));
    let error = refused(|job, options| {
        options.grace_seconds = Some(30);
        job.shutdown_timeout = Some(30);
    });
    assert!(error.contains("kills them after 30 s"), "{error}");
}

#[test]
fn names_that_kubernetes_would_refuse_are_refused() {
    let long = "a".repeat(60);
    for name in ["", "Train", "1st", "a_b", "-a", "a-", "a.b", &long] {
        let error = refused(|job, _| job.name = name.to_owned());
        assert!(error.contains("cannot be the job's name"), "{error}");
    }
    let fits = made(|job, _| job.name = "a".repeat(57));
    assert_eq!(
        fits["Secret"]["metadata"]["name"].as_str().map(str::len),
        Some(63)
    );
    let error = refused(|job, options| {
        job.name = "a".repeat(57);
        options.jobset = true;
    });
    assert!(
        error.contains("it has 57 letters, pods leave room for 53"),
        "{error}"
    );
    let error = refused(|_, options| options.namespace = Some("My Space".to_owned()));
    assert!(error.starts_with("--namespace"), "{error}");
    assert!(refused(|_, options| options.image.clear()).starts_with("--image"));
}

#[test]
fn small_things_are_written_in_one_word() {
    for text in ["", "=", "a", "=b", "a="] {
        assert!(text.parse::<Selector>().is_err(), "{text}");
    }
    for text in ["", "=v", "a:Never", ":NoSchedule"] {
        assert!(text.parse::<Toleration>().is_err(), "{text}");
    }
    for text in [
        "",
        "data",
        "data:",
        "data:path",
        ":/data",
        "data:/",
        "data:/a:rx",
        "data:/a:ro:x",
    ] {
        assert!(text.parse::<Claim>().is_err(), "{text}");
    }
    let claim: Claim = "data:/data:ro".parse().expect("a claim");
    assert_eq!(
        (claim.claim.as_str(), claim.path.as_str(), claim.read_only),
        ("data", "/data", true)
    );
}
