//! Joining: each rank opens its libraries and its device and reports it, rank 0 creates NCCL's unique id, and NCCL connects.

use std::sync::Arc;

use paceline_collective::ProcessGroup;

use crate::communicator::Joined;
use crate::driver::Driver;
use crate::error::NcclError;
use crate::identity::{agree as all_agree, heard, own, stated};
use crate::nccl::{Comm, Nccl, UNIQUE_ID_BYTES, UniqueId};
use crate::options::{NcclOptions, Probe};
use crate::report::PairReport;
use crate::shared::{Lane, Shared};
use crate::worker::Worker;

/// Joins the other ranks of the first lane, on the thread that makes all NCCL calls.
pub(crate) fn join(
    shared: &Arc<Shared>,
    device: usize,
    options: &NcclOptions,
) -> Result<(Worker, Joined), NcclError> {
    let mut worker = match open(shared, device, options) {
        Ok(worker) => worker,
        Err(error) => {
            // The others wait for what this rank says.
            shared.group.all_gather_bytes(&stated(Err(&error)))?;
            return Err(error);
        }
    };
    let agreed = agree(&worker, &shared.group)?;
    match agreed.connect(&mut worker) {
        Ok(joined) => Ok((worker, joined)),
        Err(error) => Err(worker.give_up(0, error)),
    }
}

/// Opens the libraries and the device, and makes the device's context current on this thread.
fn open(shared: &Arc<Shared>, device: usize, options: &NcclOptions) -> Result<Worker, NcclError> {
    crate::environment::check(&crate::environment::here)?;
    let nccl = shared.within("loading NCCL", || Nccl::load(&options.places))?;
    let driver = shared.within("cuInit", || Driver::load(&options.places))?;
    shared.within("opening the device", || {
        let device = driver.device(device)?;
        let context = device.primary()?;
        context.make_current()?;
        let identity = own(shared.rank(), &device, nccl.version, options)?;
        Worker::new(shared, (nccl, identity), context.stream()?)
    })
}

/// A lane whose ranks can connect.
pub(crate) struct Agreed {
    lane: Lane,
    id: UniqueId,
    probe: (Probe, usize),
    report: PairReport,
}

/// Finds out whether the ranks of a group can connect. NCCL has not begun then.
///
/// *Errors*: the same on all ranks, unless the group has failed.
pub(crate) fn agree(worker: &Worker, group: &ProcessGroup) -> Result<Agreed, NcclError> {
    let mut identity = worker.identity.clone();
    identity.place.rank = group.rank();
    let said = group.all_gather_bytes(&stated(Ok(&identity)))?;
    let statements = said.iter().enumerate();
    let all = all_agree(statements.map(|(rank, bytes)| heard(rank, bytes)).collect())?;
    let control = (group.world() > 1)
        .then(|| group.split(Some(0), group.rank() as i64))
        .transpose()?
        .flatten();
    let first = all.first().unwrap_or(&identity);
    let probe = (first.probe, first.probe_bytes);
    let places = all.into_iter().map(|identity| identity.place).collect();
    Ok(Agreed {
        id: unique_id(worker, group)?,
        lane: Lane {
            group: group.clone(),
            control,
        },
        probe,
        report: PairReport::empty(worker.nccl.version, places),
    })
}

impl Agreed {
    /// Connects the ranks, and tests the connections.
    pub(crate) fn connect(self, worker: &mut Worker) -> Result<Joined, NcclError> {
        let mut report = self.report;
        let (rank, world) = (self.lane.group.rank(), self.lane.group.world());
        let (nccl, number) = (worker.nccl, worker.lanes());
        worker.connect(self.lane, || Comm::begin(nccl, self.id, rank, world))?;
        crate::probe::probe(worker, self.probe, &mut report)?;
        worker.clear();
        if let Some((from, to, speed)) = report.slowest() {
            tracing::info!(
                "NCCL {} connects {world} ranks; the slowest pair reaches {speed:.1} GB/s, from rank {from} to rank {to}",
                report.nccl
            );
        }
        Ok(Joined {
            lane: number,
            pool: worker.pool.clone(),
            context: worker.stream.context.clone(),
            report,
        })
    }
}

/// NCCL's unique id of the communicator. Rank 0 creates it and sends it over the group, whose connections are authenticated.
fn unique_id(worker: &Worker, group: &ProcessGroup) -> Result<UniqueId, NcclError> {
    let create = || {
        worker
            .shared
            .within("ncclGetUniqueId", || worker.nccl.unique_id())
    };
    let own = (group.rank() == 0).then(create);
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
