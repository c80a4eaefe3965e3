//! How what the agents of a job do grows with their number, to 10,240 ranks on 128 nodes. By hand:
//! `cargo test -p paceline-launch growth -- --ignored --nocapture`.

use super::*;

/// Ranks of a node.
const RANKS: usize = 80;

/// What happened in a part of a job.
struct Part {
    /// In the world's time.
    took: Duration,
    /// Of the machine that simulates, for each agent.
    processor: Duration,
    /// Answers and events, for each agent.
    inputs: u64,
}

impl World {
    /// Runs until all that live have a round with this many nodes, in steps of the world's time.
    fn until_whole(&mut self, nodes: usize, wait: Duration) -> Part {
        let (began, thought, inputs) = (self.now, self.thought, self.inputs);
        let is_there = |world: &Self| {
            let round = world.whole_round();
            round.is_some_and(|(record, _)| record.members.len() == nodes)
        };
        while !is_there(self) {
            assert!(self.now < began + wait, "no round of {nodes} nodes");
            self.run(self.now + ms(100));
        }
        self.part(began, thought, inputs)
    }

    fn part(&self, began: Duration, thought: Duration, inputs: u64) -> Part {
        let agents = self.nodes.len();
        Part {
            took: self.now - began,
            processor: (self.thought - thought) / agents as u32,
            inputs: (self.inputs - inputs) / agents as u64,
        }
    }
}

#[test]
fn a_small_job_can_be_measured() {
    measure(&[8]);
}

#[test]
#[ignore = "measures; by hand"]
fn what_agents_do_in_a_job_that_begins_runs_and_loses_a_node() {
    measure(&[8, 32, 64, 128]);
}

fn measure(jobs: &[usize]) {
    println!("| nodes, ranks | | job's time | processor time of an agent | its inputs |");
    println!("|---|---|---|---|---|");
    for nodes in jobs.iter().copied() {
        let row = |what: &str, part: &Part| {
            println!(
                "| {nodes}, {} | {what} | {:.1} s | {:.1} ms | {} |",
                nodes * RANKS,
                part.took.as_secs_f64(),
                part.processor.as_secs_f64() * 1e3,
                part.inputs
            );
        };
        let arrivals: Vec<_> = (0..nodes).map(|host| (host, ms(0))).collect();
        let rules = Rules {
            recovers_live: true,
            ..rules(nodes - 1, nodes)
        };
        let mut world = World::new(1, rules, WORK, &arrivals);
        (world.nproc, world.is_checked) = (Some(RANKS), false);
        row("begins", &world.until_whole(nodes, ms(60_000)));
        let (began, thought, inputs) = (world.now, world.thought, world.inputs);
        world.run(began + ms(10_000));
        row("runs for 10 s", &world.part(began, thought, inputs));
        world.fault(world.now, Fault::PowerOff(nodes / 2));
        row("loses a node", &world.until_whole(nodes - 1, ms(60_000)));
    }
}
