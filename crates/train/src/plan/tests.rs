use super::*;

/// A model of 10 million values in 8 layers; for a sample a layer takes 10 ms forward and twice that backward, and 2 MB.
fn depth(layers: usize) -> Depth {
    let (samples, count) = (10.0, layers as f64);
    Depth {
        layers,
        tp: 1,
        recompute: false,
        samples: 10,
        parameters: [2_000_000, 1_000_000],
        state: 2.0,
        forward: samples * (0.02 + 0.01 * count),
        backward: samples * (0.04 + 0.02 * count),
        optimizer: 1e-9 * (2e6 + 1e6 * count),
        other: 1e-9 * (2e6 + 1e6 * count),
        rest_bytes: 50e6,
        kept_bytes: None,
        pass_bytes: 50e6 + 16.0 * (2e6 + 1e6 * count) + samples * (1e6 + 2e6 * count),
        end_bytes: 50e6 + 20.0 * (2e6 + 1e6 * count) + 3e6,
    }
}

/// The same with recomputed blocks: a layer keeps its input, and one at a time has its values.
fn recomputed(layers: usize) -> Depth {
    let (samples, count) = (10.0, layers as f64);
    Depth {
        recompute: true,
        backward: samples * (0.04 + 0.03 * count),
        pass_bytes: 50e6 + 16.0 * (2e6 + 1e6 * count) + samples * (3e6 + 4e3 * count),
        ..depth(layers)
    }
}

const SHAPE: Shape = Shape {
    layers: 8,
    heads: 8,
    boundary: 1000,
    boundary_value_bytes: 4,
    predictions: 10,
    tied: 500_000,
};

fn model() -> ModelCosts {
    let depths = [depth(3), depth(1), recomputed(3), recomputed(1)];
    ModelCosts::of(&depths, SHAPE, None)
}

fn plan(cluster: Cluster, work: Workload) -> Plan {
    Plan::new(model(), cluster, work, |_, _| Some("paceline train".into()))
}

fn cluster(nodes: usize, ranks_per_node: usize) -> Cluster {
    let link = |latency, bandwidth| Link { latency, bandwidth };
    Cluster {
        nodes,
        ranks_per_node,
        memory: None,
        within: link(1e-6, 1e10),
        between: link(1e-5, 1e9),
        shares_cores: false,
    }
}

const WORK: Workload = Workload {
    global_batch: 64,
    shards: Some(4),
    accumulate: 1,
    bucket: 1e6,
    halves_gradients: false,
};

fn cost(layout: Layout) -> Cost {
    let ranks = layout.dp * layout.pp * layout.tp;
    layout
        .cost(&model(), &cluster(1, ranks), &WORK)
        .expect("it is possible")
}

fn near(found: f64, expect: f64) {
    assert!(
        (found - expect).abs() <= 1e-6 * expect.abs().max(1e-9),
        "{found} is not {expect}"
    );
}

#[test]
fn layers_that_were_not_measured_are_extrapolated() {
    let model = model();
    let way = model.way(1, false, 10.0);
    near(way.layer.forward, 0.01);
    near(way.outer.backward, 0.04);
    near(way.layer.kept, 2e6);
    near(way.outer.kept, 1e6);
    near(model.step_extra, 3e6);
    let one = cost(Layout::ddp(1));
    // 64 samples.
    near(one.seconds.compute, 64.0 * 0.3);
    near(one.memory.weights, 40e6);
    near(one.memory.optimizer, 80e6);
    // A stack of three blocks adds four shards up.
    near(one.memory.buckets, 120e6);
    // A shard has 16 samples.
    near(one.memory.activations, 16.0 * 17e6);
    near(one.memory.peak, 50e6 + 40e6 + 80e6 + 120e6 + 272e6);
    near(one.wire, 0.0);
}

