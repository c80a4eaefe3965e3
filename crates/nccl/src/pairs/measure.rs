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

/// Copies each way, each with other data: what stays from the one before is wrong. Two show whether a way works; more, of
/// which the best counts, are for those who ask for large copies, and so for a speed.
const ROUNDS: usize = 2;
const ROUNDS_OF_LARGE: usize = 4;
const LARGE_BYTES: usize = 16 << 20;

/// Words from where one round's data begins to where the next one's does.
const ROUND_WORDS: usize = 1031;

/// Threads of a block, and most blocks, of the kernel that writes to the other device.
const THREADS: u32 = 256;
const BLOCKS_MAX: u32 = 64;

/// `CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK`.
const PERFORMANCE_RANK: i32 = 1;

/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const ALREADY_ENABLED: i32 = 704;

/// Errors after which a context is as it was: the driver refused what it was asked. After others, as that of a kernel that
/// reached where there is nothing, "the process must be terminated and relaunched", as the header says.
///
/// *Source*: `CUresult` in `cuda.h`: invalid value, no memory, a device that another program has for itself, no device, no
/// such device, the refusals of PTX, invalid context, peer access that is not offered, is on, is off or has too many peers,
/// unknown names and handles, not permitted, not supported.
const REFUSALS: [i32; 20] = [
    1, 2, 46, 100, 101, 200, 201, 209, 217, 218, 222, 300, 400, 500, 701, 704, 705, 711, 800, 801,
];

/// Tries the ways between devices from the `first` step on, and tells how it goes, in lines for [`test`](fn@super::test).
///
/// *Blocks*: for ever, where the driver does: whoever started this process ends it.
///
/// *Errors*: nobody listens. What goes wrong with the driver is told.
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

/// Why no further step is tried.
enum Stop {
    Silence(io::Error),
    Driver(NcclError),
    /// A context is spoiled: what it would say of further steps is not true of them.
    Spent,
}

impl From<NcclError> for Stop {
    fn from(error: NcclError) -> Self {
        Self::Driver(error)
    }
}

/// Whether an error may be of a context that stays spoiled.
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
    /// Of those that were needed: to make them anew for each step would take longer than the step.
    ends: Vec<Option<Rc<End>>>,
    data: Rc<Data>,
}

/// What is sent, made once: with eight devices there are 112 ways to send it.
struct Data {
    message_bytes: usize,
    /// The data of all rounds, which lie over each other.
    pattern: Vec<u8>,
    /// Floats for the kernel, once one is to run.
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

/// How many copies of this size are made each way.
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
        let Some(ask) = self.driver.functions().device_can_access_peer else {
            return Ok(false);
        };
        let mut can = 0;
        // SAFETY: the driver stores one int.
        let answer = unsafe { ask(&mut can, self.devices[from].raw(), self.devices[to].raw()) };
        self.driver.check("cuDeviceCanAccessPeer", answer)?;
        Ok(can != 0)
    }

    fn rank(&self, from: usize, to: usize) -> Option<i32> {
        let ask = self.driver.functions().device_get_p2p_attribute?;
        let mut rank = 0;
        let (from, to) = (self.devices[from].raw(), self.devices[to].raw());
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
            driver: self.driver,
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
        // Where a copy failed this fails as well, and says nothing of the cause.
        let closed = ways.set_access(false);
        outcome.and_then(|outcome| closed.map(|()| outcome))
    }
}

/// One device's part in its copies.
struct End {
    context: Context,
    memory: Memory,
    stream: Stream,
    /// Once it has run one.
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
    driver: Driver,
    data: Rc<Data>,
    from: Rc<End>,
    to: Rc<End>,
}

impl Ways {
    /// Lets the first device reach the second's memory, or no longer.
    fn set_access(&self, is_on: bool) -> Result<(), NcclError> {
        let functions = self.driver.functions();
        let missing = |function| NcclError::Function {
            path: "the driver".into(),
            function,
        };
        let _entered = self.from.context.enter()?;
        let peer = self.to.context.raw();
        // SAFETY: both contexts are retained, and the first is current.
        let (call, answer) = unsafe {
            match is_on {
                true => {
                    let call = "cuCtxEnablePeerAccess";
                    let enable = functions
                        .ctx_enable_peer_access
                        .ok_or_else(|| missing(call))?;
                    (call, enable(peer, 0))
                }
                false => {
                    let call = "cuCtxDisablePeerAccess";
                    let disable = functions
                        .ctx_disable_peer_access
                        .ok_or_else(|| missing(call))?;
                    (call, disable(peer))
                }
            }
        };
        match answer {
            ALREADY_ENABLED => Ok(()),
            answer => self.driver.check(call, answer),
        }
    }

    /// Copies some rounds of data, and compares what arrives.
    fn copies(&self) -> Result<Outcome, NcclError> {
        let bytes = self.from.memory.bytes();
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
        // A driver that says nonsense has no speed, rather than one without end.
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
        let Some(copy) = self.driver.functions().memcpy_peer_async else {
            return Err(NcclError::Function {
                path: "the driver".into(),
                function: "cuMemcpyPeerAsync",
            });
        };
        let _entered = from.context.enter()?;
        // SAFETY: both memories have as many bytes, are of these contexts, and stay until the caller has waited.
        let answer = unsafe {
            copy(
                to.memory.ptr(),
                to.context.raw(),
                from.memory.ptr(),
                from.context.raw(),
                from.memory.bytes(),
                from.stream.raw(),
            )
        };
        self.driver.check("cuMemcpyPeerAsync", answer)
    }

    /// A kernel of the first device adds to zeros in the second's memory: NCCL's kernels read and write that way too.
    fn kernel(&self, gb_per_second: f64) -> Result<Outcome, NcclError> {
        let count = self.from.memory.bytes() / 4;
        let sent = self.data.numbers();
        let mut got = vec![0; sent.len()];
        self.to.memory.write(&got, &self.to.stream)?;
        self.from.memory.write(sent, &self.from.stream)?;
        let kernel = self.from.kernel()?;
        let (mut to, mut from, mut numbers) =
            (self.to.memory.ptr(), self.from.memory.ptr(), count as u64);
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

/// So many words, of which no two are the same.
fn pattern(words: usize) -> Vec<u8> {
    // Multiplying by an odd number gives each number of 32 bits another one.
    let numbers = (0..words).map(|index| (index as u32).wrapping_mul(0x9e37_79b9));
    numbers.flat_map(u32::to_le_bytes).collect()
}

/// What is wrong with what arrived, if something is.
fn compare(by: &str, sent: &[u8], got: &[u8]) -> Option<Outcome> {
    // Much faster than counting, and mostly all there is to do.
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
