//! Sub-groups and meshes: who is in which, and that they work and fail side by side.

mod common;

use std::time::Duration;

use common::{WIRES, Wire, on_ranks};
use paceline_collective::{DeviceMesh, Error, GroupOptions, ProcessGroup, ReduceOp};
use paceline_rendezvous::env::WorkerEnv;
use paceline_testing::Meeting;

/// The sum over a group of the job's numbers of its ranks, by reduction.
fn sum_of_ranks(group: &ProcessGroup) -> f64 {
    let mut data = vec![group.global_rank(group.rank()) as f64; 100];
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert!(data.iter().all(|value| *value == data[0]));
    data[0]
}

fn total(ranks: &[usize]) -> f64 {
    ranks.iter().sum::<usize>() as f64
}

#[test]
fn interleaved_colours_make_groups_of_their_ranks() {
    for wire in WIRES {
        for world in [1, 2, 3, 5, 8] {
            on_ranks(wire, world, |group| {
                let rank = group.rank();
                let colour = (rank % 3) as u32;
                let sub = group.split(Some(colour), rank as i64).unwrap().unwrap();
                let expected: Vec<usize> =
                    (0..world).filter(|other| other % 3 == rank % 3).collect();
                assert_eq!(sub.ranks(), expected);
                assert_eq!((sub.world(), sub.rank()), (expected.len(), rank / 3));
                assert_eq!(sub.global_rank(sub.rank()), rank);
                assert_eq!(sub.name(), format!("world/{colour}"));
                assert_eq!(sum_of_ranks(&sub), total(&expected));
                // The parent is as good as before.
                assert_eq!(sum_of_ranks(&group), total(&group.ranks()));
            });
        }
    }
}

#[test]
fn a_group_is_made_by_its_members_alone() {
    for wire in WIRES {
        on_ranks(wire, 4, |group| {
            if group.rank() == 1 {
                return;
            }
            let sub = group.subgroup("all but one", &[3, 0, 2]).unwrap();
            assert_eq!((sub.name(), sub.ranks()), ("all but one", vec![3, 0, 2]));
            assert_eq!(sum_of_ranks(&sub), total(&[0, 2, 3]));
            let missing = format!("rank {} is not in the list [1]", group.rank());
            for (members, reason) in [
                (&[1][..], missing.as_str()),
                (&[0, 2, 3, 0], "a rank is in the list twice"),
                (
                    &[0, 9],
                    "a rank of the list [0, 9] is not below 4, the number of ranks",
                ),
            ] {
                let refused = group.subgroup("x", members).unwrap_err().to_string();
                let begin = "group \"x\" cannot be made of group \"world\"";
                assert_eq!(refused, format!("{begin}: {reason}"));
            }
        });
    }
}

#[test]
fn keys_decide_the_order() {
    for wire in WIRES {
        on_ranks(wire, 4, |group| {
            let sub = group
                .split(Some(7), -(group.rank() as i64))
                .unwrap()
                .unwrap();
            assert_eq!(sub.ranks(), [3, 2, 1, 0]);
            assert_eq!(sub.rank(), 3 - group.rank());
            let mut gathered = [0_i64; 4];
            sub.all_gather(&[group.rank() as i64], &mut gathered)
                .unwrap();
            assert_eq!(gathered, [3, 2, 1, 0]);
            // Messages follow the sub-group's numbers too.
            if sub.rank() == 0 {
                sub.send_bytes(b"from three", 3, 1).unwrap();
            } else if sub.rank() == 3 {
                assert_eq!(group.rank(), 0);
                assert_eq!(sub.recv_bytes(0, 1).unwrap(), b"from three");
            }
        });
    }
}

#[test]
fn a_rank_without_a_colour_is_in_no_group() {
    for wire in WIRES {
        on_ranks(wire, 4, |group| {
            let colour = (group.rank() != 1).then_some(0);
            match group.split(colour, 0).unwrap() {
                None => assert_eq!(group.rank(), 1),
                Some(sub) => {
                    assert_eq!(sub.ranks(), [0, 2, 3]);
                    assert_eq!(sum_of_ranks(&sub), 5.0);
                }
            }
            assert!(group.split(None, 0).unwrap().is_none());
            group.barrier().unwrap();
        });
    }
}

