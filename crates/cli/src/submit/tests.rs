//! Command lines of `paceline submit` and what they come to.

use paceline_submit::{Memory, TimeLimit};

use super::*;

fn parse(line: &str) -> Result<SubmitArgs, String> {
    let command = clap::Command::new("paceline").subcommand(super::command());
    let words = std::iter::once("paceline").chain(line.split_whitespace());
    let matches = command
        .try_get_matches_from(words)
        .map_err(|error| error.to_string())?;
    let (_, matches) = matches.subcommand().expect("a command");
    read(matches).map_err(|error| error.to_string())
}

fn parsed(line: &str) -> SubmitArgs {
    parse(line).unwrap_or_else(|error| panic!("{line}: {error}"))
}

fn slurm(line: &str) -> paceline_submit::slurm::Options {
    match parsed(line).scheduler {
        Scheduler::Slurm(options) => options,
        other => panic!("{other:?}"),
    }
}

fn kubernetes(line: &str) -> paceline_submit::kubernetes::Options {
    match parsed(line).scheduler {
        Scheduler::Kubernetes(options) => options,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_definitions_are_sound() {
    super::command().debug_assert();
}

#[test]
fn everything_after_the_program_is_the_programs() {
    for scheduler in ["slurm", "kubernetes --image i", "ray"] {
        let job = parsed(&format!(
            "submit {scheduler} --nodes 2 ./prog --nodes 9 -h --image j -- --dry-run"
        ))
        .job;
        assert_eq!((job.nodes.max(), job.program.as_str()), (2, "./prog"));
        assert_eq!(
            job.args,
            ["--nodes", "9", "-h", "--image", "j", "--", "--dry-run"]
        );
    }
}

#[test]
fn a_job_needs_a_program_and_a_pod_an_image() {
    let error = parse("submit slurm --nodes 2").expect_err("no program");
    assert!(
        error.contains("no PROGRAM to start") && error.contains("paceline submit slurm"),
        "{error}"
    );
    let error = parse("submit kubernetes ./prog").expect_err("no image");
    assert!(error.contains("--image"), "{error}");
}

#[test]
fn all_schedulers_take_the_same_words_for_the_same_things() {
    let options = "-J mnist -N 2:4 --nproc-per-node 8 --cpus-per-rank 2 --gpus-per-node 8 --mem 64G -t 1-0 --env A=b=c --env PATH \
                   --shutdown-timeout 20 --launcher /opt/paceline --file some.file --dry-run";
    let of_slurm = parsed(&format!("submit slurm {options} ./prog"));
    let of_kubernetes = parsed(&format!("submit kubernetes --image i {options} ./prog"));
    let of_ray = parsed(&format!("submit ray {options} ./prog"));
    assert_eq!(of_slurm.job, of_kubernetes.job);
    assert_eq!(of_slurm.job, of_ray.job);
    for args in [&of_slurm, &of_kubernetes, &of_ray] {
        assert!(args.dry_run && !args.no_submit);
        assert_eq!(args.file, PathBuf::from("some.file"));
    }
    let job = of_slurm.job;
    assert_eq!(job.name, "mnist");
    assert_eq!(
        (job.nodes.min(), job.nodes.max(), job.ranks),
        (2, 4, Ranks::Count(8))
    );
    assert_eq!((job.cpus_per_rank, job.gpus_per_node), (Some(2), Some(8)));
    assert_eq!(job.memory.map(Memory::mebibytes), Some(65_536));
    assert_eq!(job.time_limit.map(TimeLimit::seconds), Some(86_400));
    assert_eq!(job.env[0], ("A".to_owned(), "b=c".to_owned()));
    assert_eq!(job.env[1].1, std::env::var("PATH").expect("a path"));
    assert_eq!(
        (job.shutdown_timeout, job.launcher.as_str()),
        (Some(20), "/opt/paceline")
    );
}

#[test]
fn there_is_a_rank_for_each_gpu_unless_it_is_said() {
    let ranks = |line: &str| parsed(&format!("submit slurm {line} ./prog")).job.ranks;
    assert_eq!(ranks(""), Ranks::Count(1));
    assert_eq!(ranks("--gpus-per-node 4"), Ranks::Count(4));
    assert_eq!(
        ranks("--gpus-per-node 4 --nproc-per-node 2"),
        Ranks::Count(2)
    );
    assert_eq!(
        ranks("--nproc_per_node=auto"),
        Ranks::Named("auto".to_owned())
    );
}

#[test]
fn options_of_run_are_passed_on_word_for_word() {
    let job = parsed(
        "submit slurm --max_restarts=3 --no-fold --tee 0:3 --rdzv-conf lease=5 ./prog --tee 1",
    )
    .job;
    let mut pairs = job.run_options.clone();
    pairs.sort();
    assert_eq!(
        pairs,
        [
            "--max-restarts",
            "--no-fold",
            "--rdzv-conf",
            "--tee",
            "0:3",
            "3",
            "lease=5"
        ]
    );
    assert!(parsed("submit slurm ./prog").job.run_options.is_empty());
    let error = parse("submit slurm --max-restarts many ./prog").expect_err("no number");
    assert!(error.contains("many"), "{error}");
}

#[test]
fn what_the_submission_says_to_the_launchers_cannot_be_said_otherwise() {
    for option in [
        "--rdzv-backend c10d",
        "--node-rank 1",
        "--master-addr a",
        "--rdzv-endpoint a",
        "--standalone",
    ] {
        let error = parse(&format!("submit slurm {option} ./prog")).expect_err(option);
        assert!(error.contains("unexpected argument"), "{error}");
    }
}

#[test]
fn sbatchs_options_have_their_names_and_short_forms() {
    let long = slurm(
        "submit slurm --partition p --account a --qos q --constraint c --chdir d --output o --exclusive --signal TERM@60 \
         --requeue --sbatch-option=--reservation=r --sbatch-option --nice --setup true --setup false --log-dir l ./prog",
    );
    assert_eq!(long.directives, ["--reservation=r", "--nice"]);
    assert_eq!(long.setup, ["true", "false"]);
    assert_eq!(long.notice, "TERM@60".parse().ok());
    assert_eq!(long.log_dir.as_deref(), Some("l"));
    assert!(long.exclusive && long.requeue);
    let short = slurm("submit slurm -p p -A a -q q -C c -D d -o o ./prog");
    for (long, short) in [
        (&long.partition, &short.partition),
        (&long.account, &short.account),
        (&long.qos, &short.qos),
        (&long.constraint, &short.constraint),
        (&long.chdir, &short.chdir),
        (&long.output, &short.output),
    ] {
        assert!(long.is_some() && long == short, "{long:?} {short:?}");
    }
}

#[test]
fn pods_are_described_in_kubernetes_words() {
    let options = kubernetes(
        "submit kubernetes --image i:1 --namespace n --jobset --chdir /w --pvc d:/d:ro --pvc r:/r --shm-size 2G --node-selector a=b \
         --toleration t:NoSchedule --gpu-resource amd.com/gpu --service-account s --image-pull-secret x --grace-period 90 \
         --backoff-limit 0 --ttl-seconds-after-finished 60 --cluster-domain c.d ./prog",
    );
    assert_eq!(
        (
            options.image.as_str(),
            options.namespace.as_deref(),
            options.jobset
        ),
        ("i:1", Some("n"), true)
    );
    assert_eq!(
        (
            options.claims.len(),
            options.node_selector.len(),
            options.tolerations.len()
        ),
        (2, 1, 1)
    );
    assert_eq!(
        (
            options.grace_seconds,
            options.backoff_limit,
            options.ttl_seconds
        ),
        (Some(90), Some(0), Some(60))
    );
    assert_eq!(
        (
            options.gpu_resource.as_str(),
            options.cluster_domain.as_str()
        ),
        ("amd.com/gpu", "c.d")
    );
}

#[test]
fn ray_is_told_in_its_own_words_and_waits_as_long_as_the_launchers() {
    let args = parsed(
        "submit ray --address http://h:8265 --working-dir . --chdir /w --runtime-env-json {\"pip\":[\"x\"]} \
         --rdzv-conf lease=5,join_timeout=9 ./prog",
    );
    let Scheduler::Ray(options) = args.scheduler else {
        panic!("{:?}", args.scheduler);
    };
    assert_eq!(options.address.as_deref(), Some("http://h:8265"));
    assert_eq!(options.working_dir.as_deref(), Some("."));
    assert_eq!(options.chdir.as_deref(), Some("/w"));
    assert_eq!(options.join_timeout, Some(Duration::from_secs(9)));
    let env = options.runtime_env_json.expect("an object");
    assert_eq!(env["pip"][0], "x");
    assert_eq!(
        args.job.run_options,
        ["--rdzv-conf", "lease=5,join_timeout=9"]
    );
}

#[test]
fn the_job_is_called_like_its_program_if_nothing_else_is_said() {
    for (program, name) in [
        ("./train", "train"),
        ("/a/My_Prog.py", "my-prog"),
        ("3d", "job-3d"),
        ("_", "job"),
        ("ä", "job"),
    ] {
        assert_eq!(name_of(program, &[]), name, "{program}");
    }
    assert_eq!(
        parsed("submit slurm python -u a/train.py --x y").job.name,
        "train"
    );
    let args = parsed("submit slurm ./train");
    assert_eq!(args.file, PathBuf::from("train.sbatch"));
    assert_eq!(
        parsed("submit kubernetes --image i ./train").file,
        PathBuf::from("train.yaml")
    );
    // Not the script itself.
    assert_eq!(
        parsed("submit ray train.py").file,
        PathBuf::from("train.ray.py")
    );
}

#[test]
fn what_cannot_be_meant_is_refused_with_what_can() {
    for (line, text) in [
        ("slurm --nodes 0 p", "MIN:MAX"),
        ("slurm --time soon p", "MINUTES"),
        ("slurm --mem much p", "64G"),
        ("slurm --signal TERM p", "TERM@120"),
        ("slurm --nproc-per-node some p", "auto"),
        ("slurm --env NO_SUCH_VARIABLE_HERE p", "NAME=VALUE"),
        ("slurm --dry-run --no-submit p", "cannot be used with"),
        ("kubernetes --image i --pvc data p", "CLAIM:PATH"),
        ("kubernetes --image i --toleration a:b p", "NoSchedule"),
        ("ray --runtime-env-json [] p", "JSON object"),
        ("pbs p", "pbs"),
    ] {
        let error = parse(&format!("submit {line}")).expect_err(line);
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn the_file_is_written_even_where_the_scheduler_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("job.yaml");
    let line = format!(
        "submit kubernetes --image i --no-submit --file {} ./prog",
        file.display()
    );
    assert_eq!(submit(&parsed(&line)), Ok(Exit::Done));
    let text = std::fs::read_to_string(&file).expect("written");
    assert!(text.contains("kind: Job"), "{text}");
}

#[test]
fn a_wrong_job_is_wrong_usage_and_a_missing_scheduler_is_the_machines_lack() {
    let failure = submit(&parsed("submit slurm --dry-run -J a/b ./prog")).expect_err("no name");
    assert_eq!(failure.exit(), Exit::Usage);
    let line = "submit slurm --no-submit --file /nowhere/job ./prog";
    assert_eq!(
        submit(&parsed(line)).expect_err("no folder").exit(),
        Exit::Environment
    );
}
