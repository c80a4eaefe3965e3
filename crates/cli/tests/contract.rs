//! The contract with torchrun: the same command line gives a rank the same variables under both, but for a table of
//! differences with a reason each.
//!
//! What torchrun gives was recorded, so that this runs without PyTorch too; with PyTorch it is checked that torchrun still
//! does. To record it anew:
//!
//! ```text
//! PACELINE_TEST_PYTHON=venv/bin/python cargo test -p paceline-cli --test contract -- --ignored record
//! ```

#[path = "contract/differences.rs"]
mod differences;
#[path = "contract/scenarios.rs"]
mod scenarios;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use differences::DIFFERENCES;
use scenarios::{Ranks, SCENARIOS, Vars, recorded_path, run};
use serde::{Deserialize, Serialize};

/// Set, torchrun is recorded before it is compared.
const RECORD: &str = "PACELINE_TEST_RECORD";

/// What torchrun gives its ranks.
#[derive(Serialize, Deserialize)]
struct Recorded {
    /// How this file was made.
    how: String,
    torch: String,
    scenarios: BTreeMap<String, Ranks>,
}

fn recorded() -> Recorded {
    let text = std::fs::read(recorded_path()).expect("the recorded values");
    serde_json::from_slice(&text).expect("JSON")
}

/// All that differs and is not in the table, or is in it and differs in another way.
fn compare(ours: &Vars, theirs: &Vars, used: &mut BTreeSet<&'static str>) -> Vec<String> {
    let names: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    let mut mistakes = Vec::new();
    for name in names {
        let (our, their) = (ours.get(name), theirs.get(name));
        if our == their {
            continue;
        }
        match DIFFERENCES
            .iter()
            .find(|difference| difference.name == name)
        {
            Some(difference) => {
                used.insert(difference.name);
                mistakes.extend(difference.mistake(ours, theirs));
            }
            None => mistakes.push(format!("{name} is {our:?} here and {their:?} there")),
        }
    }
    mistakes
}

#[test]
fn a_rank_finds_what_torchrun_gives_it_but_for_the_differences_agreed_on() {
    let recorded = recorded();
    let (mut used, mut mistakes) = (BTreeSet::new(), Vec::new());
    let mut compared = 0;
    for scenario in SCENARIOS {
        let name = scenario.name;
        let (ours, theirs) = (run(scenario, None), &recorded.scenarios[name]);
        let ranks = |ranks: &Ranks| ranks.keys().cloned().collect::<Vec<_>>();
        assert_eq!(ranks(&ours), ranks(theirs), "{name}");
        for (rank, vars) in &ours {
            compared += theirs[rank].len();
            let found = compare(vars, &theirs[rank], &mut used);
            mistakes.extend(
                found
                    .iter()
                    .map(|found| format!("{name}, rank {rank}: {found}")),
            );
        }
    }
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
    let (scenarios, torch) = (SCENARIOS.len(), &recorded.torch);
    eprintln!("{compared} variables of {scenarios} scenarios compared with torchrun {torch}");
    // The share of the cores is 1 where there are as many ranks.
    used.insert("OMP_NUM_THREADS");
    let unused = DIFFERENCES
        .iter()
        .filter(|difference| !used.contains(difference.name));
    let unused: Vec<_> = unused.map(|difference| difference.name).collect();
    assert!(
        unused.is_empty(),
        "these do not differ any more: {unused:?}"
    );
}

#[test]
fn what_is_not_agreed_on_is_a_mistake() {
    let vars = |pairs: &[(&str, &str)]| -> Vars {
        let pairs = pairs
            .iter()
            .map(|(name, value)| ((*name).into(), (*value).into()));
        [("LOCAL_WORLD_SIZE".to_owned(), "2".to_owned())]
            .into_iter()
            .chain(pairs)
            .collect()
    };
    let check = |ours: &[(&str, &str)], theirs: &[(&str, &str)], mistakes: usize| {
        let found = compare(&vars(ours), &vars(theirs), &mut BTreeSet::new());
        assert_eq!(found.len(), mistakes, "{found:?}");
    };
    check(&[("RANK", "0")], &[("RANK", "1")], 1);
    check(&[("RANK", "0")], &[], 1);
    check(&[], &[("NEW_IN_TORCH", "1")], 1);
    let restarts = |count| [("TORCHELASTIC_RESTART_COUNT", count)];
    check(&restarts("1"), &restarts("0"), 0);
    check(&restarts("0"), &restarts("1"), 1);
    check(
        &[("MASTER_ADDR", "127.0.0.1")],
        &[("MASTER_ADDR", "localhost")],
        0,
    );
    check(
        &[("MASTER_ADDR", "10.0.0.1")],
        &[("MASTER_ADDR", "localhost")],
        1,
    );
    check(&[], &[("PACELINE_STORE", "x")], 1);
    check(
        &[("OMP_NUM_THREADS", "4000")],
        &[("OMP_NUM_THREADS", "1")],
        1,
    );
}

#[test]
fn torchrun_still_gives_its_ranks_what_was_recorded() {
    let Some(python) = paceline_testing::python_with(support::TORCHRUN) else {
        return;
    };
    if std::env::var_os(RECORD).is_some() {
        record(&python);
    }
    let recorded = recorded();
    for scenario in SCENARIOS {
        let mut theirs = run(scenario, Some(&python));
        let mut expect = recorded.scenarios[scenario.name].clone();
        for ranks in [&mut theirs, &mut expect] {
            forget_agents(ranks);
        }
        assert_eq!(theirs, expect, "{}", scenario.name);
    }
}

/// Which of two nodes comes first is chance, and so is whose agent has counted a failure.
fn forget_agents(ranks: &mut Ranks) {
    for vars in ranks.values_mut() {
        vars.remove("TORCHELASTIC_RESTART_COUNT");
    }
}

/// Records anew what torchrun gives its ranks.
fn record(python: &str) {
    let version = Command::new(python)
        .args(["-c", "import torch; print(torch.__version__)"])
        .output()
        .expect("python runs");
    let scenarios = SCENARIOS
        .iter()
        .map(|scenario| (scenario.name.to_owned(), run(scenario, Some(python))));
    let recorded = Recorded {
        how: format!("{RECORD}=1 cargo test -p paceline-cli --test contract torchrun_still"),
        torch: String::from_utf8_lossy(&version.stdout).trim().to_owned(),
        scenarios: scenarios.collect(),
    };
    let text = serde_json::to_string_pretty(&recorded).expect("text");
    std::fs::write(recorded_path(), text + "\n").expect("written");
}
