use paceline_rendezvous::page::{JobPage, Revocation};
use paceline_rendezvous::store::Server;
use paceline_rendezvous::token::Token;
use paceline_testing::{Meeting, wait_until};

use super::*;
use crate::async_calls::AllReduce;
use crate::element::ReduceOp;
use crate::options::Transport;

/// The sum of the ranks that started the job, over the ranks of this group.
fn sum(group: &ProcessGroup, started: usize) -> f32 {
    let mut sum = [started as f32];
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    sum[0]
}

fn options(timeout: Duration) -> GroupOptions {
    GroupOptions {
        timeout,
        ..GroupOptions::default()
    }
}

#[test]
fn threads_go_on_without_the_ones_that_left() {
    let groups = ProcessGroup::local(4, &options(Duration::from_secs(30))).unwrap();
    std::thread::scope(|scope| {
        for (started, mut group) in groups.into_iter().enumerate() {
            scope.spawn(move || {
                assert_eq!(sum(&group, started), 6.0);
                let mut left = vec![0, 1, 2, 3];
                // Rank 0 first, then the last one.
                for (number, lost) in [(1, 0), (2, 3)] {
                    if started == lost {
                        return;
                    }
                    left.retain(|rank| *rank != lost);
                    let error = group.all_reduce(&mut [0.0], ReduceOp::Sum).unwrap_err();
                    let next = group.next_generation();
                    let next = next.unwrap_or_else(|again| panic!("{again} after {error}"));
                    let old = std::mem::replace(&mut group, next);
                    assert_eq!(group.generation(), number);
                    assert_eq!((group.world(), group.transport()), (left.len(), "local"));
                    assert_eq!(
                        group.rank(),
                        left.iter().position(|r| *r == started).unwrap()
                    );
                    assert!(old.health().is_err());
                    drop(old);
                    assert_eq!(sum(&group, started), left.iter().sum::<usize>() as f32);
                }
                // Its sub-groups know where they belong, and one rank can be left.
                let alone = group.split(Some(started as u32), 0).unwrap().unwrap();
                assert_eq!((alone.world(), alone.generation()), (1, 2));
                assert!(alone.next_generation().is_err());
                if started == 1 {
                    return;
                }
                group.barrier().unwrap_err();
                let last = group.next_generation().unwrap();
                assert_eq!((last.world(), sum(&last, started)), (1, 2.0));
            });
        }
    });
}

#[test]
fn a_thread_that_does_not_come_in_time_is_fenced() {
    let mut groups = ProcessGroup::local(3, &options(Duration::from_secs(2))).unwrap();
    let late = groups.pop().unwrap();
    std::thread::scope(|scope| {
        let others = groups.into_iter().enumerate().map(|(started, group)| {
            scope.spawn(move || {
                group.barrier().unwrap_err();
                let next = group.next_generation().unwrap();
                assert_eq!((next.world(), sum(&next, started)), (2, 1.0));
            })
        });
        let others: Vec<_> = others.collect();
        others.into_iter().for_each(|other| other.join().unwrap());
    });
    late.health().unwrap_err();
    let error = late.next_generation().unwrap_err();
    assert!(
        matches!(error, Error::Fenced { generation: 1, .. }),
        "{error}"
    );
}

#[test]
fn a_group_without_a_launcher_has_no_successor() {
    let group = ProcessGroup::connect(WorkerEnv::alone(), &GroupOptions::default()).unwrap();
    assert!(!group.declare_recovery());
    let error = group.next_generation().unwrap_err();
    assert!(matches!(error, Error::NoRecovery { .. }), "{error}");
}

/// A launcher's store and page with ranks that are threads, which reach them as processes do.
fn launched(world: usize, transport: Transport, rank: impl Fn(&JobPage, ProcessGroup) + Sync) {
    launched_on(&[world], transport, |pages, group| rank(&pages[0], group));
}

/// The same with so many ranks on each node.
fn launched_on(
    nodes: &[usize],
    transport: Transport,
    rank: impl Fn(&[JobPage], ProcessGroup) + Sync,
) {
    let token = Token::generate().unwrap();
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), &token).unwrap();
    let page = |slots: &usize| JobPage::create_memfd(*slots).unwrap();
    let pages: Vec<JobPage> = nodes.iter().map(page).collect();
    pages.iter().for_each(JobPage::set_recovers);
    let options = GroupOptions {
        transport,
        arena_bytes: Some(1 << 20),
        ..options(Duration::from_secs(30))
    };
    let world = nodes.iter().sum();
    let places = (0..).zip(nodes);
    let places = places.flat_map(|(node, slots)| (0..*slots).map(move |slot| (node, slot)));
    std::thread::scope(|scope| {
        for (own, (node, slot)) in places.enumerate() {
            let (rank, options, pages, token) = (&rank, &options, &pages, &token);
            let store = Some(server.addr().to_string());
            scope.spawn(move || {
                let env = WorkerEnv {
                    rank: own,
                    world,
                    local_rank: slot,
                    local_world: nodes[node],
                    store,
                    token: token.clone(),
                    token_is_secret: true,
                    page_fd: pages[node].raw_fd(),
                    ..WorkerEnv::alone()
                };
                rank(pages, ProcessGroup::connect(env, options).unwrap());
            });
        }
    });
}

