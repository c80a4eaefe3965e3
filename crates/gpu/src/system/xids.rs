//! What the driver wrote into the kernel's log about failing devices.

use std::collections::VecDeque;
use std::io::{self, Read, Seek, SeekFrom};
use std::time::Duration;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::{CHARS_MAX, gap, line};
use crate::host::Host;
use crate::snapshot::{Gap, Xid};
use paceline_words::plain;

/// A process that fails over and over fills the log; the newest are kept.
const XIDS_MAX: usize = 128;
/// The longest record of the kernel's log, with room to spare.
const RECORD_BYTES_MAX: usize = 16 << 10;
/// The kernel's ring is 16 MiB where it was made large.
const RING_BYTES_MAX: u64 = 64 << 20;
/// Of a log file its end counts.
const TAIL_BYTES_MAX: u64 = 8 << 20;
const KERNEL: &str = "/dev/kmsg";
const FILES: [&str; 4] = [
    "/var/log/kern.log",
    "/var/log/messages",
    "/var/log/syslog",
    "/var/log/dmesg",
];
/// What is looked for before a line is read more closely.
const MARK: &str = "Xid (";

/// Oldest first. `now` is the time since 1970.
pub(super) fn read(host: &Host<'_>, now: Option<Duration>) -> Result<Vec<Xid>, Gap> {
    let up = line(host, "/proc/uptime").and_then(|line| {
        let seconds: f64 = line.split_whitespace().next()?.parse().ok()?;
        Duration::try_from_secs_f64(seconds).ok()
    });
    let times = Times { up, now };
    let mut refused = match read_ring(host, &times) {
        Ok(found) => return Ok(found),
        Err(error) => gap(&error),
    };
    for path in FILES {
        match read_end(host, path, &times) {
            Ok(found) => return Ok(found),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                refused = Gap::NoPermission;
            }
            Err(_) => {}
        }
    }
    Err(refused)
}

/// What ages are counted from.
struct Times {
    /// Since boot.
    up: Option<Duration>,
    /// Since 1970.
    now: Option<Duration>,
}

fn read_ring(host: &Host<'_>, times: &Times) -> io::Result<Vec<Xid>> {
    read_lines(host.open(KERNEL)?, RING_BYTES_MAX, |line| {
        of_ring(line, times)
    })
}

fn read_end(host: &Host<'_>, path: &str, times: &Times) -> io::Result<Vec<Xid>> {
    let mut file = host.open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES_MAX)))?;
    // The file that the kernel's messages since boot were written to; others may be of earlier boots.
    let is_of_this_boot = path == "/var/log/dmesg";
    read_lines(file, TAIL_BYTES_MAX, |line| {
        of_file(line, is_of_this_boot, times)
    })
}

/// Reads line by line and keeps the newest. The kernel's log gives one record with each read.
fn read_lines(
    mut file: impl Read,
    most: u64,
    parse: impl Fn(&str) -> Option<Xid>,
) -> io::Result<Vec<Xid>> {
    let mut found = VecDeque::new();
    let mut chunk = vec![0; RECORD_BYTES_MAX];
    let mut pending: Vec<u8> = Vec::new();
    let mut seen = 0;
    let mut take = |line: &[u8]| {
        let text = String::from_utf8_lossy(line);
        if text.contains(MARK)
            && let Some(xid) = parse(&text)
        {
            if found.len() == XIDS_MAX {
                found.pop_front();
            }
            found.push_back(xid);
        }
    };
    while seen < most {
        let length = match file.read(&mut chunk) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // The end of the ring.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            // Records were overwritten before they were read; the next ones can be.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                seen += RECORD_BYTES_MAX as u64;
                continue;
            }
            Err(error) if seen == 0 => return Err(error),
            Err(_) => break,
        };
        seen += length as u64;
        pending.extend_from_slice(&chunk[..length]);
        let mut start = 0;
        while let Some(end) = pending[start..].iter().position(|byte| *byte == b'\n') {
            take(&pending[start..start + end]);
            start += end + 1;
        }
        pending.drain(..start);
        // What goes on without an end is no line of a log.
        if pending.len() > RECORD_BYTES_MAX {
            pending.clear();
        }
    }
    take(&pending);
    Ok(found.into())
}

