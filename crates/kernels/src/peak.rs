//! How fast this processor can be.

use crate::isa::{Kernels, Task};
use crate::registers::Register;

impl Kernels {
    /// Fused multiply-adds on registers alone, to compare a kernel with: about `count` of one value each.
    pub fn multiply_adds(self, count: usize) -> f32 {
        struct Chains(usize);

        impl Task for Chains {
            type Output = f32;

            #[inline(always)]
            fn run<R: Register>(self) -> f32 {
                const CHAINS: usize = 12;
                let factor = R::splat(1.0 - f32::EPSILON);
                let mut sums = [R::splat(0.5); CHAINS];
                for _ in 0..self.0 / (R::LEN * CHAINS) {
                    for sum in &mut sums {
                        *sum = factor.mul_add(factor, *sum);
                    }
                }
                let mut values = [0.0; 16];
                let all = sums.into_iter().reduce(R::add);
                all.expect("a chain or more").store(&mut values);
                values[0]
            }
        }

        self.run(Chains(count))
    }
}
