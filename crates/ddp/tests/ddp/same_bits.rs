//! One hash for any number of ranks.

use burn::tensor::DType;

use crate::support::*;

#[test]
fn the_weights_do_not_depend_on_the_number_of_ranks() {
    let expected = train(ranks(1, |group| group).remove(0), 8, 6);
    for world in [2, 3, 4, 5, 8] {
        for hash in ranks(world, |group| train(group, 8, 6)) {
            assert_eq!(hash, expected, "{world} ranks");
        }
    }
}

#[test]
fn a_number_of_shards_that_is_no_power_of_two_works_too() {
    for shards in [3, 5, 6, 7] {
        let expected = train(ranks(1, |group| group).remove(0), shards, 3);
        for world in 2..=shards {
            for hash in ranks(world, |group| train(group, shards, 3)) {
                assert_eq!(hash, expected, "{shards} shards on {world} ranks");
            }
        }
    }
}

#[test]
fn another_number_of_shards_is_another_computation() {
    let a = train(ranks(1, |group| group).remove(0), 4, 3);
    let b = train(ranks(1, |group| group).remove(0), 8, 3);
    assert_ne!(a, b);
}

#[test]
fn half_precision_is_summed_in_f32_and_gives_one_hash_too() {
    for dtype in [DType::BF16, DType::F16] {
        let expected = train_as(dtype, ranks(1, |group| group).remove(0), 8, 6);
        for world in [2, 3, 8] {
            for hash in ranks(world, |group| train_as(dtype, group, 8, 6)) {
                assert_eq!(hash, expected, "{world} ranks, {dtype:?}");
            }
        }
    }
}
