//! Interpolation, and its bits on every instruction set and number of threads.

use crate::support::{everywhere, noise};
use paceline_kernels::Kernels;

#[test]
fn any_number_of_values() {
    for count in [0, 1, 33, 1023, 1025, 200_011] {
        let (start, end) = (noise(1, count), noise(2, count));
        let got = everywhere(|kernels: Kernels| {
            let mut values = start.clone();
            kernels.lerp(&mut values, &end, 0.25);
            [values]
        });
        let expected = start.iter().zip(&end);
        let expected: Vec<f32> = expected.map(|(a, b)| a + (b - a) * 0.25).collect();
        assert_eq!(got, [expected], "{count} values");
    }
}
