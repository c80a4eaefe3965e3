//! A set of CPUs, or of nodes, as the kernel writes it: `0-3,8`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use rustix::thread::CpuSet;

/// No machine has as many; a bound on what a range in a file may make us count.
const NUMBERS_MAX: usize = 1 << 16;

/// CPUs by the kernel's numbers. Display and parsing are the kernel's list format, `0-3,8`.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cpus(pub(super) BTreeSet<usize>);

impl Cpus {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this one is among them.
    pub fn contains(&self, cpu: usize) -> bool {
        self.0.contains(&cpu)
    }

    /// Their numbers, smallest first.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }

    /// As the kernel takes it; CPUs beyond what a mask holds cannot be in the launcher's own either.
    pub(crate) fn mask(&self) -> CpuSet {
        let mut mask = CpuSet::new();
        for cpu in self.iter().filter(|cpu| *cpu < CpuSet::MAX_CPU) {
            mask.set(cpu);
        }
        mask
    }
}

impl From<&CpuSet> for Cpus {
    fn from(mask: &CpuSet) -> Self {
        (0..CpuSet::MAX_CPU)
            .filter(|cpu| mask.is_set(*cpu))
            .collect()
    }
}

impl FromIterator<usize> for Cpus {
    fn from_iter<T: IntoIterator<Item = usize>>(numbers: T) -> Self {
        Self(numbers.into_iter().collect())
    }
}

/// A text that is no list of CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected a list of CPUs as `0-3,8`")]
pub struct NotCpus;

impl FromStr for Cpus {
    type Err = NotCpus;

    /// Takes what the kernel writes: numbers and ranges, each beyond the one before.
    fn from_str(text: &str) -> Result<Self, NotCpus> {
        let mut cpus = BTreeSet::new();
        let mut least = 0;
        let entries = text.trim().split(',').filter(|entry| !entry.is_empty());
        for entry in entries {
            let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
            let number = |text: &str| text.parse::<usize>().map_err(|_| NotCpus);
            let (first, last) = (number(first)?, number(last)?);
            // The order keeps a long text from being more work than the numbers that there can be.
            if first < least || last < first || last >= NUMBERS_MAX {
                return Err(NotCpus);
            }
            cpus.extend(first..=last);
            least = last + 1;
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut numbers = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = numbers.next() {
            let mut last = first;
            while let Some(next) = numbers.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: Option<(usize, &str)>) {
        let cpus = text.parse::<Cpus>().ok();
        let got = cpus.map(|cpus| (cpus.len(), cpus.to_string()));
        let expect = expect.map(|(len, text)| (len, text.to_owned()));
        assert_eq!(got, expect, "{text:?}");
    }

    #[test]
    fn a_list_of_the_kernels_is_read_and_written() {
        check("0-3,8\n", Some((5, "0-3,8")));
        check("7", Some((1, "7")));
        check("0,1,2,5,6", Some((5, "0-2,5-6")));
        check("\n", Some((0, "")));
        check("65535", Some((1, "65535")));
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in [
            "a",
            "3-1",
            "-1",
            "1-",
            "0-1-2",
            "2,1",
            "0-3,3",
            "65536",
            "0-99999999999",
            "0 1",
        ] {
            check(text, None);
        }
    }

    #[test]
    fn a_mask_holds_the_same_cpus() {
        let cpus: Cpus = "0,2-3".parse().unwrap();
        assert_eq!(Cpus::from(&cpus.mask()), cpus);
        let far: Cpus = "5,65535".parse().unwrap();
        assert_eq!(Cpus::from(&far.mask()).to_string(), "5");
    }
}
