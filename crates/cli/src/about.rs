//! The program's own information: its version, completions for shells, and a man page for each command. All come
//! from the definition that `--help` shows.

use std::ffi::OsString;

use clap::builder::ValueParser;
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};
use clap_complete::aot::{Shell, generate};

use crate::flags::{one_of, option, valued};

const HEADING: &str = "About this command";

/// Adds to a program and all its commands what each of them has: `--print-man`, and for the program itself `version` and
/// `help [COMMAND]`.
#[must_use]
pub fn complete(program: Command) -> Command {
    let version = Command::new("version")
        .about("Print the version")
        .disable_help_subcommand(true);
    with_man(program.subcommand(version)).disable_help_subcommand(false)
}

fn with_man(command: Command) -> Command {
    command
        .disable_help_subcommand(true)
        .arg(
            option("print_man")
                .action(ArgAction::SetTrue)
                .help("Print the man page, for `man -l -`, and do nothing else")
                .help_heading(HEADING),
        )
        .mut_subcommands(with_man)
}

/// The man page that a command line asks for, the program's name first, whatever else the command would require.
#[must_use]
pub fn page(program: &Command, words: &[OsString]) -> Option<Vec<u8>> {
    let (mut command, mut name) = (program, program.get_name().to_owned());
    let mut words = words.iter().skip(1);
    while let Some(word) = words.next() {
        let word = word.to_str()?;
        match command.find_subcommand(word) {
            Some(found) => {
                name = format!("{name} {word}");
                command = found;
            }
            None if matches!(word, "--print-man" | "--print_man") => {
                return Some(man(program.get_name(), name, command));
            }
            // What follows belongs to a program.
            None if word == "--" || !word.starts_with('-') && is_program(command) => return None,
            None if takes_value(command, word) => drop(words.next()),
            None => {}
        }
    }
    None
}

fn is_program(command: &Command) -> bool {
    command.is_allow_external_subcommands_set()
}

/// Whether the next word is this option's value. Long names may be shortened.
fn takes_value(command: &Command, word: &str) -> bool {
    let is_meant = |arg: &&Arg| match word.strip_prefix("--") {
        Some(name) => {
            let long = arg.get_long().unwrap_or_default();
            long.starts_with(&name.replace('_', "-"))
        }
        None => (arg.get_short())
            .is_some_and(|short| word.strip_prefix('-') == Some(short.encode_utf8(&mut [0; 4]))),
    };
    let takes = |arg: &Arg| {
        arg.get_num_args()
            .is_none_or(|count| count.min_values() > 0)
    };
    let found = command.get_arguments().find(is_meant);
    found.is_some_and(|arg| arg.get_action().takes_values() && takes(arg))
}

/// The option for completions of all commands, for the commands that people type first.
#[must_use]
pub fn completion_arg() -> Arg {
    let shells = one_of(&[Shell::Bash, Shell::Zsh, Shell::Fish], |shell| {
        shell.to_string()
    });
    valued("print_completion", "SHELL", ValueParser::new(shells))
        .help("Print completions of all commands, and start nothing")
        .help_heading(HEADING)
}

/// The completions that were asked for. `program` has the command as a subcommand.
#[must_use]
pub fn asked(program: &Command, matches: &ArgMatches) -> Option<Vec<u8>> {
    let shell = matches.get_one::<Shell>("print_completion")?;
    Some(completion(program, *shell))
}

fn completion(program: &Command, shell: Shell) -> Vec<u8> {
    let name = program.get_name();
    let mut program = program.clone();
    // The other shells offer files by themselves where nothing else fits.
    if shell == Shell::Zsh {
        program = program.mut_subcommands(|command| match is_program(&command) {
            true => command.arg(words()),
            false => command,
        });
    }
    let mut script = Vec::new();
    if shell != Shell::Bash || !name.contains('-') {
        generate(shell, &mut program, name, &mut script);
        return script;
    }
    // The functions of a program with a dash in its name would not find their subcommands: clap_complete writes such a
    // name in two ways. So they get another one, and only what registers them has the program's.
    let plain = name.replace('-', "_");
    generate(
        shell,
        &mut program.clone().name(plain.clone()),
        &plain,
        &mut script,
    );
    let registers = |line: &str| line.trim_start().starts_with("complete -F");
    let lines = String::from_utf8_lossy(&script).into_owned();
    let lines = lines.lines().map(|line| match line.strip_suffix(&plain) {
        Some(start) if registers(line) => format!("{start}{name}\n"),
        _ => format!("{line}\n"),
    });
    lines.collect::<String>().into_bytes()
}

/// The program and its arguments, which the command itself takes as clap's external subcommand.
fn words() -> Arg {
    Arg::new("program")
        .value_name("PROGRAM")
        .num_args(1..)
        .trailing_var_arg(true)
        .value_hint(ValueHint::CommandWithArguments)
}

