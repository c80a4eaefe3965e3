//! Ranks that form a group with odd settings, and ranks that fail one after another in an order that the test decides.

use paceline_rendezvous::store::Server;
use paceline_rendezvous::token::Token;

use super::record::hosts;
use super::swap::{Swap, Swapped, lost};
use super::*;
use crate::handover;
use crate::memory::Shown;
use crate::mesh::farewell;

/// A job whose ranks have one process, and so one life.
struct Job {
    server: Option<Server>,
    envs: Vec<WorkerEnv>,
    options: GroupOptions,
    formation: Formation,
}

/// A rank that is connected to all others and has sent nothing yet.
struct Met<'a> {
    forming: Forming<'a>,
    records: Vec<Record>,
    team: Vec<usize>,
    shown: Shown,
    links: Vec<Option<Socket>>,
    _listeners: Listeners,
}

impl Job {
    fn new(world: usize, transport: Transport) -> Self {
        let token = Token::generate().unwrap();
        let server = Server::bind("127.0.0.1:0".parse().unwrap(), &token).unwrap();
        let env = |rank| WorkerEnv {
            rank,
            world,
            local_rank: rank,
            local_world: world,
            store: Some(server.addr().to_string()),
            token: token.clone(),
            token_is_secret: true,
            ..WorkerEnv::alone()
        };
        Self {
            envs: (0..world).map(env).collect(),
            server: Some(server),
            options: GroupOptions {
                timeout: Duration::from_secs(30),
                transport,
                arena_bytes: Some(1 << 20),
                ..GroupOptions::default()
            },
            formation: Formation::new(),
        }
    }

    fn forming(&self, rank: usize) -> Forming<'_> {
        let (env, timeout) = (&self.envs[rank], self.options.timeout);
        let address = env.store.as_deref().unwrap();
        let client = Client::connect(address, &env.token, timeout).unwrap();
        let page = JobPage::for_worker(env).unwrap();
        let formation = &self.formation;
        Forming::new(env, &self.options, client, page, Instant::now(), formation)
            .numbered()
            .unwrap()
    }

    fn meet(&self) -> Vec<Met<'_>> {
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..self.envs.len())
                .map(|rank| scope.spawn(move || Met::of(self.forming(rank))))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

impl<'a> Met<'a> {
    fn of(forming: Forming<'a>) -> Self {
        let (_, records, listeners) = forming.report_in().unwrap();
        let hosts = hosts(&records);
        let prepared = forming
            .prepare(&records, &hosts, listeners.unix.as_ref())
            .1
            .unwrap();
        let (links, team, shown) = forming.meet(&records, prepared).unwrap();
        Self {
            forming,
            records,
            team,
            shown,
            links,
            _listeners: listeners,
        }
    }

    fn links(&self) -> &[Option<Socket>] {
        &self.links
    }

    fn swap(&self) -> Result<Swapped, Error> {
        let swap = Swap {
            forming: &self.forming,
            records: &self.records,
            team: &self.team,
            sockets: self.links(),
        };
        swap.run(&self.shown, None)
    }

    /// It waits no longer.
    fn out_of_time(mut self) -> Self {
        self.forming.deadline = Instant::now();
        self
    }

    /// Hands over its memory and hears nothing.
    fn send(&self) {
        let fd = self.shown.control.fd();
        for socket in self.links().iter().flatten() {
            // Higher ranks expect a connection behind it.
            handover::send(socket, &[fd, fd], self.forming.deadline).unwrap();
        }
    }

    fn died(&self, rank: usize) -> Error {
        lost(&self.records[rank])
    }
}

fn check(outcome: Result<Swapped, Error>, culprit: usize, words: &str) {
    let error = outcome.err().unwrap();
    assert_eq!(error.culprit(), Some(culprit), "{error}");
    assert!(error.to_string().starts_with(words), "{error}");
}

#[test]
fn ranks_that_are_all_there_have_all_segments_and_connections() {
    let job = Job::new(12, Transport::Shm);
    std::thread::scope(|scope| {
        for rank in job.meet() {
            scope.spawn(move || {
                let swapped = rank.swap().unwrap();
                assert_eq!(swapped.shown.len(), 12);
                assert_eq!(swapped.p2p.iter().flatten().count(), 11);
            });
        }
    });
}

