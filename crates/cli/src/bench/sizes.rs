//! Sizes as people write them, and the list that a range of them comes to.

/// Largest size that is measured.
///
/// *Units*: bytes.
const SIZE_BYTES_MAX: usize = 16 << 30;

/// Reads a size: a whole number with nothing, `B`, a binary unit (`KiB`, `MiB`, `GiB`, also `K`, `M`, `G` as in
/// nccl-tests) or a decimal one (`kB`, `MB`, `GB`).
///
/// *Errors*: a sentence that says what a size looks like.
pub(super) fn parse_bytes(text: &str) -> Result<usize, String> {
    let error = || {
        format!("{text:?} is not a size: expected bytes as in 8, 64KiB, 4MiB or 1GB, at most 16GiB")
    };
    let digits = text
        .find(|letter: char| !letter.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: usize = number.parse().map_err(|_| error())?;
    let factor = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err(error()),
    };
    number
        .checked_mul(factor)
        .filter(|bytes| *bytes <= SIZE_BYTES_MAX)
        .ok_or_else(error)
}

/// The sizes from `min` to `max`, each `factor` times the one before, and `max` itself. Empty if `min` is above `max`.
///
/// *Units*: bytes.
pub(super) fn sizes(min: usize, max: usize, factor: usize) -> Vec<usize> {
    std::iter::successors(Some(min.max(1)), |bytes| bytes.checked_mul(factor.max(2)))
        .take_while(|bytes| *bytes < max)
        .chain((min <= max).then_some(max))
        .collect()
}

/// A size as short as it can be said exactly, in binary units.
pub(super) fn bytes_text(bytes: usize) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    units
        .into_iter()
        .find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit))
        .map_or_else(
            || format!("{bytes} B"),
            |(unit, name)| format!("{} {name}", bytes / unit),
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_any_usual_unit() {
        for (text, expect) in [
            ("8", 8),
            ("8B", 8),
            ("64KiB", 64 << 10),
            ("64k", 64 << 10),
            ("4 MiB", 4 << 20),
            ("1M", 1 << 20),
            ("2MB", 2_000_000),
            ("1GiB", 1 << 30),
            ("16G", SIZE_BYTES_MAX),
        ] {
            assert_eq!(parse_bytes(text), Ok(expect), "{text}");
        }
        for text in [
            "",
            "x",
            "MiB",
            "-1",
            "1.5MiB",
            "17GiB",
            "99999999999999999999",
            "8 X",
        ] {
            let error = parse_bytes(text).unwrap_err();
            assert!(
                error.starts_with(&format!("{text:?} is not a size")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_range_has_both_its_ends() {
        let check = |min, max, factor, expect: &[usize]| {
            assert_eq!(
                sizes(min, max, factor),
                expect,
                "{min} to {max} by {factor}"
            );
        };
        check(8, 512, 8, &[8, 64, 512]);
        check(8, 600, 8, &[8, 64, 512, 600]);
        check(8, 8, 2, &[8]);
        check(9, 8, 2, &[]);
        check(0, 4, 2, &[1, 2, 4]);
        // A factor below 2 would never end.
        check(8, 32, 1, &[8, 16, 32]);
    }

    #[test]
    fn sizes_are_written_in_the_largest_unit_that_is_exact() {
        for (bytes, text) in [
            (0, "0 B"),
            (8, "8 B"),
            (1500, "1500 B"),
            (1 << 10, "1 KiB"),
            (3 << 19, "1536 KiB"),
            (64 << 20, "64 MiB"),
        ] {
            assert_eq!(bytes_text(bytes), text);
        }
    }
}
