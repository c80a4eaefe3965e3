//! Reading a file of records: each in its place, tied to the one before.

use std::io::{self, BufRead, Read};
use std::ops::Range;

use super::fault::Fault;
use super::lines::{Entry, Hash, LINE_BYTES_MAX, Line};

/// Faults after which reading ends.
const FAULTS_MAX: usize = 20;

/// The records in their order, each tied to the one before.
#[derive(Default)]
pub(crate) struct Chain {
    ledger: Option<Hash>,
    /// The number that the next record must have.
    next: u64,
    /// The checksum of the last record, unless that line was changed.
    last: Option<Hash>,
    /// Missing records, and the line after each gap.
    gaps: Vec<(u64, Range<u64>)>,
    faults: Vec<Fault>,
}

impl Chain {
    /// Hands each record in `lines` that is whole and in its place to `take`, which returns the number of faults that it has found so
    /// far. Reading ends early after too many faults. Returns the bytes of an unfinished line at the end.
    pub(crate) fn read<R: Line>(
        &mut self,
        lines: &mut impl BufRead,
        mut take: impl FnMut(Entry<R>) -> usize,
    ) -> io::Result<u64> {
        let mut bytes = Vec::new();
        let mut faults = 0;
        for line in 1.. {
            bytes.clear();
            let mut limited = lines.take(LINE_BYTES_MAX + 1);
            let len = limited.read_until(b'\n', &mut bytes)? as u64;
            if bytes.pop_if(|last| *last == b'\n').is_none() {
                if len <= LINE_BYTES_MAX {
                    return Ok(len);
                }
                self.faults.push(Fault::TooLong { line });
                break;
            }
            if let Some(entry) = self.follow(line, &bytes) {
                faults = take(entry);
            }
            if self.faults.len() + self.gaps.len() + faults >= FAULTS_MAX {
                break;
            }
        }
        Ok(0)
    }

    /// The record in `bytes` if it is whole and in its place.
    fn follow<R: Line>(&mut self, line: u64, bytes: &[u8]) -> Option<Entry<R>> {
        let (entry, sum) = match Entry::decode(bytes) {
            Ok(decoded) => decoded,
            Err(why) => {
                self.faults.push(Fault::Changed { line, why });
                (self.next, self.last) = (self.next + 1, None);
                return None;
            }
        };
        let expected = *self.ledger.get_or_insert(entry.ledger);
        let found = entry.ledger;
        if found != expected {
            self.faults.push(Fault::OtherRun {
                line,
                found,
                expected,
            });
            return None;
        }
        let record = entry.n;
        if record < self.next {
            let after = self.next - 1;
            let fault = match self.fill(record) {
                true => Fault::OutOfOrder {
                    line,
                    record,
                    after,
                },
                false => Fault::Doubled { line, record },
            };
            self.faults.push(fault);
            return None;
        }
        if record > self.next {
            self.gaps.push((line, self.next..record));
            self.last = None;
        }
        let previous = self.last.or((record == 0).then(Hash::default));
        if let Some(expected) = previous.filter(|sum| *sum != entry.previous) {
            let found = entry.previous;
            self.faults.push(Fault::OtherHistory {
                line,
                found,
                expected,
            });
        }
        (self.next, self.last) = (record.saturating_add(1), Some(sum));
        Some(entry)
    }

    /// Takes a record out of the gap that it belongs to, if there is one.
    fn fill(&mut self, record: u64) -> bool {
        let Some(at) = self.gaps.iter().position(|(_, gap)| gap.contains(&record)) else {
            return false;
        };
        let (line, gap) = self.gaps.swap_remove(at);
        let rest = [gap.start..record, record + 1..gap.end];
        self.gaps.extend(
            rest.into_iter()
                .filter(|gap| !gap.is_empty())
                .map(|gap| (line, gap)),
        );
        true
    }

    /// Everything that is wrong with the records read.
    pub(crate) fn end(mut self) -> Vec<Fault> {
        self.gaps.sort_by_key(|(_, gap)| gap.start);
        let gaps = self.gaps.into_iter();
        let missing = gaps.map(|(line, records)| Fault::Missing { line, records });
        missing.chain(self.faults).collect()
    }
}
