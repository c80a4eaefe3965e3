//! The user's choices about the ranks' logs, and how they are written on a command line.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use super::prefix::PrefixTemplate;
use super::stream::Stream;

/// Most entries in one list of ranks or words.
const ENTRIES_MAX: usize = 4096;

/// How the ranks' output looks on the console, and which lines also go to files.
///
/// The default is every line of every rank as `[rank 3] line`, and whatever the files take.
///
/// *Source*: the options of torchrun with the same names, except that files are always written: `redirects` only takes
/// a stream off the console, and `tee` puts it back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Logs")]
pub struct LogOptions {
    /// Keep these streams off the console: 0 none, 1 stdout, 2 stderr, 3 both, or a map of local ranks such as 0:1,12:3; the
    /// files have them anyway
    #[arg(long, short = 'r', value_name = "STREAMS", default_value = "0")]
    #[arg(hide_default_value = true)]
    pub redirects: StreamMap,
    /// Show these streams on the console whatever --redirects says
    #[arg(long, short = 't', value_name = "STREAMS", default_value = "0")]
    #[arg(hide_default_value = true)]
    pub tee: StreamMap,
    /// Show only these local ranks on the console, such as 0,2 or 0-3; the files have all
    #[arg(id = "local_ranks_filter", long = "local-ranks-filter")]
    #[arg(value_name = "RANKS")]
    pub local_ranks: Option<RankFilter>,
    /// What stands before each line, with ${role_name}, ${local_rank}, ${rank} and ${hostname} [default: '[rank ${rank}] '] [env:
    /// TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE]
    #[arg(id = "log_line_prefix_template", long = "log-line-prefix-template")]
    #[arg(value_name = "TEXT")]
    pub prefix: Option<PrefixTemplate>,
    /// Write the lines of stdout that have one of these words, divided by commas, also to filtered_stdout.log
    #[arg(id = "duplicate_stdout_filters", long = "duplicate-stdout-filters")]
    #[arg(value_name = "WORDS")]
    #[arg(default_value = "", hide_default_value = true)]
    pub filter_out: LineFilter,
    /// Write the lines of stderr that have one of these words also to filtered_stderr.log
    #[arg(id = "duplicate_stderr_filters", long = "duplicate-stderr-filters")]
    #[arg(value_name = "WORDS")]
    #[arg(default_value = "", hide_default_value = true)]
    pub filter_err: LineFilter,
    /// How lines are written on the console; json is one object a line, with time, rank and host
    #[arg(id = "log_format", long = "log-format", value_name = "FORMAT")]
    #[arg(default_value = "text")]
    #[arg(value_parser = PossibleValuesParser::new(["text", "json"]).map(|name| LogFormat::named(&name)))]
    pub format: LogFormat,
    /// Write the time, in UTC, before each line on the console
    #[arg(id = "log_timestamps", long = "log-timestamps")]
    pub timestamps: bool,
    /// Whether equal lines that several ranks print within a moment are printed once, as `[ranks 0-7] line`. A line
    /// then waits up to [`FOLD_WINDOW`](crate::FOLD_WINDOW). JSON lines are never folded.
    #[arg(skip)]
    pub fold: bool,
    /// A file that gets as long as this is renamed to `<name>.1`, and a new one begins; so the newest lines are kept.
    #[arg(skip)]
    pub file_bytes_max: Option<u64>,
}

impl LogOptions {
    /// Whether a stream of a local rank reaches the console.
    pub(crate) fn shows(&self, local_rank: usize, stream: Stream) -> bool {
        let is_wanted = self
            .local_ranks
            .as_ref()
            .is_none_or(|ranks| ranks.0.contains(&local_rank));
        let is_kept = !self.redirects.has(local_rank, stream) || self.tee.has(local_rank, stream);
        is_wanted && is_kept
    }

    pub(crate) fn filter(&self, stream: Stream) -> &LineFilter {
        match stream {
            Stream::Out => &self.filter_out,
            Stream::Err => &self.filter_err,
        }
    }
}

/// How a line is written on the console.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// A prefix and the line.
    #[default]
    Text,
    /// One JSON object a line: `time`, `rank`, `local_rank`, `host`, `stream`, `attempt` and `text`.
    Json,
}

impl LogFormat {
    fn named(name: &str) -> Self {
        match name {
            "json" => Self::Json,
            _ => Self::Text,
        }
    }
}

/// Which streams of which local ranks: `0` none, `1` standard output, `2` standard error, `3` both, for all ranks or
/// for those of a map, `0:1,12:3`.
///
/// ```
/// use paceline_launch::StreamMap;
///
/// assert!("0:1,12:3".parse::<StreamMap>().is_ok());
/// assert!("4".parse::<StreamMap>().is_err());
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StreamMap {
    of_rank: BTreeMap<usize, u8>,
    of_others: u8,
}

impl StreamMap {
    fn has(&self, local_rank: usize, stream: Stream) -> bool {
        let bits = self.of_rank.get(&local_rank).unwrap_or(&self.of_others);
        bits & (1 << stream as u8) != 0
    }
}

