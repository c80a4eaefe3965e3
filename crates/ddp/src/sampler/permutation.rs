//! The shuffled order of an epoch: `torch.randperm` on the CPU, bit for bit.

/// From this length on, the shuffle uses 64-bit draws: `floor((2^32 - 1) / 20)`, the bound in PyTorch's source.
const LONG_LEN: usize = (u32::MAX / 20) as usize;

/// The permutation of `0..len` that `torch.randperm(len, generator=g)` returns on the CPU after `g.manual_seed(seed)`.
///
/// *Numerics*: like PyTorch, uses only the low 32 bits of `seed` and keeps the slight bias of drawing with `%`. For a
/// negative Python seed pass its two's complement.
/// *Cost*: one draw per sample, 8 bytes per sample.
/// *Source*: `randperm_cpu` in PyTorch's `TensorFactories.cpp`; the generator is Matsumoto and Nishimura's MT19937.
///
/// ```
/// # use paceline_ddp::sampler::permutation;
/// assert_eq!(permutation(10, 0), [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]);
/// ```
#[must_use]
pub fn permutation(len: usize, seed: u64) -> Vec<usize> {
    permutation_with(len, seed, LONG_LEN)
}

/// `permutation` with the bound as an argument, so that a test can run the long algorithm without gigabytes.
fn permutation_with(len: usize, seed: u64, long_len: usize) -> Vec<usize> {
    let draws = Mt19937::new(seed as u32);
    if len < long_len {
        shuffle_forward(len, draws)
    } else {
        shuffle_inside_out(len, draws)
    }
}

/// Fisher-Yates from the front with 32-bit draws; the last position needs no draw.
fn shuffle_forward(len: usize, mut draws: Mt19937) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    for place in 0..len.saturating_sub(1) {
        let ahead = draws.next_u32() as usize % (len - place);
        order.swap(place, place + ahead);
    }
    order
}

/// The inside-out variant with 64-bit draws, one for every position including the first.
fn shuffle_inside_out(len: usize, mut draws: Mt19937) -> Vec<usize> {
    let mut order = Vec::with_capacity(len);
    for place in 0..len {
        let other = (draws.next_u64() % (place as u64 + 1)) as usize;
        order.push(place);
        order.swap(place, other);
    }
    order
}

/// Words of state.
const WORDS: usize = 624;
/// Distance of the word that is mixed in.
const SHIFT: usize = 397;

/// The 32-bit Mersenne Twister, refilled a whole block of words at a time.
struct Mt19937 {
    state: [u32; WORDS],
    next: usize,
}

impl Mt19937 {
    fn new(seed: u32) -> Self {
        let mut state = [seed; WORDS];
        for index in 1..WORDS {
            let before = state[index - 1];
            state[index] = (before ^ (before >> 30))
                .wrapping_mul(1_812_433_253)
                .wrapping_add(index as u32);
        }
        Self { state, next: WORDS }
    }

    fn next_u32(&mut self) -> u32 {
        if self.next == WORDS {
            self.refill();
        }
        let word = self.state[self.next];
        self.next += 1;
        temper(word)
    }

    /// The first draw is the high half, as in PyTorch.
    fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        let low = u64::from(self.next_u32());
        high << 32 | low
    }

    fn refill(&mut self) {
        for index in 0..WORDS {
            let joined =
                (self.state[index] & 0x8000_0000) | (self.state[(index + 1) % WORDS] & 0x7fff_ffff);
            let twist = if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[index] = self.state[(index + SHIFT) % WORDS] ^ (joined >> 1) ^ twist;
        }
        self.next = 0;
    }
}