#[test]
fn the_ranks_of_several_nodes_go_on_in_another_store() {
    for transport in [Transport::Tcp, Transport::Auto] {
        let all_are_ready = Meeting::new(4);
        // The first node has lost rank 1 and its place; the ranks of the second come first now.
        launched_on(&[2, 2], transport, |pages, group| {
            assert!(group.declare_recovery());
            group.declare_admission();
            let started = group.rank();
            all_are_ready.wait();
            if started == 1 {
                return;
            }
            let token = &group.env().token;
            let server = (started == 0).then(|| {
                let server = Server::bind("127.0.0.1:0".parse().unwrap(), token).unwrap();
                for (page, first, members) in [(&pages[0], 2, vec![0]), (&pages[1], 0, vec![0, 1])]
                {
                    page.end_generation(0, 1);
                    page.publish(&Generation {
                        number: 3,
                        world: 3,
                        first,
                        members,
                        store: Some(server.addr().to_string()),
                        is_held: true,
                    });
                }
                server
            });
            group.barrier().unwrap_err();
            let next = group.next_generation().unwrap();
            assert_eq!((next.rank(), next.world()), ([2, 9, 0, 1][started], 3));
            assert_eq!(
                (next.generation(), next.local_world()),
                (3, [1, 0, 2, 2][started])
            );
            assert!(next.is_held());
            assert_eq!(sum(&next, started), 5.0);
            if started == 0 {
                pages.iter().for_each(JobPage::release);
            }
            next.wait_while_held();
            assert!(!next.is_held());
            next.blame((next.rank() + 1) % 3);
            let blamed = next.slot().victim_in(3);
            assert_eq!(blamed, Some([2, 9, 3, 0][started]));
            drop(group);
            next.barrier().unwrap();
            drop(server);
        });
    }
}

#[test]
fn a_rank_that_was_given_up_and_lives_changes_nothing() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let all_are_ready = Meeting::new(3);
        launched(3, transport, |page, group| {
            assert!(group.declare_recovery());
            let started = group.rank();
            let pair = group
                .split(Some((started != 1).into()), 0)
                .unwrap()
                .unwrap();
            all_are_ready.wait();
            if started == 0 {
                // As the launcher does, but rank 1 is not killed.
                page.end_generation(0, 1);
                page.publish_generation(&[0, 2]);
            }
            let old = group.barrier().unwrap_err();
            assert_eq!(old.culprit(), Some(1), "{old}");
            assert!(
                pair.health().is_err(),
                "a sub-group is of the same generation"
            );
            let next = group.next_generation();
            if started == 1 {
                let error = next.unwrap_err();
                assert!(
                    matches!(error, Error::Fenced { generation: 1, .. }),
                    "{error}"
                );
                return;
            }
            let next = next.unwrap();
            assert_eq!((next.rank(), next.world()), (started / 2, 2));
            assert_eq!((next.generation(), next.slot().index()), (1, started));
            assert_eq!(sum(&next, started), 2.0);
            assert!(group.barrier().is_err());
            drop((group, pair));
            assert_eq!(sum(&next, started), 2.0);
            next.blame(1 - next.rank());
            assert_eq!(next.slot().victim_in(1), Some(2 - started));
        });
    }
}

#[test]
fn a_generation_that_ends_while_it_forms_is_passed_over() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let all_are_ready = Meeting::new(4);
        launched(4, transport, |page, group| {
            let started = group.rank();
            assert!(group.declare_recovery());
            all_are_ready.wait();
            match started {
                0 => return,
                // Rank 1 is a member of generation 1 and never comes.
                1 => {
                    page.end_generation(0, 0);
                    page.publish_generation(&[1, 2, 3]);
                    let waits = |slot| page.slot(slot).awaits() == Some(0);
                    wait_until("both wait for rank 1", || waits(2) && waits(3));
                    // They may be anywhere in forming it.
                    std::thread::sleep(Duration::from_millis(5));
                    page.end_generation(1, 1);
                    page.publish_generation(&[2, 3]);
                    return;
                }
                _ => {}
            }
            group.barrier().unwrap_err();
            let next = group.next_generation().unwrap();
            assert_eq!((next.generation(), next.world()), (2, 2));
            assert_eq!(sum(&next, started), 5.0);
        });
    }
}

#[test]
fn the_launchers_end_of_the_job_ends_the_wait() {
    let both_have_formed = Meeting::new(2);
    launched(2, Transport::Shm, |page, group| {
        assert!(group.declare_recovery());
        both_have_formed.wait();
        if group.rank() == 0 {
            page.revoke(&Revocation {
                rank: Some(1),
                text: "too few are left".into(),
            });
        }
        let error = group.next_generation().unwrap_err();
        let says = "the launcher ended the job: too few are left";
        assert_eq!(error.to_string(), says);
    });
}

