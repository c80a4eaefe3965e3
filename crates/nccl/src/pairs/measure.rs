//! The child's side: copies between two devices, checked byte by byte and timed by the driver.
#![allow(unsafe_code)]

use std::cell::OnceCell;
use std::ffi::c_void;
use std::io::{self, Write};
use std::rc::Rc;
use std::time::Duration;

use super::{DEVICES_MAX, Line, Link, LinkReport, Outcome, PairDevice, PairTest, Step, steps};
use crate::driver::{Context, Device, Driver, Kernel, Memory, Stream};
use crate::error::NcclError;
use crate::tree_sum::add_kernel;

/// Copies in each direction, each with other data, so that leftovers of the previous one are errors. Two show whether a way
/// works. Large copies measure speed: four are made, and the fastest counts.
const ROUNDS: usize = 2;
const ROUNDS_OF_LARGE: usize = 4;
const LARGE_BYTES: usize = 16 << 20;

/// Distance in words between the data of two rounds.
const ROUND_WORDS: usize = 1031;

/// Threads of a block, and most blocks, of the kernel that writes to the other device.
const THREADS: u32 = 256;
const BLOCKS_MAX: u32 = 64;

/// `CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK`.
const PERFORMANCE_RANK: i32 = 1;

/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const ALREADY_ENABLED: i32 = 704;

/// Errors that leave a context intact, because the driver refused the call. After others, such as an illegal address in a
/// kernel, "the process must be terminated and relaunched", as the header says.
///
/// *Source*: `CUresult` in `cuda.h`: invalid value, out of memory, device in exclusive use, no device, invalid device,
/// refused PTX, invalid context, peer access unsupported, already on, off or with too many peers, unknown name or handle,
/// not permitted, not supported.
const REFUSALS: [i32; 20] = [
    1, 2, 46, 100, 101, 200, 201, 209, 217, 218, 222, 300, 400, 500, 701, 704, 705, 711, 800, 801,
];

/// Tries the ways between devices from step `first` on, and writes the results as lines for [`test`](fn@super::test).
///
/// *Blocks*: for ever if the driver hangs; the parent process ends this one.
///
/// *Errors*: `out` cannot be written. The driver's errors are written as lines.
pub fn serve(test: &PairTest, first: usize, out: &mut dyn Write) -> io::Result<()> {
    let told = match Bench::open(test) {
        Ok(mut bench) => bench.run(first, out),
        Err(error) => Err(error),
    };
    match told {
        Ok(()) => tell(&Line::Done, out),
        Err(Stop::Silence(error)) => Err(error),
        Err(Stop::Spent) => tell(&Line::Spent, out),
        Err(Stop::Driver(error)) => tell(&Line::Failed(error.to_string(), error.hint()), out),
    }
}

/// Why the test stops early.
enum Stop {
    Silence(io::Error),
    Driver(NcclError),
    /// A context is corrupted, so that its answers about further steps would be wrong.
    Spent,
}

impl From<NcclError> for Stop {
    fn from(error: NcclError) -> Self {
        Self::Driver(error)
    }
}

/// Whether the error may have corrupted a context.
fn spoils(error: &NcclError) -> bool {
    matches!(error, NcclError::Driver { code, .. } if !REFUSALS.contains(code))
}

fn tell(line: &Line, out: &mut dyn Write) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    out.write_all(&text)?;
    out.flush()
}

/// The devices, ready.
struct Bench {
    driver: Driver,
    devices: Vec<Device>,
    /// Created on first use; creating them for each step would take longer than the step.
    ends: Vec<Option<Rc<End>>>,
    data: Rc<Data>,
}

/// The data to send, generated once: eight devices have 112 ways.
struct Data {
    message_bytes: usize,
    /// The data of all rounds, overlapping.
    pattern: Vec<u8>,
    /// Floats for the kernel, generated on first use.
    numbers: OnceCell<Vec<u8>>,
}

