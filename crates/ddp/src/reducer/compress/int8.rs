//! `CommHook::Int8`: an all-reduce in 8 bits per element.
//!
//! ```text
//!  quantise each shard's chunks -> all_to_all: each rank gets its slice of all shards
//!  sum in f32, in the order of the shards; quantise -> all_gather
//! ```
//!
//! Every chunk has its own scale and is of one parameter, and a slice is a number of whole chunks. So the result depends neither on who
//! adds nor on the parameters beside it in the bucket.

use std::ops::Range;

use paceline_collective::{AllGather, Buffer, Error, OpTiming, Ticket};

use super::{Compressor, Context, Leaf, Received};

/// Elements that share a scale.
const CHUNK: usize = 256;
/// Bytes of a chunk: its scale, then its elements.
const RECORD: usize = size_of::<f32>() + CHUNK;
/// The largest magnitude of an element.
const STEPS: f32 = 127.0;

pub(super) struct Int8 {
    context: Context,
    live: Vec<Live>,
}

#[derive(Default)]
struct Live {
    /// Where the chunks lie in the bucket.
    chunks: Vec<Range<usize>>,
    /// Records to each rank, by shard; then those from each rank.
    exchange: Option<Buffer<i8>>,
    gather: Option<Buffer<i8>>,
    sent: Option<Ticket<i8>>,
    first: Option<OpTiming>,
}

impl Int8 {
    pub(super) fn new(context: Context) -> Self {
        let live = context.plan.buckets[..context.buckets()]
            .iter()
            .map(|bucket| {
                let chunks = bucket.segments.iter().flat_map(|segment| {
                    let end = segment.offset + segment.len;
                    let starts = (segment.offset..end).step_by(CHUNK);
                    starts.map(move |start| start..end.min(start + CHUNK))
                });
                Live {
                    chunks: chunks.collect(),
                    ..Live::default()
                }
            });
        let live = live.collect();
        Self { context, live }
    }

    /// Chunks of a rank's slice.
    fn slice(&self, bucket: usize) -> usize {
        self.live[bucket]
            .chunks
            .len()
            .div_ceil(self.context.group.world())
    }

    /// The most shards of a rank.
    fn turns(&self) -> usize {
        self.context.shards(0)
    }

    /// Offset of a chunk of the slice that is exchanged with `rank`.
    fn at(&self, bucket: usize, rank: usize, turn: usize, chunk: usize) -> usize {
        ((rank * self.turns() + turn) * self.slice(bucket) + chunk) * RECORD
    }
}

impl Compressor for Int8 {
    fn begin(&mut self, step: u64) {
        self.context.step = step;
    }

    fn add(&mut self, leaf: Leaf<'_>) -> Result<(), Error> {
        let (bucket, slice) = (leaf.bucket, self.slice(leaf.bucket));
        let world = self.context.group.world();
        let mut buffer = match self.live[bucket].exchange.take() {
            Some(buffer) => buffer,
            None => {
                let half = world * self.turns() * slice * RECORD;
                self.context.group.buffer(2 * half)?
            }
        };
        let turn = self.context.turn(leaf.shard);
        for (chunk, range) in self.live[bucket].chunks.iter().enumerate() {
            let at = self.at(bucket, chunk / slice, turn, chunk % slice);
            quantise(&leaf.values[range.clone()], &mut buffer[at..at + RECORD]);
        }
        self.live[bucket].exchange = Some(buffer);
        Ok(())
    }

    fn send(&mut self, bucket: usize) -> Result<(), Error> {
        let buffer = self.live[bucket].exchange.take();
        let buffer = buffer.expect("every rank has a shard");
        self.live[bucket].sent = Some(self.context.group.all_to_all_async(buffer));
        Ok(())
    }

