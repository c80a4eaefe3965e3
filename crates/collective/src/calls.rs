//! The synchronous operations, on callers' own memory.
#![allow(unsafe_code)]

use std::sync::Arc;

use crate::buffer::Buffer;
use crate::call::{Call, Header};
use crate::element::{DType, Element, ReduceOp};
use crate::error::{Error, OpKind, Operation};
use crate::fold::premultiply;
use crate::group::ProcessGroup;
use crate::memory::Operand;
use crate::plan::{Algorithm, Counts, Kind, Pattern, Situation, Spec, choose};
use crate::tree::Tree;

/// Longest piece of a call on ordinary memory that goes through shared memory: what two ranks copy in, fold and copy out
/// again stays in second-level caches meanwhile, and the two meetings that a piece costs are a hundredth of its time.
///
/// *Units*: bytes.
const PIECE_BYTES_MAX: usize = 512 << 10;
/// Bytes of a cache line: boundaries of slices fall on multiples.
const LINE_BYTES: usize = 64;

/// What a caller asks for, before it is a call.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) kind: OpKind,
    pub(crate) pattern: Pattern,
    pub(crate) reduce: Option<ReduceOp>,
    /// The root, or the step of training.
    pub(crate) mark: u32,
    pub(crate) bucket: Option<u32>,
    /// None for one leaf per rank.
    pub(crate) tree: Option<Arc<Tree>>,
}

impl Ask {
    pub(crate) fn new(kind: Kind, counts: impl Into<Counts>) -> Self {
        Self::rooted(kind, counts, 0)
    }

    pub(crate) fn rooted(kind: Kind, counts: impl Into<Counts>, root: usize) -> Self {
        Self {
            kind: OpKind::of(kind),
            pattern: Pattern::rooted(kind, counts, root),
            reduce: None,
            mark: root as u32,
            bucket: None,
            tree: None,
        }
    }

    /// Under the name of another operation, of which it is a part.
    fn called(self, kind: OpKind) -> Self {
        Self { kind, ..self }
    }

    pub(crate) fn reducing(self, op: ReduceOp) -> Self {
        Self {
            reduce: Some(op),
            ..self
        }
    }

    /// Part of a training step.
    pub(crate) fn of_bucket(self, bucket: Option<u32>, step: u64) -> Self {
        Self {
            bucket,
            mark: step as u32,
            ..self
        }
    }
}

/// Tells lists of counts apart; 0 is kept for calls without one.
fn digest(counts: &Counts) -> u64 {
    let Counts::Each(counts) = counts else {
        return 0;
    };
    let mix = |hash: u64, count: &usize| {
        (hash ^ *count as u64)
            .wrapping_mul(0x0100_0000_01B3)
            .rotate_left(29)
    };
    counts.iter().fold(0xCBF2_9CE4_8422_2325, mix) | 1
}

/// A copy of a rank's own data, multiplied by its factor.
fn premultiplied<T: Element>(input: &[T], factor: f64) -> Vec<T> {
    let mut scaled = vec![T::default(); input.len()];
    let (from, to) = (input.as_ptr().cast(), scaled.as_mut_ptr().cast());
    // SAFETY: two slices of the dtype and of one length that do not overlap.
    unsafe { premultiply(T::DTYPE, from, to, input.len(), factor) };
    scaled
}

