//! Activations that travel from device to device, as NCCL moves them: a message takes both its ranks, and each rank has one queue.

use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::tensor::{DType, Tensor, TensorData};
use paceline_collective::ProcessGroup;
use paceline_ddp::{Arrival, DdpError, DdpOptions, DeviceExchange, Precision};
use paceline_split::pipeline::Schedule::*;
use paceline_split::pipeline::{Pipeline, PipelineError, Schedule};

use crate::support::*;

/// Longer than any message takes; ranks that wait for each other take longer.
const PATIENCE: Duration = Duration::from_secs(20);

/// A rank's queue of messages, which a thread works off in order.
#[derive(Debug)]
struct Queue(Mutex<Sender<Message>>);

enum Message {
    Send(TensorData, usize),
    Receive(DType, usize, usize, Sender<TensorData>),
}

/// The queues of the ranks of a group.
fn queues(world: usize) -> Vec<Arc<Queue>> {
    let mut from: Vec<Vec<Receiver<TensorData>>> = (0..world).map(|_| Vec::new()).collect();
    let to = (0..world).map(|_| {
        let ways = from.iter_mut().map(|from| {
            // Without room: a send waits for its receive.
            let (send, receive) = sync_channel(0);
            from.push(receive);
            send
        });
        ways.collect()
    });
    let to: Vec<Vec<SyncSender<TensorData>>> = to.collect();
    let ranks = to.into_iter().zip(from);
    ranks
        .map(|(to, from)| {
            let (queue, messages) = channel();
            // It ends with the queue, or with a peer that is lost.
            std::thread::spawn(move || {
                for message in messages {
                    match message {
                        Message::Send(data, peer) => {
                            if to[peer].send(data).is_err() {
                                return;
                            }
                        }
                        Message::Receive(dtype, len, peer, arrived) => {
                            let Ok(data) = from[peer].recv() else { return };
                            assert_eq!((data.dtype(), data.num_elements()), (dtype, len));
                            let _ = arrived.send(data);
                        }
                    }
                }
            });
            Arc::new(Queue(Mutex::new(queue)))
        })
        .collect()
}

impl Queue {
    fn put(&self, message: Message) -> Result<(), DdpError> {
        let put = self.0.lock().expect("no panic").send(message);
        put.map_err(|_| DdpError::Device("a peer is lost".into()))
    }
}

impl DeviceExchange for Queue {
    fn sum(&self, _: Vec<Tensor<1>>, _: Option<Arc<[usize]>>) -> Result<Tensor<1>, DdpError> {
        unreachable!("stages send and receive")
    }

    fn gather(&self, _: Tensor<1>, _: Arc<[usize]>) -> Result<Tensor<1>, DdpError> {
        unreachable!("stages send and receive")
    }

    fn max(&self, _: Tensor<1>) -> Result<Tensor<1>, DdpError> {
        unreachable!("stages send and receive")
    }

    fn send(&self, values: Tensor<1>, to: usize) -> Result<(), DdpError> {
        self.put(Message::Send(values.into_data(), to))
    }

    fn receive(&self, len: usize, dtype: DType, from: usize) -> Result<Box<dyn Arrival>, DdpError> {
        let (arrived, arrival) = channel();
        self.put(Message::Receive(dtype, len, from, arrived))?;
        Ok(Box::new(Coming(arrival)))
    }
}

struct Coming(Receiver<TensorData>);

impl Arrival for Coming {
    fn tensor(self: Box<Self>) -> Result<Tensor<1>, DdpError> {
        let data = self.0.recv_timeout(PATIENCE);
        let data = data.map_err(|error| DdpError::Device(error.to_string()))?;
        let dtype = data.dtype();
        Ok(Tensor::from_data(data, (&device().inner(), dtype)))
    }
}

/// Trains on `world` ranks in pipelines of `pp`, whose messages take the queues.
fn check(world: usize, pp: usize, (schedule, chunks): (Schedule, usize), options: &DdpOptions) {
    let expect = alone(options);
    let queues: Vec<_> = (0..world / pp).flat_map(|_| queues(pp)).collect();
    let train = |group: ProcessGroup| -> Result<Outcome, PipelineError> {
        let queue = queues[group.rank()].clone();
        let made = Pipeline::new(&group, gpt(), layout(pp, schedule, chunks), options.clone())?;
        let (mut pipeline, ddp, net) = made;
        pipeline.connect(queue);
        let of_shard = |step, shard| data(step, shard, options);
        steps_in_pipeline((pipeline, ddp, net), None, of_shard)
    };
    for outcome in ranks(world, |group| train(group).expect("it trains")) {
        assert_eq!(outcome, expect, "{world} ranks, {schedule}");
    }
}

const SCHEDULES: [(Schedule, usize); 4] = [
    (GPipe, 1),
    (OneForwardOneBackward, 1),
    (Interleaved, 2),
    (ZeroBubbleH1, 1),
];

#[test]
fn every_schedule_on_2_and_4_ranks_has_the_bits_of_one_rank() {
    for schedule in SCHEDULES {
        for pp in [2, 4] {
            check(pp, pp, schedule, &options(1, 4));
        }
    }
}

#[test]
fn two_pipelines_beside_each_other_in_mixed_precision() {
    for schedule in SCHEDULES {
        for precision in [Precision::F32, Precision::Bf16] {
            let options = DdpOptions {
                precision,
                ..options(4, 2)
            };
            check(4, 2, schedule, &options);
        }
    }
}
