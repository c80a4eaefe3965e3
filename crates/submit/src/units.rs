//! Sizes and times in the schedulers' notation.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// An amount of memory in whole mebibytes, written as `sbatch --mem` takes it: `500M`, `64G`, `1T`; MiB without a unit.
///
/// ```
/// use paceline_submit::Memory;
///
/// assert_eq!("2G".parse::<Memory>().unwrap().mebibytes(), 2048);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Memory(u64);

impl Memory {
    /// How many mebibytes.
    pub fn mebibytes(self) -> u64 {
        self.0
    }
}

impl FromStr for Memory {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str = "expected a size such as 500M, 64G or 1T, from 1 MiB to 1 PiB";
        let digits = text.trim_end_matches(|letter: char| !letter.is_ascii_digit());
        let unit = match text[digits.len()..].to_ascii_uppercase().as_str() {
            "" | "M" | "MI" | "MB" | "MIB" => 1,
            "G" | "GI" | "GB" | "GIB" => 1 << 10,
            "T" | "TI" | "TB" | "TIB" => 1 << 20,
            _ => return Err(EXPECTED),
        };
        let count: u64 = digits.parse().map_err(|_| EXPECTED)?;
        count
            .checked_mul(unit)
            .filter(|mebibytes| (1..=1 << 30).contains(mebibytes))
            .map(Self)
            .ok_or(EXPECTED)
    }
}

/// The longest that a job may take, written as `sbatch --time` takes it: `MINUTES`, `MINUTES:SECONDS`,
/// `HOURS:MINUTES:SECONDS`, `DAYS-HOURS`, `DAYS-HOURS:MINUTES` or `DAYS-HOURS:MINUTES:SECONDS`.
///
/// ```
/// use paceline_submit::TimeLimit;
///
/// let limit: TimeLimit = "1-12".parse().unwrap();
/// assert_eq!((limit.seconds(), limit.to_string().as_str()), (129_600, "1-12:00:00"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimeLimit(u64);

/// A year: more is a mistake, and it fits every scheduler's field.
const SECONDS_MAX: u64 = 366 * 86_400;

impl TimeLimit {
    /// How many seconds.
    pub fn seconds(self) -> u64 {
        self.0
    }
}

impl From<TimeLimit> for Duration {
    fn from(limit: TimeLimit) -> Self {
        Self::from_secs(limit.0)
    }
}

impl FromStr for TimeLimit {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const EXPECTED: &str =
            "expected MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS, up to a year";
        let number = |text: &str| {
            let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let number = text.parse::<u64>().ok().filter(|_| is_number);
            number.filter(|number| *number <= SECONDS_MAX)
        };
        let (days, rest) = match text.split_once('-') {
            Some((days, rest)) => (Some(days), rest),
            None => (None, text),
        };
        let parts: Option<Vec<u64>> = rest.split(':').map(number).collect();
        let (hours, minutes, seconds) = match (days.is_some(), parts.as_deref()) {
            (false, Some(&[minutes])) => (0, minutes, 0),
            (false, Some(&[minutes, seconds])) => (0, minutes, seconds),
            (true, Some(&[hours])) => (hours, 0, 0),
            (true, Some(&[hours, minutes])) => (hours, minutes, 0),
            (_, Some(&[hours, minutes, seconds])) => (hours, minutes, seconds),
            _ => return Err(EXPECTED),
        };
        let days = days.map_or(Some(0), number).ok_or(EXPECTED)?;
        let total = days * 86_400 + hours * 3600 + minutes * 60 + seconds;
        if (1..=SECONDS_MAX).contains(&total) {
            Ok(Self(total))
        } else {
            Err(EXPECTED)
        }
    }
}

/// `DAYS-HOURS:MINUTES:SECONDS`, without days where there are none.
impl fmt::Display for TimeLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, rest) = (self.0 / 86_400, self.0 % 86_400);
        if days > 0 {
            write!(f, "{days}-")?;
        }
        let (hours, minutes, seconds) = (rest / 3600, rest / 60 % 60, rest % 60);
        write!(f, "{hours:02}:{minutes:02}:{seconds:02}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_sbatch_reads_them() {
        let check = |text: &str, seconds| {
            assert_eq!(text.parse().map(TimeLimit::seconds), Ok(seconds), "{text}");
        };
        check("90", 5_400);
        check("1:30", 90);
        check("2:00:05", 7_205);
        check("1-0", 86_400);
        check("1-12:30", 131_400);
        check("7-00:00:01", 604_801);
    }

    #[test]
    fn times_are_written_as_they_can_be_read_again() {
        for (text, expect) in [
            ("90", "01:30:00"),
            ("1:30", "00:01:30"),
            ("48:00:00", "2-00:00:00"),
        ] {
            let limit: TimeLimit = text.parse().expect(text);
            assert_eq!(limit.to_string(), expect);
            assert_eq!(expect.parse(), Ok(limit));
        }
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            "0",
            "-5",
            "1-",
            "a",
            "1:2:3:4",
            "+1",
            "1-1:1:1:1",
            "400-0",
            "99999999999999999999",
        ] {
            assert!(text.parse::<TimeLimit>().is_err(), "{text}");
        }
    }

    #[test]
    fn memory_is_counted_in_binary_units() {
        for (text, expect) in [
            ("500", 500),
            ("500M", 500),
            ("64G", 65_536),
            ("64gib", 65_536),
            ("1T", 1 << 20),
        ] {
            assert_eq!(text.parse().map(Memory::mebibytes), Ok(expect), "{text}");
        }
        for text in [
            "",
            "0",
            "G",
            "1.5G",
            "-1",
            "1K",
            "2000T",
            "99999999999999999999G",
            "64Ж",
        ] {
            assert!(text.parse::<Memory>().is_err(), "{text}");
        }
    }
}