impl ProcessGroup {
    /// Replaces every rank's `data` by the reduction of all ranks' `data`, over a tree with one leaf for each rank.
    ///
    /// *Shape*: the same length on all ranks. *Errors*: a reduction that the type does not have.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.in_place(Ask::new(Kind::AllReduce, data.len()).reducing(op), data)
    }

    /// Replaces the root's `data` by the reduction of all ranks' `data`.
    ///
    /// *Shape*: the same length on all ranks. The contents of `data` elsewhere are unspecified afterwards.
    ///
    /// *Errors*: a root that is no rank, and as [`all_reduce`](Self::all_reduce).
    pub fn reduce<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<(), Error> {
        self.check_root(OpKind::Reduce, root)?;
        let ask = Ask::rooted(Kind::Reduce, data.len(), root).reducing(op);
        self.in_place(ask, data)
    }

    /// Replaces every rank's `data` by the root's.
    ///
    /// *Shape*: the same length on all ranks. *Errors*: a root that is no rank.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), Error> {
        self.broadcast_as(OpKind::Broadcast, data, root)
    }

    pub(crate) fn broadcast_as<T: Element>(
        &self,
        kind: OpKind,
        data: &mut [T],
        root: usize,
    ) -> Result<(), Error> {
        self.check_root(kind, root)?;
        let ask = Ask::rooted(Kind::Broadcast, data.len(), root).called(kind);
        self.in_place(ask, data)
    }

    /// Fills `output` with all ranks' `input`, in rank order.
    ///
    /// *Shape*: inputs of one length on all ranks; `output` is `world` times as long.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.all_gather_as(OpKind::AllGather, input, output)
    }

    pub(crate) fn all_gather_as<T: Element>(
        &self,
        kind: OpKind,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), Error> {
        self.check_slots(kind, "output", output.len(), input.len())?;
        let ask = Ask::new(Kind::AllGather, input.len()).called(kind);
        self.apart(ask, input, output)
    }

    /// Fills `output` with all ranks' inputs of different lengths, in rank order.
    ///
    /// *Shape*: `counts` are the lengths of all ranks' inputs, the same on all ranks; `output` is as long as their sum.
    pub fn all_gather_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<(), Error> {
        self.all_gather_v_as(OpKind::AllGather, input, output, counts)
    }

    pub(crate) fn all_gather_v_as<T: Element>(
        &self,
        kind: OpKind,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<(), Error> {
        self.check_dealt(
            kind,
            ("output", output.len()),
            ("input", input.len()),
            counts,
        )?;
        let ask = Ask::new(Kind::AllGather, counts).called(kind);
        self.apart(ask, input, output)
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
        self.check_slots(OpKind::ReduceScatter, "input", input.len(), output.len())?;
        let ask = Ask::new(Kind::ReduceScatter, output.len()).reducing(op);
        self.apart(ask, input, output)
    }

    /// Reduces all ranks' `input` and gives each rank its slice of the result, of different lengths.
    ///
    /// *Shape*: `counts` are the lengths of all ranks' slices, the same on all ranks; `input` is as long as their sum.
    pub fn reduce_scatter_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<(), Error> {
        let kind = OpKind::ReduceScatter;
        self.check_dealt(
            kind,
            ("input", input.len()),
            ("output", output.len()),
            counts,
        )?;
        let ask = Ask::new(Kind::ReduceScatter, counts).reducing(op);
        self.apart(ask, input, output)
    }

    /// Fills the root's `output` with all ranks' `input`, in rank order.
    ///
    /// *Shape*: inputs of one length on all ranks; `output` is given on the root, `world` times as long, and nowhere else.
    pub fn gather<T: Element>(
        &self,
        input: &[T],
        output: Option<&mut [T]>,
        root: usize,
    ) -> Result<(), Error> {
        let kind = OpKind::Gather;
        self.check_root(kind, root)?;
        self.check_given(kind, "output", output.is_some(), root)?;
        if let Some(output) = &output {
            self.check_slots(kind, "output", output.len(), input.len())?;
        }
        let ask = Ask::rooted(Kind::Gather, input.len(), root);
        self.apart(ask, input, output.unwrap_or_default())
    }

    /// Gives each rank its slice of the root's `input`: rank `r` the `r`-th of `world` equal ones.
    ///
    /// *Shape*: `input` is given on the root, `world` times as long as `output`, and nowhere else.
    pub fn scatter<T: Element>(
        &self,
        input: Option<&[T]>,
        output: &mut [T],
        root: usize,
    ) -> Result<(), Error> {
        let kind = OpKind::Scatter;
        self.check_root(kind, root)?;
        self.check_given(kind, "input", input.is_some(), root)?;
        if let Some(input) = input {
            self.check_slots(kind, "input", input.len(), output.len())?;
        }
        let ask = Ask::rooted(Kind::Scatter, output.len(), root);
        self.apart(ask, input.unwrap_or_default(), output)
    }

    /// Gives each rank its slice of every rank's `input`: slice `r` goes to rank `r`, and `output` holds what came from all
    /// ranks, in rank order.
    ///
    /// *Shape*: `input` and `output` have one length, a multiple of `world`, the same on all ranks.
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        let (kind, len, world) = (OpKind::AllToAll, input.len(), self.world());
        self.require(kind, len.is_multiple_of(world), || {
            format!("the input has {len} elements, which is no multiple of {world}")
        })?;
        let each = len / world;
        self.check_slots(kind, "output", output.len(), each)?;
        self.apart(Ask::new(Kind::AllToAll, each), input, output)
    }

    /// As [`all_to_all`](Self::all_to_all) with slices of different lengths.
    ///
    /// *Shape*: `input` holds `input_counts[r]` elements for each rank `r`, `output` takes `output_counts[r]` from each.
    /// *Cost*: one more all-gather, of the counts. *Errors*: a rank expects another number than its peer sends.
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        input_counts: &[usize],
        output: &mut [T],
        output_counts: &[usize],
    ) -> Result<(), Error> {
        let kind = OpKind::AllToAll;
        self.check_counts(kind, "input", input.len(), input_counts)?;
        self.check_counts(kind, "output", output.len(), output_counts)?;
        let counts = self.all_counts(kind, input_counts)?;
        for (from, expected) in output_counts.iter().enumerate() {
            let sent = counts[from * self.world() + self.rank()];
            self.require(kind, sent == *expected, || {
                format!("rank {from} sends {sent} elements, but {expected} are expected")
            })?;
        }
        self.apart(Ask::new(Kind::AllToAll, &*counts), input, output)
    }

    /// All ranks' counts, one rank's after another.
    pub(crate) fn all_counts(&self, kind: OpKind, counts: &[usize]) -> Result<Vec<usize>, Error> {
        let own: Vec<i64> = counts.iter().map(|count| *count as i64).collect();
        let mut all = vec![0_i64; own.len() * self.world()];
        self.all_gather_as(kind, &own, &mut all)?;
        Ok(all.into_iter().map(|count| count as usize).collect())
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<(), Error> {
        let ask = Ask::new(Kind::Barrier, 0);
        let call = Call {
            header: Header {
                dtype: None,
                ..self.header(&ask, DType::U8, false)
            },
            spec: self.spec(&ask, LINE_BYTES),
        };
        self.member().executor.run(call, Operand::none()).map(drop)
    }

    pub(crate) fn in_place<T: Element>(&self, ask: Ask, data: &mut [T]) -> Result<(), Error> {
        let call = self.call(&ask, T::DTYPE, false)?;
        if let Some(ReduceOp::PreMulSum(factor)) = ask.reduce {
            let start = data.as_mut_ptr().cast::<u8>();
            // SAFETY: one slice of the dtype, onto itself.
            unsafe { premultiply(T::DTYPE, start, start, data.len(), factor) };
        }
        // SAFETY: `run` returns when the operation is over, and `data` is borrowed until then.
        let operand = unsafe { Operand::in_place(data) };
        self.member().executor.run(call, operand).map(drop)
    }

    fn apart<T: Element>(&self, ask: Ask, input: &[T], output: &mut [T]) -> Result<(), Error> {
        let call = self.call(&ask, T::DTYPE, false)?;
        let scaled;
        let input = match ask.reduce {
            Some(ReduceOp::PreMulSum(factor)) => {
                scaled = premultiplied(input, factor);
                &scaled
            }
            _ => input,
        };
        // SAFETY: as above.
        let operand = unsafe { Operand::apart(input, output) };
        self.member().executor.run(call, operand).map(drop)
    }

    /// A call that all ranks make alike. `shared`: its memory is the group's own, which peers can work on. Not generic over the type:
    /// it is compiled here, once, and not in each user's crate with that crate's optimiser.
    pub(crate) fn call(&self, ask: &Ask, dtype: DType, shared: bool) -> Result<Call, Error> {
        self.check_reduce(ask.kind, ask.reduce, dtype)?;
        let mut spec = self.spec(ask, LINE_BYTES / dtype.bytes());
        let mut header = self.header(ask, dtype, shared);
        spec.algorithm = self.algorithm(ask, dtype);
        header.algorithm = spec.algorithm;
        Ok(Call { header, spec })
    }

    fn spec(&self, ask: &Ask, line: usize) -> Spec {
        let member = self.member();
        Spec {
            pattern: ask.pattern.clone(),
            algorithm: Algorithm::Direct,
            tree: ask.tree.clone().unwrap_or_else(|| member.tree.clone()),
            hosts: member.hosts.clone(),
            line,
        }
    }

    fn header(&self, ask: &Ask, dtype: DType, shared: bool) -> Header {
        let member = self.member();
        let total = ask.pattern.longest();
        let leaves = ask.tree.as_ref().unwrap_or(&member.tree).leaves();
        // Slots that are staged at the same time share the piece's room.
        let slots = match ask.pattern.in_place() {
            true => 1,
            false => self.world(),
        };
        let piece = PIECE_BYTES_MAX / dtype.bytes() / slots;
        let piece = piece.next_multiple_of(LINE_BYTES / dtype.bytes());
        Header {
            operation: Operation {
                kind: ask.kind,
                seq: 0,
                bucket: ask.bucket,
            },
            reduce: ask.reduce.map(ReduceOp::compared),
            dtype: Some(dtype),
            algorithm: Algorithm::Direct,
            total,
            piece: match shared || !member.stages {
                true => total,
                false => piece.min(total),
            },
            counts: digest(&ask.pattern.counts),
            mark: ask.mark,
            leaves: ask.reduce.map_or(0, |_| leaves as u32),
        }
    }

    fn algorithm(&self, ask: &Ask, dtype: DType) -> Algorithm {
        let member = self.member();
        let kind = ask.pattern.kind;
        let slots = match kind {
            Kind::AllGather | Kind::ReduceScatter => self.world(),
            _ => 1,
        };
        let wanted = member.options.algorithm.of(kind);
        let sixteen_bit = matches!(dtype, DType::F16 | DType::BF16);
        let situation = Situation {
            kind,
            bytes: ask.pattern.longest() * slots * dtype.bytes(),
            tree: ask.tree.as_ref().unwrap_or(&member.tree),
            hosts: &member.hosts,
            sixteen_bit,
            // A caller that brings a tree asks for its bits. Half precision is rounded once unless the user wants otherwise.
            ordered: dtype.is_float() && (ask.tree.is_some() || sixteen_bit && wanted.is_none()),
            wanted,
        };
        let choice = choose(&situation);
        if let Some(reason) = choice.refused {
            member.warn(reason);
        }
        choice.algorithm
    }

    fn check_reduce(
        &self,
        kind: OpKind,
        reduce: Option<ReduceOp>,
        dtype: DType,
    ) -> Result<(), Error> {
        let checked = reduce.map_or(Ok(()), |op| op.check(dtype));
        checked.map_err(|reason| self.refuse(kind, reason))
    }

    pub(crate) fn check_root(&self, kind: OpKind, root: usize) -> Result<(), Error> {
        let world = self.world();
        self.require(kind, root < world, || {
            format!("rank {root} is not one of the {world} ranks")
        })
    }

    /// `len` elements are one slot of `each` for every rank.
    fn check_slots(&self, kind: OpKind, what: &str, len: usize, each: usize) -> Result<(), Error> {
        let world = self.world();
        self.require(kind, Some(len) == each.checked_mul(world), || {
            format!("the {what} has {len} elements, expected {world} times {each}")
        })
    }

    /// `len` elements are slots of these lengths, one for every rank.
    fn check_counts(
        &self,
        kind: OpKind,
        what: &str,
        len: usize,
        counts: &[usize],
    ) -> Result<(), Error> {
        let sum = self.sum_counts(kind, what, counts)?;
        self.require(kind, sum == len, || {
            format!("the {what} has {len} elements, its counts add up to {sum}")
        })
    }

    /// The sum of one count for every rank.
    pub(crate) fn sum_counts(
        &self,
        kind: OpKind,
        what: &str,
        counts: &[usize],
    ) -> Result<usize, Error> {
        let mut all = counts.iter();
        let sum = all.try_fold(0_usize, |sum, count| sum.checked_add(*count));
        let reason = match sum {
            _ if counts.len() != self.world() => format!(
                "{} counts for the {what}, expected one for each of the {} ranks",
                counts.len(),
                self.world()
            ),
            Some(sum) => return Ok(sum),
            None => format!("the counts of the {what} add up to more than there can be"),
        };
        Err(self.refuse(kind, reason))
    }

    /// The `whole` is slots of these lengths, one for every rank, and this rank's `own` is as long as its slot.
    fn check_dealt(
        &self,
        kind: OpKind,
        (whole, len): (&str, usize),
        (own, own_len): (&str, usize),
        counts: &[usize],
    ) -> Result<(), Error> {
        self.check_counts(kind, whole, len, counts)?;
        let (rank, expected) = (self.rank(), counts[self.rank()]);
        self.require(kind, own_len == expected, || {
            format!("the {own} of rank {rank} has {own_len} elements, but its count is {expected}")
        })
    }

    /// The root gives it, and no other rank.
    pub(crate) fn check_given(
        &self,
        kind: OpKind,
        what: &str,
        given: bool,
        root: usize,
    ) -> Result<(), Error> {
        self.require(kind, given == (self.rank() == root), || {
            format!("the {what} is given on the root, rank {root}, and nowhere else")
        })
    }

    pub(crate) fn check_own<T: Element>(
        &self,
        kind: OpKind,
        buffer: &Buffer<T>,
    ) -> Result<(), Error> {
        self.require(kind, self.member().allocator.owns(buffer.region()), || {
            "the buffer belongs to another group".into()
        })
    }

    /// Gives up with [`refuse`](Self::refuse) unless something holds.
    pub(crate) fn require(
        &self,
        kind: OpKind,
        holds: bool,
        reason: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        match holds {
            true => Ok(()),
            false => Err(self.refuse(kind, reason())),
        }
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
