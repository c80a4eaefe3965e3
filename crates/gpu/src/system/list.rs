//! Lists of numbers as the kernel writes them: `0-3,7`.

/// No machine has as many CPUs.
const NUMBERS_MAX: usize = 1 << 16;

/// The numbers, ascending; nothing where it is no list.
pub(super) fn parse(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').map(str::trim) {
        if part.is_empty() {
            continue;
        }
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || (last - first) as usize >= NUMBERS_MAX - numbers.len() {
            return None;
        }
        numbers.extend(first..=last);
    }
    numbers.sort_unstable();
    numbers.dedup();
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_nonsense_is_refused() {
        let check = |text: &str, expect: Option<&[u32]>| {
            assert_eq!(parse(text).as_deref(), expect, "{text:?}");
        };
        check("0-3,7\n", Some(&[0, 1, 2, 3, 7]));
        check("7,0-1,1", Some(&[0, 1, 7]));
        check("\n", Some(&[]));
        check("3-0", None);
        check("0-4294967295", None);
        check("0-65536", None);
        check("0-40000,0-40000", None);
        check("x", None);
        check("-1", None);
    }
}
