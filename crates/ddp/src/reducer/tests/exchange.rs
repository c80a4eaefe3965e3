//! Values that the ranks of a row exchange on their device, between the buckets of the columns.

use paceline_collective::{AllGather, AllReduce, DeviceMesh, ReduceOp};

use super::*;

const SHARDS: usize = 3;
const DIMS: [(&str, usize); 2] = [("dp", 2), ("tp", 2)];

/// A rank of a mesh of two by two, with the network of the others.
fn replica(world: &ProcessGroup, walk: impl Fn(usize) -> Walk) -> (DeviceMesh, Ddp, Net) {
    let mesh = DeviceMesh::new(world, &DIMS).expect("a mesh");
    let (rank, walk) = (world.rank(), walk(world.rank()));
    let dp = mesh.group("dp").expect("a dimension").clone();
    let device = Device::flex().autodiff();
    let make = move |_: &Device, setup: Setup| match walk {
        Walk::Device => {
            let group = stand_in::group(&setup, rank, Reduction::Tree)?;
            let reducer: Arc<dyn Reducer> = Arc::new(DeviceReducer::new(setup, Arc::new(group)));
            Ok(reducer)
        }
        other => other.reducer(setup),
    };
    let made = Ddp::with_reducer(dp, Net::new(&device), options(SHARDS), make);
    let (ddp, net) = made.expect("ranks agree");
    (mesh, ddp, net)
}

fn tensor(values: &[f32]) -> Tensor<1> {
    Tensor::from_data(values, &Device::flex())
}

fn bits(tensor: Tensor<1>) -> Vec<u32> {
    let values = tensor.into_data().try_to_vec::<f32>().expect("f32");
    values.into_iter().map(f32::to_bits).collect()
}

/// Every exchange of the ranks of `tp`, on their devices and on the host, with the numbers of one moment.
fn exchange(
    exchange: &dyn DeviceExchange,
    (tp, tree): (&ProcessGroup, &Arc<Tree>),
    moment: usize,
) -> [Vec<Vec<u32>>; 2] {
    const LEN: usize = 21;
    let counts: Arc<[usize]> = [13, 8].into();
    let own = [0..13, 13..21][tp.rank()].clone();
    let blocks = tree.blocks(tp.rank()).len();
    let noise = |block: usize| -> Vec<f32> {
        let at = |k| moment * 1000 + tp.rank() * 100 + block * 50 + k;
        (0..LEN)
            .map(|k| wave(at(k)) * 10f32.powi(k as i32 % 7))
            .collect()
    };
    let all: Vec<Vec<f32>> = (0..blocks).map(noise).collect();
    let tensors = || all.iter().map(|block| tensor(block)).collect::<Vec<_>>();
    // NCCL overwrites what it is lent, which must not show here.
    let kept = tensors();
    let on_device = vec![
        bits(exchange.sum(kept.clone(), None).expect("a sum")),
        bits(
            exchange
                .sum(kept.clone(), Some(counts.clone()))
                .expect("a part"),
        ),
        bits(
            exchange
                .gather(kept[0].clone().slice([own.clone()]), counts.clone())
                .expect("all"),
        ),
        bits(exchange.max(kept[0].clone()).expect("the largest")),
    ];
    for (kept, block) in kept.into_iter().zip(tensors()) {
        assert_eq!(bits(kept), bits(block), "the inputs stay");
    }

    let to_bits = |values: &[f32]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
    let mut buffer = tp.buffer::<f32>(blocks * LEN).expect("memory");
    buffer.copy_from_slice(&all.concat());
    let call = AllReduce {
        tree: Some(tree.clone()),
        ..AllReduce::new(ReduceOp::Sum, LEN)
    };
    let sum = tp.all_reduce_buffer(buffer, call).expect("a sum").buffer;
    let mut gathered = tp.buffer::<f32>(LEN).expect("memory");
    gathered[own.clone()].copy_from_slice(&all[0][own.clone()]);
    let call = AllGather {
        counts: Some(counts),
        ..AllGather::default()
    };
    let gathered = tp
        .all_gather_async(gathered, call)
        .wait()
        .expect("all")
        .buffer;
    let mut largest = all[0].clone();
    tp.all_reduce(&mut largest, ReduceOp::Max)
        .expect("the largest");
    let on_host = vec![
        to_bits(&sum[..LEN]),
        to_bits(&sum[own]),
        to_bits(&gathered),
        to_bits(&largest),
    ];
    [on_device, on_host]
}

#[test]
fn values_of_a_row_pass_between_the_buckets_of_the_columns_with_the_bits_of_the_host() {
    let expected = train(Walk::Host, 1, SHARDS).pop();
    for parts in [2, 3, 4] {
        let hashes = on_ranks(4, |world| {
            let (mesh, mut ddp, mut net) = replica(&world, |_| Walk::Device);
            let tp = mesh.group("tp").expect("a dimension");
            let tree = Tree::split(parts, tp.world()).expect("parts");
            let exchanges = ddp.device_exchange(tp, &tree).expect("ranks agree");
            let exchanges = exchanges.expect("buckets stay on their device");
            let mut optimizer = SgdConfig::new().init();
            let mut moment = 0;
            for _ in 0..4 {
                // The first replica has two shards and the second one, so the rows exchange at other moments.
                let reduced = step_between(&mut ddp, &net, || {
                    moment += 1;
                    let [device, host] = exchange(&*exchanges, (tp, &tree), moment);
                    assert_eq!(device, host, "moment {moment}, {parts} parts");
                });
                net = optimizer.step(0.1, net, reduced.expect("a step").grads);
            }
            ddp.synchronize().expect("nothing is under way");
            weights::sha256(&weights::export(&net))
        });
        assert!(hashes.iter().all(|hash| Some(hash) == expected.as_ref()));
    }
}

#[test]
fn values_go_through_the_host_if_gradients_of_one_column_do() {
    let walk = |rank| match rank % 2 {
        0 => Walk::Device,
        _ => Walk::Host,
    };
    on_ranks(4, |world| {
        let (mesh, ddp, _) = replica(&world, walk);
        let tp = mesh.group("tp").expect("a dimension");
        let tree = Tree::per_rank(2);
        let exchanges = ddp.device_exchange(tp, &tree).expect("ranks agree");
        assert!(exchanges.is_none(), "rank {}", world.rank());
    });
}

#[test]
fn a_rank_that_is_lost_in_an_exchange_is_named_by_the_jobs_number() {
    let errors = on_ranks(4, |world| {
        let (mesh, ddp, _) = replica(&world, |_| Walk::Device);
        let tp = mesh.group("tp").expect("a dimension");
        let tree = Tree::per_rank(2);
        let exchanges = ddp.device_exchange(tp, &tree).expect("ranks agree");
        let exchanges = exchanges.expect("buckets stay on their device");
        let sum = || exchanges.sum(vec![tensor(&[1.0, 2.0])], None);
        sum().expect("a sum");
        world.barrier().expect("all have it");
        if world.rank() == 3 {
            tp.abort("it has fallen off the bus");
        }
        let error = loop {
            if let Err(error) = sum() {
                break error;
            }
        };
        // What follows has the same failure.
        assert_eq!(
            sum().expect_err("it latches").to_string(),
            error.to_string()
        );
        error
    });
    for error in &errors[..3] {
        let text = error.to_string();
        assert!(
            text.contains("rank 3 of the job") && text.ends_with("it has fallen off the bus"),
            "{text}"
        );
        assert!(error.collective().is_some(), "{text}");
    }
    // The first one to hear it hears it from rank 3.
    assert!(errors[..3].iter().any(|error| error.culprit() == Some(3)));
}
