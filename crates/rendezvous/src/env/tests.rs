//! Environments as tables: what they mean, and what their faults are called.

use proptest::prelude::*;

use super::*;

fn read(vars: &[(&str, &str)]) -> Result<WorkerEnv, EnvError> {
    WorkerEnv::from_lookup(&|name| {
        vars.iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned())
    })
}

fn with(
    vars: &[(&'static str, &'static str)],
    changes: &[(&'static str, &'static str)],
) -> Result<WorkerEnv, EnvError> {
    let mut all = changes.to_vec();
    all.extend_from_slice(vars);
    read(&all)
}

/// What torchrun sets for rank 5 of 2 nodes with 4 processes.
const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("GROUP_RANK", "1"),
    ("GROUP_WORLD_SIZE", "2"),
    ("ROLE_NAME", "default"),
    ("ROLE_RANK", "5"),
    ("ROLE_WORLD_SIZE", "8"),
    ("MASTER_ADDR", "node-a.example"),
    ("MASTER_PORT", "34567"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
    ("TORCHELASTIC_RESTART_COUNT", "1"),
    ("TORCHELASTIC_MAX_RESTARTS", "3"),
    ("TORCHELASTIC_RUN_ID", "6f1e"),
    ("TORCHELASTIC_ERROR_FILE", "/tmp/e/attempt_0/1/error.json"),
];

#[test]
fn torchruns_variables_are_understood() {
    let env = read(TORCHRUN).unwrap();
    assert_eq!(
        (env.rank, env.world, env.local_rank, env.local_world),
        (5, 8, 1, 4)
    );
    assert_eq!((env.node_rank, env.node_count), (1, 2));
    assert_eq!(
        (env.master_addr.as_str(), env.master_port),
        ("node-a.example", 34567)
    );
    assert!(env.agent_store && !env.token_is_secret && env.is_exposed());
    assert_eq!(
        (env.restart_count, env.max_restarts, env.run_id.as_str()),
        (1, 3, "6f1e")
    );
    assert_eq!(
        env.error_file.as_deref(),
        Some("/tmp/e/attempt_0/1/error.json")
    );
}

