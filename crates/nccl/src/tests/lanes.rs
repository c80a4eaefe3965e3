//! Two lanes of one device: the ranks of a mesh along both dimensions, and failures in one of them.

use std::time::Duration;

use paceline_collective::{AllReduce, DeviceMesh, ProcessGroup, ReduceOp, Tree};
use paceline_testing::seconds_after;

use super::calls::{NONE, noise};
use super::{Bench, PATIENCE, buffer, machine, on_ranks, options};
use crate::{Before, Communicator, Float, NcclError, Ticket, TreeSum};

const DIMS: [&str; 2] = ["dp", "tp"];

/// The lanes of a mesh of two by two, by dimension; `order` is that of joining.
fn lanes(
    world: &ProcessGroup,
    order: [usize; 2],
    library: &paceline_fake_cuda::Library,
) -> (DeviceMesh, [Communicator; 2]) {
    let mesh = DeviceMesh::new(world, &[("dp", 2), ("tp", 2)]).unwrap();
    let group = |at: usize| mesh.group(DIMS[at]).unwrap();
    let options = options(library);
    let first = Communicator::join(group(order[0]), world.rank(), &options).unwrap();
    let second = first.join_lane(group(order[1])).unwrap();
    let lanes = match order {
        [0, _] => [first, second],
        _ => [second, first],
    };
    (mesh, lanes)
}

/// A sum along a lane of numbers that the caller forgets.
fn sum(comm: &Communicator, bench: &Bench) -> Ticket {
    let room = bench.floats(&[1.0; 16]);
    // Freeing it would wait for what is behind it.
    std::mem::forget(room.clone());
    comm.all_reduce(buffer(&room), Float::F32, Before::Now, NONE)
}

#[test]
fn sums_and_maxima_along_both_dimensions_of_a_mesh_have_the_bits_of_the_host() {
    const LEN: usize = 100;
    for order in [[0, 1], [1, 0]] {
        let library = machine(4, "");
        on_ranks(4, PATIENCE, |world| {
            let (mesh, lanes) = lanes(&world, order, &library);
            let bench = Bench::new(&library, world.rank());
            let own = |at: usize| noise(world.rank() + 4 * at, 2 * LEN);
            // Buckets between the calls of parts, and none is waited for.
            let rooms: Vec<_> = (0..12).map(|at| bench.floats(&own(at))).collect();
            let trees = [3, 4].map(|leaves| Tree::split(leaves, 2).unwrap());
            let calls = rooms.iter().enumerate().map(|(at, room)| {
                let lane = usize::from(at % 3 != 0);
                let (comm, tree) = (&lanes[lane], &trees[at % 2]);
                match at {
                    5 => comm.max(buffer(room), Float::F32, Before::Now, NONE),
                    _ => {
                        let sum = TreeSum {
                            tree: tree.clone(),
                            len: LEN,
                            stride: LEN,
                            counts: None,
                        };
                        comm.reduce_in_tree_order(buffer(room), sum, Before::Now, NONE)
                    }
                }
            });
            let calls: Vec<Ticket> = calls.collect();
            for (at, (call, room)) in calls.iter().zip(&rooms).enumerate() {
                call.wait().unwrap();
                let lane = usize::from(at % 3 != 0);
                let group = mesh.group(DIMS[lane]).unwrap();
                let (op, tree) = match at {
                    5 => (ReduceOp::Max, None),
                    _ => (ReduceOp::Sum, Some(trees[at % 2].clone())),
                };
                let blocks = tree.as_ref().map_or(1, |it| it.blocks(group.rank()).len());
                let mut host = group.buffer::<f32>(blocks * LEN).unwrap();
                host.copy_from_slice(&own(at)[..blocks * LEN]);
                let call = AllReduce {
                    tree,
                    ..AllReduce::new(op, LEN)
                };
                let host = group.all_reduce_buffer(host, call).unwrap();
                let bits = |all: &[f32]| all.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
                let found = bits(&bench.read(room)[..LEN]);
                assert_eq!(found, bits(&host.buffer[..LEN]), "call {at}, {order:?}");
            }
            assert_eq!(lanes[1].rank(), world.rank() % 2);
            // The other one goes on.
            let [dp, tp] = lanes;
            drop(dp);
            sum(&tp, &bench).wait().unwrap();
        });
    }
}

