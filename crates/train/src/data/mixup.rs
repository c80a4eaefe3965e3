//! Mixup: training samples that are mixtures of two.

use paceline_nn::mix;

use super::draws::Draws;

/// How samples are mixed in training: each with its opposite in the micro-batch of a shard, the first with the last, as timm does in a batch.
///
/// *Numerics*: a pure function of the seed, the epoch and the samples of the micro-batch, which are the same on any number of ranks.
///
/// *Source*: Zhang and others 2018, "mixup: Beyond Empirical Risk Minimization".
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixup {
    /// Both parameters of the Beta distribution that shares are drawn from, above 0.
    pub alpha: f64,
    /// Seed of the shares.
    pub seed: u64,
}

impl Mixup {
    /// The share of a sample's own values and label in a micro-batch that begins with sample `first`.
    pub(crate) fn share(&self, epoch: u64, first: usize) -> f64 {
        // Other numbers than those of the first sample's crop.
        let mut draws = Draws::new(mix(self.seed, epoch, !(first as u64)));
        beta(self.alpha, || draws.uniform())
    }
}

/// Mixes samples of `width` values each with their opposites.
pub(crate) fn mix_opposites(values: &mut [f32], width: usize, share: f64) {
    let (own, other) = (share as f32, (1.0 - share) as f32);
    let mut samples: Vec<&mut [f32]> = values.chunks_exact_mut(width.max(1)).collect();
    let middle = samples.len().div_ceil(2);
    let (first, last) = samples.split_at_mut(middle);
    for (one, two) in first.iter_mut().zip(last.iter_mut().rev()) {
        for (one, two) in one.iter_mut().zip(two.iter_mut()) {
            (*one, *two) = (own * *one + other * *two, own * *two + other * *one);
        }
    }
}

/// A number from the Beta distribution whose parameters are both `alpha`.
///
/// *Source*: Jöhnk 1964, by logarithms, so that small parameters divide no zeros.
fn beta(alpha: f64, mut uniform: impl FnMut() -> f64) -> f64 {
    loop {
        // Above 0, and at most 1.
        let [one, two] = [0; 2].map(|_: i32| libm::log(1.0 - uniform()) / alpha);
        if libm::exp(one) + libm::exp(two) <= 1.0 {
            return 1.0 / (1.0 + libm::exp(two - one));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_have_the_moments_of_the_beta_distribution() {
        for alpha in [0.01, 0.2, 1.0, 4.0] {
            let mixup = Mixup { alpha, seed: 7 };
            let shares: Vec<f64> = (0..20_000).map(|first| mixup.share(3, first)).collect();
            assert!(shares.iter().all(|share| (0.0..=1.0).contains(share)));
            let count = shares.len() as f64;
            let mean = shares.iter().sum::<f64>() / count;
            let squares = shares.iter().map(|share| (share - mean).powi(2));
            let variance = squares.sum::<f64>() / count;
            let expected = 1.0 / (4.0 * (2.0 * alpha + 1.0));
            assert!((mean - 0.5).abs() < 0.02, "{alpha}: {mean}");
            assert!(
                (variance - expected).abs() < 0.01,
                "{alpha}: {variance} {expected}"
            );
        }
        let mixup = Mixup {
            alpha: 1.0,
            seed: 7,
        };
        assert_ne!(mixup.share(0, 5), mixup.share(1, 5));
    }

    #[test]
    fn each_sample_is_mixed_with_its_opposite() {
        let mut values = [0.0, 1.0, 10.0, 20.0, 4.0, 5.0];
        mix_opposites(&mut values, 2, 0.75);
        assert_eq!(values, [1.0, 2.0, 10.0, 20.0, 3.0, 4.0]);
        let mut one = [3.0, 4.0];
        mix_opposites(&mut one, 2, 0.75);
        assert_eq!(one, [3.0, 4.0]);
    }
}