#[test]
fn replicas_share_the_shards_and_zero_deals_the_state_out() {
    let ddp = cost(Layout::ddp(4));
    near(ddp.seconds.compute, 16.0 * 0.3);
    near(ddp.wire, 2.0 * 3.0 / 4.0 * 40e6);
    near(ddp.memory.buckets, 40e6);
    // Three quarters of the other ranks' buckets, and one's own memory without them.
    near(ddp.memory.mapped, 30e6);
    near(ddp.memory.own(), 50e6 + 40e6 + 80e6 + 40e6 + 272e6);
    let zero = |stage, recompute| {
        cost(Layout {
            zero: stage,
            recompute,
            ..Layout::ddp(4)
        })
    };
    near(zero(1, false).memory.optimizer, 20e6);
    near(zero(1, false).memory.buckets, 40e6);
    near(zero(2, false).memory.buckets, 2e6);
    let three = zero(3, true);
    // What is outside of layers is whole.
    near(three.memory.weights, 8e6 + 32e6 / 4.0 + 2.0 * 4e6);
    near(three.memory.buckets, 2.0 * 4e6);
    // Those are gathered once, and the weights of layers twice.
    near(three.wire, 0.75 * (40e6 + 8e6) + 1.5 * 32e6);
    // Inputs of eight layers, one layer, and what is outside.
    let for_a_sample = 8.0 * 4e3 + 2e6 + 1e6;
    near(three.memory.activations, 16.0 * for_a_sample);
    near(three.seconds.compute, 16.0 * (0.3 + 0.08));
    // The weights travel whole.
    let work = Workload {
        halves_gradients: true,
        ..WORK
    };
    let halved = |zero| {
        let layout = Layout {
            zero,
            recompute: zero == 3,
            ..Layout::ddp(4)
        };
        let cost = layout.cost(&model(), &cluster(1, 4), &work);
        cost.expect("it is possible")
    };
    near(halved(0).wire, 0.5 * ddp.wire);
    near(halved(2).wire, 0.75 * ddp.wire);
    near(halved(3).wire, three.wire - 0.25 * ddp.wire);
    near(halved(0).memory.buckets, 60e6);
    let shared = Cluster {
        shares_cores: true,
        ..cluster(1, 4)
    };
    let waits = |work: &Workload| {
        let cost = Layout::ddp(4).cost(&model(), &shared, work);
        cost.expect("it is possible").seconds.communication
    };
    near(waits(&work) - 6e-6, 0.5 * (waits(&WORK) - 6e-6));
    // Four passes gather the weights of layers four times as often.
    let work = Workload {
        accumulate: 4,
        ..WORK
    };
    let layout = Layout {
        zero: 3,
        recompute: true,
        ..Layout::ddp(4)
    };
    let four = layout.cost(&model(), &cluster(1, 4), &work);
    near(
        four.expect("it is possible").wire,
        three.wire + 3.0 * 1.5 * 32e6,
    );
}

#[test]
fn a_pipeline_has_bubbles_and_says_how_it_cuts_the_model() {
    let with = |schedule| {
        cost(Layout {
            pp: 2,
            schedule,
            ..Layout::ddp(1)
        })
    };
    let pp = with(Schedule::OneForwardOneBackward);
    // 12 units of compute are cut in two halves, the embedding has none of them.
    assert_eq!((&pp.cuts[..], pp.accumulate), (&[6][..], 8));
    near(pp.seconds.compute, 64.0 * 0.15);
    assert!(pp.seconds.bubble > 0.0);
    // The first stage has five layers and the matrix; two of its eight micro-batches of two samples are in flight, each with the
    // stage's output.
    near(pp.memory.activations, 2.0 * 2.0 * (10e6 + 4e3));
    near(pp.memory.optimizer, 2.0 * 28e6);
    let gpipe = with(Schedule::GPipe);
    near(gpipe.memory.activations, 8.0 * 2.0 * (10e6 + 4e3));
    let interleaved = with(Schedule::Interleaved);
    assert_eq!(interleaved.cuts.len(), 3);
    assert!(interleaved.seconds.bubble < pp.seconds.bubble);
    assert!(interleaved.wire > pp.wire);
    let zero_bubble = with(Schedule::ZeroBubbleH1);
    assert!(zero_bubble.seconds.bubble < pp.seconds.bubble);
    near(zero_bubble.wire, pp.wire);
}

