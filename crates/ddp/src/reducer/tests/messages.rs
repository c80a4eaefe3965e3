//! Messages along one dimension of a mesh and buckets along the other, in one queue for each device, as a pipeline has them.

use paceline_collective::DeviceMesh;

use super::*;

const LEN: usize = 37;

/// What flows between the stages of a replica.
fn activations(replica: usize, micro_batch: usize) -> Tensor<1> {
    let values = (0..LEN).map(|at| wave(replica * 1000 + micro_batch * 100 + at));
    let values: Vec<f32> = values.collect();
    Tensor::from_data(TensorData::new(values, [LEN]), &Device::flex())
}

/// A step of two replicas of two stages, which talk over an exchange if gradients stay on the device: the gradient of a weight, and whether
/// they do.
fn piped(group: ProcessGroup, walk: Walk, fails: bool) -> Result<(TensorData, bool), DdpError> {
    let mesh = DeviceMesh::new(&group, &[("dp", 2), ("pp", 2)])?;
    let (replica, stage) = (mesh.coordinate("dp")?, mesh.coordinate("pp")?);
    let device = Device::flex().autodiff();
    let rank = group.rank();
    let (dp, pp) = (mesh.group("dp")?.clone(), mesh.group("pp")?.clone());
    let (mut ddp, net) = Ddp::with_reducer(dp, Net::new(&device), options(2), move |_, setup| {
        Ok(match walk {
            Walk::Device => {
                let group = stand_in::group(&setup, rank, Reduction::Tree)?;
                Arc::new(DeviceReducer::new(setup, Arc::new(group)))
            }
            _ => walk.reducer(setup)?,
        })
    })?;
    let exchange = ddp.device_exchange(&pp, &Tree::per_rank(2))?;
    let other = 1 - stage;
    let reduced = ddp.step(&net, |turn| {
        turn.micro_batches(2);
        let mut asked = Vec::new();
        for micro_batch in 0..2 {
            let Some(exchange) = &exchange else { continue };
            // All inputs first, as GPipe has them.
            match stage {
                0 => exchange.send(activations(replica, micro_batch), other)?,
                _ => asked.push(exchange.receive(LEN, DType::F32, other)?),
            }
        }
        let mut inputs = asked.into_iter();
        for micro_batch in 0..2 {
            let sent = activations(replica, micro_batch);
            if let (0, Some(exchange)) = (stage, &exchange) {
                let gradient = exchange.receive(LEN, DType::F32, other)?.tensor()?;
                assert_eq!(gradient.into_data(), (sent.clone() * 2.0).into_data());
            }
            let input = inputs.next().map(|input| input.tensor()).transpose()?;
            // The last backward pass sends the buckets.
            let loss = turn.model()?.loss(&[rank, micro_batch], true);
            turn.backward(loss, 1.0)?;
            if let (Some(exchange), Some(input)) = (&exchange, input) {
                assert_eq!(input.clone().into_data(), sent.into_data());
                if fails && rank == 3 && micro_batch == 1 {
                    let error = DdpError::Device("it has fallen off the bus".into());
                    // As a pipeline does.
                    pp.abort(&error.to_string());
                    return Err(error);
                }
                exchange.send(input * 2.0, other)?;
            }
        }
        Ok(())
    })?;
    ddp.synchronize()?;
    let gradient: Tensor<2> = reduced.grads.get(net.first.weight.id).expect("a gradient");
    Ok((gradient.into_data(), exchange.is_some()))
}

#[test]
fn stages_talk_and_replicas_sum_in_one_queue_with_the_bytes_of_host_memory() {
    let of = |walk: Walk| on_ranks(4, |group| piped(group, walk, false).expect("a step"));
    let (host, device) = (of(Walk::Host), of(Walk::Device));
    for (rank, (host, device)) in host.iter().zip(&device).enumerate() {
        assert_eq!(host.0, device.0, "rank {rank}");
        assert_eq!((host.1, device.1), (false, true));
    }
}

#[test]
fn a_stage_that_fails_ends_the_messages_and_the_sums_of_all_others() {
    let errors = on_ranks(4, |group| {
        let error = piped(group, Walk::Device, true).expect_err("a rank has failed");
        error.to_string()
    });
    assert_eq!(errors[3], "device: it has fallen off the bus");
    // Its neighbour hears it first, and its replica that it has left; what ends first on rank 0 differs.
    assert!(errors[2].contains("rank 3 of the job"), "{}", errors[2]);
    for error in &errors[..2] {
        assert!(error.contains("rank 1"), "{error}");
    }
}