/// A record of the ring: `6,1234,5678901,-;NVRM: Xid (...`, the third number being microseconds since boot.
fn of_ring(line: &str, times: &Times) -> Option<Xid> {
    let (head, message) = line.split_once(';')?;
    let at = head.split(',').nth(2).and_then(|at| at.parse().ok());
    let age = at.and_then(|at| times.up?.checked_sub(Duration::from_micros(at)));
    message_of(message, age)
}

/// A line of a file: `2026-11-22T05:38:00+00:00 host kernel: [12.5] NVRM: Xid (...`. Times without a year or a zone are
/// not read.
fn of_file(line: &str, is_of_this_boot: bool, times: &Times) -> Option<Xid> {
    let at = line
        .find("NVRM:")
        .or_else(|| line.find("nvidia-nvswitch"))?;
    let head = &line[..at];
    let since_boot = || {
        let (_, rest) = head.rsplit_once('[')?;
        let seconds: f64 = rest.split_once(']')?.0.trim().parse().ok()?;
        times
            .up?
            .checked_sub(Duration::try_from_secs_f64(seconds).ok()?)
    };
    let since_1970 = || {
        let written = unix_time(head.split_whitespace().next()?)?;
        times.now?.checked_sub(Duration::from_secs(written))
    };
    let age = match is_of_this_boot {
        true => since_boot(),
        false => since_1970(),
    };
    message_of(&line[at..], age)
}

/// `NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.`, and of a switch
/// `nvidia-nvswitch3: SXid (PCI:0000:85:00.0): 20034, ...`.
///
/// *Source*: NVIDIA's "Xid Errors"; drivers before 2013 leave `PCI:` out, those with MIG add the instance.
fn message_of(message: &str, age: Option<Duration>) -> Option<Xid> {
    let is_driver = message.starts_with("NVRM:") || message.starts_with("nvidia-nvswitch");
    let (_, rest) = message.split_once(MARK).filter(|_| is_driver)?;
    let (place, rest) = rest.split_once("):")?;
    let place = place.strip_prefix("PCI:").unwrap_or(place);
    let place = place.split_whitespace().next()?;
    let rest = rest.trim_start();
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (code, text) = rest.split_at(digits);
    let mut pci = plain(place, 32).to_ascii_lowercase();
    if !pci.contains('.') {
        pci.push_str(".0");
    }
    Some(Xid {
        code: code.parse().ok()?,
        pci,
        age_s: age.map(|age| age.as_secs()),
        text: plain(text.trim_start_matches([',', ' ']).trim_end(), CHARS_MAX),
    })
}

