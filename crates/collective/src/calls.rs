//! The synchronous operations: ordinary memory, copied through a staging buffer in pieces.

use std::sync::PoisonError;

use crate::buffer::Buffer;
use crate::call::{Call, Header};
use crate::element::{DType, Element, ReduceOp};
use crate::error::{Error, OpKind, Operation};
use crate::group::{Member, ProcessGroup};
use crate::memory::Region;
use crate::old_plan::Plan;

/// Longest piece of a call on ordinary memory. Two of them (source and staging) fit a second-level cache, and the
/// meeting that every piece costs is below a hundredth of its copying.
///
/// *Units*: bytes.
const PIECE_BYTES_MAX: usize = 4 << 20;
/// Longest byte string of [`ProcessGroup::all_gather_bytes`] and [`ProcessGroup::broadcast_bytes`].
const STRING_BYTES_MAX: usize = 64 << 20;

/// The memory that pieces are copied to; kept between calls, as large as the largest piece so far.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    region: Option<Region>,
}

impl Staging {
    fn take<T: Element>(&mut self, member: &Member, len: usize) -> Result<Buffer<T>, Error> {
        let bytes = len * size_of::<T>();
        let kept = self.region.take().filter(|region| region.bytes() >= bytes);
        let region = match kept {
            Some(region) => region,
            None => member.allocator.allocate(bytes.next_power_of_two())?,
        };
        Ok(Buffer::new(region, len))
    }
}

/// What stays the same over the pieces of one call.
struct Shape {
    kind: OpKind,
    reduce: Option<ReduceOp>,
    root: usize,
    /// Elements of the whole call, for each rank.
    total: usize,
    /// How many times its length a piece is in staging: once, or once for each rank.
    copies: usize,
}

/// Which way a piece is copied: into staging, or the result out of it.
#[derive(Clone, Copy)]
enum Way {
    In,
    Out,
}

/// One piece: elements `first..first + len` of the call.
#[derive(Clone, Copy)]
struct Piece {
    first: usize,
    len: usize,
}

