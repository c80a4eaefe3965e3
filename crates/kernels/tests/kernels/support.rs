//! What the tests of all kernels share.

use paceline_kernels::{Isa, Kernels};

/// `count` values from -1 to 1.
pub(crate) fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let value = || {
        // SplitMix64; an f32 holds the upper 24 bits exactly.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(value).take(count).collect()
}

/// The results of `work` on each instruction set of this machine, with one and three threads. All have the same bits.
pub(crate) fn everywhere<const N: usize>(
    work: impl Fn(Kernels) -> [Vec<f32>; N] + Sync,
) -> [Vec<f32>; N] {
    let bits = |results: &[Vec<f32>; N]| {
        results.each_ref().map(|values| {
            values
                .iter()
                .map(|value| value.to_bits())
                .collect::<Vec<_>>()
        })
    };
    let mut first: Option<[Vec<f32>; N]> = None;
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let kernels = Kernels::with(isa).unwrap();
            let results = pool.unwrap().install(|| work(kernels));
            match &first {
                None => first = Some(results),
                Some(first) => {
                    assert!(bits(first) == bits(&results), "{isa}, {threads} threads")
                }
            }
        }
    }
    first.unwrap()
}

/// Asserts an error that f32 explains, relative to the largest value.
pub(crate) fn assert_close(got: &[f32], expected: &[f64], case: &str) {
    assert_eq!(got.len(), expected.len(), "{case}");
    let largest = expected
        .iter()
        .fold(1.0, |most: f64, value| most.max(value.abs()));
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs() / largest;
        assert!(error < 1e-6, "{got} in place of {expected} at {at}: {case}");
    }
}
