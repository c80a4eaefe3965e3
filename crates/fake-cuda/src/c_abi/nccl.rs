//! NCCL's functions.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use super::caller::{handle, of_nccl, require};
use super::exported;
use crate::code::Reply;
use crate::device::{Span, Stream};
use crate::machine::Effect;
use crate::nccl::{Comm, Fold, Group, Id, Join, Op, Task, Type, open_hub};
use crate::process::Process;

/// *Source*: `ncclUniqueId`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct UniqueId([u8; 128]);

/// The beginning of `ncclConfig_t`, equal in all versions.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

/// *Source*: `NCCL_CONFIG_INITIALIZER`.
const CONFIG_MAGIC: c_uint = 0xcafe_beef;

type Answer = Result<(), Reply>;

fn code(answer: Answer) -> u32 {
    answer.map_or_else(|reply| reply.0, |()| Reply::SUCCESS.0)
}

/// Counts the call, then answers it unless the machine makes it fail.
fn answer(name: &'static str, tell: impl FnOnce() -> Answer) -> u32 {
    match Process::here().enter(name, None) {
        Some(Effect::Code(code)) => code,
        _ => code(tell()),
    }
}

/// The same for a communicator, with its rank's faults.
fn of_comm(
    name: &'static str,
    comm: *mut c_void,
    tell: impl FnOnce(Arc<Comm>, Option<Effect>) -> Answer,
) -> u32 {
    let process = Process::here();
    let found = process.comms.get(comm.addr() as u64);
    match process.enter(name, found.as_ref().map(|comm| comm.rank)) {
        Some(Effect::Code(code)) => code,
        effect => {
            let comm = found.ok_or(Reply::INVALID_ARGUMENT);
            code(comm.and_then(|comm| tell(comm, effect)))
        }
    }
}

fn put<T>(to: *mut T, value: T) -> Answer {
    super::caller::put(to, value).map_err(|_| Reply::INVALID_ARGUMENT)
}

fn done(reply: Reply) -> Answer {
    require(reply == Reply::SUCCESS, reply)
}

/// Memory of the communicator's device.
fn span(comm: &Comm, address: *const c_void, count: usize, size: usize) -> Result<Span, Reply> {
    let length = count.checked_mul(size).ok_or(Reply::INVALID_ARGUMENT)?;
    let span = Process::here()
        .memory
        .span(address.addr() as u64, length)
        .ok_or(Reply::INVALID_ARGUMENT)?;
    let is_its = span.device().ordinal == comm.device.ordinal;
    require(is_its, Reply::INVALID_ARGUMENT).map(|()| span)
}

/// A call that puts work on a stream.
fn enqueue(
    name: &'static str,
    comm: *mut c_void,
    stream: *mut c_void,
    op: impl FnOnce(&Comm) -> Result<Op, Reply>,
) -> u32 {
    let code = of_comm(name, comm, |comm, effect| {
        match comm.reply() {
            Reply::SUCCESS => {}
            // The caller must poll NCCL until the previous call is done.
            Reply::IN_PROGRESS => return Err(Reply::INVALID_ARGUMENT),
            wrong => return Err(wrong),
        }
        let stream: Arc<Stream> = of_nccl()
            .stream(stream)
            .map_err(|_| Reply::INVALID_ARGUMENT)?;
        if stream.device.ordinal != comm.device.ordinal {
            return Err(Reply::INVALID_USAGE);
        }
        let op = op(&comm)?;
        done(Group::add(Task {
            comm,
            stream,
            op,
            effect,
        }))
    });
    if code != Reply::SUCCESS.0 && code != Reply::IN_PROGRESS.0 {
        Group::fail(Reply(code));
    }
    code
}

fn kind(number: c_uint) -> Result<Type, Reply> {
    Type::of(number).ok_or(Reply::INVALID_ARGUMENT)
}

/// Accepts `ncclSum` and `ncclMax`, the only reductions in use.
fn fold(op: c_uint) -> Result<Fold, Reply> {
    Fold::of(op).ok_or(Reply::INVALID_ARGUMENT)
}

/// A rank given by the caller.
fn rank(comm: &Comm, number: c_int) -> Result<u32, Reply> {
    let rank = u32::try_from(number).ok().filter(|rank| *rank < comm.world);
    rank.ok_or(Reply::INVALID_ARGUMENT)
}

/// Begins to join, and waits for the join if calls block.
fn join(
    name: &'static str,
    to: *mut *mut c_void,
    (world, id, rank): (c_int, UniqueId, c_int),
    config: *const Config,
) -> u32 {
    let process = Process::here();
    let number = u32::try_from(rank).ok();
    let effect = match process.enter(name, number) {
        Some(Effect::Code(code)) => return code,
        effect => effect,
    };
    let told = || {
        let world = u32::try_from(world)
            .ok()
            .filter(|world| number.is_some_and(|rank| rank < *world));
        let (Some(rank), Some(world)) = (number, world) else {
            return Err(Reply::INVALID_ARGUMENT);
        };
        let id = Id::of_bytes(&id.0).ok_or(Reply::INVALID_ARGUMENT)?;
        let is_blocking = blocks(config)?;
        let device = of_nccl()
            .context()
            .map_err(|_| Reply::UNHANDLED_CUDA_ERROR)?;
        let comm = Comm::begin(
            Join {
                id,
                rank,
                world,
                is_blocking,
                effect,
            },
            device,
        );
        put(to, handle(process.comms.put(comm.clone())))?;
        done(Group::await_join(comm))
    };
    code(told())
}