impl Data {
    fn new(message_bytes: usize) -> Self {
        // Whole numbers for the kernel.
        let message_bytes = message_bytes.next_multiple_of(4).max(4);
        let words = message_bytes / 4 + ROUND_WORDS * (rounds(message_bytes) - 1);
        Self {
            message_bytes,
            pattern: pattern(words),
            numbers: OnceCell::new(),
        }
    }

    /// Data of a round: every word differs from its neighbours and from the same word of other rounds.
    fn of_round(&self, round: usize) -> &[u8] {
        &self.pattern[round * ROUND_WORDS * 4..][..self.message_bytes]
    }

    /// Whole numbers up to 2^20, which floats hold exactly, and never zero.
    fn numbers(&self) -> &[u8] {
        self.numbers.get_or_init(|| {
            let count = self.message_bytes / 4;
            let numbers =
                (0..count).map(|index| (index.wrapping_mul(7919) % (1 << 20)) as f32 + 1.0);
            numbers.flat_map(f32::to_le_bytes).collect()
        })
    }
}

/// Number of copies of this size in each direction.
fn rounds(message_bytes: usize) -> usize {
    if message_bytes < LARGE_BYTES {
        ROUNDS
    } else {
        ROUNDS_OF_LARGE
    }
}

impl Bench {
    fn open(test: &PairTest) -> Result<Self, Stop> {
        let driver = Driver::load(&test.places)?;
        let count = driver.device_count()?.min(DEVICES_MAX);
        let devices = (0..count).map(|ordinal| driver.device(ordinal));
        Ok(Self {
            driver,
            ends: vec![None; count],
            devices: devices.collect::<Result<_, _>>()?,
            data: Rc::new(Data::new(test.message_bytes)),
        })
    }

    fn run(&mut self, first: usize, out: &mut dyn Write) -> Result<(), Stop> {
        let report = self.describe()?;
        let links = report.links.clone();
        tell(&Line::Devices(report), out).map_err(Stop::Silence)?;
        for (number, step) in steps(self.devices.len())
            .into_iter()
            .enumerate()
            .skip(first)
        {
            let is_its = |link: &&Link| (link.from, link.to) == (step.from, step.to);
            let says_ok = links.iter().find(is_its).is_some_and(|link| link.says_ok);
            tell(&Line::Begin(number), out).map_err(Stop::Silence)?;
            let tried = match step.is_peer && !says_ok {
                true => Ok(Outcome::NotSupported),
                false => self.try_step(step),
            };
            let is_spent = tried.as_ref().is_err_and(spoils);
            let outcome = tried.unwrap_or_else(|error| Outcome::Failed {
                reason: error.to_string(),
            });
            tell(&Line::End(number, outcome), out).map_err(Stop::Silence)?;
            if is_spent {
                return Err(Stop::Spent);
            }
        }
        Ok(())
    }

    /// What the driver says, before anything is tried.
    fn describe(&self) -> Result<LinkReport, NcclError> {
        let place = |device: &Device| -> Result<PairDevice, NcclError> {
            Ok(PairDevice {
                name: device.name()?,
                bus: device.bus()?,
                uuid: device.uuid()?,
            })
        };
        let mut links = Vec::new();
        for Step { from, to, .. } in steps(self.devices.len())
            .into_iter()
            .filter(|step| step.is_peer)
        {
            links.push(Link {
                from,
                to,
                says_ok: self.says_ok(from, to)?,
                rank: self.rank(from, to),
                peer: Outcome::NotTried,
                host: Outcome::NotTried,
            });
        }
        Ok(LinkReport {
            cuda: self.driver.version()?,
            devices: self.devices.iter().map(place).collect::<Result<_, _>>()?,
            message_bytes: self.data.message_bytes,
            links,
        })
    }

    fn says_ok(&self, from: usize, to: usize) -> Result<bool, NcclError> {
        let Some(ask) = self.driver.0.device_can_access_peer else {
            return Ok(false);
        };
        let mut can = 0;
        // SAFETY: the driver stores one int.
        let answer = unsafe { ask(&mut can, self.devices[from].raw, self.devices[to].raw) };
        self.driver.check(("cuDeviceCanAccessPeer", answer))?;
        Ok(can != 0)
    }

