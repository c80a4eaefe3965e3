//! The engine for ranks that reach each other over TCP: one connection for each pair, everything exchanged directly.
//!
//! A reduction takes two phases. In the first every rank sends each slice owner its blocks of that slice, and folds its
//! own slice in the order of the tree once all blocks are in; in the second every owner sends its result to all. A gather
//! is the second phase alone, a barrier only the frames' heads. Every rank sends a head to every other one at the start
//! of each operation, so all compare all calls, and sends and receives of a phase advance together, so that full socket
//! buffers never make ranks wait in a circle.
//!
//! Bytes out of and into each rank for an all-reduce of `n` bytes: `n (W-1)/W` in each phase, as in a ring, but in two
//! steps instead of `2 (W-1)`.
#![allow(unsafe_code)]

mod exchange;
mod frame;

use std::io;
use std::time::Instant;

use self::exchange::{Flow, drive};
use self::frame::{Frame, Phase};
use crate::call::Call;
use crate::engine::{Engine, Runner};
use crate::error::Error;
use crate::fold::{Fold, Scratch};
use crate::memory::Region;
use crate::old_plan::Partition;
use crate::socket::Socket;
use crate::status::Vigil;
use crate::tree::Step;

/// One rank's engine over its connections.
#[derive(Debug)]
pub(crate) struct TcpEngine {
    rank: usize,
    /// By peer; none to oneself.
    sockets: Vec<Option<Socket>>,
    scratch: Scratch,
    /// The peers' blocks of this rank's slice; kept between operations, as large as the largest so far.
    received: Option<Region>,
}

impl TcpEngine {
    pub(crate) fn new(rank: usize, sockets: Vec<Option<Socket>>) -> io::Result<Self> {
        for socket in sockets.iter().flatten() {
            socket.set_nonblocking(true)?;
            if let Socket::Tcp(stream) = socket {
                stream.set_nodelay(true)?;
            }
        }
        Ok(Self {
            rank,
            sockets,
            scratch: Scratch::default(),
            received: None,
        })
    }

    /// Phase one of a reduction: hands out blocks, takes in those of the own slice, folds them into the own buffer.
    fn reduce(
        &mut self,
        call: &Call,
        slices: &Partition,
        region: &mut Region,
        vigil: &Vigil<'_>,
    ) -> Result<Instant, Error> {
        let size = call.element_bytes();
        let own_bytes = slices.range(self.rank).len() * size;
        let peers: Vec<usize> = (0..self.sockets.len())
            .filter(|peer| *peer != self.rank)
            .collect();
        let wanted: usize = peers
            .iter()
            .map(|peer| call.blocks(*peer) * own_bytes)
            .sum();
        let mut received = match self
            .received
            .take()
            .filter(|received| received.bytes() >= wanted)
        {
            Some(received) => received,
            None => Region::heap(wanted).ok_or(Error::Memory {
                bytes: wanted,
                used: 0,
                size: isize::MAX as usize,
            })?,
        };
        let memory = region.as_slice();
        let mut space = &mut received.as_mut_slice()[..wanted];
        let mut flows = Vec::with_capacity(peers.len());
        for peer in &peers {
            let slice = slices.range(*peer);
            let blocks = (0..call.blocks(self.rank)).map(|block| block * call.block_bytes());
            let parts = blocks
                .map(|start| &memory[start + slice.start * size..start + slice.end * size])
                .collect();
            let (into, rest) = space.split_at_mut(call.blocks(*peer) * own_bytes);
            space = rest;
            flows.push(self.flow(*peer, call, Phase::First, parts, into));
        }
        let ready = drive(&mut flows, call, self.rank, vigil)?;
        drop(flows);
        self.fold(call, slices, region, &received);
        self.received = Some(received);
        Ok(ready)
    }

