//! Plans of all ranks, run on the host instead of on devices.

use super::*;
use paceline_collective::{AllReduce, GroupOptions, ProcessGroup, ReduceOp, Tree};

/// Numbers whose sum depends on the order of additions.
fn number(seed: usize) -> f32 {
    let mixed = (seed as u32).wrapping_mul(0x9E37_79B1).rotate_left(13) ^ 0x5bd1_e995;
    let mixed = mixed.wrapping_mul(0x85EB_CA6B);
    (mixed as i32) as f32 / (1_u32 << (mixed % 29)) as f32
}

/// Every rank's blocks: `blocks[rank][block * stride + i]`.
fn blocks(sum: &TreeSum) -> Vec<Vec<f32>> {
    let each = |rank: usize| {
        let count = sum.tree.blocks(rank).len() * sum.stride;
        (0..count).map(|i| number(i * 64 + rank)).collect()
    };
    (0..sum.tree.world()).map(each).collect()
}

/// What the plans make of them, on every rank: exchanges copy, additions add.
fn planned(sum: &TreeSum, mut own: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let world = sum.tree.world();
    let plans: Vec<Plan> = (0..world).map(|rank| Plan::new(sum, rank)).collect();
    let sent = own.clone();
    let mut results = Vec::new();
    for plan in &plans {
        let slice = plan.slices.of(plan.rank);
        let each = plan.spot_singles();
        let mut came = vec![f32::NAN; plan.spots * each];
        let mut place = 0;
        for peer in plan.peers() {
            for number in 0..plan.blocks[peer] {
                let from = number * sum.stride + slice.start;
                came[place * each..][..slice.len()]
                    .copy_from_slice(&sent[peer][from..from + slice.len()]);
                place += 1;
            }
        }
        assert_eq!(place, plan.spots);
        let mine = &mut own[plan.rank];
        let at = |spot: Spot, i: usize| match spot {
            Spot::Own(number) => (true, number * sum.stride + slice.start + i),
            Spot::Came(place) => (false, place * each + i),
        };
        for (left, right) in &plan.adds {
            assert_ne!(left, right);
            for i in 0..slice.len() {
                let read = |(is_own, at): (bool, usize)| if is_own { mine[at] } else { came[at] };
                let added = read(at(*left, i)) + read(at(*right, i));
                match at(*left, i) {
                    (true, at) => mine[at] = added,
                    (false, at) => came[at] = added,
                }
            }
        }
        results.extend_from_slice(&mine[slice]);
    }
    vec![results; world]
}

/// What the collective on the host makes of them.
fn reduced(sum: &TreeSum, own: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let groups = ProcessGroup::local(own.len(), &GroupOptions::default()).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = groups
            .into_iter()
            .zip(own)
            .map(|(group, own)| {
                scope.spawn(move || {
                    let count = sum.tree.blocks(group.rank()).len();
                    let mut buffer = group.buffer::<f32>(count * sum.len).unwrap();
                    for block in 0..count {
                        buffer[block * sum.len..][..sum.len]
                            .copy_from_slice(&own[block * sum.stride..][..sum.len]);
                    }
                    let call = AllReduce {
                        tree: Some(sum.tree.clone()),
                        ..AllReduce::new(ReduceOp::Sum, sum.len)
                    };
                    let done = group.all_reduce_buffer(buffer, call).unwrap();
                    done.buffer[..sum.len].to_vec()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn bits(all: &[Vec<f32>]) -> Vec<Vec<u32>> {
    let each = all.iter();
    each.map(|one| one.iter().map(|it| it.to_bits()).collect())
        .collect()
}

#[test]
fn plans_give_the_bytes_of_the_collective_on_the_host() {
    for world in [1, 2, 3, 4, 5, 8] {
        for leaves in [world, world + 1, 8, 12, 13, 32] {
            if leaves < world {
                continue;
            }
            for len in [1, 3, 16, 100, 4 * world + 1, 1000] {
                let sum = TreeSum {
                    tree: Tree::split(leaves, world).unwrap(),
                    len,
                    stride: len + 5,
                    counts: None,
                };
                let own = blocks(&sum);
                let expected = reduced(&sum, &own);
                assert_eq!(
                    bits(&planned(&sum, own)),
                    bits(&expected),
                    "{leaves} leaves on {world} ranks, {len} numbers"
                );
            }
        }
    }
}

#[test]
fn slices_cover_everything_and_leave_little_over() {
    for world in 1..=17 {
        for len in [0, 1, 3, 4, 63, 64, 65, 1000, 4096] {
            let slices = Slices::new(len, world, None);
            let mut next = 0;
            for rank in 0..world {
                let slice = slices.of(rank);
                assert_eq!(slice.start, next.min(slice.start));
                assert!(slice.start.is_multiple_of(SLICE_SINGLES));
                next = slice.end;
            }
            assert_eq!(next, len);
            assert!(slices.rest().len() < world * SLICE_SINGLES, "{len} {world}");
        }
    }
}

#[test]
fn a_sum_that_cannot_work_is_refused_in_words() {
    let tree = Tree::split(8, 3).unwrap();
    let sum = |len: usize, stride: usize| TreeSum {
        tree: tree.clone(),
        len,
        stride,
        counts: None,
    };
    for (sum, place, bytes, expected) in [
        (sum(4, 4), (0, 3), 32, None),
        (sum(4, 8), (0, 3), 48, None),
        (sum(4, 4), (2, 3), 16, None),
        (
            sum(4, 8),
            (0, 3),
            47,
            Some("47 bytes have no room for 2 blocks of 4 numbers, 8 apart"),
        ),
        (
            sum(4, 3),
            (0, 3),
            99,
            Some("blocks of 4 numbers cannot be 3 apart"),
        ),
        (
            sum(4, 4),
            (0, 2),
            99,
            Some("the tree is for 3 ranks, not 2"),
        ),
    ] {
        assert_eq!(wrong(&sum, place, bytes).as_deref(), expected);
    }
    let uneven = TreeSum {
        counts: Some([1, 1, 1].into()),
        ..sum(4, 4)
    };
    assert_eq!(
        wrong(&uneven, (0, 3), 32).as_deref(),
        Some("the parts [1, 1, 1] are not 4 elements")
    );
    let huge = sum(usize::MAX / 2, usize::MAX / 2);
    assert!(wrong(&huge, (0, 3), usize::MAX).is_some());
}
