//! Command lines that torchrun and Paceline are started with alike, and what their ranks find then.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::support::{LAUNCHER, PATIENCE, Run, TOKEN, free_port};

/// A rank's variables.
pub(crate) type Vars = BTreeMap<String, String>;
/// By `<rank>.<life>`: a rank that was started again has another life.
pub(crate) type Ranks = BTreeMap<String, Vars>;

/// One command line, on one or more nodes.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// Each node's processes.
    nproc: &'static [usize],
    /// `{port}`, `{node}` and `{nproc}` are filled in.
    args: &'static str,
    /// The user's own variables.
    env: &'static [(&'static str, &'static str)],
    /// The rank that fails in its first life.
    fails: Option<&'static str>,
}

pub(crate) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "standalone",
        nproc: &[2],
        args: "--standalone --nproc-per-node {nproc}",
        env: &[],
        fails: None,
    },
    Scenario {
        name: "one rank, with variables of the user's",
        nproc: &[1],
        args: "--nproc_per_node={nproc} --role trainer",
        env: &[
            ("OMP_NUM_THREADS", "3"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ],
        fails: None,
    },
    Scenario {
        name: "one rank",
        nproc: &[1],
        args: "--nproc-per-node {nproc} --master-addr 127.0.0.1 --master-port {port}",
        env: &[],
        fails: None,
    },
    Scenario {
        name: "static, nodes of different size",
        nproc: &[1, 2],
        args: "--nnodes 2 --nproc-per-node {nproc} --node-rank {node} --master-addr 127.0.0.1 --master-port {port}",
        env: &[],
        fails: None,
    },
    Scenario {
        name: "static",
        nproc: &[2, 2],
        args: "--nnodes=2 --nproc-per-node={nproc} --node-rank={node} --master-addr=127.0.0.1 --master-port={port}",
        env: &[],
        fails: None,
    },
    Scenario {
        name: "c10d",
        nproc: &[2, 2],
        args: "--nnodes 2 --nproc-per-node {nproc} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id job7",
        env: &[],
        fails: None,
    },
    Scenario {
        name: "a restart",
        nproc: &[2],
        args: "--nproc-per-node {nproc} --max-restarts 2 --monitor-interval 0.1",
        env: &[],
        fails: Some("1"),
    },
    Scenario {
        name: "a virtual local rank",
        nproc: &[2],
        args: "--nproc-per-node {nproc} --virtual-local-rank",
        env: &[],
        fails: None,
    },
    Scenario {
        name: "c10d, a restart",
        nproc: &[2, 2],
        args: "--nnodes 1:2 --nproc-per-node {nproc} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id job7 \
               --rdzv-conf last_call_timeout=5 --max-restarts 1",
        env: &[],
        fails: Some("3"),
    },
];

