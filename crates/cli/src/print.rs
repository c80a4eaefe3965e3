//! What the commands print about themselves for other programs: completions for shells, and a man page. Both come from
//! the definition that `--help` shows.

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};
use clap_complete::aot::{Shell, generate};

use crate::flags::{option, valued};

const HEADING: &str = "About this command";

/// The options.
#[must_use]
pub fn args() -> [Arg; 2] {
    [
        valued("print_completion", "SHELL", shell)
            .help("Print completions of all commands for bash, zsh or fish, and start nothing"),
        option("print_man")
            .action(ArgAction::SetTrue)
            .help("Print the man page, for `man -l -`, and start nothing"),
    ]
    .map(|arg| arg.help_heading(HEADING))
}

/// What is to be printed, if something is. `program` has the command as a subcommand.
#[must_use]
pub fn asked(program: &Command, command: &Command, matches: &ArgMatches) -> Option<Vec<u8>> {
    if let Some(shell) = matches.get_one::<Shell>("print_completion") {
        return Some(completion(program, *shell));
    }
    matches
        .get_flag("print_man")
        .then(|| man(program.get_name(), command))
}

fn shell(text: &str) -> Result<Shell, String> {
    match text {
        "bash" => Ok(Shell::Bash),
        "zsh" => Ok(Shell::Zsh),
        "fish" => Ok(Shell::Fish),
        "tcsh" => Err("expected bash, zsh or fish; there are none for tcsh".to_owned()),
        _ => Err("expected bash, zsh or fish".to_owned()),
    }
}

fn completion(program: &Command, shell: Shell) -> Vec<u8> {
    let name = program.get_name();
    let mut program = program.clone();
    // The other shells offer files by themselves where nothing else fits.
    if shell == Shell::Zsh && program.find_subcommand("run").is_some() {
        program = program.mut_subcommand("run", |run| run.arg(words()));
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

/// The page of a command, named as for the program that has it.
fn man(program: &str, command: &Command) -> Vec<u8> {
    let title = format!("{program}-{}", command.get_name());
    let version = format!("{program} {}", env!("CARGO_PKG_VERSION"));
    let page = clap_mangen::Man::new(command.clone().name(title)).source(version);
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

    #[test]
    fn shells_without_completions_are_refused() {
        assert_eq!(shell("bash"), Ok(Shell::Bash));
        for text in ["tcsh", "sh", ""] {
            let why = shell(text).expect_err(text);
            assert!(why.starts_with("expected bash, zsh or fish"), "{why}");
        }
    }

    #[test]
    fn the_man_page_has_every_option() {
        let command = crate::run::command();
        let page = String::from_utf8(man("paceline", &command)).expect("text");
        assert!(page.contains(".TH paceline-run 1"), "{page}");
        for arg in command.get_arguments() {
            let long = arg.get_long().expect("every option has a name");
            let written = format!("\\-\\-{}", long.replace('-', "\\-"));
            assert!(page.contains(&written), "{written}");
        }
    }
}
