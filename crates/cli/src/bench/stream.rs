//! What the memory system gives all ranks at once: each reads two arrays of its own, adds them, and stores the sum into
//! both, as each of two ranks does with its half of an all-reduce in place.
#![allow(unsafe_code)]

use std::time::Instant;

use paceline_collective::{Error, ProcessGroup};

use super::quantile::quantile;
use super::record::Streaming;
use super::timing::{nanos_since, slowest};

/// Passes of each kind that count; one more comes before them.
const PASSES: usize = 9;

/// One line of a cache.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// How the sums are stored.
#[derive(Clone, Copy)]
enum Store {
    Ordinary,
    NonTemporal,
}

/// Measures both ways of storing, a pass of one after a pass of the other. The same on all ranks.
pub(super) fn measure(group: &ProcessGroup, bytes: usize) -> Result<Streaming, Error> {
    let lines = (bytes / 2 / size_of::<Line>()).max(1);
    let mut left = vec![Line([0.0; 16]); lines];
    let mut right = left.clone();
    let (mut ordinary, mut non_temporal) = (Vec::new(), Vec::new());
    for pass in 0..=PASSES {
        for (store, nanos) in [
            (Store::Ordinary, &mut ordinary),
            (Store::NonTemporal, &mut non_temporal),
        ] {
            group.barrier()?;
            let began = Instant::now();
            add(store, &mut left, &mut right);
            let took = nanos_since(began);
            if pass > 0 {
                nanos.push(took);
            }
        }
    }
    // Two arrays, each read and written.
    let moved = 4 * lines * size_of::<Line>() * group.world();
    let rate = |nanos: Vec<i64>| -> Result<f64, Error> {
        let mut nanos = slowest(group, nanos)?;
        nanos.sort_unstable();
        Ok(moved as f64 / quantile(&nanos, 0.5).max(1) as f64)
    };
    let ordinary_gb_s = rate(ordinary)?;
    let non_temporal_gb_s = rate(non_temporal)?;
    let non_temporal_gb_s = cfg!(target_arch = "x86_64").then_some(non_temporal_gb_s);
    Ok(Streaming {
        library: "paceline",
        world: group.world(),
        bytes: 2 * lines * size_of::<Line>(),
        passes: PASSES,
        ordinary_gb_s,
        non_temporal_gb_s,
        gb_s: non_temporal_gb_s.unwrap_or(0.0).max(ordinary_gb_s),
        shares: Vec::new(),
    })
}

/// Stores the sums of two arrays into both. Elsewhere than on x86-64 all stores are ordinary.
fn add(store: Store, left: &mut [Line], right: &mut [Line]) {
    #[cfg(target_arch = "x86_64")]
    {
        let is_wide = std::arch::is_x86_feature_detected!("avx512f");
        match store {
            // SAFETY: the processor has the instructions.
            Store::Ordinary if is_wide => unsafe { x86::ordinary_wide(left, right) },
            Store::Ordinary => ordinary(left, right),
            // SAFETY: as above.
            Store::NonTemporal if is_wide => unsafe { x86::non_temporal_wide(left, right) },
            Store::NonTemporal => x86::non_temporal(left, right),
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    match store {
        Store::Ordinary | Store::NonTemporal => ordinary(left, right),
    }
}

#[inline(always)]
fn ordinary(left: &mut [Line], right: &mut [Line]) {
    for (left, right) in left.iter_mut().zip(right) {
        for (left, right) in left.0.iter_mut().zip(&mut right.0) {
            let sum = *left + *right;
            *left = sum;
            *right = sum;
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm_add_ps, _mm_load_ps, _mm_sfence, _mm_stream_ps, _mm512_add_ps, _mm512_load_ps,
        _mm512_stream_ps,
    };

    use super::Line;

    #[target_feature(enable = "avx512f")]
    pub(super) fn ordinary_wide(left: &mut [Line], right: &mut [Line]) {
        super::ordinary(left, right);
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn non_temporal_wide(left: &mut [Line], right: &mut [Line]) {
        for (left, right) in left.iter_mut().zip(right) {
            let (left, right) = (left.0.as_mut_ptr(), right.0.as_mut_ptr());
            // SAFETY: each points to a line of 64 bytes, aligned to as many and borrowed exclusively.
            unsafe {
                let sum = _mm512_add_ps(_mm512_load_ps(left), _mm512_load_ps(right));
                _mm512_stream_ps(left, sum);
                _mm512_stream_ps(right, sum);
            }
        }
        _mm_sfence();
    }

    pub(super) fn non_temporal(left: &mut [Line], right: &mut [Line]) {
        for (left, right) in left.iter_mut().zip(right) {
            let (left, right) = (left.0.as_mut_ptr(), right.0.as_mut_ptr());
            // SAFETY: as above, in four parts of 16 bytes; every x86-64 has SSE.
            unsafe {
                let sums = [0, 4, 8, 12]
                    .map(|at| _mm_add_ps(_mm_load_ps(left.add(at)), _mm_load_ps(right.add(at))));
                for (part, sum) in sums.into_iter().enumerate() {
                    _mm_stream_ps(left.add(4 * part), sum);
                }
                for (part, sum) in sums.into_iter().enumerate() {
                    _mm_stream_ps(right.add(4 * part), sum);
                }
            }
        }
        // SAFETY: as above.
        unsafe { _mm_sfence() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(scale: f32) -> Vec<Line> {
        let line = |at: usize| Line(std::array::from_fn(|i| scale * (16 * at + i) as f32));
        (0..5).map(line).collect()
    }

    fn check(add: impl FnOnce(&mut [Line], &mut [Line])) {
        let (mut left, mut right) = (lines(1.0), lines(2.0));
        add(&mut left, &mut right);
        for (at, expected) in lines(3.0).iter().enumerate() {
            assert_eq!(left[at].0, expected.0);
            assert_eq!(right[at].0, expected.0);
        }
    }

    #[test]
    fn both_arrays_get_the_sums() {
        check(|left, right| add(Store::Ordinary, left, right));
        check(|left, right| add(Store::NonTemporal, left, right));
        check(ordinary);
        #[cfg(target_arch = "x86_64")]
        check(x86::non_temporal);
    }
}