    fn fold(&mut self, call: &Call, slices: &Partition, region: &mut Region, received: &Region) {
        let (Some(op), Some(dtype)) = (call.header.reduce, call.header.dtype) else {
            return;
        };
        let slice = slices.range(self.rank);
        let (first_byte, own_bytes) = (slice.start * dtype.bytes(), slice.len() * dtype.bytes());
        if own_bytes == 0 {
            return;
        }
        let own = region.as_mut_slice().as_mut_ptr();
        let mut inputs = Vec::new();
        // The program loads each rank's blocks in rank order, which is how they lie in `received`.
        let mut next = received.as_slice().chunks_exact(own_bytes);
        for step in call.tree.program() {
            let Step::Load { rank, block } = *step else {
                continue;
            };
            inputs.push(if rank == self.rank {
                let at = block * call.block_bytes() + first_byte;
                assert!(at + own_bytes <= region.bytes());
                // SAFETY: inside the region, as just checked.
                unsafe { own.add(at) }.cast_const()
            } else {
                next.next()
                    .expect("there is room for every peer's blocks")
                    .as_ptr()
            });
        }
        let fold = Fold {
            tree: &call.tree,
            dtype,
            op,
            inputs: &inputs,
            len: slice.len(),
        };
        // SAFETY: every input is `own_bytes` long and aligned (regions to a line, slices to an element); the stores go to
        // the chunk of the own first block that was just read, and nobody else has the region.
        unsafe {
            fold.run(&mut self.scratch, |at, bytes| {
                own.add(first_byte + at)
                    .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            });
        }
    }

    /// Sends the own slice to all and takes in all others'.
    fn gather(
        &self,
        call: &Call,
        phase: Phase,
        slices: &Partition,
        region: &mut Region,
        vigil: &Vigil<'_>,
    ) -> Result<Instant, Error> {
        let size = call.element_bytes();
        // Ranges ascend in rank order and cover the block, so it comes apart into one piece for each rank.
        let mut rest = &mut region.as_mut_slice()[..call.block_bytes()];
        let mut pieces = Vec::with_capacity(self.sockets.len());
        for rank in 0..self.sockets.len() {
            let (piece, others) = rest.split_at_mut(slices.range(rank).len() * size);
            pieces.push(piece);
            rest = others;
        }
        let own: &mut [u8] = std::mem::take(&mut pieces[self.rank]);
        let own: &[u8] = own;
        let mut flows: Vec<Flow<'_>> = pieces
            .into_iter()
            .enumerate()
            .filter(|(peer, _)| *peer != self.rank)
            .map(|(peer, into)| self.flow(peer, call, phase, vec![own], into))
            .collect();
        drive(&mut flows, call, self.rank, vigil)
    }

    /// Heads only.
    fn meet(&self, call: &Call, vigil: &Vigil<'_>) -> Result<Instant, Error> {
        let peers = (0..self.sockets.len()).filter(|peer| *peer != self.rank);
        let mut flows: Vec<_> = peers
            .map(|peer| self.flow(peer, call, Phase::First, vec![], &mut []))
            .collect();
        drive(&mut flows, call, self.rank, vigil)
    }

    fn flow<'a>(
        &'a self,
        peer: usize,
        call: &Call,
        phase: Phase,
        parts: Vec<&'a [u8]>,
        into: &'a mut [u8],
    ) -> Flow<'a> {
        let payload = parts.iter().map(|part| part.len()).sum::<usize>() as u64;
        let socket = self.sockets[peer]
            .as_ref()
            .expect("there is a connection to every peer");
        Flow::new(
            peer,
            socket,
            Frame {
                header: call.header,
                phase,
                payload,
            },
            parts,
            into,
        )
    }
}

