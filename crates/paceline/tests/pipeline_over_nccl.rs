//! A whole pipeline whose activations and gradients go through NCCL, a stand-in for it: the bits of messages through the host.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_ddp::{Arrival, DdpError, DdpOptions, DeviceExchange, Precision, weights};
use paceline_fake_cuda::{Library, Room};
use paceline_nccl::{
    Before, Communicator, DeviceBuffer, Label, NcclOptions, Places, Probe, Ticket,
};
use paceline_nn::gpt::{Gpt, GptConfig};
use paceline_split::pipeline::{MicroBatches, Pipeline, PipelineError, PipelineOptions, Schedule};

const CONFIG: GptConfig = GptConfig {
    vocabulary: 11,
    context: 8,
    layers: 4,
    heads: 2,
    width: 8,
    // Threads share one source of random numbers.
    dropout: 0.0,
};
const STEPS: usize = 3;
/// A multiple of all numbers of ranks, as `interleaved` needs it.
const MICRO_BATCHES: usize = 6;

fn device() -> Device {
    Device::flex().autodiff()
}

/// Weights that do not depend on random numbers.
fn gpt() -> Gpt {
    let net = CONFIG.init(&device());
    let mut state = 0_u32;
    let mut value = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let values = weights::export(&net).into_iter().map(|(path, data)| {
        let values: Vec<f32> = (0..data.num_elements()).map(|_| value()).collect();
        (path, TensorData::new(values, data.shape().clone()))
    });
    let values = values.collect();
    weights::import(net, values)
}

/// One shard's micro-batches of a step, which differ in size.
struct Data {
    seed: usize,
    precision: Precision,
}

impl Data {
    fn rows(&self, micro_batch: usize) -> usize {
        1 + (self.seed + micro_batch) % 2
    }

    fn tokens(&self, micro_batch: usize, shift: usize) -> Tensor<2, Int> {
        let (rows, length) = (self.rows(micro_batch), CONFIG.context);
        let first = self.seed * 100 + micro_batch * 10 + shift;
        let token = |at: usize| ((first + at * 7 + at / length) % CONFIG.vocabulary) as i32;
        let tokens: Vec<i32> = (0..rows * length).map(token).collect();
        Tensor::from_data(TensorData::new(tokens, [rows, length]), &device())
    }
}

impl MicroBatches<Tensor<2, Int>, Tensor<3>> for Data {
    fn count(&self) -> usize {
        MICRO_BATCHES
    }

    fn weight(&self, micro_batch: usize) -> f32 {
        (self.rows(micro_batch) * CONFIG.context) as f32
    }

    fn input(&self, micro_batch: usize) -> Tensor<2, Int> {
        self.tokens(micro_batch, 0)
    }

    fn loss(&self, micro_batch: usize, output: Tensor<3>) -> Tensor<1> {
        let scores = self.precision.logits(output.flatten::<2>(0, 1));
        let labels = self.tokens(micro_batch, 1).flatten(0, 1);
        let loss = CrossEntropyLossConfig::new().init(&scores.device());
        loss.forward(scores, labels)
    }
}

/// The ranks of a pipeline, each with a simulated device in which tensors of ordinary memory lie while they travel.
struct OverNccl {
    communicator: Communicator,
    library: Arc<Library>,
    ordinal: usize,
    /// Freeing memory of a device waits for the calls behind it.
    rooms: Mutex<Vec<Arc<Room>>>,
}

impl OverNccl {
    fn join(group: &ProcessGroup, ordinal: usize, library: &Arc<Library>) -> Self {
        let options = NcclOptions {
            probe: Probe::None,
            places: Places {
                nccl: Some(library.nccl()),
                cuda: Some(library.driver()),
                ..Places::from_env()
            },
            ..NcclOptions::default()
        };
        let communicator = Communicator::join(group, ordinal, &options);
        Self {
            communicator: communicator.expect("a device for each rank"),
            library: library.clone(),
            ordinal,
            rooms: Mutex::default(),
        }
    }

    fn lend(&self, bytes: &[u8]) -> (Arc<Room>, DeviceBuffer) {
        let room = Arc::new(Room::new(&self.library, self.ordinal, bytes));
        self.rooms.lock().expect("no panic").push(room.clone());
        let buffer = DeviceBuffer {
            ptr: room.address,
            bytes: room.bytes,
            keep: Box::new(room.clone()),
        };
        (room, buffer)
    }
}