/// Seconds since 1970 of `2026-11-22T05:38:00.123456+09:00`.
fn unix_time(text: &str) -> Option<u64> {
    let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    time.unix_timestamp().try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    /// Code, place, age in seconds, text.
    type Short<'a> = (u32, &'a str, Option<u64>, &'a str);

    fn check(files: &[(&str, &str)], expect: Result<&[Short<'_>], Gap>) {
        let recorded = Recorded::new(files);
        // 2026-11-22 05:38:00 UTC
        let now = Some(Duration::from_secs(1_795_325_880));
        let found = read(&recorded.host(), now);
        let expect = expect.map(|expect| {
            let xid = |(code, pci, age_s, text): &Short<'_>| Xid {
                code: *code,
                pci: (*pci).to_owned(),
                age_s: *age_s,
                text: (*text).to_owned(),
            };
            expect.iter().map(xid).collect()
        });
        assert_eq!(found, expect);
    }

    #[test]
    fn the_kernels_ring_is_read_first() {
        let ring = "6,1,100,-;Linux version 6.8\n\
                    4,2000,900000000,-;NVRM: Xid (PCI:0000:18:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n\
                    SUBSYSTEM=pci\n DEVICE=+pci:0000:18:00.0\n\
                    4,2001,960000000,c;NVRM: Xid (PCI:0000:5D:00 GPU-I:05): 94, Contained: SM (0x1).\n\
                    4,2002,970000000,-;NVRM: Xid (0000:03:00): 13, Ch 00000010\n\
                    3,2003,980000000,-;nvidia-nvswitch3: SXid (PCI:0000:85:00.0): 20034, Fatal, Link 46 LTSSM Fault Up\n\
                    4,2004,990000000,-;someone said NVRM: Xid (PCI:0000:18:00): 1, no\n\
                    4,2005,990000000,-;NVRM: Xid (PCI:0000:18:00): x, no\n";
        check(
            &[
                ("/dev/kmsg", ring),
                ("/proc/uptime", "1000.50 4000.00\n"),
                (
                    "/var/log/kern.log",
                    "NVRM: Xid (PCI:0000:18:00): 7, not read\n",
                ),
            ],
            Ok(&[
                (
                    79,
                    "0000:18:00.0",
                    Some(100),
                    "pid=1234, name=python, GPU has fallen off the bus.",
                ),
                (94, "0000:5d:00.0", Some(40), "Contained: SM (0x1)."),
                (13, "0000:03:00.0", Some(30), "Ch 00000010"),
                (
                    20034,
                    "0000:85:00.0",
                    Some(20),
                    "Fatal, Link 46 LTSSM Fault Up",
                ),
            ]),
        );
    }

    #[test]
    fn files_are_read_where_the_ring_is_not_there() {
        let dated = "2026-11-22T14:37:00.123456+09:00 host kernel: [  12.5] NVRM: Xid (PCI:0000:18:00): 31, MMU Fault\n\
                     Nov 22 05:37:30 host kernel: [  20.1] NVRM: Xid (PCI:0000:18:00): 48, DBE\n";
        check(
            &[
                ("/var/log/kern.log", dated),
                ("/proc/uptime", "1000.50 4000.00\n"),
            ],
            Ok(&[
                (31, "0000:18:00.0", Some(60), "MMU Fault"),
                (48, "0000:18:00.0", None, "DBE"),
            ]),
        );
        let boot = "[  100.500000] NVRM: Xid (PCI:0000:18:00): 62, 0d7\n";
        check(
            &[
                ("/var/log/dmesg", boot),
                ("/proc/uptime", "1000.50 4000.00\n"),
            ],
            Ok(&[(62, "0000:18:00.0", Some(900), "0d7")]),
        );
        check(&[("/var/log/messages", "")], Ok(&[]));
        check(&[], Err(Gap::NotSupported));
    }

    #[test]
    fn only_the_newest_are_kept_and_nothing_moves_the_cursor() {
        let mut ring = String::new();
        for code in 0..1000 {
            ring += &format!(
                "4,1,1,-;NVRM: Xid (PCI:0000:18:00): {code}, \u{1b}[31m{}\n",
                "x".repeat(900)
            );
        }
        // A line that never ends.
        ring += &"4,1,1,-;NVRM: Xid (PCI:0000:18:00): 7, ".repeat(2000);
        let recorded = Recorded::new(&[("/dev/kmsg", &ring)]);
        let found = read(&recorded.host(), None).expect("read");
        assert_eq!(found.len(), XIDS_MAX);
        assert_eq!(found.last().map(|xid| xid.code), Some(999));
        assert!(
            found
                .iter()
                .all(|xid| xid.text.len() == CHARS_MAX && xid.text.starts_with(" [31m"))
        );
    }

    #[test]
    fn times_are_read_with_their_zone() {
        for (text, expect) in [
            ("1970-01-01T00:00:00Z", Some(0)),
            ("2000-02-29T12:00:00Z", Some(951_825_600)),
            ("2026-11-22T05:38:00.123456+00:00", Some(1_795_325_880)),
            ("2026-11-22T14:38:00+09:00", Some(1_795_325_880)),
            ("2026-11-21T22:38:00-07:00", Some(1_795_325_880)),
            ("2026-11-22T05:38:00", None),
            ("2026-13-22T05:38:00Z", None),
            ("2026-11-22T05:38", None),
            ("2026-11-22T05:38:00é", None),
            ("1969-01-01T00:00:00Z", None),
            ("Nov", None),
            ("+026-11-22T05:38:00Z", None),
        ] {
            assert_eq!(unix_time(text), expect, "{text}");
        }
    }
}