    fn resend(&mut self, bucket: usize) -> Result<(), Error> {
        let ticket = self.live[bucket].sent.take();
        let done = ticket.expect("every bucket is sent").wait()?;
        let group = &self.context.group;
        let (rank, slice) = (group.rank(), self.slice(bucket));
        let mut gather = match self.live[bucket].gather.take() {
            Some(buffer) => buffer,
            None => group.buffer(group.world() * slice * RECORD)?,
        };
        let half = done.buffer.len() / 2;
        let chunks = self.live[bucket].chunks.len();
        let own = chunks.saturating_sub(rank * slice).min(slice);
        for chunk in 0..own {
            let mut sum = [0.0; CHUNK];
            for from in 0..group.world() {
                for turn in 0..self.context.shards(from) {
                    let at = half + self.at(bucket, from, turn, chunk);
                    let values = dequantise(&done.buffer[at..at + RECORD]);
                    sum.iter_mut()
                        .zip(values)
                        .for_each(|(sum, value)| *sum += value);
                }
            }
            let at = (rank * slice + chunk) * RECORD;
            quantise(&sum, &mut gather[at..at + RECORD]);
        }
        let call = AllGather {
            counts: None,
            bucket: Some(bucket as u32),
            step: self.context.step,
        };
        let sent = group.all_gather_async(gather, call);
        let live = &mut self.live[bucket];
        live.sent = Some(sent);
        live.first = Some(done.timing);
        live.exchange = Some(done.buffer);
        Ok(())
    }

    fn receive(&mut self, bucket: usize) -> Result<Received, Error> {
        let ticket = self.live[bucket].sent.take();
        let done = ticket.expect("every bucket is sent twice").wait()?;
        let mut values = vec![0.0; self.context.len(bucket)];
        let live = &mut self.live[bucket];
        for (range, record) in live.chunks.iter().zip(done.buffer.chunks(RECORD)) {
            let slots = values[range.clone()].iter_mut();
            slots
                .zip(dequantise(record))
                .for_each(|(slot, value)| *slot = value);
        }
        let exchanged = live.exchange.as_ref().map_or(0, |buffer| buffer.len() / 2);
        let bytes = exchanged + done.buffer.len() / self.context.group.world();
        let first = live.first.take().unwrap_or(done.timing);
        live.gather = Some(done.buffer);
        Ok(Received {
            values,
            bytes,
            timing: Some([first, done.timing]),
            own: None,
        })
    }
}

/// Writes a chunk: `value = element * scale`. A chunk with an infinity or NaN becomes NaN.
fn quantise(values: &[f32], record: &mut [i8]) {
    let largest = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = match values.iter().all(|x| x.is_finite()) {
        true => largest / STEPS,
        false => f32::NAN,
    };
    let (head, elements) = record.split_at_mut(size_of::<f32>());
    for (slot, byte) in head.iter_mut().zip(scale.to_le_bytes()) {
        *slot = byte as i8;
    }
    elements.fill(0);
    if scale > 0.0 {
        for (slot, value) in elements.iter_mut().zip(values) {
            // Saturates, which matters only if the scale is subnormal.
            *slot = (value / scale).round() as i8;
        }
    }
}

fn dequantise(record: &[i8]) -> impl Iterator<Item = f32> {
    let (head, elements) = record.split_at(size_of::<f32>());
    let scale = f32::from_le_bytes(std::array::from_fn(|at| head[at] as u8));
    elements
        .iter()
        .map(move |element| f32::from(*element) * scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(values: &[f32]) -> Vec<f32> {
        let mut record = [0; RECORD];
        quantise(values, &mut record);
        dequantise(&record).take(values.len()).collect()
    }

    #[test]
    fn an_element_is_off_by_at_most_half_a_step() {
        let values: Vec<f32> = (0..CHUNK).map(|at| (at as f32 * 0.7).sin() * 3.0).collect();
        let largest = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (value, found) in values.iter().zip(there_and_back(&values)) {
            assert!(
                (value - found).abs() <= largest / STEPS * 0.5001,
                "{value} {found}"
            );
        }
        assert_eq!(there_and_back(&[0.0; 3]), [0.0; 3]);
    }

    #[test]
    fn an_infinity_is_not_hidden() {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            assert!(
                there_and_back(&[1.0, bad, 2.0])
                    .iter()
                    .all(|value| value.is_nan())
            );
        }
    }
}
