//! Joining: each rank opens its libraries and its device and reports it, rank 0 creates NCCL's unique id, and NCCL connects.

use std::sync::Arc;

use crate::communicator::Joined;
use crate::driver::Driver;
use crate::error::NcclError;
use crate::identity::{Identity, agree, heard, own, stated};
use crate::nccl::{Comm, Nccl, UNIQUE_ID_BYTES, UniqueId};
use crate::options::NcclOptions;
use crate::pool::Pool;
use crate::report::PairReport;
use crate::shared::Shared;
use crate::worker::{Track, Worker};

/// A rank's libraries and device, opened before it exchanges anything with other ranks.
struct Opened {
    nccl: Nccl,
    track: Track,
    identity: Identity,
}

/// Joins the other ranks, on the thread that makes all NCCL calls.
pub(crate) fn join(
    shared: &Arc<Shared>,
    device: usize,
    options: &NcclOptions,
) -> Result<(Worker, Joined), NcclError> {
    let group = &shared.group;
    let opened = open(shared, device, options);
    let said = group.all_gather_bytes(&stated(opened.as_ref().map(|it| &it.identity)))?;
    let opened = opened?;
    let statements = said.iter().enumerate();
    let all = agree(statements.map(|(rank, bytes)| heard(rank, bytes)).collect())?;
    let control = (group.world() > 1)
        .then(|| group.split(Some(0), group.rank() as i64))
        .transpose()?
        .flatten();
    let id = identity(shared, opened.nccl)?;

    let (rank, world) = (group.rank(), group.world());
    let first = all.first().unwrap_or(&opened.identity);
    let probe = (first.probe, first.probe_bytes);
    let places = all.into_iter().map(|identity| identity.place).collect();
    let mut report = PairReport::empty(opened.nccl.version, places);
    let context = opened.track.stream.context.clone();
    let begin = || Comm::begin(opened.nccl, id, rank, world);
    let mut worker = Worker::connect(shared, (opened.track, control), begin)?;
    if let Err(error) = crate::probe::probe(&mut worker, probe, &mut report) {
        return Err(worker.give_up(error));
    }
    worker.clear();
    if let Some((from, to, speed)) = report.slowest() {
        tracing::info!(
            "NCCL {} connects {world} ranks; the slowest pair reaches {speed:.1} GB/s, from rank {from} to rank {to}",
            report.nccl
        );
    }
    let joined = Joined {
        pool: Pool::new(&context, false),
        context,
        report,
    };
    Ok((worker, joined))
}

/// Opens the libraries and the device, and makes the device's context current on this thread.
fn open(shared: &Shared, device: usize, options: &NcclOptions) -> Result<Opened, NcclError> {
    crate::environment::check(&crate::environment::here)?;
    let nccl = shared.within("loading NCCL", || Nccl::load(&options.places))?;
    let driver = shared.within("cuInit", || Driver::load(&options.places))?;
    shared.within("opening the device", || {
        let device = driver.device(device)?;
        let context = device.primary()?;
        context.make_current()?;
        Ok(Opened {
            nccl,
            track: Track::new(context.stream()?)?,
            identity: own(shared.rank(), &device, nccl.version, options)?,
        })
    })
}

/// NCCL's unique id of the communicator. Rank 0 creates it and sends it over the group, whose connections are authenticated.
fn identity(shared: &Shared, nccl: Nccl) -> Result<UniqueId, NcclError> {
    let group = &shared.group;
    let own = (group.rank() == 0).then(|| shared.within("ncclGetUniqueId", || nccl.unique_id()));
    let told = own.as_ref().map(|made| match made {
        Ok(id) => id.0.to_vec(),
        Err(error) => error.to_string().into_bytes(),
    });
    let came = group.broadcast_bytes(told.as_deref(), 0)?;
    if let Some(made) = own {
        return made;
    }
    let id: Result<[u8; UNIQUE_ID_BYTES], _> = came.try_into();
    id.map(UniqueId)
        .map_err(|words| NcclError::unable(0, &String::from_utf8_lossy(&words)))
}
