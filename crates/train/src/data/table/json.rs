//! JSON lines: a flat object on each line, whose keys are the columns.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::{self, BufRead, BufReader, Read};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use super::rows::{COLUMNS_MAX, LINE_BYTES_MAX};
use crate::data::DataProblem;
use crate::data::error::quote;
use crate::data::source::not_text;

/// A value that is there, with its text.
pub(super) enum Value {
    Number(f64, String),
    Word(String),
    /// Neither of them: in Parquet a list, a struct or bytes.
    Opaque,
}

pub(super) struct JsonLines<R> {
    reader: BufReader<R>,
    /// Lines read.
    line: u64,
    /// The column of each key.
    columns: HashMap<String, usize>,
    /// The only key whose values are read; `None` reads those of all.
    wanted: Option<String>,
}

/// A line's number and its values by column.
type Line = (u64, Vec<Option<Value>>);

impl<R: Read> JsonLines<R> {
    /// The lines of a reader that stands on the first object, after so many lines; of one key only, if it is `wanted`.
    pub(super) fn open(reader: R, line: u64, wanted: Option<&str>) -> Self {
        Self {
            reader: BufReader::new(reader),
            line,
            columns: HashMap::new(),
            wanted: wanted.map(str::to_owned),
        }
    }

    pub(super) fn reader_mut(&mut self) -> &mut R {
        self.reader.get_mut()
    }

    /// The values of the next line that is not blank, or why it is no row. Keys that have not occurred before are added to `names`.
    ///
    /// *Errors*: the reader's, as `failed` words them; a line that is too long; too many keys.
    pub(super) fn next(
        &mut self,
        names: &mut Vec<String>,
        failed: impl FnOnce(&R, io::Error) -> DataProblem,
    ) -> Result<Option<Result<Line, DataProblem>>, DataProblem> {
        let mut bytes = Vec::new();
        while bytes.trim_ascii().is_empty() {
            bytes.clear();
            let mut bounded = self.reader.by_ref().take(LINE_BYTES_MAX + 1);
            match bounded.read_until(b'\n', &mut bytes) {
                Err(error) => return Err(failed(self.reader.get_ref(), error)),
                Ok(0) => return Ok(None),
                Ok(_) => self.line += 1,
            }
            if bytes.len() as u64 > LINE_BYTES_MAX {
                let line = self.line;
                return Err(DataProblem::new(format!(
                    "line {line}: longer than {LINE_BYTES_MAX} bytes"
                )));
            }
        }
        match flat(&bytes, self.line, self.wanted.as_deref()) {
            Err(problem) => Ok(Some(Err(problem))),
            Ok(object) => {
                let values = self.by_column(object, names)?;
                Ok(Some(Ok((self.line, values))))
            }
        }
    }

    fn by_column(
        &mut self,
        object: Vec<(String, Option<Value>)>,
        names: &mut Vec<String>,
    ) -> Result<Vec<Option<Value>>, DataProblem> {
        let mut values: Vec<Option<Value>> = Vec::new();
        for (key, value) in object {
            let column = match self.columns.get(&key) {
                Some(column) => *column,
                None if names.len() == COLUMNS_MAX => {
                    let (line, key) = (self.line, quote(&key));
                    return Err(DataProblem::new(format!(
                        "line {line}: with {key:?} there are more than {COLUMNS_MAX} keys"
                    )));
                }
                None => {
                    names.push(key.clone());
                    self.columns.insert(key, names.len() - 1);
                    names.len() - 1
                }
            };
            values.resize_with(values.len().max(column + 1), || None);
            values[column] = value;
        }
        Ok(values)
    }
}

/// The keys and values of a line; of other keys than the one that is `wanted`, if one is, no values.
///
/// *Errors*: no object; a nested one; a key that is there twice.
fn flat(
    bytes: &[u8],
    line: u64,
    wanted: Option<&str>,
) -> Result<Vec<(String, Option<Value>)>, DataProblem> {
    let text = str::from_utf8(bytes).map_err(|_| not_text(line, bytes))?;
    let Entries(entries) = serde_json::from_str(text).map_err(|error| {
        let why = error.to_string();
        let why = why.split(" at line").next().unwrap_or_default();
        let column = match error.is_eof() {
            true => text.trim_end().len(),
            false => error.column(),
        };
        DataProblem::new(format!(
            "line {line}: no JSON object: {why}, at column {column}"
        ))
        .with_hint("JSON lines have one whole object on each line")
    })?;
    let mut flat: Vec<(String, Option<Value>)> = Vec::with_capacity(entries.len());
    let mut seen = HashSet::new();
    for (key, value) in &entries {
        let name = quote(key);
        let problem = |what| {
            Err(DataProblem::new(format!(
                "line {line}: key {name:?} {what}"
            )))
        };
        if !seen.insert(key) {
            return problem("is there twice");
        }
        let value = match value {
            _ if wanted.is_some_and(|wanted| wanted != key) => None,
            serde_json::Value::Null => None,
            serde_json::Value::Bool(is) => Some(Value::Number(f64::from(*is), is.to_string())),
            serde_json::Value::Number(number) => {
                let number = number.as_f64().unwrap_or(f64::NAN);
                Some(Value::Number(number, number.to_string()))
            }
            serde_json::Value::String(text) if text.is_empty() => None,
            serde_json::Value::String(text) => Some(Value::Word(text.clone())),
            serde_json::Value::Array(_) => return problem("holds an array; values must be flat"),
            serde_json::Value::Object(_) => return problem("holds an object; values must be flat"),
        };
        flat.push((key.clone(), value));
    }
    Ok(flat)
}

/// An object in the order of its keys as written.
struct Entries(Vec<(String, serde_json::Value)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(InOrder)
    }
}

struct InOrder;

impl<'de> Visitor<'de> for InOrder {
    type Value = Entries;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Entries(entries))
    }
}
