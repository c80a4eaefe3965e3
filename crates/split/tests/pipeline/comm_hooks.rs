//! Communication hooks between the replicas of stages.

use paceline_ddp::DdpOptions;

use crate::support::*;

fn hooked(hook: &str, shards: usize) -> DdpOptions {
    DdpOptions {
        comm_hook: hook.parse().expect("a hook"),
        ..options(shards, 2)
    }
}

/// Each parameter is compressed by itself, so the parameters beside it in a stage do not matter.
#[test]
fn compressed_stages_have_the_bits_of_one_rank() {
    let mut seen = vec![alone(&hooked("none", 2))];
    for hook in ["int8", "powersgd:2:1"] {
        let options = hooked(hook, 2);
        let expect = alone(&options);
        assert!(!seen.contains(&expect), "{hook} has bits of its own");
        for (schedule, chunks) in SCHEDULES {
            let layout = layout(2, schedule, chunks);
            for world in [2, 4] {
                let train = |group| train(&group, layout.clone(), &options).expect("it trains");
                for outcome in ranks(world, train) {
                    assert_eq!(outcome, expect, "{hook}, {world} ranks, {schedule}");
                }
            }
        }
        seen.push(expect);
    }
}

/// The ranks of a pipeline are one worker: its steps have the bits of those of a rank with the whole model.
#[test]
fn pipelines_take_local_steps_as_ranks_with_the_whole_model_do() {
    for hook in ["localsgd:3", "diloco:3:0:0.7:0.5"] {
        let options = hooked(hook, 2);
        let workers = replicas(2, &options, &counts(&options));
        assert_eq!(workers[0].0, workers[1].0, "the round has ended");
        assert_ne!(workers[0].1, workers[1].1, "norms are each worker's own");
        assert_ne!(workers[0], alone(&hooked("none", 2)));
        for (schedule, chunks) in SCHEDULES {
            let layout = layout(2, schedule, chunks);
            let train = |group| train(&group, layout.clone(), &options).expect("it trains");
            for (rank, outcome) in ranks(4, train).iter().enumerate() {
                assert_eq!(
                    *outcome,
                    workers[rank / 2],
                    "{hook}, rank {rank}, {schedule}"
                );
            }
        }
    }
}