#[test]
fn the_next_generation_works_on_the_memory_of_this_one() {
    const LEN: usize = 200 << 10;
    let sum = || AllReduce::new(ReduceOp::Sum, LEN);
    let all_are_ready = Meeting::new(3);
    launched(3, Transport::Shm, |page, group| {
        assert!(group.declare_recovery());
        let started = group.rank();
        let arena = group.member().allocator.arena().unwrap().clone();
        let mut kept = group.buffer::<f32>(10).unwrap();
        kept.fill(started as f32);
        // Its copy lies in memory of the group's own.
        group.all_reduce(&mut [0.0; 1000], ReduceOp::Sum).unwrap();
        all_are_ready.wait();
        if started == 1 {
            page.end_generation(0, 1);
            page.publish_generation(&[0, 2]);
            return;
        }
        // The memory of an operation that failed belongs to its peers until they have all left it.
        let lost = group.buffer::<f32>(LEN).unwrap();
        group.all_reduce_async(lost, sum()).wait().unwrap_err();
        assert!(group.buffer::<f32>(LEN).is_err());
        let next = group.next_generation().unwrap();
        assert!(Arc::ptr_eq(
            next.member().allocator.arena().unwrap(),
            &arena
        ));
        let known = group.member().p2p.mapped();
        let known: Vec<_> = known.map(Arc::as_ptr).collect();
        assert!(
            next.member()
                .p2p
                .mapped()
                .all(|arena| known.contains(&Arc::as_ptr(arena)))
        );
        // All but `kept` is one piece again, although somebody still has the group until now.
        drop(next.buffer::<f32>(255 << 10).unwrap());
        drop(group);
        let mut buffer = next.buffer::<f32>(LEN).unwrap();
        assert!(buffer.iter().all(|value| *value == 0.0));
        buffer.fill(started as f32);
        let sums = next.all_reduce_async(buffer, sum()).wait().unwrap();
        assert!(sums.buffer.iter().all(|sum| *sum == 2.0));
        assert!(kept.iter().all(|value| *value == started as f32));
        drop((sums, kept));
        next.trim();
        assert_eq!(arena.report().used, 0);
    });
}

#[test]
fn a_replacement_joins_where_the_others_agree() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let (all_are_ready, all_know) = (Meeting::new(3), Meeting::new(3));
        launched(3, transport, |page, group| {
            let mut started = group.rank();
            let mut group = group;
            assert!(group.declare_recovery());
            group.declare_admission();
            all_are_ready.wait();
            if started == 1 {
                page.end_generation(0, 1);
                page.publish_generation(&[0, 2]);
                let env = group.env().clone();
                let same = GroupOptions {
                    transport,
                    arena_bytes: Some(1 << 20),
                    ..options(Duration::from_secs(30))
                };
                drop(group);
                all_know.wait();
                // This thread is the process that the launcher starts.
                page.clear_slot(1);
                let env = WorkerEnv {
                    replacement: 1,
                    ..env
                };
                group = ProcessGroup::connect(env, &same).unwrap();
                let error = group.all_reduce(&mut [0.0], ReduceOp::Sum).unwrap_err();
                assert!(matches!(error, Error::NotJoined { rank: 1 }), "{error}");
                assert!(group.barrier().is_err() && group.is_joining());
                let invite = || {
                    wait_until("it is ready", || page.slot(1).is_ready_to_join());
                    page.invite_generation(&[0, 2, 1])
                };
                group = std::thread::scope(|scope| {
                    let joined = scope.spawn(|| group.next_generation().unwrap());
                    assert_eq!(invite(), 2);
                    joined.join().unwrap()
                });
                group.declare_joined();
                assert!(!group.is_joining());
                started = 10;
            } else {
                group.barrier().unwrap_err();
                group = group.next_generation().unwrap();
                assert_eq!((group.world(), group.generation()), (2, 1));
                all_know.wait();
                wait_until("one is invited", || {
                    let mut wants = [i32::from(group.is_invited())];
                    group.all_reduce(&mut wants, ReduceOp::Max).unwrap();
                    wants == [1]
                });
                let next = group.admit().unwrap();
                // Nothing has failed.
                group.health().unwrap();
                group = next;
            }
            assert_eq!((group.world(), group.generation()), (3, 2));
            let ranks = [0, 2, 1];
            assert_eq!(group.rank(), ranks[group.slot().index()]);
            assert!(!group.is_invited());
            assert_eq!(sum(&group, started), 12.0);
        });
    }
}

#[test]
fn a_replacement_needs_a_launcher() {
    let env = WorkerEnv {
        world: 2,
        local_world: 2,
        replacement: 1,
        ..WorkerEnv::alone()
    };
    let error = ProcessGroup::connect(env, &GroupOptions::default()).unwrap_err();
    assert!(matches!(error, Error::NoRecovery { .. }), "{error}");
}