    fn rank(&self, from: usize, to: usize) -> Option<i32> {
        let ask = self.driver.0.device_get_p2p_attribute?;
        let mut rank = 0;
        let (from, to) = (self.devices[from].raw, self.devices[to].raw);
        // SAFETY: the driver stores one int.
        let answer = unsafe { ask(&mut rank, PERFORMANCE_RANK, from, to) };
        (answer == 0).then_some(rank)
    }

    /// A device's part in a step.
    fn end(&mut self, ordinal: usize) -> Result<Rc<End>, NcclError> {
        if let Some(end) = &self.ends[ordinal] {
            return Ok(end.clone());
        }
        let context = self.devices[ordinal].primary()?;
        let end = Rc::new(End {
            memory: context.memory(self.data.message_bytes)?,
            stream: context.stream()?,
            kernel: OnceCell::new(),
            context,
        });
        self.ends[ordinal] = Some(end.clone());
        Ok(end)
    }

    fn try_step(&mut self, step: Step) -> Result<Outcome, NcclError> {
        let ways = Ways {
            data: self.data.clone(),
            from: self.end(step.from)?,
            to: self.end(step.to)?,
        };
        if !step.is_peer {
            return ways.copies();
        }
        ways.set_access(true)?;
        let outcome = ways.copies();
        let outcome = match outcome {
            Ok(Outcome::Fine { gb_per_second }) => ways.kernel(gb_per_second),
            other => other,
        };
        // After a failed copy this fails too, and says nothing about the cause.
        let closed = ways.set_access(false);
        outcome.and_then(|outcome| closed.map(|()| outcome))
    }
}

/// One device's part in its copies.
struct End {
    context: Context,
    memory: Memory,
    stream: Stream,
    /// Created on first use.
    kernel: OnceCell<Kernel>,
}

impl End {
    fn kernel(&self) -> Result<&Kernel, NcclError> {
        if let Some(kernel) = self.kernel.get() {
            return Ok(kernel);
        }
        let kernel = add_kernel(&self.context)?;
        Ok(self.kernel.get_or_init(|| kernel))
    }
}

/// From one device to another.
struct Ways {
    data: Rc<Data>,
    from: Rc<End>,
    to: Rc<End>,
}

impl Ways {
    /// Turns the first device's access to the second's memory on or off.
    fn set_access(&self, is_on: bool) -> Result<(), NcclError> {
        let (context, peer) = (&self.from.context, self.to.context.raw());
        let set = match is_on {
            // SAFETY: both contexts are retained, and the first is current.
            true => context.call(|cu| unsafe { cu.ctx_enable_peer_access(peer, 0) }),
            // SAFETY: the same.
            false => context.call(|cu| unsafe { cu.ctx_disable_peer_access(peer) }),
        };
        match set {
            Err(NcclError::Driver {
                code: ALREADY_ENABLED,
                ..
            }) => Ok(()),
            set => set,
        }
    }

    /// Copies some rounds of data, and compares what arrives.
    fn copies(&self) -> Result<Outcome, NcclError> {
        let bytes = self.from.memory.bytes;
        let mut got = vec![0; bytes];
        let (begin, end) = (
            self.from.context.event(true)?,
            self.from.context.event(true)?,
        );
        let mut best: Option<Duration> = None;
        for round in 0..rounds(bytes) {
            let sent = self.data.of_round(round);
            self.from.memory.write(sent, &self.from.stream)?;
            self.from.stream.record(&begin)?;
            self.copy()?;
            self.from.stream.record(&end)?;
            self.from.stream.synchronize()?;
            self.to.memory.read(&mut got, &self.to.stream)?;
            if let Some(wrong) = compare("a copy", sent, &got) {
                return Ok(wrong);
            }
            let time = end.since(&begin)?;
            best = Some(best.map_or(time, |best| best.min(time)));
        }
        // A nonsensical time gives no speed rather than an infinite one.
        let seconds = best.unwrap_or_default().as_secs_f64();
        let gb_per_second = if seconds > 0.0 {
            bytes as f64 / seconds / 1e9
        } else {
            0.0
        };
        Ok(Outcome::Fine { gb_per_second })
    }