#[test]
fn parts_of_layers_cost_what_was_measured_on_any_link() {
    let tp = |model: &ModelCosts, tp, bandwidth, recompute| {
        let layout = Layout {
            tp,
            recompute,
            ..Layout::ddp(1)
        };
        let mut cluster = cluster(1, tp);
        cluster.within.bandwidth = bandwidth;
        layout.cost(model, &cluster, &WORK).expect("it is possible")
    };
    let derived = tp(&model(), 4, 1e10, false);
    near(derived.memory.weights, 10e6);
    near(derived.seconds.compute, 64.0 * 0.3 / 4.0);
    // 34 all-reduces of what is between two layers, and 12 bytes for each prediction.
    let bytes = 34.0 * 4e3 + 12.0 * 10.0;
    near(derived.wire, 2.0 * 3.0 / 4.0 * 64.0 * bytes);

    // Two parts that take 0.9 of the time of the whole, of which a part is the exchange.
    let link = cluster(1, 2).within;
    let mut depths = vec![depth(1), depth(3), recomputed(1), recomputed(3)];
    let parts = |whole: &Depth| Depth {
        tp: 2,
        forward: 0.9 * whole.forward,
        backward: 0.9 * whole.backward,
        ..*whole
    };
    depths.extend(depths.clone().iter().map(parts));
    let model = ModelCosts::of(&depths, SHAPE, Some(link));
    let two = tp(&model, 2, link.bandwidth, false);
    let computed = two.seconds.compute + two.seconds.communication;
    assert!(
        (computed / (64.0 * 0.3 * 0.9) - 1.0).abs() < 1e-3,
        "{two:?}"
    );
    assert!(tp(&model, 2, link.bandwidth / 1e4, false).seconds.step > 1.1 * two.seconds.step);
    // Four parts: each half of one of two.
    let four = tp(&model, 4, link.bandwidth, false);
    near(four.seconds.compute, two.seconds.compute / 2.0);
    let again = tp(&model, 2, link.bandwidth, true);
    assert!(again.seconds.compute > 1.2 * two.seconds.compute);
    assert!(again.memory.activations < two.memory.activations / 2.0);
}

#[test]
fn recomputed_blocks_cost_what_was_measured() {
    let layout = Layout {
        recompute: true,
        ..Layout::ddp(4)
    };
    let cost = cost(layout);
    near(cost.memory.activations, 16.0 * (8.0 * 4e3 + 3e6));
    near(cost.seconds.compute, 16.0 * (0.3 + 8.0 * 0.01));
}

#[test]
fn passes_take_the_time_of_those_of_about_their_size_and_keep_what_a_waiting_one_does() {
    // A sample alone takes twice the time, and keeps half of the memory of its pass.
    let single = |layers: usize| Depth {
        samples: 1,
        forward: 2.0 * depth(layers).forward / 10.0,
        backward: 2.0 * depth(layers).backward / 10.0,
        kept_bytes: Some(0.5e6 + 1e6 * layers as f64),
        ..depth(layers)
    };
    let depths = [depth(1), depth(3), single(1), single(3)];
    let model = ModelCosts::of(&depths, SHAPE, None);
    near(model.way(1, false, 16.0).layer.forward, 0.01);
    near(model.way(1, false, 2.0).layer.forward, 0.02);
    for samples in [16.0, 2.0] {
        let way = model.way(1, false, samples);
        near(way.layer.kept, 1e6);
        near(way.outer.kept, 0.5e6);
        near(way.temporary, 7e6 - 3.5e6);
    }
}

#[test]
fn of_two_measurements_the_quieter_times_and_the_larger_memory_count() {
    let loud = Depth {
        forward: 9.0,
        pass_bytes: 9e9,
        ..depth(1)
    };
    let both = depth(1).or_quieter(loud);
    assert_eq!(both, loud.or_quieter(depth(1)));
    assert_eq!((both.forward, both.pass_bytes), (depth(1).forward, 9e9));
}