#[test]
fn a_split_of_a_split_knows_the_jobs_numbers() {
    for wire in WIRES {
        on_ranks(wire, 8, |group| {
            let rank = group.rank();
            let half = group.split(Some((rank / 4) as u32), 0).unwrap().unwrap();
            let pair = half
                .split(Some((half.rank() % 2) as u32), -(rank as i64))
                .unwrap()
                .unwrap();
            let low = rank / 4 * 4 + rank % 2;
            assert_eq!(pair.ranks(), [low + 2, low]);
            assert_eq!(pair.name(), format!("world/{}/{}", rank / 4, rank % 2));
            drop(half);
            assert_eq!(sum_of_ranks(&pair), (2 * low + 2) as f64);
            let alone = pair.split(Some(rank as u32), 0).unwrap().unwrap();
            assert_eq!((alone.world(), alone.ranks()), (1, vec![rank]));
            assert_eq!(sum_of_ranks(&alone), rank as f64);
            let again = alone.split(Some(1), 0).unwrap().unwrap();
            assert_eq!(again.ranks(), [rank]);
        });
    }
}

#[test]
fn the_same_split_again_is_another_group() {
    for wire in WIRES {
        on_ranks(wire, 3, |group| {
            let first = group.split(Some(1), 0).unwrap().unwrap();
            let second = group.split(Some(1), 0).unwrap().unwrap();
            first.abort("only the first");
            assert!(first.barrier().is_err());
            assert_eq!(sum_of_ranks(&second), 3.0);
            assert_eq!(sum_of_ranks(&group), 3.0);
        });
    }
}

#[test]
fn groups_reduce_at_the_same_time_from_several_threads() {
    for wire in WIRES {
        on_ranks(wire, 4, |group| {
            let rank = group.rank();
            let row = group.split(Some((rank / 2) as u32), 0).unwrap().unwrap();
            let column = group.split(Some((rank % 2) as u32), 0).unwrap().unwrap();
            std::thread::scope(|scope| {
                for sub in [&row, &column, &group] {
                    scope.spawn(move || {
                        let expected = total(&sub.ranks());
                        for _ in 0..100 {
                            assert_eq!(sum_of_ranks(sub), expected);
                        }
                    });
                }
            });
        });
    }
}

#[test]
fn a_failure_stays_in_its_group_and_a_panic_does_not() {
    for wire in WIRES {
        let all_have_reduced = Meeting::new(4);
        let outcomes = on_ranks(wire, 4, |group| {
            let rank = group.rank();
            let pair = group.split(Some((rank / 2) as u32), 0).unwrap().unwrap();
            if rank < 2 {
                let error = pair
                    .all_reduce(&mut vec![0.0_f32; 10 + rank], ReduceOp::Sum)
                    .unwrap_err();
                assert!(matches!(error, Error::Mismatch { .. }), "{error}");
            }
            assert_eq!(sum_of_ranks(&group), 6.0);
            if rank >= 2 {
                assert_eq!(sum_of_ranks(&pair), 5.0);
            }
            all_have_reduced.wait();
            if rank == 3 {
                let moved = std::panic::AssertUnwindSafe(move || {
                    assert!(
                        group.world() + pair.world() == 0,
                        "this rank is meant to panic"
                    );
                });
                std::panic::catch_unwind(moved).unwrap_err();
                return None;
            }
            Some((
                group.barrier().unwrap_err(),
                (rank == 2).then(|| pair.barrier().unwrap_err()),
            ))
        });
        for (of_world, of_pair) in outcomes.into_iter().flatten() {
            assert_eq!(of_world.to_string(), "rank 3 gave up: it panicked");
            if let Some(of_pair) = of_pair {
                assert_eq!(of_pair.to_string(), "rank 1 gave up: it panicked");
            }
        }
    }
}

#[test]
fn an_error_names_the_group_and_the_jobs_number_of_a_rank() {
    for wire in WIRES {
        let all_have_split = Meeting::new(4);
        on_ranks(wire, 4, |group| {
            let pair = group
                .split(Some((group.rank() % 2) as u32), 0)
                .unwrap()
                .unwrap();
            all_have_split.wait();
            pair.set_timeout(Duration::from_secs(1));
            if group.rank() == 1 {
                let text = pair.barrier().unwrap_err().to_string();
                assert!(
                    text.contains("rank 1 (world/1, rank 3 of the job, host ")
                        && text.contains("barrier #1"),
                    "{text}"
                );
            } else if group.rank() == 3 {
                while pair.health().is_ok() {
                    std::thread::yield_now();
                }
            }
        });
    }
}

#[test]
fn a_world_of_one_splits_into_itself() {
    let group = ProcessGroup::connect(WorkerEnv::alone(), &GroupOptions::default()).unwrap();
    assert_eq!((group.name(), group.ranks()), ("world", vec![0]));
    let sub = group.split(Some(4), 0).unwrap().unwrap();
    assert_eq!((sub.name(), sub.ranks()), ("world/4", vec![0]));
    assert_eq!(sum_of_ranks(&sub), 0.0);
    assert!(group.split(None, 0).unwrap().is_none());
    let mesh = DeviceMesh::new(&group, &[("dp", 1)]).unwrap();
    assert_eq!(mesh.coordinate("dp").unwrap(), 0);
}

