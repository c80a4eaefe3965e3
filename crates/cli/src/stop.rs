//! Command lines that end the program: help, the version, and mistakes with what was probably meant.

use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use paceline_launch::find_program;

use crate::exit::Exit;
use crate::{run, variables};

/// A command line that ends the program: by asking for help or the version, or by a mistake.
#[derive(Debug)]
pub struct Stop(pub clap::Error);

/// Other launchers' names for options of `run`, and the names here.
const ELSEWHERE: [(&str, &str); 14] = [
    ("gpus", "--nproc-per-node"),
    ("num_gpus", "--nproc-per-node"),
    ("ngpus", "--nproc-per-node"),
    ("gpus_per_node", "--nproc-per-node"),
    ("num_processes", "--nproc-per-node"),
    ("n", "--nproc-per-node"),
    ("np", "--nproc-per-node"),
    ("workers", "--nproc-per-node"),
    ("nodes", "--nnodes"),
    ("num_nodes", "--nnodes"),
    ("num_machines", "--nnodes"),
    ("machine_rank", "--node-rank"),
    ("main_process_ip", "--master-addr"),
    ("main_process_port", "--master-port"),
];

impl Stop {
    /// What clap reports, with our tip in place of clap's guess by spelling if there is one: the program's own, or one of those
    /// for users of other launchers.
    #[must_use]
    pub fn new(mut error: clap::Error, tip: Option<String>) -> Self {
        variables::blame(&mut error, |name| std::env::var_os(name));
        if let Some(tip) = tip.or_else(|| advice(&error)) {
            error.remove(ContextKind::SuggestedSubcommand);
            if error.remove(ContextKind::SuggestedArg).is_some() {
                // The usage line that clap wrote ends with its guess.
                error.remove(ContextKind::Usage);
            }
            let tip = ContextValue::StyledStrs(vec![tip.into()]);
            error.insert(ContextKind::Suggested, tip);
        }
        Self(error)
    }

    /// How to end.
    #[must_use]
    pub fn exit(&self) -> Exit {
        if self.0.use_stderr() {
            Exit::Usage
        } else {
            Exit::Done
        }
    }

    /// Prints help and version on stdout, a mistake on stderr, and returns how to end.
    ///
    /// Coloured on a terminal only, and not with `NO_COLOR`.
    #[must_use]
    pub fn report(self) -> Exit {
        // A closed pipe, as in `paceline --help | head`, is no failure.
        let _ = self.0.print();
        self.exit()
    }
}

/// Advice for a command line that torchrun or another launcher would have understood.
fn advice(error: &clap::Error) -> Option<String> {
    if let (ErrorKind::InvalidSubcommand, Some(ContextValue::String(program))) =
        (error.kind(), error.get(ContextKind::InvalidSubcommand))
    {
        // What is no program is a mistyped command, for which clap has its own tip.
        return is_program(program)
            .then(|| format!("to start it as the ranks of a job: `paceline run {program}`"));
    }
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let option = option.split('=').next().unwrap_or(option);
    let name = option.trim_start_matches('-').replace('-', "_");
    let ours = ELSEWHERE.iter().find(|(other, _)| *other == name);
    let of_run = run::command();
    let is_known = of_run.get_arguments().any(|arg| *arg.get_id() == *name);
    match (command(error).as_str(), ours) {
        ("run" | "doctor" | "bench", Some((_, ours))) => {
            Some(format!("'{option}' is called '{ours}' here"))
        }
        ("run", None) => error.get(ContextKind::SuggestedArg).is_none().then(|| {
            format!("options of the program go after its name: `paceline run PROGRAM {option} ...`")
        }),
        ("", _) => is_known
            .then(|| format!("'{option}' is an option of `paceline run` and goes after `run`")),
        _ => None,
    }
}

/// Whether a word looks like a program: a path or a file with an ending, or a command in `PATH`.
fn is_program(word: &str) -> bool {
    let is_in_path = || find_program(Path::new(word), &|name| std::env::var_os(name)).is_ok();
    word.contains(['/', '.']) || is_in_path()
}

/// The command whose line is wrong; empty for the program itself.
fn command(error: &clap::Error) -> String {
    let usage = match error.get(ContextKind::Usage) {
        Some(ContextValue::StyledStr(usage)) => usage.to_string(),
        _ => String::new(),
    };
    let mut words = usage.trim_start_matches("Usage:").split_whitespace();
    let is_name = |word: &&str| word.starts_with(|letter: char| letter.is_ascii_lowercase());
    words.nth(1).filter(is_name).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(line: &str, expect: Option<&str>) {
        let words = std::iter::once("paceline").chain(line.split_whitespace());
        let program = crate::launcher().name("paceline");
        let error = program.try_get_matches_from(words).expect_err(line);
        assert_eq!(advice(&error).as_deref(), expect, "{line}");
        let guess = error
            .get(ContextKind::SuggestedArg)
            .map(|guess| format!("{guess} <"));
        let shown = Stop::new(error, None).0.to_string();
        match expect {
            Some(tip) => {
                assert!(shown.contains(&format!("  tip: {tip}\n")), "{shown}");
                assert!(guess.is_none_or(|guess| !shown.contains(&guess)), "{shown}");
            }
            None => assert!(!shown.contains("`paceline run"), "{shown}"),
        }
        assert!(shown.matches("tip: ").count() <= 1, "{shown}");
    }

    #[test]
    fn a_command_line_without_run_is_told_of_it() {
        let expect = "to start it as the ranks of a job: `paceline run train.py`";
        check("train.py --epochs 3", Some(expect));
        let expect = "'--nproc_per_node' is an option of `paceline run` and goes after `run`";
        check("--nproc_per_node=2 train.py", Some(expect));
        check("--epochs 2 train.py", None);
        let expect = "to start it as the ranks of a job: `paceline run sh`";
        check("sh -c true", Some(expect));
        // A mistyped command.
        check("docter --nnodes 2", None);
        check("run --nnods 2 train.py", None);
        let expect =
            "options of the program go after its name: `paceline run PROGRAM --epochs ...`";
        check("run --epochs 2 train.py", Some(expect));
    }

    #[test]
    fn other_launchers_options_are_told_their_names_here() {
        for (line, other, ours) in [
            ("run --gpus 2 prog", "--gpus", "--nproc-per-node"),
            ("run -n 2 prog", "-n", "--nproc-per-node"),
            ("run -np 2 prog", "-n", "--nproc-per-node"),
            ("bench --np 2", "--np", "--nproc-per-node"),
            ("run --num_nodes=2 prog", "--num_nodes", "--nnodes"),
            (
                "run --main_process_port 1 prog",
                "--main_process_port",
                "--master-port",
            ),
        ] {
            check(line, Some(&format!("'{other}' is called '{ours}' here")));
        }
    }
}