#[test]
fn the_simplest_of_the_fastest_that_fit_is_taken_with_its_reasons() {
    let plan = |memory| {
        let cluster = Cluster {
            memory,
            ..cluster(1, 4)
        };
        plan(cluster, WORK)
    };
    let free = plan(None);
    assert_eq!(free.rows[0].layout, "dp 4");
    assert!(free.choice.is_some());
    let tight = plan(Some(170e6));
    let taken = &tight.rows[tight.choice.expect("something fits")];
    assert!(taken.cost.memory.with_saves() <= 170e6 && !tight.rows[0].fits);
    assert!(
        tight.reasons[0].contains("does not fit"),
        "{:?}",
        tight.reasons
    );
    let none = plan(Some(60e6));
    assert_eq!(none.choice, None);
    assert!(
        none.reasons[0].starts_with("Nothing fits into 60.0 MB"),
        "{:?}",
        none.reasons
    );
    for text in [free.text(), tight.text(), none.text()] {
        assert!(text.lines().count() < 30, "{text}");
    }
    assert!(tight.text().contains("<- take this") && tight.text().contains("does not fit"));
}

#[test]
fn a_layout_without_a_command_is_neither_taken_nor_shown() {
    let command = |layout: &Layout, _: &Cost| (layout.zero == 2).then(|| "a command".to_owned());
    let plan = Plan::new(model(), cluster(1, 4), WORK, command);
    let taken = &plan.rows[plan.choice.expect("one of them")];
    assert_eq!(taken.parts.zero, 2);
    let text = plan.text();
    assert!(
        text.contains("zero 2") && !text.contains("zero 1"),
        "{text}"
    );
    assert!(text.ends_with("\na command\n"), "{text}");
    let plan = Plan::new(model(), cluster(1, 4), WORK, |_, _| None);
    assert_eq!(plan.choice, None);
}

#[test]
fn ten_thousand_ranks_are_planned_at_once() {
    let work = Workload {
        global_batch: 20_000,
        shards: None,
        ..WORK
    };
    let large = Cluster {
        memory: Some(1e9),
        ..cluster(1250, 8)
    };
    let found = plan(large, work);
    assert!(found.rows.len() > 20, "{}", found.rows.len());
    let all = found
        .rows
        .iter()
        .all(|row| row.parts.dp * row.parts.pp * row.parts.tp == 10_000);
    assert!(all && found.choice.is_some());
    let few = Workload {
        global_batch: 100,
        shards: None,
        ..WORK
    };
    let found = plan(cluster(1250, 8), few);
    assert!(found.rows.iter().all(|row| row.parts.dp <= 100));
}

#[test]
fn a_layout_that_makes_no_sense_says_why() {
    let check = |layout: Layout, expect: &str| {
        let error = layout.cost(&model(), &cluster(1, 16), &WORK).unwrap_err();
        assert_eq!(error, expect);
    };
    check(Layout::ddp(65), "65 replicas for a global batch of 64");
    check(
        Layout {
            pp: 11,
            ..Layout::ddp(1)
        },
        "11 stages for 10 blocks",
    );
    check(
        Layout {
            tp: 3,
            ..Layout::ddp(1)
        },
        "3 parts do not divide 8 heads",
    );
    check(
        Layout {
            zero: 1,
            ..Layout::ddp(1)
        },
        "one replica has nothing to deal out",
    );
    check(
        Layout {
            zero: 3,
            ..Layout::ddp(2)
        },
        "stage 3 of ZeRO computes blocks again",
    );
}

#[test]
fn a_links_figures_give_its_all_reduce_back() {
    let link = Link::of_all_reduce(4, 6e-6, 1e6, 1e-3);
    near(link.all_reduce(4.0, 1e6), 1e-3);
}

#[test]
fn a_model_that_is_no_list_of_layers_has_data_parallel_layouts_only() {
    let depth = Depth {
        tp: 1,
        samples: 16,
        parameters: [1000, 0],
        forward: 0.1,
        backward: 0.2,
        ..Depth::default()
    };
    let model = ModelCosts::of(&[depth], Shape::default(), None);
    let plan = Plan::new(model, cluster(1, 4), WORK, |_, _| Some(String::new()));
    let names: Vec<_> = plan.rows.iter().map(|row| row.layout.as_str()).collect();
    assert_eq!(names, ["dp 4", "dp 4, zero 1", "dp 4, zero 2"]);
}
