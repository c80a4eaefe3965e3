//! A rank that trains a few steps on any device with operations that all back ends compute alike: products and sums of single
//! numbers. Its weights' SHA-256 is therefore the same on every device and any number of ranks.
//!
//! ```text
//! paceline run --nproc-per-node 2 target/debug/examples/probe device vulkan
//! ```

use std::env::Args;
use std::error::Error;

use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData};
use paceline::{BucketCaps, Ddp, DdpError, DdpOptions, device, weights};

const LEN: usize = 1000;
const PART: usize = 300;

#[derive(Module, Debug)]
struct Net {
    factor: Param<Tensor<1>>,
    offset: Param<Tensor<1>>,
    part: Param<Tensor<1>>,
    never: Param<Tensor<1>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let values = |len, first| Param::from_tensor(waves(len, first, device));
        Self {
            factor: values(LEN, 1),
            offset: values(LEN, 5000),
            part: values(PART, 9000),
            never: values(7, 3),
        }
    }

    fn loss(&self, sample: usize, uses_part: bool) -> Tensor<1> {
        let input = waves(LEN, 13 * sample, &self.factor.device());
        let mut output = input * self.factor.val() + self.offset.val();
        if uses_part {
            output = output.narrow(0, 0, PART) * self.part.val();
        }
        (output.clone() * output).mean()
    }
}

/// Numbers that need all their digits.
fn waves(len: usize, first: usize, device: &Device) -> Tensor<1> {
    let wave = |at: usize| ((at * 7919 % 1009) as f32 / 1009.0 - 0.5) * 0.3;
    let values: Vec<f32> = (first..first + len).map(wave).collect();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

pub(crate) fn run(mut args: Args) -> Result<(), Box<dyn Error>> {
    let kind = args.next().unwrap_or_else(|| "cpu".into());
    let group = paceline::init()?;
    let rank = group.rank();
    let device = device::open_for_rank(kind.parse()?, group.local_rank())?.autodiff();
    let options = DdpOptions {
        shards: Some(4),
        caps: BucketCaps {
            first_bytes: 64,
            bytes: 4096,
        },
        ..DdpOptions::default()
    };
    let (mut ddp, mut net) = Ddp::new(group, Net::new(&device), options)?;
    let mut optimizer = SgdConfig::new().init();
    for _ in 0..5 {
        let reduced = ddp.step(&net, |turn| {
            let (step, shard) = (turn.step() as usize, turn.shard());
            // Uneven, and sometimes none.
            let passes = (step * 5 + shard * 3) % 4;
            turn.micro_batches(passes);
            for pass in 0..passes {
                let loss = turn
                    .model()?
                    .loss(step * 100 + shard * 10 + pass, shard == 1);
                turn.backward(loss, 1.0 + pass as f32)?;
            }
            Ok::<(), DdpError>(())
        })?;
        net = optimizer.step(0.1, net, reduced.grads);
    }
    ddp.synchronize()?;
    if rank == 0 {
        println!("{}", weights::sha256(&weights::export(&net)));
    }
    Ok(())
}
