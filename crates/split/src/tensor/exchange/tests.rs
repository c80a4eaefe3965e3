//! Exchanges on a device have the shapes and bits of those through the host.

use std::sync::atomic::{AtomicUsize, Ordering};

use paceline_collective::{GroupOptions, ProcessGroup, Tree};
use paceline_ddp::Arrival;

use super::*;

/// A device whose exchanges are the process group's.
#[derive(Debug)]
struct OnHost {
    group: ProcessGroup,
    tree: Arc<Tree>,
    calls: AtomicUsize,
}

impl OnHost {
    fn buffer(&self, values: &[f32]) -> Buffer<f32> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut buffer = self.group.buffer(values.len()).expect("memory");
        buffer.copy_from_slice(values);
        buffer
    }
}

fn numbers(tensor: Tensor<1>) -> Vec<f32> {
    tensor.into_data().try_to_vec().expect("f32")
}

fn tensor(values: &[f32]) -> Tensor<1> {
    Tensor::from_data(values, &Device::flex())
}

impl DeviceExchange for OnHost {
    fn sum(
        &self,
        blocks: Vec<Tensor<1>>,
        counts: Option<Arc<[usize]>>,
    ) -> Result<Tensor<1>, DdpError> {
        let len = blocks[0].dims()[0];
        assert_eq!(blocks.len(), self.tree.blocks(self.group.rank()).len());
        let all: Vec<f32> = blocks.into_iter().flat_map(numbers).collect();
        let call = AllReduce {
            tree: Some(self.tree.clone()),
            ..AllReduce::new(ReduceOp::Sum, len)
        };
        let sum = self
            .group
            .all_reduce_buffer(self.buffer(&all), call)?
            .buffer;
        let own = match counts {
            Some(counts) => {
                assert_eq!(counts.iter().sum::<usize>(), len);
                let start: usize = counts[..self.group.rank()].iter().sum();
                start..start + counts[self.group.rank()]
            }
            None => 0..len,
        };
        Ok(tensor(&sum[own]))
    }

    fn gather(&self, values: Tensor<1>, counts: Arc<[usize]>) -> Result<Tensor<1>, DdpError> {
        let own = numbers(values);
        assert_eq!(own.len(), counts[self.group.rank()]);
        let mut all = vec![0.0; counts.iter().sum()];
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.group.all_gather_v(&own, &mut all, &counts)?;
        Ok(tensor(&all))
    }

    fn max(&self, values: Tensor<1>) -> Result<Tensor<1>, DdpError> {
        let mut all = self.buffer(&numbers(values)).to_vec();
        self.group.all_reduce(&mut all, ReduceOp::Max)?;
        Ok(tensor(&all))
    }

    fn send(&self, _: Tensor<1>, _: usize) -> Result<(), DdpError> {
        unreachable!("parts send no messages")
    }

    fn receive(&self, _: usize, _: DType, _: usize) -> Result<Box<dyn Arrival>, DdpError> {
        unreachable!("parts send no messages")
    }
}

#[test]
fn what_stays_on_a_device_has_the_shapes_and_bits_of_what_goes_through_the_host() {
    const ROWS: usize = 7;
    for (parts, world) in [(2, 2), (3, 2), (4, 3)] {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let groups = ProcessGroup::local(world, &GroupOptions::default()).expect("a group");
            paceline_testing::on_threads(groups, |group| {
                let through_host = TensorParallel::new(group.clone(), parts).expect("parts");
                let on_device = TensorParallel::new(group.clone(), parts).expect("parts");
                let device = Arc::new(OnHost {
                    tree: on_device.tree.clone(),
                    group,
                    calls: AtomicUsize::new(0),
                });
                on_device.device.set(device.clone()).expect("the only one");
                let values = |part: usize, rows: usize| {
                    let at = |k: usize| ((k * 37 + part * 11) % 101) as f32 / 7.0 - 5.0;
                    let values: Vec<f32> = (0..rows * 6).map(at).collect();
                    let data = TensorData::new(values, [rows, 2, 3]);
                    Tensor::<3>::from_data(data, &Device::flex()).cast(dtype)
                };
                let results = [&through_host, &on_device].map(|tp| {
                    let all = || tp.local().map(|part| values(part, ROWS)).collect();
                    let first = tp.local().start;
                    let own = tp.share_of_rank(ROWS, tp.group.rank()).len();
                    let results = [
                        tp.sum(all()),
                        tp.sum_rows(all()),
                        tp.gather_rows(values(first, own), ROWS),
                        tp.max(values(first, ROWS)),
                    ];
                    results.map(|result| result.expect("an exchange").into_data())
                });
                assert_eq!(results[0], results[1], "{parts} parts, {dtype:?}");
                let calls = if dtype == DType::F64 { 0 } else { 4 };
                assert_eq!(device.calls.load(Ordering::Relaxed), calls);
            });
        }
    }
}
