use super::*;

/// A model of 10 million values in 8 layers; a pass takes 0.1 s forward for each layer and twice that backward.
fn model() -> ModelCosts {
    let depth = |layers: usize| Depth {
        layers,
        parameters: [2_000_000, 1_000_000],
        forward: 0.2 + 0.1 * layers as f64,
        backward: 0.4 + 0.2 * layers as f64,
        optimizer: 1e-9 * (2_000_000 + 1_000_000 * layers) as f64,
        other: 1e-9 * (2_000_000 + 1_000_000 * layers) as f64,
        rest_bytes: 50e6,
        pass_bytes: 50e6 + 16.0 * (2e6 + 1e6 * layers as f64) + 10e6 + 20e6 * layers as f64,
        end_bytes: 50e6 + 20.0 * (2e6 + 1e6 * layers as f64) + 3e6,
    };
    let shape = Shape {
        layers: 8,
        heads: 8,
        boundary: 1000,
    };
    ModelCosts::of(&[depth(1), depth(3)], shape, 16)
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
    shards: 4,
    accumulate: 1,
    bucket: 1e6,
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
    near(model.layer.forward, 0.1);
    near(model.outer.backward, 0.4);
    near(model.layer.activations, 20e6);
    near(model.outer.activations, 10e6);
    near(model.step_extra, 3e6);
    let one = cost(Layout::ddp(1));
    // Four shards, one after the other, of 16 samples each.
    near(one.seconds.compute, 4.0 * (1.0 + 2.0));
    near(one.memory.weights, 40e6);
    near(one.memory.optimizer, 80e6);
    // A stack of three blocks adds four shards up.
    near(one.memory.buckets, 120e6);
    near(one.memory.activations, 170e6);
    near(one.memory.peak, 50e6 + 40e6 + 80e6 + 120e6 + 170e6);
    near(one.wire, 0.0);
}

#[test]
fn replicas_share_the_shards_and_zero_deals_the_state_out() {
    let ddp = cost(Layout::ddp(4));
    near(ddp.seconds.compute, 3.0);
    near(ddp.wire, 2.0 * 3.0 / 4.0 * 40e6);
    near(ddp.memory.buckets, 40e6);
    let zero = |stage, recompute| {
        cost(Layout {
            zero: stage,
            recompute,
            ..Layout::ddp(4)
        })
    };
    near(zero(1, false).memory.optimizer, 20e6);
    near(zero(1, false).memory.buckets, 40e6);
    near(zero(2, false).memory.buckets, 3e6);
    let three = zero(3, true);
    near(three.memory.weights, 10e6 + 2.0 * 8e6);
    near(three.wire, 1.5 * ddp.wire);
    // Inputs of eight layers, one layer, and what is outside.
    near(three.memory.activations, 8.0 * 64e3 + 20e6 + 10e6);
    assert!(three.seconds.compute > ddp.seconds.compute);
}

#[test]
fn a_pipeline_has_bubbles_and_parts_have_their_share_of_a_layer() {
    let pp = cost(Layout {
        dp: 1,
        pp: 2,
        ..Layout::ddp(1)
    });
    assert!(pp.seconds.bubble > 0.0);
    // The cut balances 10 units of a forward pass; four passes take at least half of 12 s.
    assert!(pp.seconds.step > 6.0 && pp.seconds.step < 9.0, "{pp:?}");
    assert!(pp.memory.weights < 40e6);
    let tp = cost(Layout {
        dp: 1,
        tp: 4,
        ..Layout::ddp(1)
    });
    near(tp.memory.weights, 10e6);
    near(tp.seconds.compute, 3.0);
    near(tp.wire, 4.0 * 4.0 * 8.0 * 2.0 * 3.0 / 4.0 * 64e3);
}

#[test]
fn the_simplest_of_the_fastest_that_fit_is_taken_with_its_reasons() {
    let plan = |memory| {
        Plan::new(
            model(),
            Cluster {
                memory,
                ..cluster(1, 4)
            },
            WORK,
        )
    };
    let free = plan(None);
    assert_eq!(free.rows[0].layout, "dp 4");
    assert!(free.choice.is_some());
    let tight = plan(Some(150e6));
    let taken = &tight.rows[tight.choice.expect("something fits")];
    assert!(taken.cost.memory.peak <= 150e6 && !tight.rows[0].fits);
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
fn ten_thousand_ranks_are_planned_at_once() {
    let work = Workload {
        global_batch: 20_000,
        shards: 10_000,
        ..WORK
    };
    let plan = Plan::new(
        model(),
        Cluster {
            memory: Some(1e9),
            ..cluster(1250, 8)
        },
        work,
    );
    assert!(plan.rows.len() > 20, "{}", plan.rows.len());
    let all = plan
        .rows
        .iter()
        .all(|row| row.parts.dp * row.parts.pp * row.parts.tp == 10_000);
    assert!(all && plan.choice.is_some());
    let few = Workload {
        global_batch: 100,
        shards: 1,
        ..WORK
    };
    let plan = Plan::new(model(), cluster(1250, 8), few);
    assert!(plan.rows.iter().all(|row| row.parts.dp <= 100));
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
            pp: 10,
            ..Layout::ddp(1)
        },
        "10 stages for 9 blocks",
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
        parameters: [1000, 0],
        forward: 0.1,
        backward: 0.2,
        ..Depth::default()
    };
    let model = ModelCosts::of(&[depth], Shape::default(), 16);
    let plan = Plan::new(model, cluster(1, 4), WORK);
    let names: Vec<_> = plan.rows.iter().map(|row| row.layout.as_str()).collect();
    assert_eq!(names, ["dp 4", "dp 4, zero 1", "dp 4, zero 2"]);
}