impl fmt::Debug for OverNccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.ordinal)
    }
}

impl DeviceExchange for OverNccl {
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
        let (_, buffer) = self.lend(values.into_data().as_bytes());
        let sent = self
            .communicator
            .send(buffer, to, Before::Now, Label::default());
        drop(sent);
        Ok(())
    }

    fn receive(&self, len: usize, dtype: DType, from: usize) -> Result<Box<dyn Arrival>, DdpError> {
        let (room, buffer) = self.lend(&vec![0; len * dtype.size()]);
        let ticket = self
            .communicator
            .receive(buffer, from, Before::Now, Label::default());
        Ok(Box::new(Coming {
            ticket,
            room,
            len,
            dtype,
        }))
    }
}

struct Coming {
    ticket: Ticket,
    room: Arc<Room>,
    len: usize,
    dtype: DType,
}

impl Arrival for Coming {
    fn tensor(self: Box<Self>) -> Result<Tensor<1>, DdpError> {
        let arrived = self.ticket.wait();
        arrived.map_err(|error| DdpError::Device(error.to_string()))?;
        let data = TensorData::from_bytes_vec(self.room.read(), [self.len], self.dtype);
        Ok(Tensor::from_data(data, (&device().inner(), self.dtype)))
    }
}

#[derive(Clone, Debug)]
struct Job {
    world: usize,
    layout: PipelineOptions,
    precision: Precision,
}

/// The hash of the weights and the bits of each step's norm, on every rank; messages go through `library` if there is one.
fn train(job: &Job, library: Option<&Arc<Library>>) -> Vec<(String, Vec<u64>)> {
    let options = GroupOptions {
        timeout: Duration::from_secs(30),
        ..GroupOptions::default()
    };
    let groups = ProcessGroup::local(job.world, &options).expect("a group");
    let options = DdpOptions {
        shards: Some(job.world / job.layout.ranks),
        accumulate: MICRO_BATCHES,
        clip_norm: Some(0.5),
        precision: job.precision,
        ..DdpOptions::default()
    };
    let rank = |group: ProcessGroup| {
        let (ordinal, layout) = (group.rank(), job.layout.clone());
        let (mut pipeline, mut ddp, mut net) =
            Pipeline::new(&group, gpt(), layout, options.clone())?;
        if let Some(library) = library {
            let pipe = pipeline.mesh().group("pp").expect("a dimension");
            let over = OverNccl::join(pipe, ordinal, library);
            pipeline.connect(Arc::new(over));
        }
        let mut optimizer = AdamWConfig::new().init();
        let mut norms = Vec::new();
        for step in 0..STEPS {
            let reduced = pipeline.step(&mut ddp, &net, |pipeline, shard| {
                let data = Data {
                    seed: step * 3 + shard.shard(),
                    precision: job.precision,
                };
                pipeline.shard(shard, &data).map(drop)
            })?;
            norms.push(reduced.grad_norm.expect("clipped").to_bits());
            net = optimizer.step(0.01, net, reduced.grads);
        }
        Ok::<_, PipelineError>((ddp.sha256(&net)?, norms))
    };
    paceline_testing::on_threads(groups, |group| rank(group).expect("it trains"))
}

#[test]
fn a_model_trains_over_nccl_to_the_bits_of_messages_through_the_host() {
    for (schedule, chunks) in [
        (Schedule::GPipe, 1),
        (Schedule::OneForwardOneBackward, 1),
        (Schedule::Interleaved, 2),
        (Schedule::ZeroBubbleH1, 1),
    ] {
        for (world, ranks, precision) in [
            (2, 2, Precision::F32),
            (4, 2, Precision::Bf16),
            (3, 3, Precision::F32),
        ] {
            let job = Job {
                world,
                layout: PipelineOptions {
                    ranks,
                    schedule,
                    chunks,
                    cuts: None,
                },
                precision,
            };
            let library = Library::whole();
            library.load(r#"{"devices": 4}"#);
            let library = Arc::new(library);
            assert_eq!(train(&job, Some(&library)), train(&job, None), "{job:?}");
            // Each micro-batch passes each boundary twice.
            let boundaries = ranks * chunks - 1;
            let shards = world / ranks;
            let messages = STEPS * shards * MICRO_BATCHES * 2 * boundaries;
            assert_eq!(library.calls("ncclSend"), messages as u64, "{job:?}");
        }
    }
}
