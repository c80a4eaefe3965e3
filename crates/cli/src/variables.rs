//! The environment's form of each option: `PET_NNODES` for `--nnodes`, as torchrun reads it.
//!
//! The command line wins over the variable, and the variable over the default. Two options have a second variable, which
//! is read where the first is not set. An empty variable counts as not set: that is what `PET_NNODES= paceline run ...`
//! means.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction};

/// An option that prints something and ends the program has no variable.
const WITHOUT: &str = "print_completion";

/// Options with a second variable, which torchrun reads where nothing else is said.
const SECOND: [(&str, &str); 2] = [
    ("shutdown_timeout", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    (
        "log_line_prefix_template",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    ),
];

/// The option, with the variable's value where there is one.
pub(crate) fn read(arg: Arg) -> Arg {
    let id = arg.get_id().as_str();
    let is_flag = matches!(arg.get_action(), ArgAction::SetTrue);
    let Some((name, value)) = chosen(id, |name| std::env::var_os(name)) else {
        return arg;
    };
    if !is_flag {
        return arg.env(name).hide_env(true);
    }
    // A flag that is set to nothing must not clash with others.
    if value.to_str().map(flag) == Some(Ok(false)) {
        return arg;
    }
    arg.env(name).hide_env(true).value_parser(flag)
}

/// The variable that counts for an option, and its value.
fn chosen(option: &str, var: impl Fn(&str) -> Option<OsString>) -> Option<(String, OsString)> {
    if option == WITHOUT {
        return None;
    }
    let mut names = names(option);
    names.find_map(|name| Some((name.clone(), var(&name).filter(|value| !value.is_empty())?)))
}

/// The variables of an option, the first one first; torchrun's for one called `--some-name`, whose own name is `some_name`.
fn names(option: &str) -> impl Iterator<Item = String> {
    let second = SECOND.iter().find(|(name, _)| *name == option);
    std::iter::once(format!("PET_{}", option.to_uppercase()))
        .chain(second.map(|(_, variable)| (*variable).to_owned()))
}

/// A flag's variable, of which torchrun takes whole numbers; the words are what clap calls a flag's values.
fn flag(text: &str) -> Result<bool, String> {
    match (text.parse::<i64>(), text.parse::<bool>()) {
        (Ok(number), _) => Ok(number != 0),
        (_, Ok(word)) => Ok(word),
        _ => Err("expected 1 or 0".to_owned()),
    }
}

/// Says in an error about an option's value that the value comes from the variable, if it does.
pub(crate) fn blame(error: &mut clap::Error, var: impl Fn(&str) -> Option<OsString>) {
    let (Some(ContextValue::String(option)), Some(ContextValue::String(value))) = (
        error.get(ContextKind::InvalidArg),
        error.get(ContextKind::InvalidValue),
    ) else {
        return;
    };
    let long = option.split_whitespace().next().unwrap_or_default();
    let name = long.trim_start_matches('-').replace('-', "_");
    if let Some((name, set)) = chosen(&name, var)
        && set.to_string_lossy() == value.as_str()
    {
        let both = format!("{name}, the environment's form of {option}");
        error.insert(ContextKind::InvalidArg, ContextValue::String(both));
    }
}

/// The variable of a setting of `paceline train`.
pub(crate) fn setting_variable(key: &str) -> String {
    format!("PACELINE_{}", key.to_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::valued;

    #[test]
    fn a_flags_variable_is_a_number_as_for_torchrun() {
        let check = |text: &str, expect| assert_eq!(flag(text).ok(), expect, "{text}");
        check("1", Some(true));
        check("2", Some(true));
        check("0", Some(false));
        check("false", Some(false));
        check("yes", None);
    }

    #[test]
    fn torchruns_variable_counts_before_the_second_one_and_an_empty_one_does_not_count() {
        let check = |option: &str, set: &[(&str, &str)], expect: Option<(&str, &str)>| {
            let var = |name: &str| {
                let found = set.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| OsString::from(value))
            };
            let expect = expect.map(|(name, value)| (name.to_owned(), value.into()));
            assert_eq!(chosen(option, var), expect, "{option}");
        };
        check("nnodes", &[("PET_NNODES", "2")], Some(("PET_NNODES", "2")));
        check("nnodes", &[("PET_NNODES", ""), ("NNODES", "2")], None);
        let second = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5");
        check("shutdown_timeout", &[second], Some(second));
        let first = ("PET_SHUTDOWN_TIMEOUT", "7");
        check("shutdown_timeout", &[second, first], Some(first));
        check(
            "print_completion",
            &[("PET_PRINT_COMPLETION", "bash")],
            None,
        );
    }

    #[test]
    fn an_error_names_the_variable_that_has_the_value() {
        let text = |value: Option<&str>| {
            let count = valued("master_port", "PORT", clap::value_parser!(u16));
            let command = clap::Command::new("run").no_binary_name(true).arg(count);
            let mut error = command
                .try_get_matches_from(["--master-port", "x"])
                .expect_err("no number");
            blame(&mut error, |name| {
                assert_eq!(name, "PET_MASTER_PORT");
                value.map(OsString::from)
            });
            error.to_string()
        };
        let named = "invalid value 'x' for 'PET_MASTER_PORT, the environment's form of --master-port <PORT>'";
        assert!(text(Some("x")).contains(named), "{}", text(Some("x")));
        for other in [None, Some("y")] {
            assert!(!text(other).contains("PET_"), "{}", text(other));
        }
    }
}
