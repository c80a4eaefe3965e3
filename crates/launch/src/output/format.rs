//! One line of a rank as one line of the console.

use std::time::SystemTime;

use serde::Serialize;

use super::escapes::{self, Keep};
use super::fold::Folded;
use super::options::{LogFormat, LogOptions};
use super::prefix::{self, Who};
use crate::time;

/// How lines are written, and where they come from.
#[derive(Debug, Clone)]
pub(crate) struct Formatter {
    pub(crate) options: LogOptions,
    pub(crate) host: String,
    pub(crate) role: String,
    pub(crate) attempt: u32,
}

/// A line as JSON.
#[derive(Serialize)]
struct Record<'a> {
    time: String,
    rank: usize,
    local_rank: usize,
    host: &'a str,
    stream: &'static str,
    attempt: u32,
    text: &'a str,
}

impl Formatter {
    /// Appends a line; `ranks` has the rank in the job of each local rank.
    pub(crate) fn write(&self, line: &Folded, ranks: &[usize], out: &mut Vec<u8>) {
        match self.options.format {
            LogFormat::Text => self.write_text(line, ranks, out),
            LogFormat::Json => self.write_json(line, ranks, out),
        }
        out.push(b'\n');
    }

    /// Appends a line without its end.
    pub(crate) fn write_text(&self, line: &Folded, ranks: &[usize], out: &mut Vec<u8>) {
        if self.options.timestamps {
            out.extend_from_slice(time::utc(line.at).as_bytes());
            out.push(b' ');
        }
        let in_job: Vec<_> = line
            .ranks
            .iter()
            .map(|local| in_job(*local, ranks))
            .collect();
        out.extend_from_slice(self.prefix(&in_job, &line.ranks).as_bytes());
        escapes::clean(&line.text, Keep::Colours, out);
    }

    /// The text before a line of these ranks.
    pub(crate) fn prefix(&self, ranks: &[usize], local_ranks: &[usize]) -> String {
        let who = Who {
            ranks,
            local_ranks,
            role: &self.role,
            host: &self.host,
        };
        prefix::prefix(self.options.prefix.as_ref(), &who)
    }

    fn write_json(&self, line: &Folded, ranks: &[usize], out: &mut Vec<u8>) {
        let mut text = Vec::with_capacity(line.text.len());
        escapes::clean(&line.text, Keep::Text, &mut text);
        let text = String::from_utf8_lossy(&text);
        for (place, local_rank) in line.ranks.iter().enumerate() {
            if place > 0 {
                out.push(b'\n');
            }
            let record = Record {
                time: time::utc(line.at),
                rank: in_job(*local_rank, ranks),
                local_rank: *local_rank,
                host: &self.host,
                stream: line.stream.name(),
                attempt: self.attempt,
                text: &text,
            };
            // Numbers and text into memory: nothing there can fail.
            let _ = serde_json::to_writer(&mut *out, &record);
        }
    }
}

fn in_job(local_rank: usize, ranks: &[usize]) -> usize {
    ranks.get(local_rank).copied().unwrap_or(local_rank)
}

/// A line that is not folded.
pub(crate) fn single(
    at: SystemTime,
    rank: usize,
    stream: super::stream::Stream,
    text: &[u8],
) -> Folded {
    Folded {
        stream,
        text: text.into(),
        ranks: vec![rank],
        at,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::stream::Stream;
    use super::*;

    fn check(options: LogOptions, ranks: &[usize], text: &str, expect: &str) {
        let formatter = Formatter {
            options,
            host: "node1".to_owned(),
            role: "default".to_owned(),
            attempt: 2,
        };
        let line = Folded {
            ranks: ranks.to_vec(),
            ..single(
                SystemTime::UNIX_EPOCH + Duration::from_millis(1_500),
                0,
                Stream::Err,
                text.as_bytes(),
            )
        };
        let mut out = Vec::new();
        formatter.write(&line, &[8, 9], &mut out);
        assert_eq!(String::from_utf8_lossy(&out), expect);
    }

    #[test]
    fn a_line_of_text_has_a_prefix_and_a_time_on_request() {
        check(LogOptions::default(), &[1], "hello", "[rank 9] hello\n");
        let timed = LogOptions {
            timestamps: true,
            ..LogOptions::default()
        };
        check(
            timed,
            &[0, 1],
            "a\x1b[2Jb",
            "1970-01-01T00:00:01.500Z [ranks 8-9] ab\n",
        );
    }

    #[test]
    fn a_json_line_says_all_that_is_known() {
        let json = LogOptions {
            format: LogFormat::Json,
            ..LogOptions::default()
        };
        check(
            json,
            &[1],
            "say \"é\"\t\x1b[31mred",
            "{\"time\":\"1970-01-01T00:00:01.500Z\",\"rank\":9,\"local_rank\":1,\"host\":\"node1\",\
             \"stream\":\"stderr\",\"attempt\":2,\"text\":\"say \\\"é\\\"\\tred\"}\n",
        );
    }
}
