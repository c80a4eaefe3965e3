//! Products of matrices against sums in f64, and their bits on every instruction set and number of threads.

use crate::support::{assert_close, everywhere, noise};
use paceline_kernels::{Gemm, Kernels};

/// Where a matrix of `[rows, columns]` has a value, transposed or not.
fn place(transposed: bool, [rows, columns]: [usize; 2], row: usize, column: usize) -> usize {
    match transposed {
        true => column * rows + row,
        false => row * columns + column,
    }
}

fn check(rows: usize, columns: usize, depth: usize) {
    let (a, b) = (noise(1, rows * depth), noise(2, depth * columns));
    let bias = noise(3, columns);
    for (a_transposed, b_transposed) in [(false, false), (false, true), (true, false), (true, true)]
    {
        let gemm = Gemm {
            rows,
            columns,
            depth,
            a_transposed,
            b_transposed,
        };
        let mut expected = Vec::new();
        for row in 0..rows {
            for column in 0..columns {
                let sum = (0..depth).map(|step| {
                    let a = a[place(a_transposed, [rows, depth], row, step)];
                    let b = b[place(b_transposed, [depth, columns], step, column)];
                    f64::from(a) * f64::from(b)
                });
                expected.push(f64::from(bias[column]) + sum.sum::<f64>());
            }
        }
        let [got] = everywhere(|kernels| [kernels.gemm(&gemm, &a, &b, Some(&bias))]);
        assert_close(&got, &expected, &format!("{gemm:?}"));
    }
}

#[test]
fn shapes_around_those_of_registers_blocks_and_pieces() {
    for rows in [1, 2, 5, 8, 23, 24, 25] {
        for columns in [1, 15, 16, 17, 31, 33] {
            check(rows, columns, 7);
        }
    }
    check(97, 48, 255);
    check(200, 64, 257);
    check(31, 40, 1031);
    check(3, 130, 512);
}

#[test]
fn empty_shapes_and_one_value() {
    check(1, 1, 1);
    check(0, 3, 4);
    check(3, 0, 4);
    check(3, 4, 0);
}

#[test]
fn shapes_from_a_seed() {
    for (at, value) in noise(9, 40).iter().enumerate() {
        let bits = (value.abs() * 8_388_608.0) as usize;
        check(
            1 + bits % 61,
            1 + bits / 61 % 67,
            1 + bits / 4087 % 300 + at,
        );
    }
}

#[test]
fn numbers_that_are_not_finite_reach_their_row_and_column_only() {
    let gemm = Gemm {
        rows: 3,
        columns: 3,
        depth: 2,
        a_transposed: false,
        b_transposed: false,
    };
    let a = [f32::NAN, 1.0, 1.0, 1.0, 1.0, 1.0];
    let b = [1.0, f32::INFINITY, 1.0, 1.0, 1.0, 1.0];
    let [got] = everywhere(|kernels| [kernels.gemm(&gemm, &a, &b, None)]);
    assert!(got[..3].iter().all(|value| value.is_nan()));
    let infinity = f32::INFINITY;
    assert_eq!(got[3..], [2.0, infinity, 2.0, 2.0, infinity, 2.0]);
}

#[test]
fn columns_are_added() {
    for (rows, columns) in [(0, 3), (1, 1), (3, 130), (600, 67), (513, 64), (2, 0)] {
        let values = noise(5, rows * columns);
        let of_column = |column: usize| -> f64 {
            let rows = 0..rows;
            rows.map(|row| f64::from(values[row * columns + column]))
                .sum()
        };
        let expected: Vec<f64> = (0..columns).map(of_column).collect();
        let [got] = everywhere(|kernels| [kernels.column_sums(&values, columns)]);
        assert_close(&got, &expected, &format!("{rows} x {columns}"));
    }
}

#[test]
#[should_panic(expected = "the right matrix")]
fn a_matrix_of_another_size_is_refused() {
    let gemm = Gemm {
        rows: 2,
        columns: 2,
        depth: 2,
        a_transposed: false,
        b_transposed: false,
    };
    let _ = Kernels::of_process()
        .unwrap()
        .gemm(&gemm, &[0.0; 4], &[0.0; 3], None);
}
