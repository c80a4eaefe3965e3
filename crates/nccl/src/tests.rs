//! Communicators on a driver and an NCCL that are made up: ranks as threads and as processes, and all that can go wrong.

mod calls;
mod failures;
mod lanes;
mod processes;
mod real;
mod start;

use std::sync::Arc;
use std::time::Duration;

use paceline_collective::{GroupOptions, ProcessGroup};
use paceline_fake_cuda::Library;

use crate::call::DeviceBuffer;
use crate::driver::{Context, Driver, Memory, Stream};
use crate::{Communicator, NcclError, NcclOptions, Places, Probe};

/// How long a group waits where nothing is to go wrong.
const PATIENCE: Duration = Duration::from_secs(30);

/// The libraries of a made-up machine.
fn places(library: &Library) -> Places {
    Places {
        nccl: Some(library.nccl()),
        cuda: Some(library.driver()),
        ..Places::from_lookup(&|_| None)
    }
}

/// Without a probe, and with little patience for NCCL.
fn options(library: &Library) -> NcclOptions {
    NcclOptions {
        probe: Probe::None,
        probe_bytes: 64 << 10,
        grace: Duration::from_millis(500),
        places: places(library),
    }
}

/// Machine with so many devices.
fn machine(devices: usize, more: &str) -> Library {
    let library = Library::whole();
    library.load(&format!(r#"{{"devices": {devices}{more}}}"#));
    library
}

/// Runs `main` on ranks that are threads, and gives what they return, in rank order.
fn on_ranks<R: Send>(
    world: usize,
    timeout: Duration,
    main: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    let options = GroupOptions {
        timeout,
        ..GroupOptions::default()
    };
    let groups = ProcessGroup::local(world, &options).unwrap();
    let main = &main;
    std::thread::scope(|scope| {
        let ranks = groups
            .into_iter()
            .map(|group| scope.spawn(move || main(group)));
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Runs `main` on ranks that have joined, each with the device of its number.
fn joined<R: Send>(
    library: &Library,
    world: usize,
    main: impl Fn(&Communicator, &Bench) -> R + Sync,
) -> Vec<R> {
    on_ranks(world, PATIENCE, |group| {
        let comm = Communicator::join(&group, group.rank(), &options(library)).unwrap();
        main(&comm, &Bench::new(library, group.rank()))
    })
}

/// The caller's side of a device: memory, and a stream that the communicator knows nothing of.
struct Bench {
    context: Context,
    stream: Stream,
}

impl Bench {
    fn new(library: &Library, device: usize) -> Self {
        Self::at(&places(library), device)
    }

    fn at(places: &Places, device: usize) -> Self {
        let driver = Driver::load(places).unwrap();
        let context = driver.device(device).unwrap().primary().unwrap();
        context.make_current().unwrap();
        let stream = context.stream().unwrap();
        Self { context, stream }
    }

    fn room(&self, bytes: usize) -> Arc<Memory> {
        Arc::new(self.context.memory(bytes).unwrap())
    }

    fn floats(&self, values: &[f32]) -> Arc<Memory> {
        let bytes: Vec<u8> = values.iter().flat_map(|it| it.to_le_bytes()).collect();
        let room = self.room(bytes.len());
        room.write(&bytes, &self.stream).unwrap();
        room
    }

    /// Queues a copy on this stream. Both rooms must live until the stream has done it.
    #[allow(unsafe_code)]
    fn copy(&self, to: &Memory, from: &Memory) {
        let (context, stream) = (self.context.raw(), self.stream.raw);
        // SAFETY: both rooms have this length.
        let copied = self.context.call(|cu| unsafe {
            cu.memcpy_peer_async(to.ptr, context, from.ptr, context, to.bytes, stream)
        });
        copied.unwrap();
    }

    fn read(&self, room: &Memory) -> Vec<f32> {
        let mut bytes = vec![0; room.bytes];
        room.read(&mut bytes, &self.stream).unwrap();
        let singles = bytes.chunks_exact(4);
        singles
            .map(|it| f32::from_le_bytes(it.try_into().unwrap()))
            .collect()
    }
}

/// A room as a call takes it.
fn buffer(room: &Arc<Memory>) -> DeviceBuffer {
    DeviceBuffer {
        ptr: room.ptr,
        bytes: room.bytes,
        keep: Box::new(room.clone()),
    }
}

/// The words of an error.
fn words<T: std::fmt::Debug>(result: Result<T, NcclError>) -> String {
    result.unwrap_err().to_string()
}