/// How the calls of every rank ended after rank 3 failed as `fails` says, while the others wait for it: rank 2 along `tp`, rank 1
/// along `dp`, and rank 0 for these.
fn failed(
    timeout: Duration,
    order: [usize; 2],
    fails: impl Fn(&DeviceMesh) + Sync,
) -> Vec<NcclError> {
    let library = machine(4, r#", "peer_death": "hang""#);
    on_ranks(4, timeout, |world| {
        let (mesh, lanes) = lanes(&world, order, &library);
        let bench = Bench::new(&library, world.rank());
        for lane in &lanes {
            sum(lane, &bench).wait().unwrap();
        }
        world.barrier().unwrap();
        if world.rank() == 3 {
            fails(&mesh);
            let is_sound = |dim: &&str| mesh.group(dim).unwrap().health().is_ok();
            while DIMS.iter().all(is_sound) {
                std::thread::yield_now();
            }
        }
        let calls = [0, 1].map(|lane| sum(&lanes[lane], &bench));
        let ends = calls.into_iter().filter_map(|call| call.wait().err());
        let error = ends.last().unwrap();
        // Both lanes have the same failure, and take no more calls.
        for lane in &lanes {
            assert_eq!(lane.health().unwrap_err().to_string(), error.to_string());
            let again = sum(lane, &bench).wait().unwrap_err();
            assert_eq!(again.to_string(), error.to_string());
        }
        error
    })
}

#[test]
fn a_rank_that_gives_up_in_one_lane_ends_both_and_is_named() {
    for (order, dim) in [([0, 1], "tp"), ([1, 0], "tp"), ([0, 1], "dp")] {
        let errors = failed(PATIENCE, order, |mesh| {
            mesh.group(dim).unwrap().abort("the loss is not a number");
        });
        // Rank 0 hears it from one of the others.
        for error in &errors[..3] {
            let text = error.to_string();
            assert!(
                text.contains("rank 3 of the job") && text.ends_with("the loss is not a number"),
                "{order:?}, {dim}: {text}"
            );
        }
        // The first one to hear it hears it from rank 3.
        let heard = |error: &NcclError| match error {
            NcclError::Along {
                group,
                rank: Some(3),
                error,
            } => matches!(**error, NcclError::Group(_)) && ["dp1", "tp1"].contains(&&**group),
            _ => false,
        };
        assert!(errors[..3].iter().any(heard), "{errors:?}");
    }
}

#[test]
fn a_rank_that_never_calls_is_named_by_those_who_wait_for_it_in_either_lane() {
    let errors = failed(Duration::from_secs(1), [0, 1], |_| {});
    // The first one to find out tells the others, of which some wait for ranks that wait themselves.
    let found = |error: &&NcclError| error.is_deadline() && error.culprit() == Some(3);
    assert!(errors[1..3].iter().any(|error| found(&error)), "{errors:?}");
    for error in &errors[..3] {
        let text = error.to_string();
        assert!(text.contains("rank 3 of the job"), "{text}");
    }
}

#[test]
fn a_call_that_is_stuck_in_one_lane_ends_both() {
    for (does, expected) in [
        ("hang", "all-gather #1 timed out after "),
        ("block", "ncclBroadcast has not returned for "),
    ] {
        let fault = format!(r#"{{"call": "ncclBroadcast", "rank": 1, "does": "{does}"}}"#);
        let library = machine(4, &format!(r#", "faults": [{fault}]"#));
        let errors = on_ranks(4, Duration::from_secs(1), |world| {
            let (_, lanes) = lanes(&world, [0, 1], &library);
            let bench = Bench::new(&library, world.rank());
            let room = bench.floats(&[1.0; 8]);
            std::mem::forget(room.clone());
            let stuck = lanes[1].all_gather(buffer(&room), [16, 16].into(), Before::Now, NONE);
            let behind = sum(&lanes[0], &bench);
            let [first, second] = [stuck, behind].map(|call| call.wait().unwrap_err().to_string());
            assert_eq!(first, second);
            while does == "block" && world.rank() % 2 == 1 && !lanes[0].is_wedged() {
                std::thread::yield_now();
            }
            first
        });
        for error in errors {
            let seconds = seconds_after(&error, expected);
            assert!((1.5..20.0).contains(&seconds), "{does}: {error}");
        }
    }
}

#[test]
fn a_lane_whose_ranks_cannot_all_join_leaves_the_others_as_they_are() {
    let library = machine(4, "");
    on_ranks(4, PATIENCE, |world| {
        let mesh = DeviceMesh::new(&world, &[("dp", 2), ("tp", 2)]).unwrap();
        let tp = mesh.group("tp").unwrap();
        // Ranks 0 and 1 share a device, as do 2 and 3.
        let device = world.rank() / 2;
        let comm = Communicator::join(mesh.group("dp").unwrap(), device, &options(&library));
        let comm = comm.unwrap();
        let error = comm.join_lane(tp).unwrap_err();
        assert!(
            matches!(
                error,
                NcclError::OneDevice {
                    first: 0,
                    second: 1,
                    ..
                }
            ),
            "{error}"
        );
        tp.barrier().unwrap();
    });
}

#[test]
fn a_rank_that_aborts_one_lane_has_ended_both() {
    let library = machine(4, "");
    on_ranks(4, PATIENCE, |world| {
        let (_, [dp, tp]) = lanes(&world, [0, 1], &library);
        let bench = Bench::new(&library, world.rank());
        world.barrier().unwrap();
        dp.abort().unwrap();
        let error = sum(&tp, &bench).wait().unwrap_err();
        let text = error.to_string();
        assert!(text.ends_with("its communicator has ended"), "{text}");
    });
}