impl ProcessGroup {
    /// Replaces every rank's `data` by the reduction of all ranks' `data`, over a tree with one leaf for each rank.
    ///
    /// *Shape*: the same length on all ranks. *Errors*: [`ReduceOp::Average`] of integers.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), Error> {
        let shape = Shape {
            kind: OpKind::AllReduce,
            reduce: Some(op),
            root: 0,
            total: data.len(),
            copies: 1,
        };
        let world = self.world();
        let plan = |piece: Piece| Plan::all_reduce(piece.len, world, size_of::<T>());
        self.in_pieces::<T>(&shape, plan, |way, piece, staging| {
            let data = &mut data[piece.first..][..piece.len];
            match way {
                Way::In => staging.copy_from_slice(data),
                Way::Out => data.copy_from_slice(staging),
            }
        })
    }

    /// Replaces every rank's `data` by the root's.
    ///
    /// *Shape*: the same length on all ranks. *Errors*: a root that is no rank.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), Error> {
        self.broadcast_as(OpKind::Broadcast, data, root)
    }

    fn broadcast_as<T: Element>(
        &self,
        kind: OpKind,
        data: &mut [T],
        root: usize,
    ) -> Result<(), Error> {
        self.check_root(kind, root)?;
        let shape = Shape {
            kind,
            reduce: None,
            root,
            total: data.len(),
            copies: 1,
        };
        let (world, is_root) = (self.world(), self.rank() == root);
        let plan = |piece: Piece| Plan::broadcast(piece.len, world, root);
        self.in_pieces::<T>(&shape, plan, |way, piece, staging| {
            let data = &mut data[piece.first..][..piece.len];
            match way {
                Way::In if is_root => staging.copy_from_slice(data),
                Way::Out if !is_root => data.copy_from_slice(staging),
                Way::In | Way::Out => {}
            }
        })
    }

    /// Fills `output` with all ranks' `input`, in rank order.
    ///
    /// *Shape*: inputs of one length on all ranks; `output` is `world` times as long.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.all_gather_as(OpKind::AllGather, input, output)
    }

    fn all_gather_as<T: Element>(
        &self,
        kind: OpKind,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), Error> {
        let (rank, world, each) = (self.rank(), self.world(), input.len());
        if Some(output.len()) != each.checked_mul(world) {
            let reason = format!(
                "the output has {} elements, expected {world} times {each}",
                output.len()
            );
            return Err(self.refuse(kind, reason));
        }
        let shape = Shape {
            kind,
            reduce: None,
            root: 0,
            total: each,
            copies: world,
        };
        let plan = |piece: Piece| Plan::all_gather(piece.len, world);
        self.in_pieces::<T>(
            &shape,
            plan,
            |way, Piece { first, len }, staging| match way {
                Way::In => staging[rank * len..][..len].copy_from_slice(&input[first..][..len]),
                Way::Out => {
                    for from in 0..world {
                        output[from * each + first..][..len]
                            .copy_from_slice(&staging[from * len..][..len]);
                    }
                }
            },
        )
    }

    /// Reduces all ranks' `input` and gives each rank its slice of the result: rank `r` the `r`-th of `world` equal ones.
    ///
    /// *Shape*: `input` is `world` times as long as `output`. *Errors*: as [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Error> {
        let (rank, world, each) = (self.rank(), self.world(), output.len());
        if Some(input.len()) != each.checked_mul(world) {
            let reason = format!(
                "the input has {} elements, expected {world} times {each}",
                input.len()
            );
            return Err(self.refuse(OpKind::ReduceScatter, reason));
        }
        let shape = Shape {
            kind: OpKind::ReduceScatter,
            reduce: Some(op),
            root: 0,
            total: each,
            copies: world,
        };
        let plan = |piece: Piece| Plan::reduce_scatter(piece.len, world);
        self.in_pieces::<T>(
            &shape,
            plan,
            |way, Piece { first, len }, staging| match way {
                Way::In => {
                    for to in 0..world {
                        staging[to * len..][..len]
                            .copy_from_slice(&input[to * each + first..][..len]);
                    }
                }
                Way::Out => output[first..][..len].copy_from_slice(&staging[rank * len..][..len]),
            },
        )
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<(), Error> {
        let member = self.member();
        let region = Region::heap(0).ok_or(Error::Memory {
            bytes: 0,
            used: 0,
            size: 0,
        })?;
        let header = Header {
            operation: Operation {
                kind: OpKind::Barrier,
                seq: 0,
                bucket: None,
            },
            reduce: None,
            dtype: None,
            total: 0,
            first: 0,
            piece: 0,
            mark: 0,
            leaves: 0,
        };
        member
            .executor
            .run(
                Call {
                    header,
                    plan: Plan::barrier(),
                    tree: member.tree.clone(),
                },
                region,
            )
            .map(drop)
    }

    /// All ranks' byte strings, in rank order; each may have its own length.
    ///
    /// *Cost*: two all-gathers; for control data. *Errors*: a string of more than 64 MiB.
    pub fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let kind = OpKind::AllGatherBytes;
        let mut lengths = vec![0_i64; self.world()];
        self.all_gather_as(kind, &[bytes.len() as i64], &mut lengths)?;
        let lengths = lengths
            .iter()
            .map(|length| self.check_string(kind, *length))
            .collect::<Result<Vec<_>, _>>()?;
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let mut input = to_words(bytes);
        input.resize(longest.div_ceil(8), 0);
        let mut output = vec![0_i64; input.len() * self.world()];
        self.all_gather_as(kind, &input, &mut output)?;
        let strings = lengths
            .iter()
            .enumerate()
            .map(|(rank, length)| to_bytes(&output[rank * input.len()..][..input.len()], *length));
        Ok(strings.collect())
    }

    /// The root's byte string. `bytes` is given on the root and nowhere else.
    ///
    /// *Cost*: two broadcasts; for control data. *Errors*: a string of more than 64 MiB, or one on the wrong rank.
    pub fn broadcast_bytes(&self, bytes: Option<&[u8]>, root: usize) -> Result<Vec<u8>, Error> {
        let kind = OpKind::BroadcastBytes;
        self.check_root(kind, root)?;
        if bytes.is_some() != (self.rank() == root) {
            return Err(self.refuse(
                kind,
                format!("the bytes are given on the root, rank {root}, and nowhere else"),
            ));
        }
        let mut length = [bytes.map_or(0, |bytes| bytes.len() as i64)];
        self.broadcast_as(kind, &mut length, root)?;
        let length = self.check_string(kind, length[0])?;
        let mut words = to_words(bytes.unwrap_or_default());
        words.resize(length.div_ceil(8), 0);
        self.broadcast_as(kind, &mut words, root)?;
        Ok(to_bytes(&words, length))
    }

    /// Runs a call piece by piece: copy into staging, execute, copy the result out. A call without elements has one piece,
    /// because the ranks meet and compare all the same.
    fn in_pieces<T: Element>(
        &self,
        shape: &Shape,
        plan: impl Fn(Piece) -> Plan,
        mut copy: impl FnMut(Way, Piece, &mut [T]),
    ) -> Result<(), Error> {
        self.check_reduce::<T>(shape.kind, shape.reduce)?;
        let member = self.member();
        let len_max = (PIECE_BYTES_MAX / size_of::<T>() / shape.copies).max(1);
        let mut staging = member
            .staging
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut first = 0;
        loop {
            let piece = Piece {
                first,
                len: len_max.min(shape.total - first),
            };
            let mut buffer = staging
                .take::<T>(member, piece.len * shape.copies)
                .map_err(|error| self.give_up(error))?;
            copy(Way::In, piece, &mut buffer);
            let header = Header {
                operation: Operation {
                    kind: shape.kind,
                    seq: 0,
                    bucket: None,
                },
                reduce: shape.reduce,
                dtype: Some(T::DTYPE),
                total: shape.total,
                first,
                piece: piece.len,
                mark: shape.root as u32,
                leaves: member.tree.leaves() as u32,
            };
            let call = Call {
                header,
                plan: plan(piece),
                tree: member.tree.clone(),
            };
            let (region, _) = member.executor.run(call, buffer.into_region())?;
            let mut buffer = Buffer::<T>::new(region, piece.len * shape.copies);
            copy(Way::Out, piece, &mut buffer);
            staging.region = Some(buffer.into_region());
            first += piece.len;
            if first == shape.total {
                return Ok(());
            }
        }
    }

    pub(crate) fn check_reduce<T: Element>(
        &self,
        kind: OpKind,
        reduce: Option<ReduceOp>,
    ) -> Result<(), Error> {
        if reduce == Some(ReduceOp::Average) && T::DTYPE == DType::I64 {
            return Err(self.refuse(kind, "an average of i64 is not an i64".into()));
        }
        Ok(())
    }

    pub(crate) fn check_root(&self, kind: OpKind, root: usize) -> Result<(), Error> {
        if root >= self.world() {
            return Err(self.refuse(
                kind,
                format!("rank {root} is not one of the {} ranks", self.world()),
            ));
        }
        Ok(())
    }

    fn check_string(&self, kind: OpKind, length: i64) -> Result<usize, Error> {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > STRING_BYTES_MAX {
            return Err(self.refuse(
                kind,
                format!("{length} bytes, at most {STRING_BYTES_MAX} are allowed"),
            ));
        }
        Ok(length)
    }

    /// A call that cannot work: the peers that make it correctly must not wait for this rank.
    pub(crate) fn refuse(&self, kind: OpKind, reason: String) -> Error {
        self.give_up(Error::Call {
            rank: self.rank(),
            kind,
            reason,
        })
    }

    pub(crate) fn give_up(&self, error: Error) -> Error {
        let first = self.member().status.fail(error);
        self.member().status.announce();
        first
    }
}

/// Bytes travel as integers, padded to a whole one.
fn to_words(bytes: &[u8]) -> Vec<i64> {
    let mut words = Vec::with_capacity(bytes.len().div_ceil(8));
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        words.push(i64::from_le_bytes(word));
    }
    words
}

fn to_bytes(words: &[i64], length: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.truncate(length);
    bytes
}