/// Whether calls block: unless the configuration says 0.
fn blocks(config: *const Config) -> Result<bool, Reply> {
    if config.is_null() {
        return Ok(true);
    }
    // SAFETY: the caller gives a configuration, and all versions begin with these fields.
    let config = unsafe { config.read() };
    if config.magic != CONFIG_MAGIC || config.size < size_of::<Config>() {
        return Err(Reply::INVALID_ARGUMENT);
    }
    match config.blocking {
        0 => Ok(false),
        1 | c_int::MIN => Ok(true),
        _ => Err(Reply::INVALID_ARGUMENT),
    }
}

/// Ends a communicator. Within a group NCCL defers the end, and a group that fails drops its calls; here, a deferred end never
/// happens.
fn ended(name: &'static str, comm: *mut c_void, end: fn(&Comm)) -> u32 {
    of_comm(name, comm, |found, _| {
        if Group::is_open() {
            return Ok(());
        }
        end(&found);
        Process::here().comms.take(comm.addr() as u64);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(comm: *mut c_void) -> *const c_char {
    let found = Process::here().comms.get(comm.addr() as u64);
    found
        .and_then(|comm| comm.words())
        .unwrap_or_default()
        .as_ptr()
}

exported! {
    /// The functions of NCCL that the fake library has, apart from `ncclGetLastError`.
    NCCL_FUNCTIONS:
    fn ncclGetVersion(version: *mut c_int) = |name| {
        answer(name, || put(version, Process::here().machine().map_err(|_| Reply::INTERNAL_ERROR)?.nccl))
    };
    fn ncclGetUniqueId(id: *mut UniqueId) = |name| {
        super::stay();
        answer(name, || put(id, UniqueId(open_hub().map_err(|_| Reply::SYSTEM_ERROR)?.to_bytes())))
    };
    fn ncclCommInitRank(comm: *mut *mut c_void, world: c_int, id: UniqueId, rank: c_int) = |name| {
        join(name, comm, (world, id, rank), std::ptr::null())
    };
    fn ncclCommInitRankConfig(comm: *mut *mut c_void, world: c_int, id: UniqueId, rank: c_int, config: *mut Config) = |name| {
        join(name, comm, (world, id, rank), config)
    };
    fn ncclCommGetAsyncError(comm: *mut c_void, reply: *mut c_uint) = |name| {
        of_comm(name, comm, |comm, _| put(reply, comm.reply().0))
    };
    fn ncclCommFinalize(comm: *mut c_void) = |name| of_comm(name, comm, |comm, _| done(comm.finalize()));
    fn ncclCommDestroy(comm: *mut c_void) = |name| ended(name, comm, Comm::destroy);
    fn ncclCommAbort(comm: *mut c_void) = |name| ended(name, comm, Comm::abort);

    fn ncclGroupStart() = |name| {
        answer(name, || {
            Group::start();
            Ok(())
        })
    };
    fn ncclGroupEnd() = |name| answer(name, || done(Group::end()));

    fn ncclAllReduce(
        from: *const c_void, to: *mut c_void, count: usize, data: c_uint, op: c_uint, comm: *mut c_void, stream: *mut c_void,
    ) = |name| {
        enqueue(name, comm, stream, |comm| {
            let (fold, kind) = (fold(op)?, kind(data)?);
            let (from, to) = (span(comm, from, count, kind.size())?, span(comm, to, count, kind.size())?);
            Ok(Op::AllReduce { from, to, kind, fold })
        })
    };
    fn ncclReduce(
        from: *const c_void, to: *mut c_void, count: usize, data: c_uint, op: c_uint, root: c_int, comm: *mut c_void,
        stream: *mut c_void,
    ) = |name| {
        enqueue(name, comm, stream, |comm| {
            require(fold(op)? == Fold::Sum, Reply::INVALID_ARGUMENT)?;
            let (root, kind) = (rank(comm, root)?, kind(data)?);
            let to = if root == comm.rank { Some(span(comm, to, count, kind.size())?) } else { None };
            Ok(Op::Reduce { from: span(comm, from, count, kind.size())?, to, kind, root })
        })
    };
    fn ncclBroadcast(
        from: *const c_void, to: *mut c_void, count: usize, data: c_uint, root: c_int, comm: *mut c_void, stream: *mut c_void,
    ) = |name| {
        enqueue(name, comm, stream, |comm| {
            let (root, size) = (rank(comm, root)?, kind(data)?.size());
            let from = if root == comm.rank { Some(span(comm, from, count, size)?) } else { None };
            Ok(Op::Broadcast { from, to: span(comm, to, count, size)?, root })
        })
    };
    fn ncclAllGather(
        from: *const c_void, to: *mut c_void, count: usize, data: c_uint, comm: *mut c_void, stream: *mut c_void,
    ) = |name| {
        enqueue(name, comm, stream, |comm| {
            let size = kind(data)?.size();
            let all = count.saturating_mul(comm.world as usize);
            Ok(Op::AllGather { from: span(comm, from, count, size)?, to: span(comm, to, all, size)? })
        })
    };
    fn ncclSend(from: *const c_void, count: usize, data: c_uint, peer: c_int, comm: *mut c_void, stream: *mut c_void) = |name| {
        enqueue(name, comm, stream, |comm| {
            let from = span(comm, from, count, kind(data)?.size())?;
            Ok(Op::Send { from, peer: rank(comm, peer)? })
        })
    };
    fn ncclRecv(to: *mut c_void, count: usize, data: c_uint, peer: c_int, comm: *mut c_void, stream: *mut c_void) = |name| {
        enqueue(name, comm, stream, |comm| {
            let to = span(comm, to, count, kind(data)?.size())?;
            Ok(Op::Receive { to, peer: rank(comm, peer)? })
        })
    };
}
