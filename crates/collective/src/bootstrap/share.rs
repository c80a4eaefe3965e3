//! Forms a group over shared memory: who reaches whom, and the handing over of segments and page.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use paceline_rendezvous::page::JobPage;

use super::address;
use super::record::{Record, shared_slot};
use super::{Forming, MESSAGES, PARCELS_LANES, peers};
use crate::engine::Engine;
use crate::error::Error;
use crate::group::Wiring;
use crate::handover;
use crate::memory::{Allocator, Arena, Segment, segment_bytes};
use crate::parcel::Parcels;
use crate::plan::Hosts;
use crate::socket::{Listener, Socket};
use crate::team::Team;
use crate::watch::Watch;

impl Forming<'_> {
    /// Shared memory, or nothing when some rank cannot reach another one and TCP will do.
    pub(super) fn try_shm(
        &self,
        me: &Record,
        records: &[Record],
        listener: Option<Listener>,
        or_tcp: bool,
    ) -> Result<Option<Wiring>, Error> {
        // Every rank dials all lower ones before anybody decides: only who has tried knows.
        let prepared = self.dial_lower(records, listener);
        let report = prepared.as_ref().err().cloned().unwrap_or_default();
        let reports = self.exchange(
            "reach",
            report.as_bytes(),
            "say whom they reach",
            |_, bytes| Ok(String::from_utf8_lossy(bytes).into_owned()),
        )?;
        let failed = reports
            .iter()
            .enumerate()
            .find(|(_, report)| !report.is_empty());
        match (failed, prepared) {
            (None, Ok((listener, dialed, segment))) => {
                self.shm(me, records, &listener, dialed, segment).map(Some)
            }
            (Some((rank, reason)), _) if !or_tcp => Err(Error::Transport {
                wanted: "shm",
                reason: format!("rank {rank} {reason}"),
            }),
            _ => Ok(None),
        }
    }

    #[expect(clippy::type_complexity, reason = "one use, taken apart at once")]
    fn dial_lower(
        &self,
        records: &[Record],
        listener: Option<Listener>,
    ) -> Result<(Listener, Vec<Option<Socket>>, Arc<Segment>), String> {
        let listener = listener.ok_or("does not listen")?;
        let dialed = records[..self.env.rank].iter().map(|peer| {
            let name = peer
                .unix
                .as_deref()
                .ok_or_else(|| format!("finds that rank {} does not listen", peer.rank))?;
            address::dial_unix(name)
                .map(Some)
                .map_err(|error| format!("does not reach rank {}: {error}", peer.rank))
        });
        let dialed = dialed.collect::<Result<Vec<_>, _>>()?;
        let segment = Segment::create(segment_bytes(self.options.arena_bytes));
        Ok((
            listener,
            dialed,
            Arc::new(segment.map_err(|error| format!("cannot create shared memory: {error}"))?),
        ))
    }

    fn shm(
        &self,
        me: &Record,
        records: &[Record],
        listener: &Listener,
        mut dialed: Vec<Option<Socket>>,
        segment: Arc<Segment>,
    ) -> Result<Wiring, Error> {
        let mut connections = self
            .mesh(1 + PARCELS_LANES)
            .connect(listener, |peer, attempt| match dialed[peer].take() {
                _ if attempt > 0 => None,
                Some(socket) => Some(Ok(socket)),
                None => {
                    let name = records[peer].unix.as_deref().unwrap_or_default();
                    Some(address::dial_unix(name).map_err(|error| error.to_string()))
                }
            })?;
        let parcels = connections.pop().unwrap_or_default();
        let sockets = connections.swap_remove(MESSAGES);
        // Without a launcher rank 0 makes a page for all, so that deadlines can tell what the missing are doing.
        let no_launcher =
            self.kinship.is_none() && records.iter().all(|record| record.page.is_none());
        let made = match no_launcher && me.rank == 0 {
            true => Some(JobPage::create_memfd(me.world).map_err(Arc::new)?),
            false => None,
        };
        let (segments, received) =
            self.swap_descriptors(&sockets, segment.clone(), made.as_ref())?;
        let (page, peers) = match made.or(received).filter(|_| no_launcher) {
            Some(page) if page.slots() == me.world => {
                (page, peers(records, |peer| Some(peer.rank)))
            }
            _ => (
                self.page.clone(),
                peers(records, |peer| shared_slot(me, peer)),
            ),
        };
        let status = self.status(page, peers);
        let allocator = Allocator::Arena(Arena::new(segment));
        let parcels = Parcels::connected(
            &status,
            self.options.timeout,
            allocator.clone(),
            Some(segments.clone()),
            parcels,
        )?;
        let watch = Watch::start(&status, sockets, &parcels)?;
        let team = Team::new(me.rank, me.world, (0..me.world).collect(), segments);
        Ok(Wiring {
            transport: "shm",
            engine: Engine::new(me.rank, Some(team), None, allocator.clone()),
            hosts: Hosts::one(me.world),
            allocator,
            watch: Some(watch),
            parcels,
            origin: None,
            status,
        })
    }

    /// Gives every peer this rank's segment (rank 0 also the page it made) and takes theirs.
    fn swap_descriptors(
        &self,
        sockets: &[Option<Socket>],
        own: Arc<Segment>,
        page: Option<&JobPage>,
    ) -> Result<(Vec<Arc<Segment>>, Option<JobPage>), Error> {
        let failed = |peer: usize, error: io::Error| Error::Peer {
            rank: self.env.rank,
            peer,
            reason: format!("handing over shared memory failed: {error}"),
        };
        let page_fd = page.and_then(handover::page_fd);
        let fds: Vec<BorrowedFd<'_>> = std::iter::once(own.fd()).chain(page_fd).collect();
        // Small messages: all are sent before any is waited for, so nobody waits in a circle.
        for (peer, socket) in sockets.iter().enumerate() {
            let Some(socket) = socket else { continue };
            handover::send(socket, &fds, self.deadline).map_err(|error| failed(peer, error))?;
        }
        let (mut segments, mut shared) = (Vec::with_capacity(sockets.len()), None);
        for (peer, socket) in sockets.iter().enumerate() {
            let Some(socket) = socket else {
                segments.push(own.clone());
                continue;
            };
            let mut fds = handover::receive(socket, self.deadline)
                .map_err(|error| failed(peer, error))?
                .into_iter();
            let fd = fds
                .next()
                .ok_or_else(|| failed(peer, io::ErrorKind::UnexpectedEof.into()))?;
            segments.push(Arc::new(
                Segment::open(fd).map_err(|error| failed(peer, error))?,
            ));
            if let Some(fd) = fds.next().filter(|_| peer == 0) {
                shared = Some(JobPage::from_fd(fd.as_raw_fd()).map_err(Arc::new)?);
            }
        }
        Ok((segments, shared))
    }
}
