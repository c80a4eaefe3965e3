//! A curve of any length in bounded memory.

use std::collections::VecDeque;

/// Most pieces of a curve: more than a screen has columns.
const PIECES_MAX: usize = 1024;

/// Most of the last values that are kept as they are.
const RECENT_MAX: usize = 4096;

/// Larger values are left out: sums of them would overflow.
const VALUE_MAX: f64 = 1e100;

/// Values by step, gathered into pieces of equally many steps once there are too many.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Steps of a piece.
    stride: u64,
    pieces: Vec<Piece>,
    /// The last value by itself.
    last: Option<f64>,
    /// The last values, each by itself, for a closer look.
    recent: VecDeque<Piece>,
}

/// The values of some steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece {
    /// The first step of the piece that has a value.
    pub step: u64,
    count: u64,
    sum: f64,
    /// The least of its values.
    pub least: f64,
    /// The greatest of its values.
    pub most: f64,
}

impl Piece {
    /// The mean of its values.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.sum / self.count as f64
    }
}

impl Default for Curve {
    fn default() -> Self {
        Self {
            stride: 1,
            pieces: Vec::new(),
            last: None,
            recent: VecDeque::new(),
        }
    }
}

impl Curve {
    /// Adds a value. Steps may come again, after ranks went back. Values that are not finite, or that no chart could show, leave a gap.
    pub fn push(&mut self, step: u64, value: f64) {
        if value.is_nan() || value.abs() > VALUE_MAX {
            return;
        }
        self.last = Some(value);
        let new = Piece {
            step,
            count: 1,
            sum: value,
            least: value,
            most: value,
        };
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(new);
        match self.pieces.last_mut() {
            Some(last) if last.step / self.stride == step / self.stride => last.add(&new),
            _ => self.pieces.push(new),
        }
        if self.pieces.len() > PIECES_MAX {
            self.halve();
        }
    }

    /// Makes each piece twice as long.
    fn halve(&mut self) {
        self.stride = self.stride.saturating_mul(2);
        let mut halved: Vec<Piece> = Vec::with_capacity(PIECES_MAX);
        for piece in &self.pieces {
            match halved.last_mut() {
                Some(last) if last.step / self.stride == piece.step / self.stride => {
                    last.add(piece)
                }
                _ => halved.push(*piece),
            }
        }
        // Steps that keep going back cannot be gathered, so the oldest leave.
        let extra = halved.len().saturating_sub(PIECES_MAX);
        self.pieces = halved.split_off(extra);
    }

    /// All pieces, at most 1,024.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The values of `step` and later ones: each by itself if so many are kept, else in pieces.
    #[must_use]
    pub fn since(&self, step: u64) -> Vec<Piece> {
        let is_kept = self.recent.front().is_some_and(|first| first.step <= step);
        let is_wanted = |piece: &&Piece| piece.step >= step;
        match is_kept {
            true => self.recent.iter().filter(is_wanted).copied().collect(),
            false => self.pieces.iter().filter(is_wanted).copied().collect(),
        }
    }

    /// The last value by itself.
    #[must_use]
    pub fn last(&self) -> Option<f64> {
        self.last
    }
}

impl Piece {
    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.sum += other.sum;
        self.least = self.least.min(other.least);
        self.most = self.most.max(other.most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_curve_keeps_its_extremes_and_its_mean_in_few_pieces() {
        let mut curve = Curve::default();
        for step in 1..=1_000_000_u64 {
            let value = if step == 654_321 {
                -7.0
            } else {
                (step % 10) as f64
            };
            curve.push(step, value);
        }
        let pieces = curve.pieces();
        assert!(
            (PIECES_MAX / 2 - 1..=PIECES_MAX).contains(&pieces.len()),
            "{}",
            pieces.len()
        );
        assert_eq!(
            pieces.iter().map(|piece| piece.count).sum::<u64>(),
            1_000_000
        );
        assert_eq!(curve.since(999_001).len(), 1000, "each by itself");
        let tenth = curve.since(900_001);
        assert!(
            (40..=PIECES_MAX / 10 + 1).contains(&tenth.len()),
            "{}",
            tenth.len()
        );
        let least = pieces
            .iter()
            .map(|piece| piece.least)
            .fold(f64::INFINITY, f64::min);
        assert_eq!(least, -7.0);
        assert!((pieces[9].mean() - 4.5).abs() < 0.02, "{:?}", pieces[9]);
        assert!(pieces.is_sorted_by_key(|piece| piece.step));
    }

    #[test]
    fn short_curves_are_exact_and_what_is_not_finite_is_left_out() {
        let mut curve = Curve::default();
        for (step, value) in [(1, 2.0), (2, f64::NAN), (3, 1.0), (3, 3.0)] {
            curve.push(step, value);
        }
        let means: Vec<_> = curve
            .pieces()
            .iter()
            .map(|piece| (piece.step, piece.mean()))
            .collect();
        assert_eq!(means, [(1, 2.0), (3, 2.0)]);
        assert_eq!(curve.last(), Some(3.0));
    }

    #[test]
    fn steps_and_values_of_a_damaged_file_do_no_harm() {
        let mut curve = Curve::default();
        for turn in 0..5000 {
            curve.push(if turn % 2 == 0 { 0 } else { u64::MAX }, 1.7e308);
            curve.push(if turn % 2 == 0 { 0 } else { u64::MAX }, 1.0);
        }
        assert!(curve.pieces().len() <= PIECES_MAX);
        assert_eq!(curve.last(), Some(1.0));
    }
}
