//! What a call asks for, and its execution on a group.
#![allow(unsafe_code)]

use paceline_collective::{
    DType, Element, Error, MESSAGE_BYTES_MAX, PostedRecv, ProcessGroup, ReduceOp, bf16, f16,
};

use crate::failure::Failure;
use crate::memory::{Memory, Run, Span};

/// The operations, by their numbers in a [`Call`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// The outputs become the reduction of all ranks' outputs.
    AllReduce = 1,
    /// The outputs become those of the root.
    Broadcast,
    /// The root's outputs become the reduction of all ranks' outputs; those of other ranks stay as they are.
    Reduce,
    /// One input; an output for each rank becomes that rank's input. Lengths may differ if all ranks know them.
    AllGather,
    /// As `AllGather` on the root; the others have no outputs.
    Gather,
    /// The output becomes this rank's of the root's inputs; the others have no inputs.
    Scatter,
    /// The output becomes the reduction of all ranks' inputs with this rank's number.
    ReduceScatter,
    /// An input for each rank and an output for each rank, all of one length.
    AllToAll,
    /// As `AllToAll` with any lengths.
    AllToAllV,
    /// All ranks meet.
    Barrier,
    /// The input goes to the peer.
    Send,
    /// The output becomes what the peer sent, or any rank if the peer is -1.
    Recv,
}

impl Kind {
    const ALL: [(Self, &str); 12] = [
        (Self::AllReduce, "all-reduce"),
        (Self::Broadcast, "broadcast"),
        (Self::Reduce, "reduce"),
        (Self::AllGather, "all-gather"),
        (Self::Gather, "gather"),
        (Self::Scatter, "scatter"),
        (Self::ReduceScatter, "reduce-scatter"),
        (Self::AllToAll, "all-to-all"),
        (Self::AllToAllV, "all-to-all"),
        (Self::Barrier, "barrier"),
        (Self::Send, "send"),
        (Self::Recv, "recv"),
    ];

    pub(crate) fn name(self) -> &'static str {
        Self::ALL[self as usize - 1].1
    }
}

/// The types of numbers, by their numbers in a [`Call`].
const DTYPES: [DType; 9] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I8,
    DType::U8,
    DType::Bool,
];

/// The reductions, by their numbers in a [`Call`].
const REDUCTIONS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Average,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
    ReduceOp::PreMulSum(1.0),
];

/// A method of [`Asked`] for the type of the numbers.
macro_rules! typed {
    ($dtype:expr, $method:ident) => {
        match $dtype {
            DType::F64 => Self::$method::<f64>,
            DType::F32 => Self::$method::<f32>,
            DType::F16 => Self::$method::<f16>,
            DType::BF16 => Self::$method::<bf16>,
            DType::I64 => Self::$method::<i64>,
            DType::I32 => Self::$method::<i32>,
            DType::I8 => Self::$method::<i8>,
            DType::U8 => Self::$method::<u8>,
            DType::Bool => Self::$method::<bool>,
        }
    };
}

/// An operation on the caller's memory.
#[derive(Debug)]
#[repr(C)]
pub struct Call {
    /// A [`Kind`].
    pub kind: u32,
    /// 0 f64, 1 f32, 2 f16, 3 bf16, 4 i64, 5 i32, 6 i8, 7 u8, 8 bool. Operations that only move numbers may call any type u8.
    pub dtype: u32,
    /// 0 sum, 1 average, 2 product, 3 minimum, 4 maximum, 5 bitwise and, 6 or, 7 exclusive or, 8 sum of numbers times `factor`.
    pub reduction: u32,
    /// The tag of a send or receive.
    pub tag: u32,
    /// The root of an operation that has one; the destination of a send; the source of a receive, -1 for any.
    pub peer: i64,
    /// What this rank's numbers are multiplied by, with reduction 8.
    pub factor: f64,
    /// Milliseconds that the operation may take; 0 for the group's own timeout, which sends and receives always have.
    pub timeout_ms: u64,
    /// What is read.
    pub inputs: *const Span,
    /// How many.
    pub inputs_len: usize,
    /// What is written.
    pub outputs: *const Span,
    /// How many.
    pub outputs_len: usize,
}