    fn copy(&self) -> Result<(), NcclError> {
        let (from, to) = (&self.from, &self.to);
        // SAFETY: both memories have this length, belong to these contexts, and live until the caller has waited.
        from.context.call(|cu| unsafe {
            cu.memcpy_peer_async(
                to.memory.ptr,
                to.context.raw(),
                from.memory.ptr,
                from.context.raw(),
                from.memory.bytes,
                from.stream.raw,
            )
        })
    }

    /// A kernel on the first device adds to zeros in the second's memory: NCCL's kernels also access peers this way.
    fn kernel(&self, gb_per_second: f64) -> Result<Outcome, NcclError> {
        let count = self.from.memory.bytes / 4;
        let sent = self.data.numbers();
        let mut got = vec![0; sent.len()];
        self.to.memory.write(&got, &self.to.stream)?;
        self.from.memory.write(sent, &self.from.stream)?;
        let kernel = self.from.kernel()?;
        let (mut to, mut from, mut numbers) =
            (self.to.memory.ptr, self.from.memory.ptr, count as u64);
        let mut arguments = [
            (&raw mut to).cast::<c_void>(),
            (&raw mut from).cast(),
            (&raw mut numbers).cast(),
        ];
        let blocks = u32::try_from(count.div_ceil(THREADS as usize))
            .unwrap_or(BLOCKS_MAX)
            .min(BLOCKS_MAX);
        // SAFETY: the kernel takes two addresses and a count, which both memories have; they stay until the wait below.
        unsafe { kernel.launch(&self.from.stream, (blocks, THREADS), &mut arguments)? };
        self.from.stream.synchronize()?;
        self.to.memory.read(&mut got, &self.to.stream)?;
        Ok(compare("a kernel", sent, &got).unwrap_or(Outcome::Fine { gb_per_second }))
    }
}

/// This many words, all different.
fn pattern(words: usize) -> Vec<u8> {
    // Multiplying by an odd number is a bijection on 32 bits.
    let numbers = (0..words).map(|index| (index as u32).wrapping_mul(0x9e37_79b9));
    numbers.flat_map(u32::to_le_bytes).collect()
}

/// The difference between what was sent and what arrived, if any.
fn compare(by: &str, sent: &[u8], got: &[u8]) -> Option<Outcome> {
    // The usual case, and much faster than counting.
    if sent == got {
        return None;
    }
    let bytes = sent
        .iter()
        .zip(got)
        .filter(|(sent, got)| sent != got)
        .count();
    Some(Outcome::Wrong {
        by: by.to_owned(),
        bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_have_nothing_in_common() {
        for (bytes, count) in [(4096, 2), (LARGE_BYTES, 4)] {
            let data = Data::new(bytes);
            assert_eq!(rounds(bytes), count);
            let all: Vec<_> = (0..count).map(|round| data.of_round(round)).collect();
            for (index, one) in all.iter().enumerate() {
                assert_eq!(one.len(), bytes);
                for other in &all[index + 1..] {
                    let mut words = one.chunks(4).zip(other.chunks(4));
                    assert!(words.all(|(one, other)| one != other));
                }
            }
        }
    }

    #[test]
    fn what_is_wrong_is_counted() {
        let wrong = |bytes| Outcome::Wrong {
            by: "a copy".into(),
            bytes,
        };
        for (got, expect) in [
            ([1, 2, 3], None),
            ([1, 0, 3], Some(wrong(1))),
            ([3, 1, 2], Some(wrong(3))),
        ] {
            assert_eq!(compare("a copy", &[1, 2, 3], &got), expect);
        }
    }
}
