//! Reads settings from their sources: flags, environment, file, and a run's saved file.

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};

use paceline_rendezvous::env;
use serde::{Deserialize, Serialize};
use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, about};
use super::kind::Written;
use super::settings::Settings;
use super::table::{Of, OptionRow, UserProgram, VARIABLE_PREFIX, option, synonym};
use super::value::{Setting, Source};

/// A settings file's text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileText {
    /// The file's path, as used in messages.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
}

impl FileText {
    /// Reads a file.
    ///
    /// *Errors*: it cannot be read, or is not UTF-8.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            let path = path.display();
            ConfigError::without_hint(format!("cannot read the settings in {path}: {error}"))
        })?;
        Ok(Self {
            path: path.to_owned(),
            text,
        })
    }
}

/// This process's environment, for [`Inputs::environment`](super::Inputs::environment).
///
/// Invalid UTF-8 is replaced, so that an error can show the rest.
#[must_use]
pub fn environment(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Vec<(String, String)> {
    let text = |(name, value)| (lossy(name), lossy(value));
    variables.into_iter().map(text).collect()
}

/// The key of the program in a run's saved settings.
pub(super) const PROGRAM: &str = "program";

fn is_setting(name: &str, program: Option<&UserProgram>) -> bool {
    OptionRow::all_of(program).any(|row| row.variable() == name)
}

/// The variables of ranks and tools that are not settings, for `--explain`.
pub(super) fn of_contract(
    variables: &[(String, String)],
    program: Option<&UserProgram>,
) -> Vec<env::Listed> {
    let get = |name: &str| {
        let found = variables.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.clone())
    };
    let mut listed = env::list(&get);
    listed.retain(|listed| !is_setting(listed.variable.name, program));
    listed
}

fn lossy(text: OsString) -> String {
    text.to_string_lossy().into_owned()
}

/// Settings from flags, given by key.
pub(super) fn from_flags(
    flags: &[(String, String)],
    program: Option<&UserProgram>,
) -> Result<Settings, ConfigError> {
    let mut settings = Settings::default();
    for (key, text) in flags {
        let source = Source::Flag(format!("--{}", key.replace('_', "-")));
        let row = option(key).ok_or_else(|| ConfigError::unknown_key(key, &source))?;
        require_own(row, program, &source)?;
        settings.insert(row, read_bare(row, text, source)?);
    }
    Ok(settings)
}

/// Settings from the environment; an empty variable counts as not set, as usual.
pub(super) fn from_environment(
    variables: &[(String, String)],
    program: Option<&UserProgram>,
) -> Result<Settings, ConfigError> {
    let mut settings = Settings::default();
    for row in OptionRow::all_of(program) {
        let variable = row.variable();
        let Some((_, text)) = variables.iter().find(|(name, _)| *name == variable) else {
            continue;
        };
        if !text.is_empty() {
            settings.insert(row, read_bare(row, text, Source::Environment(variable))?);
        }
    }
    Ok(settings)
}

/// Refuses a setting that the program does not have.
fn require_own(
    row: &OptionRow,
    program: Option<&UserProgram>,
    source: &Source,
) -> Result<(), ConfigError> {
    match program.filter(|_| !row.is_of(program)) {
        None => Ok(()),
        Some(program) => Err(ConfigError::new(
            format!(
                "`{}` ({source}) is a setting of `paceline train`, and {} has {} of its own",
                row.key,
                program.name,
                match row.of {
                    Of::Data => "data and a model",
                    _ => "a model",
                },
            ),
            "remove it",
        )),
    }
}

fn read_bare(row: &'static OptionRow, text: &str, source: Source) -> Result<Setting, ConfigError> {
    match row.kind.read(Written::Bare(text)) {
        Some(value) => Ok(Setting::new(value, source)),
        None => Err(ConfigError::bad_value(row, text, &source)),
    }
}