/// A shell script: both launchers run what ends in `.py` with PYTHON_EXEC, and a rank needs no Python to say what it finds.
const PROGRAM: &str = r#"
life=0
while [ -e "$DUMP/$RANK.$life" ]; do life=$((life + 1)); done
IS_MASTER_PORT_SERVED=no
(exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null && IS_MASTER_PORT_SERVED=yes
export IS_MASTER_PORT_SERVED
env -0 >"$DUMP/new.$RANK.$life"
mv "$DUMP/new.$RANK.$life" "$DUMP/$RANK.$life"
if [ -n "${FAILS:-}" ] && [ "$life" = 0 ]; then
    for ((other = 0; other < WORLD_SIZE; other++)); do
        until [ -e "$DUMP/$other.0" ]; do sleep 0.02; done
    done
    [ "$RANK" = "$FAILS" ] && exit 9
    exec sleep 100
fi
exit 0
"#;

/// The test's own variables, the system's and the shell's.
const NOT_THE_LAUNCHERS: [&str; 11] = [
    "PATH",
    "HOME",
    "LANG",
    "DUMP",
    "FAILS",
    "PYTHON_EXEC",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "PACELINE_TEST_PYTHON",
];

/// Starts `paceline-launcher run`, or torchrun of this Python.
pub(crate) fn run(scenario: &Scenario, torchruns_python: Option<&str>) -> Ranks {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let program = path("program.py");
    std::fs::write(&program, PROGRAM).expect("written");
    std::fs::create_dir(path("dump")).expect("a folder");
    let (port, logs) = (free_port().to_string(), path("logs").display().to_string());
    let nodes = scenario.nproc.iter().enumerate().map(|(node, nproc)| {
        let mut command = match torchruns_python {
            Some(python) => Command::new(python),
            None => Command::new(LAUNCHER),
        };
        match torchruns_python {
            Some(_) => command.args(["-m", "torch.distributed.run"]),
            None => command.arg("run"),
        };
        let fill = |arg: &str| {
            arg.replace("{port}", &port)
                .replace("{node}", &node.to_string())
                .replace("{nproc}", &nproc.to_string())
        };
        command
            .args(scenario.args.split_whitespace().map(fill))
            .args(["--log-dir", &logs])
            .arg(&program)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", folder.path())
            .env("LANG", "C.UTF-8")
            .env("PYTHON_EXEC", "bash")
            .env("DUMP", path("dump"))
            .envs(scenario.env.iter().copied());
        if torchruns_python.is_none() {
            command.env("PACELINE_JOB_TOKEN", TOKEN);
        }
        if let Some(rank) = scenario.fails {
            command.env("FAILS", rank);
        }
        Run::start(&mut command)
    });
    for node in nodes.collect::<Vec<_>>() {
        let end = node.end(PATIENCE);
        assert_eq!(
            end.code,
            Some(0),
            "{}: {}{}",
            scenario.name,
            end.out,
            end.err
        );
    }
    let files = std::fs::read_dir(path("dump")).expect("a folder");
    let mut ranks = Ranks::new();
    for file in files {
        let file = file.expect("a file");
        let text = std::fs::read(file.path()).expect("written by a rank");
        let vars = plain(&text, &port, &logs);
        ranks.insert(file.file_name().to_string_lossy().into_owned(), vars);
    }
    check_ports(scenario, &ranks);
    let lives = if scenario.fails.is_some() { 2 } else { 1 };
    let expect = lives * scenario.nproc.iter().sum::<usize>();
    assert_eq!(ranks.len(), expect, "{}: {:?}", scenario.name, ranks.keys());
    for vars in ranks.values_mut() {
        if let Some(port) = vars.get_mut("MASTER_PORT").filter(|port| *port != "{port}") {
            *port = "<free port>".to_owned();
        }
    }
    ranks
}

/// What `env -0` has written, with words in place of what is different each time.
fn plain(text: &[u8], port: &str, logs: &str) -> Vars {
    let text = String::from_utf8_lossy(text);
    let mut vars: Vars = (text.split('\0').filter_map(|line| line.split_once('=')))
        .filter(|(name, _)| !NOT_THE_LAUNCHERS.contains(name))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let file = error_file(&vars["TORCHELASTIC_ERROR_FILE"], logs, &vars);
    if let Some(file) = file {
        vars.insert("TORCHELASTIC_ERROR_FILE".to_owned(), file);
    }
    if is_uuid(&vars["TORCHELASTIC_RUN_ID"]) {
        vars.insert("TORCHELASTIC_RUN_ID".to_owned(), "<uuid>".to_owned());
    }
    if let Some(value) = vars.get_mut("MASTER_PORT").filter(|value| *value == port) {
        *value = "{port}".to_owned();
    }
    vars
}

/// `<logs>/<run id>_<random>/attempt_<restart count>/1/error.json` of this rank; what has another form stays as it is, and
/// is seen then.
fn error_file(file: &str, logs: &str, vars: &Vars) -> Option<String> {
    let rest = file.strip_prefix(logs)?.strip_prefix('/')?;
    let (folder, rest) = rest.split_once('/')?;
    let random = folder.strip_prefix(&vars["TORCHELASTIC_RUN_ID"])?;
    if !random.starts_with('_') || random.len() <= 6 {
        return None;
    }
    let attempt = format!("attempt_{}/", vars["TORCHELASTIC_RESTART_COUNT"]);
    let rest = rest.strip_prefix(&attempt)?;
    Some(format!(
        "<logs>/<run id>_<random>/attempt_<restart count>/{rest}"
    ))
}

fn is_uuid(text: &str) -> bool {
    let parts: Vec<_> = text.split('-').map(str::len).collect();
    parts == [8, 4, 4, 4, 12] && text.chars().all(|c| c == '-' || c.is_ascii_hexdigit())
}

/// All ranks of one life are told the same address.
fn check_ports(scenario: &Scenario, ranks: &Ranks) {
    let mut of_life: BTreeMap<&str, (&str, &str)> = BTreeMap::new();
    for (name, vars) in ranks {
        let life = name.rsplit_once('.').expect("a rank and a life").1;
        let meet = (vars["MASTER_ADDR"].as_str(), vars["MASTER_PORT"].as_str());
        let first = *of_life.entry(life).or_insert(meet);
        assert_eq!(meet, first, "{}: rank {name}", scenario.name);
        let is_port = meet.1 == "{port}" || meet.1.parse::<u16>().is_ok_and(|port| port > 0);
        assert!(is_port, "{}: {meet:?}", scenario.name);
    }
}

/// Where the recorded values are.
pub(crate) fn recorded_path() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/contract/torchrun.json")
}