#[test]
fn a_rank_is_told_from_a_process_that_may_start_ranks() {
    let check = |vars: &[(&str, &str)], expect| {
        let get = |name: &str| {
            let found = vars.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        assert_eq!(is_rank(&get), expect, "{vars:?}");
    };
    check(TORCHRUN, true);
    check(&[("RANK", "0"), ("WORLD_SIZE", "1")], true);
    check(&[], false);
    check(&[("RANK", ""), ("MASTER_ADDR", "node1")], false);
    let batch = [
        ("SLURM_JOB_ID", "7"),
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "4"),
    ];
    check(&batch, false);
    let step = |tasks| {
        [
            &batch[..2],
            &[("SLURM_STEP_ID", "0"), ("SLURM_NTASKS", tasks)],
        ]
        .concat()
    };
    check(&step("4"), true);
    check(&step("1"), false);
    let mpi = |size| {
        [
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", size),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ]
    };
    check(&mpi("2"), true);
    check(&mpi("1"), false);
}

#[test]
fn without_any_variable_a_process_is_alone() {
    assert_eq!(read(&[]).unwrap(), WorkerEnv::alone());
    assert_eq!(
        read(&[("RANK", ""), ("PATH", "/bin")]).unwrap(),
        WorkerEnv::alone()
    );
}

#[test]
fn settings_apply_to_a_process_that_is_alone() {
    let env = read(&[
        ("PACELINE_TIMEOUT_SECONDS", "2.5"),
        ("PACELINE_TRANSPORT", "tcp"),
    ])
    .unwrap();
    assert_eq!(
        (env.world, env.timeout, env.transport.as_deref()),
        (
            1,
            Some(Timeout::After(Duration::from_millis(2500))),
            Some("tcp")
        )
    );
    let env = read(&[("PACELINE_TIMEOUT_SECONDS", "auto")]).unwrap();
    assert_eq!(env.timeout, Some(Timeout::Auto));
}

#[test]
fn every_missing_variable_is_named_at_once_with_a_way_to_start() {
    let error = read(&[("RANK", "0"), ("MASTER_PORT", "1")]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "WORLD_SIZE, MASTER_ADDR are missing in the environment, although RANK, MASTER_PORT are set"
    );
    let hint = error.hint().unwrap();
    assert!(
        hint.contains("paceline run") && hint.contains("WORLD_SIZE: number of processes"),
        "{hint}"
    );

    let error = with(
        &TORCHRUN[..2],
        &[
            ("LOCAL_RANK", "0"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "1"),
        ],
    )
    .unwrap_err();
    assert!(
        error.to_string().starts_with("LOCAL_WORLD_SIZE is missing"),
        "{error}"
    );
}

#[test]
fn the_master_is_not_needed_where_a_store_is_given() {
    let env = read(&[
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("PACELINE_STORE", "[::1]:4000"),
    ])
    .unwrap();
    assert_eq!(
        (env.store.as_deref(), env.master_port),
        (Some("[::1]:4000"), 0)
    );
}

#[test]
fn a_bad_value_is_shown_with_what_was_expected() {
    for (name, value, expected) in [
        (
            "RANK",
            "one",
            "RANK is \"one\", expected a whole number below WORLD_SIZE",
        ),
        (
            "RANK",
            "-1",
            "RANK is \"-1\", expected a whole number below WORLD_SIZE",
        ),
        (
            "RANK",
            "8",
            "RANK is 8, expected a number below WORLD_SIZE, which is 8",
        ),
        (
            "WORLD_SIZE",
            "0",
            "WORLD_SIZE is \"0\", expected a whole number from 1 to 65536",
        ),
        (
            "WORLD_SIZE",
            "65537",
            "WORLD_SIZE is \"65537\", expected a whole number from 1 to 65536",
        ),
        (
            "LOCAL_RANK",
            "4",
            "LOCAL_RANK is 4, expected a number below LOCAL_WORLD_SIZE, which is 4",
        ),
        (
            "LOCAL_WORLD_SIZE",
            "9",
            "LOCAL_WORLD_SIZE is \"9\", expected a whole number from 1 to WORLD_SIZE",
        ),
        (
            "LOCAL_WORLD_SIZE",
            "0",
            "LOCAL_WORLD_SIZE is \"0\", expected a whole number from 1 to WORLD_SIZE",
        ),
        (
            "GROUP_RANK",
            "2",
            "GROUP_RANK is 2, expected a number below GROUP_WORLD_SIZE, which is 2",
        ),
        (
            "MASTER_PORT",
            "0",
            "MASTER_PORT is \"0\", expected a port from 1 to 65535",
        ),
        (
            "MASTER_PORT",
            "70000",
            "MASTER_PORT is \"70000\", expected a port from 1 to 65535",
        ),
        (
            "PACELINE_STORE",
            "4000",
            "PACELINE_STORE is \"4000\", expected host:port",
        ),
        (
            "PACELINE_STORE",
            ":4000",
            "PACELINE_STORE is \":4000\", expected host:port",
        ),
        (
            "PACELINE_STORE",
            "a:0",
            "PACELINE_STORE is \"a:0\", expected host:port",
        ),
        (
            "PACELINE_PAGE_FD",
            "-3",
            "PACELINE_PAGE_FD is \"-3\", expected the number of an open descriptor",
        ),
        (
            "TORCHELASTIC_USE_AGENT_STORE",
            "maybe",
            "TORCHELASTIC_USE_AGENT_STORE is \"maybe\", expected True or False",
        ),
    ] {
        let error = with(TORCHRUN, &[(name, value)]).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert!(error.hint().is_some(), "{error}");
    }
    for value in ["0", "-1", "nan", "inf", "1e300", "2592001", "soon"] {
        let error = with(TORCHRUN, &[("PACELINE_TIMEOUT_SECONDS", value)]).unwrap_err();
        assert!(
            matches!(
                error,
                EnvError::Invalid {
                    name: "PACELINE_TIMEOUT_SECONDS",
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn a_bad_token_is_refused_without_showing_it() {
    let error = with(TORCHRUN, &[("PACELINE_JOB_TOKEN", "5ec4e7")]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "PACELINE_JOB_TOKEN is malformed: a job token has 64 hexadecimal digits, got 6 characters"
    );
}

#[test]
fn a_token_makes_the_job_closed_and_its_absence_ties_it_to_the_meeting_point() {
    let hex: &'static str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    let env = with(TORCHRUN, &[("PACELINE_JOB_TOKEN", hex)]).unwrap();
    assert!(env.token_is_secret && !env.is_exposed());
    let open = read(TORCHRUN).unwrap();
    assert_eq!(open.token, with(TORCHRUN, &[("RANK", "0")]).unwrap().token);
    for change in [
        ("MASTER_PORT", "34568"),
        ("MASTER_ADDR", "node-b"),
        ("TORCHELASTIC_RUN_ID", "x"),
    ] {
        assert_ne!(
            open.token,
            with(TORCHRUN, &[change]).unwrap().token,
            "{change:?}"
        );
    }
    assert!(
        !with(TORCHRUN, &[("MASTER_ADDR", "127.0.0.1")])
            .unwrap()
            .is_exposed()
    );
}

#[test]
fn without_local_numbers_the_master_tells_whether_ranks_share_a_machine() {
    let by_hand = [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_PORT", "29500")];
    for (master, expected) in [
        ("localhost", (3, 4, 0, 1)),
        ("127.0.0.1", (3, 4, 0, 1)),
        ("::1", (3, 4, 0, 1)),
        ("node-a", (0, 1, 3, 4)),
    ] {
        let env = with(&by_hand, &[("MASTER_ADDR", master)]).unwrap();
        assert_eq!(
            (
                env.local_rank,
                env.local_world,
                env.node_rank,
                env.node_count
            ),
            expected,
            "{master}"
        );
    }
}

#[test]
fn a_rank_that_sees_one_device_only_is_still_told_its_number() {
    let alike = [("LOCAL_RANK", "0"), ("PACELINE_LOCAL_RANK", "3")];
    let env = with(TORCHRUN, &alike).unwrap();
    assert_eq!((env.local_rank, env.local_world), (3, 4));
    let vars = worker_vars(&env);
    for (name, value) in alike {
        assert!(
            vars.contains(&(name.to_owned(), value.to_owned())),
            "{vars:?}"
        );
    }
    let error = with(TORCHRUN, &[("PACELINE_LOCAL_RANK", "4")]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "PACELINE_LOCAL_RANK is 4, expected a number below LOCAL_WORLD_SIZE, which is 4"
    );
}

#[test]
fn the_cores_of_all_ranks_are_the_launchers_word_or_those_of_this_process() {
    let cores = |value| with(TORCHRUN, &[("PACELINE_LOCAL_CORES", value)]);
    assert_eq!(cores("96").unwrap().cores(), 96);
    let own = std::thread::available_parallelism().unwrap().get();
    assert_eq!(cores("0").unwrap().cores(), own);
    assert!(cores("65537").is_err());
}

const SLURM: &[(&str, &str)] = &[
    ("SLURM_STEP_ID", "0"),
    ("SLURM_JOB_ID", "123456"),
    ("SLURM_PROCID", "6"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "3"),
    ("SLURM_NTASKS", "7"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
    ("SLURM_STEP_NUM_NODES", "4"),
    ("SLURM_STEP_NODELIST", "gpu[07-10]"),
];

#[test]
fn a_slurm_step_is_understood_where_torchruns_names_are_absent() {
    let env = read(SLURM).unwrap();
    assert_eq!(
        (env.rank, env.world, env.local_rank, env.local_world),
        (6, 7, 0, 1)
    );
    assert_eq!((env.node_rank, env.node_count), (3, 4));
    assert_eq!(
        (env.master_addr.as_str(), env.master_port),
        ("gpu07", 16912)
    );
    assert_eq!(env.run_id, "slurm-123456.0");
    let env = with(
        SLURM,
        &[("MASTER_ADDR", "10.0.0.9"), ("MASTER_PORT", "4001")],
    )
    .unwrap();
    assert_eq!(
        (env.master_addr.as_str(), env.master_port),
        ("10.0.0.9", 4001)
    );
}

#[test]
fn a_launcher_inside_a_slurm_step_is_believed_alone() {
    let env = with(SLURM, TORCHRUN).unwrap();
    assert_eq!(
        (env.rank, env.world, env.local_world, env.run_id.as_str()),
        (5, 8, 4, "6f1e")
    );
    let error = with(SLURM, &[("RANK", "0")]).unwrap_err();
    assert!(matches!(error, EnvError::Missing { .. }), "{error}");
}

#[test]
fn a_batch_script_outside_srun_is_no_rank() {
    assert_eq!(read(&SLURM[1..]).unwrap(), WorkerEnv::alone());
}

#[test]
fn interfaces_are_named_by_the_first_variable_that_is_set() {
    let ours = ("PACELINE_SOCKET_IFNAME", "eth");
    let nccl = ("NCCL_SOCKET_IFNAME", "=ib0");
    let gloo = ("GLOO_SOCKET_IFNAME", "lo");
    for (extra, expected) in [
        (&[gloo, nccl, ours][..], Some("eth")),
        (&[gloo, nccl], Some("=ib0")),
        (&[gloo, ("NCCL_SOCKET_IFNAME", "")], Some("lo")),
        (&[], None),
    ] {
        let env = with(TORCHRUN, extra).unwrap();
        assert_eq!(env.socket_ifname.as_deref(), expected, "{extra:?}");
    }
}

#[test]
fn a_pair_has_between_1_and_8_sockets() {
    let name = "PACELINE_SOCKETS_PER_PEER";
    let env = with(TORCHRUN, &[(name, "8")]).unwrap();
    assert_eq!(env.sockets_per_peer, Some(8));
    for value in ["0", "9", "-1", "many"] {
        let error = with(TORCHRUN, &[(name, value)]).unwrap_err().to_string();
        let expected = "expected a whole number from 1 to 8, the same on every rank";
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn tls_is_on_or_off_and_nothing_else() {
    let name = "PACELINE_TLS";
    assert!(!with(TORCHRUN, &[]).unwrap().tls);
    for (value, expected) in [("1", true), ("on", true), ("0", false), ("off", false)] {
        assert_eq!(with(TORCHRUN, &[(name, value)]).unwrap().tls, expected);
    }
    for value in ["yes", "true", "2", "1.3", "on off"] {
        let error = with(TORCHRUN, &[(name, value)]).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "PACELINE_TLS is {value:?}, expected `on` or `1`, `off` or `0`; the same for every rank and the launcher"
            )
        );
    }
}

#[test]
fn variables_are_listed_with_value_and_origin_and_without_the_secret() {
    let secret = "0f".repeat(32);
    let step = [
        ("SLURM_JOB_ID", "812"),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_PROCID", "1"),
        ("PACELINE_TLS", "on"),
        ("PACELINE_TIMEOUT_SECONDS", " "),
        ("PACELINE_JOB_TOKEN", &secret),
    ];
    let get = |name: &str| {
        let found = step.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    let listed = list(&get);
    assert_eq!(listed.len(), VARIABLES.len() + TOOL_VARIABLES.len());
    for (name, value, origin) in [
        ("RANK", "1", "Slurm"),
        ("PACELINE_TLS", "on", "environment"),
        ("PACELINE_TIMEOUT_SECONDS", "60", "default"),
        ("PACELINE_JOB_TOKEN", "(secret)", "environment"),
        ("PACELINE_DEVICE", "auto", "default"),
    ] {
        let row = listed.iter().find(|row| row.variable.name == name);
        let row = row.map(|row| (row.value.as_str(), row.origin.to_string()));
        assert_eq!(row, Some((value, origin.to_owned())), "{name}");
    }
}

/// The table as Markdown.
fn reference() -> String {
    let mut text = String::from(
        "| variable | meaning | needed | when absent | in a Slurm step |\n|---|---|---|---|---|\n",
    );
    for variable in VARIABLES {
        let needed = match variable.need {
            Need::Always => "yes".into(),
            Need::UnlessStore => "unless `PACELINE_STORE`".into(),
            Need::With(other) => format!("with `{other}`"),
            Need::Optional => "no".into(),
        };
        let row = format!(
            "| `{}` | {} ({}) | {needed} | {} | {} |\n",
            variable.name,
            variable.meaning,
            variable.expected,
            variable.absent,
            variable.slurm.unwrap_or_default()
        );
        text.push_str(&row);
    }
    text
}

#[test]
fn the_documentation_shows_the_table() {
    assert_eq!(
        include_str!("variables.md"),
        reference(),
        "the table changed: write this to src/env/variables.md"
    );
}

#[test]
fn a_variable_that_nobody_reads_is_named_with_the_nearest_one() {
    let check = |name: &str, expect: Option<&str>| {
        let warnings = unknown(std::iter::once(name.to_owned()));
        let near = expect.map(|near| match near {
            "" => String::new(),
            near => format!(" (did you mean {near}?)"),
        });
        let expect = near
            .map(|near| format!("environment variable {name} has no effect in this program{near}"));
        assert_eq!(warnings, Vec::from_iter(expect));
    };
    check("PACELINE_TRANSPROT", Some("PACELINE_TRANSPORT"));
    check("PACELINE_TIMEOUT", Some(""));
    check("PACELINE_SITE", Some(""));
    check("PACELINE_TRANSPORT", None);
    check("PACELINE_FAKE_NVML", None);
    check("HOME", None);
}

proptest! {
    #[test]
    fn what_a_launcher_writes_a_rank_reads(
        (world, rank) in (1..2000_usize).prop_flat_map(|world| (Just(world), 0..world)),
        (share, place, nodes) in (0.0..1.0_f64, 0.0..1.0_f64, 0.0..1.0_f64),
        port in 1..=u16::MAX,
        (restart_count, max_restarts, replacement) in any::<(u32, u32, u32)>(),
        (agent_store, secret, tls, virtual_local_rank) in any::<(bool, bool, bool, bool)>(),
        store in proptest::option::of("[a-z]{1,9}:[1-9][0-9]{0,3}"),
        (run_id, role) in ("[a-zA-Z0-9._-]{1,40}", "[a-z]{1,9}"),
        error_file in proptest::option::of("/[a-z/]{1,30}"),
        (page_fd, local_cores) in (proptest::option::of(0..i32::MAX), proptest::option::of(1..=65_536_usize)),
        timeout_ms in proptest::option::of(1..86_400_000_u64),
        sockets_per_peer in proptest::option::of(1..=SOCKETS_PER_PEER_MAX),
        (socket_ifname, host_id) in proptest::option::of(("[=^]?[a-z0-9,]{1,20}", "[a-z0-9-]{1,20}")).prop_map(Option::unzip),
        (flight_dir, flight_records) in (proptest::option::of("/[a-z/]{1,30}"), proptest::option::of(0..=65_536_usize)),
        memory_folder in proptest::option::of("/[a-z/]{1,30}"),
    ) {
        let part = |of: usize, share: f64| ((of as f64 * share) as usize).min(of - 1);
        let local_world = 1 + part(world, share);
        let node_count = 1 + part(world, nodes);
        let master_addr = "node-a".to_owned();
        let token = Token::derived(&if secret { "secret".into() } else { format!("{run_id}\0{master_addr}\0{port}") });
        let env = WorkerEnv {
            rank, world, local_world, local_rank: part(local_world, place), virtual_local_rank, local_cores,
            node_count, node_rank: part(node_count, place),
            master_addr, master_port: port, store, agent_store, token, token_is_secret: secret,
            run_id, restart_count, max_restarts, replacement, role, error_file, page_fd,
            sockets_per_peer, socket_ifname, host_id, tls,
            transport: Some("shm".into()), algorithm: Some("allreduce:ring".into()), timeout: timeout_ms.map(|ms| Timeout::After(Duration::from_millis(ms))),
            flight_dir, flight_records, memory_folder,
        };
        let vars = worker_vars(&env);
        let get = |name: &str| vars.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        prop_assert_eq!(WorkerEnv::from_lookup(&get).unwrap(), env);
    }

    #[test]
    fn no_value_of_any_variable_panics(which in 0..VARIABLES.len(), value in "\\PC{0,40}") {
        let env = WorkerEnv::from_lookup(&|name| {
            let known = TORCHRUN.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            if name == VARIABLES[which].name { Some(value.clone()) } else { known }
        });
        if let Err(error) = env {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}