/// The page of the command that is called `line`.
fn man(program: &str, line: String, command: &Command) -> Vec<u8> {
    let version = format!("{program} {}", env!("CARGO_PKG_VERSION"));
    let title = line.replace(' ', "-");
    let command = command.clone().bin_name(line).name(title);
    let page = clap_mangen::Man::new(command).source(version);
    let mut roff = Vec::new();
    page.render(&mut roff)
        .expect("memory takes what is written");
    // A line break beside an empty line does nothing, and readers of man pages complain of it.
    let roff = String::from_utf8_lossy(&roff);
    roff.replace(
        ".br

.br
",
        "
",
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use std::process::{Command as Process, Stdio};

    use super::*;
    use crate::launcher;

    /// What bash offers for the last word of a line.
    fn offered(program: &Command, line: &str) -> Vec<String> {
        let words: Vec<&str> = line.split(' ').collect();
        let function = String::from_utf8(completion(program, Shell::Bash)).expect("text");
        let (cur, prev) = (words[words.len() - 1], words[words.len() - 2]);
        let quoted: Vec<_> = words.iter().map(|word| format!("'{word}'")).collect();
        let script = format!(
            "{function}\nCOMP_WORDS=({}); COMP_CWORD={}\n\
             [[ $(complete -p {name}) =~ -F\\ ([^ ]+) ]] && ${{BASH_REMATCH[1]}} {name} '{cur}' '{prev}'\n\
             printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            quoted.join(" "),
            words.len() - 1,
            name = words[0],
        );
        let ended = Process::new("bash")
            .args(["--norc", "-c", &script])
            .stdin(Stdio::null())
            .output()
            .expect("bash runs");
        assert!(
            ended.stderr.is_empty(),
            "{}",
            String::from_utf8_lossy(&ended.stderr)
        );
        let text = String::from_utf8(ended.stdout).expect("text");
        text.lines()
            .filter(|line| !line.is_empty())
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn bash_completes_commands_and_options_and_leaves_the_program_to_itself() {
        for name in ["paceline", "paceline-launcher"] {
            let program = launcher().name(name);
            let check = |line: &str, expect: &[&str]| {
                assert_eq!(
                    offered(&program, &format!("{name} {line}")),
                    expect,
                    "{name} {line}"
                );
            };
            check("ru", &["run"]);
            check("run --nn", &["--nnodes"]);
            check(
                "run --nnodes 2 --master-",
                &["--master-addr", "--master-port"],
            );
            // Nothing to offer: then bash offers files, as it was told with `-o default`.
            check("run --nnodes 2 train", &[]);
        }
    }

    #[test]
    fn zsh_and_fish_know_every_option() {
        let program = launcher();
        for shell in [Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(completion(&program, shell)).expect("text");
            for arg in crate::run::command().get_arguments() {
                let long = arg.get_long().expect("every option has a name");
                assert!(script.contains(long), "{shell}: {long}");
            }
        }
    }

    fn page_of(line: &str) -> Option<String> {
        let words: Vec<_> = line.split(' ').map(OsString::from).collect();
        page(&launcher(), &words).map(|page| String::from_utf8(page).expect("text"))
    }

    #[test]
    fn the_man_page_has_every_option() {
        let text = page_of("paceline-launcher run --print-man").expect("a page");
        assert!(text.contains(".TH paceline-launcher-run 1"), "{text}");
        let top = page_of("paceline-launcher gpu top --print-man").expect("a page");
        let synopsis = "\\fBpaceline\\-launcher gpu top\\fR";
        assert!(top.contains(synopsis), "{top}");
        for arg in crate::run::command().get_arguments() {
            let long = arg.get_long().expect("every option has a name");
            let written = format!("\\-\\-{}", long.replace('-', "\\-"));
            assert!(text.contains(&written), "{written}");
        }
    }

    #[test]
    fn every_command_has_a_page_and_a_program_keeps_its_own_options() {
        let check = |line: &str, expect: Option<&str>| {
            let title = page_of(line).map(|page| {
                let line = page.lines().find_map(|line| line.strip_prefix(".TH "));
                line.and_then(|line| line.split(' ').next())
                    .expect("a title")
                    .to_owned()
            });
            assert_eq!(title.as_deref(), expect, "{line}");
        };
        check("p --print-man", Some("paceline-launcher"));
        check(
            "p submit slurm --print_man",
            Some("paceline-launcher-submit-slurm"),
        );
        check(
            "p submit kubernetes --print-man",
            Some("paceline-launcher-submit-kubernetes"),
        );
        check("p gpu top --print-man", Some("paceline-launcher-gpu-top"));
        check(
            "p doctor --nnodes 2 --print-man",
            Some("paceline-launcher-doctor"),
        );
        check(
            "p run -r 3 --nn 2 --standalone --print-man prog",
            Some("paceline-launcher-run"),
        );
        check("p run prog --print-man", None);
        check("p run -- prog --print-man", None);
        check("p run --nnodes 2 prog", None);
    }

    #[test]
    fn version_and_help_are_commands_too() {
        let matches = launcher()
            .try_get_matches_from(["p", "version"])
            .expect("a command");
        let read = crate::Command::read(
            &launcher(),
            "version",
            matches.subcommand_matches("version").expect("it"),
        );
        let expect = format!("paceline-launcher {}\n", env!("CARGO_PKG_VERSION"));
        assert_eq!(
            read.expect("known").expect("right"),
            crate::Command::Print(expect.into_bytes())
        );
        for line in ["p help", "p help run", "p help submit slurm"] {
            let stopped = launcher()
                .try_get_matches_from(line.split(' '))
                .expect_err(line);
            assert!(!stopped.use_stderr(), "{stopped}");
        }
    }
}