/// Descriptors on their way count against a user's limit of open files.
#[test]
fn a_rank_sends_few_descriptors_ahead_of_those_it_gets() {
    let job = Job::new(12, Transport::Shm);
    let mut ranks = job.meet();
    let late = ranks.remove(0).out_of_time();
    check(late.swap(), 1, "rank 0 waited");
    let has_been_sent = |rank: &Met<'_>| {
        let link = rank.links()[0].as_ref().unwrap();
        let what = handover::receive(link, Instant::now());
        usize::from(what.is_ok())
    };
    assert_eq!(ranks.iter().map(has_been_sent).sum::<usize>(), 8);
}

#[test]
fn a_rank_makes_as_few_requests_in_a_large_world_as_in_a_small_one() {
    let requests = |world| {
        let job = Job::new(world, Transport::Tcp);
        std::thread::scope(|scope| {
            for rank in 0..world {
                let forming = job.forming(rank);
                scope.spawn(move || forming.report_in().unwrap());
            }
        });
        job.server.as_ref().unwrap().requests() / world as u64
    };
    let (few, many) = (requests(4), requests(64));
    assert!(many <= 2 * few, "{few} requests of each of 4, {many} of 64");
}

/// The one that gave up had not noticed this rank's connection yet, so that nothing came over it but its end.
#[test]
fn a_rank_that_has_left_because_of_another_one_is_not_taken_for_the_first() {
    let job = Job::new(3, Transport::Shm);
    let [zero, one, two] = job.meet().try_into().ok().unwrap();
    zero.forming.leave_notice(&zero.died(1));
    drop(zero);
    check(two.swap(), 1, "rank 0 gave up: rank 1 (host");
    drop(one);
}

#[test]
fn a_rank_that_left_at_its_deadline_is_not_taken_for_the_one_it_waited_for() {
    let job = Job::new(3, Transport::Shm);
    let [zero, one, two] = job.meet().try_into().ok().unwrap();
    two.send();
    let one = one.out_of_time();
    check(one.swap(), 0, "rank 1 waited");
    drop(one);
    check(two.swap(), 0, "rank 1 gave up: rank 1 waited");
    drop(zero);
}

#[test]
fn a_rank_that_dies_is_named_by_those_who_see_it_and_those_who_see_them_leave() {
    let job = Job::new(4, Transport::Shm);
    let [zero, one, two, three] = job.meet().try_into().ok().unwrap();
    drop(one);
    check(zero.swap(), 1, "rank 0 cannot work with rank 1");
    drop(zero);
    check(two.swap(), 1, "rank");
    drop(two);
    check(three.swap(), 1, "rank");
}

#[test]
fn a_notice_is_heard_while_another_rank_is_waited_for() {
    let job = Job::new(3, Transport::Shm);
    let [zero, one, two] = job.meet().try_into().ok().unwrap();
    farewell(1, one.links(), &one.died(0));
    check(two.swap(), 0, "rank 1 gave up: rank 0 (host");
    drop(zero);
}

#[test]
fn a_rank_that_waits_itself_is_not_blamed_at_the_deadline() {
    let job = Job::new(3, Transport::Shm);
    let [zero, one, two] = job.meet().try_into().ok().unwrap();
    zero.send();
    // It waits for rank 0 alone, and is not done with that.
    let waits = one.forming.absent(vec![0], "connect", String::new());
    assert_eq!(waits.culprit(), Some(0));
    check(two.out_of_time().swap(), 0, "rank 2 waited");
}

#[test]
fn without_the_store_ranks_hear_what_is_said_on_their_connections() {
    let mut job = Job::new(4, Transport::Shm);
    let server = job.server.take();
    let [zero, one, two, three] = job.meet().try_into().ok().unwrap();
    drop(server);
    farewell(0, zero.links(), &zero.died(3));
    drop(one);
    check(two.swap(), 3, "rank 0 gave up: rank 3 (host");
    drop(three);
}

#[test]
fn a_rank_that_goes_without_a_word_is_to_blame_itself() {
    let job = Job::new(3, Transport::Shm);
    let [zero, one, two] = job.meet().try_into().ok().unwrap();
    drop(zero);
    check(two.swap(), 0, "rank 2 cannot work with rank 0");
    drop(one);
}