impl Engine for TcpEngine {
    fn execute(
        &mut self,
        call: &Call,
        region: &mut Region,
        vigil: &Vigil<'_>,
        _: Runner,
    ) -> Result<Instant, Error> {
        match (&call.plan.reduce, &call.plan.gather) {
            (Some(slices), gather) => {
                let ready = self.reduce(call, slices, region, vigil)?;
                if let Some(slices) = gather {
                    self.gather(call, Phase::Second, slices, region, vigil)?;
                }
                Ok(ready)
            }
            (None, Some(slices)) => self.gather(call, Phase::First, slices, region, vigil),
            (None, None) => self.meet(call, vigil),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::time::Duration;

    use paceline_rendezvous::page::JobPage;

    use super::*;
    use crate::call::Header;
    use crate::element::{DType, ReduceOp};
    use crate::error::{OpKind, Operation};
    use crate::old_plan::Plan;
    use crate::status::{PeerInfo, Status};
    use crate::tree::Tree;

    fn all_reduce(len: usize) -> Call {
        let header = Header {
            operation: Operation {
                kind: OpKind::AllReduce,
                seq: 1,
                bucket: None,
            },
            reduce: Some(ReduceOp::Sum),
            dtype: Some(DType::F32),
            total: len,
            first: 0,
            piece: len,
            mark: 0,
            leaves: 2,
        };
        Call {
            header,
            plan: Plan::all_reduce(len, 2, 4),
            tree: Tree::per_rank(2),
        }
    }

    /// What rank 0 of 2 makes of a peer that sends `bytes` and then says nothing, or leaves.
    fn against(bytes: &[u8], leaves: bool) -> Error {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut engine = TcpEngine::new(0, vec![None, Some(Socket::Unix(ours))]).unwrap();
        let page = JobPage::private(2).unwrap();
        let peer = PeerInfo {
            host: "b".into(),
            pid: 7,
            slot: None,
        };
        let status = Arc::new(Status::new(
            0,
            vec![peer.clone(), peer],
            page.clone(),
            page.slot(0),
        ));
        theirs.write_all(bytes).unwrap();
        let theirs = (!leaves).then_some(theirs);
        let call = all_reduce(100);
        let timeout = Duration::from_millis(400);
        let vigil = Vigil {
            status: &status,
            operation: call.header.operation,
            started: Instant::now(),
            timeout,
        };
        let mut region = Region::heap(400).unwrap();
        let error = engine
            .execute(&call, &mut region, &vigil, Runner::Caller)
            .unwrap_err();
        drop(theirs);
        error
    }

    fn frame(call: &Call, phase: Phase, payload: u64) -> Vec<u8> {
        Frame {
            header: call.header,
            phase,
            payload,
        }
        .encode()
        .to_vec()
    }

    #[test]
    fn nonsense_is_the_peers_fault() {
        let call = all_reduce(100);
        for (bytes, words) in [
            (vec![0xAA; 72], "a frame begins with [aa"),
            (
                frame(&call, Phase::First, u64::MAX),
                "a payload of 18446744073709551615 bytes, expected",
            ),
            (
                frame(&call, Phase::Second, 200),
                "a frame of phase Second, expected First",
            ),
        ] {
            let error = against(&bytes, false);
            assert!(matches!(error, Error::Wire { peer: 1, .. }), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn a_result_of_another_operation_is_the_peers_fault() {
        let call = all_reduce(100);
        let payload = Plan::all_reduce(100, 2, 4).reduce.unwrap().range(0).len() as u64 * 4;
        let mut bytes = frame(&call, Phase::First, payload);
        bytes.extend(vec![0; payload as usize]);
        bytes.extend(frame(&all_reduce(99), Phase::Second, 8));
        let error = against(&bytes, false);
        assert!(matches!(error, Error::Wire { peer: 1, .. }), "{error}");
    }

    #[test]
    fn a_truncated_frame_is_a_deadline_or_a_death() {
        let bytes = &frame(&all_reduce(100), Phase::First, 192)[..40];
        let error = against(bytes, false);
        assert!(error.is_deadline() && error.culprit() == Some(1), "{error}");
        let error = against(bytes, true);
        assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
    }
}
