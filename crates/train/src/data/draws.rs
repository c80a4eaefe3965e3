//! Random numbers of samples, the same whichever rank draws them.

use paceline_nn::mix;

/// Random numbers that follow from a seed.
pub(crate) struct Draws {
    seed: u64,
    drawn: u64,
}

impl Draws {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, drawn: 0 }
    }

    /// Below 1, and at least 0.
    pub(crate) fn uniform(&mut self) -> f64 {
        self.drawn += 1;
        // 53 bits, which an f64 holds exactly.
        (mix(self.seed, self.drawn, 0) >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub(crate) fn between(&mut self, [low, high]: [f64; 2]) -> f64 {
        low + (high - low) * self.uniform()
    }

    pub(crate) fn below(&mut self, count: usize) -> usize {
        (self.uniform() * count as f64) as usize
    }
}