#[test]
fn a_mesh_has_a_group_along_each_dimension() {
    for wire in WIRES {
        for (rows, columns) in [(2, 2), (2, 3)] {
            on_ranks(wire, rows * columns, |group| {
                let mesh = DeviceMesh::new(&group, &[("pp", rows), ("dp", columns)]).unwrap();
                let (row, column) = (group.rank() / columns, group.rank() % columns);
                assert_eq!(mesh.coordinate("pp").unwrap(), row);
                assert_eq!(mesh.coordinate("dp").unwrap(), column);
                let (pp, dp) = (mesh.group("pp").unwrap(), mesh.get("dp").unwrap());
                assert_eq!((pp.rank(), dp.rank()), (row, column));
                assert_eq!(dp.name(), format!("dp{row}"));
                assert_eq!(pp.name(), format!("pp{column}"));
                let in_row: Vec<usize> =
                    (0..columns).map(|column| row * columns + column).collect();
                assert_eq!(dp.ranks(), in_row);
                assert_eq!(sum_of_ranks(dp), total(&in_row));
                assert_eq!(sum_of_ranks(pp), total(&pp.ranks()));
                assert_eq!(mesh.size("dp").unwrap(), columns);
                assert!(mesh.get("tp").is_none());
            });
        }
    }
}

#[test]
fn a_mesh_of_three_dimensions_flattens_two_of_them() {
    for wire in WIRES {
        on_ranks(wire, 8, |group| {
            let mesh = DeviceMesh::new(&group, &[("pp", 2), ("dp", 2), ("tp", 2)]).unwrap();
            let rank = group.rank();
            assert_eq!(mesh.dims(), ["pp", "dp", "tp"]);
            assert_eq!(mesh.group("tp").unwrap().ranks(), [rank & !1, rank | 1]);
            assert_eq!(mesh.group("pp").unwrap().ranks(), [rank & 3, rank & 3 | 4]);
            let flat = mesh.flatten(&["pp", "tp"]).unwrap();
            let base = rank & 2;
            assert_eq!(flat.ranks(), [base, base + 1, base + 4, base + 5]);
            assert_eq!(flat.name(), format!("pp_tp{}", base / 2));
            assert_eq!(sum_of_ranks(&flat), total(&flat.ranks()));
            // A pipeline's neighbours talk while the replicas reduce.
            let pp = mesh.group("pp").unwrap();
            pp.send(&[rank as f64], 1 - pp.rank(), 0).unwrap();
            assert_eq!(
                sum_of_ranks(mesh.group("dp").unwrap()),
                ((rank & !2) + (rank | 2)) as f64
            );
            let mut data = [0.0_f64];
            pp.recv(&mut data, 1 - pp.rank(), 0).unwrap();
            assert_eq!(data, [(rank ^ 4) as f64]);
        });
    }
}

#[test]
fn a_mesh_that_does_not_fit_is_refused_and_breaks_nothing() {
    on_ranks(Wire::Local, 6, |group| {
        let error = DeviceMesh::new(&group, &[("pp", 2), ("dp", 4)]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a mesh of pp 2, dp 4 cannot be made of group \"world\": it has 8 places for 6 ranks"
        );
        let mesh = DeviceMesh::new(&group, &[("pp", 2), ("dp", 3)]).unwrap();
        let error = mesh.group("tp").unwrap_err();
        assert!(
            error.to_string().contains("there is no dimension \"tp\""),
            "{error}"
        );
        let error = mesh.flatten(&["dp", "dp"]).unwrap_err();
        assert!(error.to_string().contains("named twice"), "{error}");
        assert_eq!(sum_of_ranks(&group), 15.0);
    });
}

#[test]
fn bytes_sent_are_those_of_all_groups_of_a_rank() {
    for wire in WIRES {
        on_ranks(wire, 4, |group| {
            let pair = group.split(Some(group.rank() as u32 / 2), 0);
            let pair = pair.unwrap().unwrap();
            let before = group.sent_bytes();
            // Each of two ranks sends what the other lacks: all of its input, or half of it and half of the result.
            pair.all_reduce(&mut [1.0_f32; 4096], ReduceOp::Sum)
                .unwrap();
            let reduced = group.sent_bytes();
            assert_eq!(reduced - before, 4096 * 4, "{wire:?}");
            match pair.rank() {
                0 => pair.send(&[7_i32; 25], 1, 3).unwrap(),
                _ => pair.recv(&mut [0_i32; 25], 0, 3).unwrap(),
            }
            let sent = if pair.rank() == 0 { 100 } else { 0 };
            assert_eq!(group.sent_bytes() - reduced, sent, "{wire:?}");
            assert_eq!(pair.sent_bytes(), group.sent_bytes());
        });
    }
}