impl FromStr for StreamMap {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let refused = || {
            let what = "a choice of streams: expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a map of local \
                ranks such as 0:1,12:3";
            not_a(what, text)
        };
        let bits = |text: &str| match text {
            "0" | "1" | "2" | "3" => Ok(text.as_bytes()[0] - b'0'),
            _ => Err(refused()),
        };
        let mut map = Self::default();
        if !text.contains(':') {
            map.of_others = bits(text)?;
            return Ok(map);
        }
        for entry in text.split(',') {
            let (rank, streams) = entry.split_once(':').ok_or_else(refused)?;
            let rank = rank_number(rank).ok_or_else(refused)?;
            // There are at most so many ranks, however long the list is.
            map.of_rank.insert(rank, bits(streams)?);
        }
        Ok(map)
    }
}

/// The local ranks whose lines reach the console: `0,2` or `0-3,8`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankFilter(BTreeSet<usize>);

impl FromStr for RankFilter {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let refused = || {
            let what =
                "a list of local ranks: expected numbers divided by commas, such as 0,2 or 0-3,8";
            not_a(what, text)
        };
        let mut ranks = BTreeSet::new();
        for entry in text.split(',') {
            let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
            let (first, last) = rank_number(first)
                .zip(rank_number(last))
                .filter(|(first, last)| first <= last)
                .ok_or_else(refused)?;
            ranks.extend(first..=last);
        }
        Ok(Self(ranks))
    }
}

/// Lines that contain one of these words; with no word, none. Words are divided by commas, `,,` is a comma.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LineFilter(Vec<Vec<u8>>);

impl LineFilter {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn takes(&self, line: &[u8]) -> bool {
        let contains = |word: &Vec<u8>| line.windows(word.len()).any(|window| window == word);
        self.0.iter().any(contains)
    }
}

impl FromStr for LineFilter {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let mut words = vec![Vec::new()];
        let mut bytes = text.bytes().peekable();
        while let Some(byte) = bytes.next() {
            if byte == b',' && bytes.next_if_eq(&b',').is_none() {
                words.push(Vec::new());
            } else if let Some(word) = words.last_mut() {
                word.push(byte);
            }
        }
        // An empty word would take every line.
        words.retain(|word| !word.is_empty());
        if words.len() > ENTRIES_MAX {
            let text = format!("more than {ENTRIES_MAX} words to look for");
            return Err(OptionError(text));
        }
        Ok(Self(words))
    }
}

/// A choice about logs that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OptionError(pub(super) String);

/// A rank that one machine can have.
fn rank_number(text: &str) -> Option<usize> {
    let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|number| *number < ENTRIES_MAX);
    number.filter(|_| is_plain)
}

/// The error of a text that is not `what`.
fn not_a(what: &str, got: &str) -> OptionError {
    let got: String = got.chars().take(100).collect();
    OptionError(format!("`{got}` is not {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_chosen_for_all_ranks_or_by_a_map() {
        let check = |text: &str, rank, expect: [bool; 2]| {
            let map: StreamMap = text.parse().unwrap();
            let got = Stream::BOTH.map(|stream| map.has(rank, stream));
            assert_eq!(got, expect, "{text} for rank {rank}");
        };
        check("0", 5, [false, false]);
        check("1", 5, [true, false]);
        check("2", 5, [false, true]);
        check("3", 5, [true, true]);
        check("0:1,12:3", 0, [true, false]);
        check("0:1,12:3", 12, [true, true]);
        check("0:1,12:3", 1, [false, false]);
    }

    #[test]
    fn what_is_no_choice_of_streams_is_refused_with_the_words_that_are() {
        for text in [
            "", "4", "-1", "0:", ":1", "0:4", "0:1,", "a:1", "0:1 ,1:1", "99999:1", "+1:1",
        ] {
            let error = text.parse::<StreamMap>().unwrap_err();
            assert!(error.to_string().contains("0:1,12:3"), "{text}: {error}");
        }
    }

    #[test]
    fn ranks_are_listed_one_by_one_or_as_ranges() {
        let check = |text: &str, expect: &[usize]| {
            let got: RankFilter = text.parse().unwrap();
            assert!(got.0.iter().eq(expect), "{text}: {got:?}");
        };
        check("0", &[0]);
        check("2,0,2", &[0, 2]);
        check("0-3,8", &[0, 1, 2, 3, 8]);
        for text in ["", "a", "1,", "3-1", "0-99999", "1 2", "-1"] {
            assert!(text.parse::<RankFilter>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_line_is_filtered_by_any_of_the_words() {
        let check = |words: &str, line: &str, expect| {
            let filter: LineFilter = words.parse().unwrap();
            assert_eq!(filter.takes(line.as_bytes()), expect, "{words} in {line}");
        };
        check("apple,orange", "an orange", true);
        check("apple,orange", "a pear", false);
        check("", "anything", false);
        check("a,,b", "a,b", true);
        check("a,,b", "ab", false);
        check(",", "anything", false);
    }

    #[test]
    fn tee_puts_back_what_redirects_took_off_the_console() {
        let check = |redirects: &str, tee: &str, rank, expect: [bool; 2]| {
            let options = LogOptions {
                redirects: redirects.parse().unwrap(),
                tee: tee.parse().unwrap(),
                local_ranks: Some("0-2".parse().unwrap()),
                ..LogOptions::default()
            };
            let got = Stream::BOTH.map(|stream| options.shows(rank, stream));
            assert_eq!(got, expect, "-r {redirects} -t {tee}, rank {rank}");
        };
        check("0", "0", 0, [true, true]);
        check("3", "0", 0, [false, false]);
        check("3", "0:2", 0, [false, true]);
        check("3", "0:2", 1, [false, false]);
        check("1:1", "0", 1, [false, true]);
        check("0", "3", 3, [false, false]);
    }
}
