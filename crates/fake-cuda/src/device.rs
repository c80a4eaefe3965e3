//! Devices, each with one context, and copies between them.

mod kernel;
mod memory;
mod stream;

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::code::Code;
use crate::machine::{Kind, Link, Machine};
use crate::process::{Process, lock};

pub(crate) use self::kernel::{Function, Module};
pub(crate) use self::memory::{HostSpan, Memory, Span};
pub(crate) use self::stream::{Event, Mark, Stream, Work};

/// A visible device and its primary context.
#[derive(Debug)]
pub(crate) struct Device {
    /// Its ordinal in this process.
    pub(crate) ordinal: usize,
    /// Its position in the machine.
    pub(crate) place: usize,
    pub(crate) name: String,
    pub(crate) uuid: [u8; 16],
    pub(crate) pci: String,
    pub(crate) capability: (i32, i32),
    pub(crate) memory_bytes: u64,
    /// The content of fresh memory: NaN as a float and -1 as an integer. Where kernels do nothing it is zero, or all results would
    /// be NaN, over which programs end.
    pub(crate) fresh: u8,
    /// Bytes in use.
    pub(crate) used: AtomicU64,
    /// Reference count of the context.
    pub(crate) retained: Mutex<u32>,
    /// The error of all calls after a piece of work has failed.
    failure: Mutex<Option<Code>>,
    streams: Mutex<Vec<Weak<Stream>>>,
    default_stream: OnceLock<Arc<Stream>>,
    /// Marks for which future streams wait.
    awaited: Mutex<Vec<Arc<Mark>>>,
    /// Devices to which the context has peer access.
    pub(crate) reach: Mutex<BTreeSet<usize>>,
}

impl Device {
    pub(crate) fn new(ordinal: usize, place: usize, machine: &Machine) -> Self {
        let described = machine.device(place);
        Self {
            ordinal,
            place,
            uuid: described.uuid(place).unwrap_or_default(),
            name: described.name.unwrap_or_else(|| "Fake GPU".to_owned()),
            pci: described
                .pci
                .unwrap_or_else(|| format!("0000:{:02x}:00.0", 0x10 + place)),
            capability: described.capability.unwrap_or((9, 0)),
            memory_bytes: described.memory_mib.unwrap_or(4096) << 20,
            fresh: machine.foreign_kernels.as_ref().map_or(0xff, |_| 0),
            used: AtomicU64::new(0),
            retained: Mutex::default(),
            failure: Mutex::default(),
            streams: Mutex::default(),
            default_stream: OnceLock::new(),
            awaited: Mutex::default(),
            reach: Mutex::default(),
        }
    }

    /// A stream. Unless `is_apart`, it is ordered with the default stream.
    pub(crate) fn new_stream(self: &Arc<Self>, is_apart: bool) -> Arc<Stream> {
        let stream = Stream::start(self.clone(), is_apart);
        let mut awaited = lock(&self.awaited);
        awaited.retain(|mark| !mark.is_done());
        for mark in awaited.iter() {
            stream.push(Work::Wait(mark.clone()));
        }
        let mut streams = lock(&self.streams);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(Arc::downgrade(&stream));
        stream
    }

    /// The stream of the null handle.
    pub(crate) fn default_stream(self: &Arc<Self>) -> Arc<Stream> {
        let stream = self.default_stream.get_or_init(|| self.new_stream(true));
        stream.clone()
    }

    /// All streams of the context.
    pub(crate) fn streams(&self) -> Vec<Arc<Stream>> {
        lock(&self.streams)
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// Puts a piece of work on a stream, ordered with the default stream unless the stream is apart.
    pub(crate) fn submit(self: &Arc<Self>, stream: &Arc<Stream>, work: Work) {
        if self
            .default_stream
            .get()
            .is_some_and(|default| Arc::ptr_eq(default, stream))
        {
            let beside: Vec<_> = self
                .streams()
                .into_iter()
                .filter(|other| !other.is_apart)
                .collect();
            for other in beside.iter().filter(|other| !other.is_idle()) {
                stream.push(Work::Wait(other.mark()));
            }
            stream.push(work);
            for other in beside {
                other.push(Work::Wait(stream.mark()));
            }
        } else {
            stream.push(work);
        }
    }

    /// Waits for all work of the context.
    pub(crate) fn synchronize(&self) -> Result<(), Code> {
        let marks: Vec<_> = self.streams().iter().map(|stream| stream.mark()).collect();
        for mark in marks {
            mark.wait();
        }
        self.check()
    }

    /// A mark after all of the context's work so far.
    pub(crate) fn mark(&self) -> Arc<Mark> {
        let streams = self.streams();
        let mark = Arc::new(Mark::after(streams.len()));
        for stream in streams {
            stream.push(Work::Hit(mark.clone()));
        }
        mark
    }

    /// Makes all later work wait for a mark.
    pub(crate) fn wait_for(&self, mark: &Arc<Mark>) {
        let mut awaited = lock(&self.awaited);
        awaited.push(mark.clone());
        for stream in self.streams() {
            stream.push(Work::Wait(mark.clone()));
        }
    }

    /// The error of the context's work, if it has failed.
    pub(crate) fn check(&self) -> Result<(), Code> {
        lock(&self.failure).map_or(Ok(()), Err)
    }

    pub(crate) fn fail(&self, code: Code) {
        lock(&self.failure).get_or_insert(code);
    }

    /// Resets the context, including its error.
    pub(crate) fn reset(&self) {
        *lock(&self.failure) = None;
        lock(&self.reach).clear();
    }

    /// The link to another device.
    pub(crate) fn link_to(&self, other: &Self) -> Link {
        let machine = Process::here().machine().unwrap_or_default();
        machine
            .link(self.place, other.place)
            .unwrap_or(Link::NotSupported)
    }

    fn reaches(&self, other: &Self) -> bool {
        lock(&self.reach).contains(&other.ordinal)
    }
}

/// A copy: over the link with peer access, otherwise through the host, which always works.
pub(crate) fn copy(from: Span, to: Span) -> Work {
    let (source, target) = (from.device().clone(), to.device().clone());
    let is_direct = source.reaches(&target) || target.reaches(&source);
    let link = match is_direct {
        true => source.link_to(&target),
        false => Link::Ok,
    };
    Work::new(Kind::Copy, move || {
        let mut bytes = from.read();
        match link {
            Link::Ok | Link::NotSupported | Link::CorruptingKernels => {}
            Link::Corrupting => corrupt(&mut bytes),
            Link::Stuck => loop {
                std::thread::park();
            },
        }
        to.write(&bytes);
        Ok(())
    })
}

/// Corrupts some of the bytes, as a bad link does.
pub(crate) fn corrupt(bytes: &mut [u8]) {
    for byte in bytes.iter_mut().step_by(4096) {
        *byte ^= 0x40;
    }
}