/// A warning for each variable with our prefix that is not a setting.
///
/// Unlike in a file, this is not an error: a site may have its own variables with our prefix.
pub(super) fn unused_variables(
    variables: &[(String, String)],
    program: Option<&UserProgram>,
) -> Vec<String> {
    let known = |name: &str| env::is_known(name) || is_setting(name, program);
    let warning = |name: &str| {
        let key = name.strip_prefix(VARIABLE_PREFIX)?;
        let contract = env::VARIABLES.iter().chain(env::TOOL_VARIABLES);
        let contract = contract.filter_map(|variable| variable.name.strip_prefix(VARIABLE_PREFIX));
        let known = contract.map(str::to_lowercase);
        let own = OptionRow::all_of(program);
        let known = known.chain(own.map(|row| row.key.to_owned()));
        let nearest = synonym(key)
            .filter(|row| row.is_of(program))
            .map(|row| row.key.to_owned());
        let nearest = nearest.or_else(|| env::nearest(&key.to_lowercase(), known));
        let advice = nearest.map(|key| {
            let name = key.to_uppercase();
            format!(" (did you mean {VARIABLE_PREFIX}{name}?)")
        });
        Some(format!(
            "environment variable {name} is not a setting and has no effect{}",
            advice.unwrap_or_default()
        ))
    };
    variables
        .iter()
        .filter(|(name, _)| !known(name))
        .filter_map(|(name, _)| warning(name))
        .collect()
}

/// The owner of a settings file.
#[derive(Clone, Copy)]
pub(super) enum FileOf {
    User,
    Run,
}

/// Settings from a file.
pub(super) fn from_file(
    file: &FileText,
    of: FileOf,
    program: Option<&UserProgram>,
) -> Result<Settings, ConfigError> {
    let table = DeTable::parse(&file.text).map_err(|error| not_toml(file, &error))?;
    // In file order, so that the first mistake is the one reported.
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    let mut settings = Settings::default();
    for (key, value) in entries {
        let here = Source::File {
            path: file.path.clone(),
            line: place(&file.text, key.span().start).0,
        };
        let name = key.get_ref().as_ref();
        if let (FileOf::Run, PROGRAM, DeValue::String(program)) = (of, name, value.get_ref()) {
            settings.program = Some(UserProgram {
                name: program.clone().into_owned(),
                reads_data: table.get_ref().contains_key("task"),
            });
            continue;
        }
        let row = option(name).ok_or_else(|| match value.get_ref() {
            DeValue::Table(_) => ConfigError::new(
                format!("unknown table `[{name}]` ({here}): settings are top-level keys"),
                format!("remove the line `[{name}]`"),
            ),
            _ => ConfigError::unknown_key(name, &here),
        })?;
        require_own(row, program, &here)?;
        let read = (row.kind.read(written(value.get_ref())))
            .ok_or_else(|| ConfigError::bad_value(row, quote(&file.text, value.span()), &here))?;
        let source = match of {
            FileOf::User => here,
            FileOf::Run => Source::Run(file.path.clone()),
        };
        settings.insert(row, Setting::new(read, source));
    }
    Ok(settings)
}

fn written<'a>(value: &'a DeValue<'_>) -> Written<'a> {
    match value {
        DeValue::String(text) => Written::String(text),
        DeValue::Integer(number) if number.radix() == 10 => Written::Number(number.as_str()),
        DeValue::Float(number) => Written::Number(number.as_str()),
        DeValue::Boolean(switch) => Written::Boolean(*switch),
        _ => Written::Other,
    }
}

/// The first line of a value as written in the file.
fn quote(text: &str, span: Range<usize>) -> &str {
    text[span].lines().next().unwrap_or_default()
}

fn not_toml(file: &FileText, error: &toml::de::Error) -> ConfigError {
    let path = file.path.display();
    let start = error.span().map_or(0, |span| span.start);
    let (line, column) = place(&file.text, start);
    let text = file.text.lines().nth(line - 1).unwrap_or_default();
    if let Some((key, rest)) = text.split_once('=')
        && rest.split('#').next().unwrap_or_default().trim().is_empty()
    {
        let key = key.trim();
        let about = option(key).map(|row| format!("; {}", about(row)));
        return ConfigError::new(
            format!("{path}:{line}: `{key}` has no value"),
            format!(
                "add a value, or remove the line{}",
                about.unwrap_or_default()
            ),
        );
    }
    let message = error.message().lines().collect::<Vec<_>>().join(", ");
    ConfigError::without_hint(format!("{path}:{line}:{column}: not valid TOML: {message}"))
}

/// Line and column of a byte, counted from 1.
fn place(text: &str, byte: usize) -> (usize, usize) {
    let before = &text[..text.floor_char_boundary(byte)];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let line = before.matches('\n').count() + 1;
    (line, before[line_start..].chars().count() + 1)
}
