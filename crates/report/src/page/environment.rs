//! The machines on which runs began.

use crate::chart::escaped;
use crate::run::Run;
use crate::words;
use paceline_usage::figures::thousands;
use paceline_words::{Lang, Word};

use super::table;

const GIB: f64 = (1_u64 << 30) as f64;

/// A table with a column for each run; nothing if no run says anything.
pub(super) fn environment(runs: &[&Run], lang: Lang) -> String {
    let columns: Vec<[Option<String>; 6]> = runs.iter().map(|run| values(run)).collect();
    let names: [Word; 6] = [
        words::HOST,
        words::CPU,
        words::CORES,
        words::MEMORY,
        words::OS,
        words::VERSION,
    ];
    let rows = names.iter().enumerate().filter_map(|(place, name)| {
        let values: Vec<Option<&String>> = columns
            .iter()
            .map(|column| column[place].as_ref())
            .collect();
        let is_known = values.iter().any(Option::is_some);
        let cell = |value: Option<&String>| value.map_or("–".to_owned(), |value| escaped(value));
        is_known.then(|| {
            let cells = values.into_iter().map(cell);
            [name.of(lang).to_owned()]
                .into_iter()
                .chain(cells)
                .collect()
        })
    });
    let rows: Vec<Vec<String>> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    let mut head = vec![String::new()];
    match runs {
        [_] => head.push(words::VALUE.of(lang).to_owned()),
        _ => head.extend(runs.iter().map(|run| escaped(&run.name))),
    }
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let title = words::ENVIRONMENT.of(lang);
    format!("<h2>{title}</h2>\n{}", table(&head, &rows))
}

fn values(run: &Run) -> [Option<String>; 6] {
    let Some(start) = &run.seen.start else {
        return Default::default();
    };
    let known = &start.environment;
    [
        known.host.clone(),
        known.cpu.clone(),
        known.cores.map(thousands),
        known
            .memory_bytes
            .map(|bytes| format!("{:.1} GiB", bytes as f64 / GIB)),
        known.os.clone(),
        known.version.clone(),
    ]
}