fn temper(mut word: u32) -> u32 {
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c_5680;
    word ^= (word << 15) & 0xefc6_0000;
    word ^ (word >> 18)
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};

    use proptest::prelude::*;

    use super::*;

    /// An independent generator, written as the recurrence over a sliding window: no block, no index, tempered on the fly.
    fn words(seed: u64) -> impl Iterator<Item = u64> {
        let mut window: VecDeque<u64> = VecDeque::from([seed % (1 << 32)]);
        while window.len() < 624 {
            let last = window[window.len() - 1];
            let mixed = (last ^ (last / (1 << 30))) * 1_812_433_253 + window.len() as u64;
            window.push_back(mixed % (1 << 32));
        }
        std::iter::from_fn(move || {
            let joined = (window[0] / (1 << 31)) * (1 << 31) + window[1] % (1 << 31);
            let mut fresh = window[397] ^ (joined / 2);
            if !joined.is_multiple_of(2) {
                fresh ^= 0x9908_b0df;
            }
            window.pop_front();
            window.push_back(fresh);
            let first = fresh ^ (fresh >> 11);
            let second = first ^ ((first << 7) & 0x9d2c_5680);
            let third = second ^ ((second << 15) & 0xefc6_0000);
            Some(third ^ (third >> 18))
        })
    }

    /// The short algorithm on a sparse array that holds moved entries only.
    fn reference_short(len: usize, seed: u64) -> Vec<usize> {
        let mut moved: HashMap<usize, usize> = HashMap::new();
        let mut words = words(seed);
        let mut order = Vec::new();
        for place in 0..len {
            let from = if place + 1 == len {
                place
            } else {
                place + (words.next().unwrap() % (len - place) as u64) as usize
            };
            let here = moved.remove(&place).unwrap_or(place);
            if from == place {
                order.push(here);
            } else {
                order.push(moved.insert(from, here).unwrap_or(from));
            }
        }
        order
    }

    /// The long algorithm as in the C++ source, three assignments per position.
    fn reference_long(len: usize, seed: u64) -> Vec<usize> {
        let words: Vec<u64> = words(seed).take(2 * len).collect();
        let mut order = vec![usize::MAX; len];
        for (place, halves) in words.chunks_exact(2).enumerate() {
            let draw = halves[0] * (1 << 32) + halves[1];
            let other = (draw % (place as u64 + 1)) as usize;
            order[place] = place;
            order[place] = order[other];
            order[other] = place;
        }
        order
    }

    #[test]
    fn the_generator_gives_the_word_that_the_cpp_standard_names() {
        // [rand.predef]: the 10000th draw of a default mt19937, whose seed is 5489.
        let mut draws = Mt19937::new(5489);
        let last = (0..10_000).map(|_| draws.next_u32()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    #[test]
    fn permutations_are_those_that_pytorch_printed() {
        assert_eq!(permutation(10, 0), [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]);
        assert_eq!(permutation(10, 1), [5, 6, 1, 2, 0, 8, 9, 3, 7, 4]);
        assert_eq!(permutation(10, 42), [2, 6, 1, 8, 4, 5, 0, 9, 3, 7]);
    }

    #[test]
    fn no_sample_and_one_sample_have_one_order() {
        assert_eq!(permutation(0, 3), [0usize; 0]);
        assert_eq!(permutation(1, 3), [0]);
        assert_eq!(permutation_with(0, 3, 0), [0usize; 0]);
        assert_eq!(permutation_with(1, 3, 0), [0]);
    }

    #[test]
    fn the_bound_between_the_algorithms_is_pytorchs() {
        assert_eq!(LONG_LEN, 214_748_364);
        let short = |len| permutation_with(len, 9, 100) == reference_short(len, 9);
        assert!(short(99), "one below the bound is the short algorithm");
        assert!(!short(100), "the bound itself is the long one");
        assert_eq!(permutation_with(100, 9, 100), reference_long(100, 9));
    }

    #[test]
    fn only_the_low_32_bits_of_the_seed_matter() {
        assert_eq!(permutation(50, 7), permutation(50, (1 << 32) + 7));
        assert_eq!(permutation(50, -1_i64 as u64), permutation(50, 0xffff_ffff));
        assert_ne!(permutation(50, 7), permutation(50, 8));
    }

    proptest! {
        #[test]
        fn both_algorithms_agree_with_a_second_implementation(len in 0usize..3000, seed: u64) {
            prop_assert_eq!(permutation(len, seed), reference_short(len, seed));
            prop_assert_eq!(permutation_with(len, seed, 0), reference_long(len, seed));
        }

        #[test]
        fn every_index_occurs_once(len in 0usize..3000, seed: u64) {
            for mut order in [permutation(len, seed), permutation_with(len, seed, 0)] {
                order.sort_unstable();
                prop_assert!(order.iter().copied().eq(0..len));
            }
        }
    }
}
