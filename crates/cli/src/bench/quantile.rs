//! Order statistics of a measurement.

/// The value at or below which a share of `ascending` lies: the nearest-rank definition, always one of the values. 0 for
/// none.
///
/// `share` is 0 to 1.
pub(super) fn quantile(ascending: &[i64], share: f64) -> i64 {
    let rank = (share * ascending.len() as f64).ceil() as usize;
    let index = rank.max(1).min(ascending.len());
    index.checked_sub(1).map_or(0, |index| ascending[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_the_value_of_the_nearest_rank() {
        let check = |values: &[i64], share, expect| {
            assert_eq!(quantile(values, share), expect, "{share} of {values:?}");
        };
        let hundred: Vec<i64> = (1..=100).collect();
        check(&hundred, 0.5, 50);
        check(&hundred, 0.99, 99);
        check(&hundred, 1.0, 100);
        check(&hundred, 0.0, 1);
        check(&[1, 2, 3], 0.5, 2);
        check(&[1, 2, 3], 0.99, 3);
        check(&[1, 2], 0.5, 1);
        check(&[7], 0.99, 7);
        check(&[], 0.5, 0);
    }
}