/// A call, checked as far as one rank can.
pub(crate) struct Asked {
    pub(crate) kind: Kind,
    dtype: DType,
    op: ReduceOp,
    tag: u32,
    peer: Option<usize>,
    pub(crate) timeout_ms: u64,
    inputs: Memory,
    outputs: Memory,
    /// Elements of each input and output.
    input_counts: Vec<usize>,
    output_counts: Vec<usize>,
}

impl Asked {
    /// # Safety
    ///
    /// The spans are as many as the call says, and their memory is as [`Memory`] promises.
    pub(crate) unsafe fn new(call: &Call) -> Result<Self, Failure> {
        let spans = |start: *const Span, len: usize| -> &[Span] {
            match len {
                0 => &[],
                // SAFETY: the caller's contract.
                _ => unsafe { std::slice::from_raw_parts(start, len) },
            }
        };
        // SAFETY: the caller's contract.
        let memory = |start, len| unsafe { Memory::new(spans(start, len)) };
        let kind = Kind::ALL.get((call.kind as usize).wrapping_sub(1));
        let dtype = DTYPES.get(call.dtype as usize);
        let op = REDUCTIONS.get(call.reduction as usize);
        let (Some((kind, name)), Some(dtype), Some(op)) = (kind, dtype, op) else {
            return Err(Failure::new("bug", format!("no call is like {call:?}")));
        };
        let inputs = memory(call.inputs, call.inputs_len);
        let outputs = memory(call.outputs, call.outputs_len);
        let refuse = |reason: String| Failure::new("call", format!("{name}: {reason}"));
        if *kind == Kind::Recv && call.peer < 0 && outputs.bytes() > MESSAGE_BYTES_MAX {
            // It would be several messages, between which those of another rank may come.
            return Err(refuse(
                "more than 1 GiB can only be received from a rank that is named".into(),
            ));
        }
        Ok(Self {
            kind: *kind,
            dtype: *dtype,
            op: match op {
                ReduceOp::PreMulSum(_) => ReduceOp::PreMulSum(call.factor),
                op => *op,
            },
            tag: call.tag,
            peer: usize::try_from(call.peer).ok(),
            timeout_ms: call.timeout_ms,
            input_counts: inputs.counts(*dtype).map_err(refuse)?,
            output_counts: outputs.counts(*dtype).map_err(refuse)?,
            inputs,
            outputs,
        })
    }

    /// Bytes that it reads.
    pub(crate) fn bytes(&self) -> usize {
        self.inputs.bytes()
    }

    /// The rank at the other end of a send.
    pub(crate) fn destination(&self) -> usize {
        self.peer.unwrap_or(usize::MAX)
    }

    /// Does it; for operations between all ranks, and for sends.
    pub(crate) fn execute(&self, group: &ProcessGroup) -> Result<(), Error> {
        let execute = typed!(self.dtype, execute_on);
        execute(self, group)
    }

    /// Takes a receive's turn now; the result waits for it and gives the rank that sent.
    pub(crate) fn post(self, group: &ProcessGroup) -> Result<Receive, Error> {
        let post = typed!(self.dtype, post_on);
        post(self, group)
    }