/// Names and namespaces say that all share a host, and the sockets of rank 0 are somewhere else.
#[test]
fn ranks_that_do_not_reach_one_of_their_host_share_memory_without_it() {
    let job = Job::new(3, Transport::Auto);
    let forming = [0, 1, 2].map(|rank| job.forming(rank));
    let wirings: Vec<Wiring> = std::thread::scope(|scope| {
        let ranks = forming.each_ref().map(|forming| {
            scope.spawn(move || {
                let (me, mut records, listeners) = forming.report_in().unwrap();
                records[0].unix = Some("paceline-elsewhere".into());
                let wiring = forming.try_sharing(&me, &records, &listeners, true);
                wiring.unwrap().expect("some ranks share memory")
            })
        });
        ranks.map(|rank| rank.join().unwrap()).into()
    });
    for wiring in &wirings {
        assert_eq!(wiring.transport, "hierarchical");
        assert_eq!(wiring.hosts, Hosts::new(vec![0, 1, 1]));
    }
}

#[test]
fn shared_memory_that_is_asked_for_and_does_not_reach_a_rank_is_an_error_of_all() {
    let job = Job::new(2, Transport::Shm);
    let forming = [0, 1].map(|rank| job.forming(rank));
    std::thread::scope(|scope| {
        for forming in &forming {
            scope.spawn(move || {
                let (me, mut records, listeners) = forming.report_in().unwrap();
                records[0].unix = Some("paceline-elsewhere".into());
                let outcome = forming.try_sharing(&me, &records, &listeners, false);
                let error = outcome.err().unwrap().to_string();
                assert!(error.contains("rank 1 does not reach rank 0: "), "{error}");
            });
        }
    });
}

/// What two ranks of a job over TCP come to, whose environments `adapt` has changed.
fn formed(adapt: impl Fn(&mut WorkerEnv)) -> Vec<Result<(), Error>> {
    let token = Token::generate().unwrap();
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), &token).unwrap();
    let options = GroupOptions {
        timeout: Duration::from_secs(30),
        transport: Transport::Tcp,
        arena_bytes: None,
        ..GroupOptions::default()
    };
    // Held until both are done: nobody leaves while the other one still connects.
    let wirings: Vec<_> = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let mut env = WorkerEnv {
                rank,
                world: 2,
                local_rank: rank,
                local_world: 2,
                master_port: server.addr().port(),
                store: Some(server.addr().to_string()),
                token: token.clone(),
                token_is_secret: true,
                ..WorkerEnv::alone()
            };
            adapt(&mut env);
            let options = &options;
            scope.spawn(move || connect(&env, options, &Formation::new()))
        });
        ranks.map(|rank| rank.join().unwrap()).into()
    });
    let outcomes = wirings.iter().map(|wiring| match wiring {
        Ok(_) => Ok(()),
        Err(error) => Err(error.clone()),
    });
    outcomes.collect()
}

#[test]
fn a_pair_has_as_many_sockets_as_all_ranks_ask_for() {
    let formed = formed(|env| env.sockets_per_peer = Some(3));
    assert!(formed.iter().all(Result::is_ok), "{formed:?}");
}

#[test]
fn ranks_that_ask_for_different_numbers_of_sockets_both_hear_of_it() {
    for (rank, outcome) in formed(|env| env.sockets_per_peer = Some(1 + env.rank))
        .into_iter()
        .enumerate()
    {
        let error = outcome.unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "rank {rank} cannot work with rank 1: rank 0 asks for 1 sockets per peer, rank 1 for 2 sockets \
                 per peer"
            )
        );
    }
}

#[test]
fn ranks_use_the_interfaces_that_are_named() {
    let formed = formed(|env| env.socket_ifname = Some("=lo".into()));
    assert!(formed.iter().all(Result::is_ok), "{formed:?}");
}

/// A rank that gave up listens no more, and is not dialed until the deadline.
#[test]
fn a_rank_that_gave_up_before_it_was_dialed_is_asked_why() {
    let job = Job::new(2, Transport::Tcp);
    let [zero, one] = [0, 1].map(|rank| job.forming(rank));
    let (_, one_reported) = std::thread::scope(|scope| {
        let reported = scope.spawn(|| one.report_in().unwrap());
        (zero.report_in().unwrap(), reported.join().unwrap())
    });
    zero.leave_notice(&zero.system("be", &io::Error::other("no")));
    let (me, records, listeners) = one_reported;
    let error = one.tcp(&me, &records, &listeners).err().unwrap();
    assert_eq!(error.to_string(), "rank 0 gave up: rank 0 could not be: no");
    assert_eq!(error.culprit(), Some(0));
}