    fn execute_on<T: Element>(&self, group: &ProcessGroup) -> Result<(), Error> {
        let root = self.destination();
        match self.kind {
            Kind::AllReduce => self.in_place(|data: &mut [T]| group.all_reduce(data, self.op)),
            Kind::Broadcast => self.in_place(|data: &mut [T]| group.broadcast(data, root)),
            Kind::Reduce if root == group.rank() => {
                self.in_place(|data: &mut [T]| group.reduce(data, self.op, root))
            }
            Kind::Reduce => {
                let mut own = self.outputs.copy::<T>()?;
                group.reduce(own.as_mut_slice(), self.op, root)
            }
            Kind::AllGather => self.apart(|input: &[T], output| match even(&self.output_counts) {
                true => group.all_gather(input, output),
                false => group.all_gather_v(input, output, &self.output_counts),
            }),
            Kind::ReduceScatter => {
                self.apart(|input: &[T], output| match even(&self.input_counts) {
                    true => group.reduce_scatter(input, output, self.op),
                    false => group.reduce_scatter_v(input, output, &self.input_counts, self.op),
                })
            }
            Kind::Gather => self.apart(|input: &[T], output| {
                group.gather(input, (root == group.rank()).then_some(output), root)
            }),
            Kind::Scatter => self.apart(|input: &[T], output| {
                group.scatter((root == group.rank()).then_some(input), output, root)
            }),
            Kind::AllToAll => self.apart(|input: &[T], output| group.all_to_all(input, output)),
            Kind::AllToAllV => self.apart(|input: &[T], output| {
                group.all_to_all_v(input, &self.input_counts, output, &self.output_counts)
            }),
            Kind::Barrier => group.barrier(),
            Kind::Send => {
                let input = self.inputs.read::<T>(&self.outputs)?;
                let mut rest = input.as_slice();
                for len in pieces::<T>(rest.len()) {
                    let (piece, after) = rest.split_at(len);
                    group.send(piece, root, self.tag)?;
                    rest = after;
                }
                Ok(())
            }
            Kind::Recv => unreachable!("a receive is posted"),
        }
    }

    fn post_on<T: Element>(self, group: &ProcessGroup) -> Result<Receive, Error> {
        let lens = pieces::<T>(self.output_counts.iter().sum());
        let post = |len: usize| {
            let posted = group.post_recv::<T>(len, self.peer, self.tag)?;
            Ok((len, posted))
        };
        let posted: Vec<(usize, PostedRecv<T>)> =
            lens.into_iter().map(post).collect::<Result<_, Error>>()?;
        Ok(Box::new(move || {
            let mut output = self.outputs.update::<T>()?;
            let (mut rest, mut from) = (output.as_mut_slice(), 0);
            for (len, posted) in posted {
                let (piece, after) = rest.split_at_mut(len);
                from = posted.wait(piece)?;
                rest = after;
            }
            self.outputs.land(&output);
            Ok(from)
        }))
    }

    fn in_place<T: Element>(
        &self,
        run: impl FnOnce(&mut [T]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut data = self.outputs.update()?;
        run(data.as_mut_slice())?;
        self.outputs.land(&data);
        Ok(())
    }

    fn apart<T: Element>(
        &self,
        run: impl FnOnce(&[T], &mut [T]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let input: Run<T> = self.inputs.read(&self.outputs)?;
        let mut output = self.outputs.update()?;
        run(input.as_slice(), output.as_mut_slice())?;
        self.outputs.land(&output);
        Ok(())
    }
}

/// Waits for a posted receive and gives the rank that sent.
pub(crate) type Receive = Box<dyn FnOnce() -> Result<usize, Error> + Send>;

/// Elements of the messages as which so many are sent: one, unless that would be too long.
fn pieces<T>(len: usize) -> Vec<usize> {
    let most = MESSAGE_BYTES_MAX / size_of::<T>();
    (0..len.div_ceil(most).max(1))
        .map(|piece| most.min(len - piece * most))
        .collect()
}

fn even(counts: &[usize]) -> bool {
    counts.windows(2).all(|pair| pair[0] == pair[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_cut() {
        assert_eq!(pieces::<f64>(0), [0]);
        assert_eq!(pieces::<f64>(1 << 27), [1 << 27]);
        assert_eq!(pieces::<u8>((2 << 30) + 5), [1 << 30, 1 << 30, 5]);
    }

    #[test]
    fn operations_stand_at_their_numbers() {
        for (place, (kind, _)) in Kind::ALL.iter().enumerate() {
            assert_eq!(*kind as usize, place + 1);
        }
    }
}
