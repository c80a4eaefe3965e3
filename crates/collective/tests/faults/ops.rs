//! Operations as words, so that a test can tell a rank's process what to call.

use std::fmt;

use paceline_collective::{
    AllGather, AllReduce, Error, ProcessGroup, ReduceOp, ReduceScatter, Tree,
};

/// The kinds of operation.
pub const KINDS: [&str; 13] = [
    "all-reduce",
    "broadcast",
    "all-gather",
    "reduce-scatter",
    "reduce",
    "gather",
    "scatter",
    "all-to-all",
    "barrier",
    "bytes",
    "pass",
    "bucket-scatter",
    "bucket-gather",
];

/// One call of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    pub kind: String,
    pub len: usize,
    pub wide: bool,
    pub max: bool,
    pub root: usize,
    pub leaves: usize,
    pub bucket: u32,
    pub step: u64,
    pub counts: Vec<usize>,
}

impl Op {
    pub fn new(kind: &str, len: usize) -> Self {
        Self {
            kind: kind.into(),
            len,
            wide: false,
            max: false,
            root: 0,
            leaves: 6,
            bucket: 0,
            step: 0,
            counts: Vec::new(),
        }
    }

    /// The other way round: what [`Display`](fmt::Display) writes.
    pub fn parse(text: &str) -> Self {
        let mut words = text.split(' ');
        let mut next = || words.next().unwrap();
        let kind = next().to_owned();
        let mut number = || next().parse::<usize>().unwrap();
        let (len, wide, max, root) = (number(), number() == 1, number() == 1, number());
        let (leaves, bucket, step) = (number(), number() as u32, number() as u64);
        let counts = words.map(|count| count.parse().unwrap()).collect();
        Self {
            kind,
            len,
            wide,
            max,
            root,
            leaves,
            bucket,
            step,
            counts,
        }
    }

    /// Calls it.
    pub fn run(&self, group: &ProcessGroup) -> Result<(), Error> {
        let (rank, world, len, root) = (group.rank(), group.world(), self.len, self.root);
        let one = vec![1.0_f32; len];
        let mut all = vec![0.0_f32; len * world];
        let mut out = vec![0.0_f32; len];
        let reduction = if self.max {
            ReduceOp::Max
        } else {
            ReduceOp::Sum
        };
        let is_root = rank == root;
        let counts = Some(self.counts.as_slice().into()).filter(|_| !self.counts.is_empty());
        let block = match &counts {
            Some(_) => self.counts.iter().sum(),
            None => len * world,
        };
        match self.kind.as_str() {
            "all-reduce" if self.wide => group.all_reduce(&mut vec![1.0_f64; len], reduction),
            "all-reduce" => {
                out.fill(1.0);
                group.all_reduce(&mut out, reduction)?;
                // Wrong numbers are worse than none.
                let expected = if self.max { 1.0 } else { world as f32 };
                assert!(out.iter().all(|sum| *sum == expected), "a wrong sum");
                Ok(())
            }
            "broadcast" => group.broadcast(&mut out, root),
            "all-gather" => group.all_gather(&one, &mut all),
            "all-gather-v" => {
                let own = vec![1.0_f32; self.counts[rank]];
                let mut all = vec![0.0_f32; self.counts.iter().sum()];
                group.all_gather_v(&own, &mut all, &self.counts)
            }
            "reduce-scatter" => group.reduce_scatter(&all, &mut out, reduction),
            "reduce" => group.reduce(&mut out, reduction, root),
            "gather" => group.gather(&one, is_root.then_some(&mut all[..]), root),
            "scatter" => group.scatter(is_root.then_some(&all[..]), &mut out, root),
            "all-to-all" => {
                let mut other = all.clone();
                group.all_to_all(&all, &mut other)
            }
            "barrier" => group.barrier(),
            "bytes" => group.all_gather_bytes(&vec![7; len]).map(drop),
            "pass" => {
                // Round the ring, and a barrier that keeps the ranks in step.
                group.send(&one, (rank + 1) % world, 5)?;
                group.recv(&mut out, (rank + world - 1) % world, 5)?;
                group.barrier()
            }
            "bucket" => {
                let tree = Tree::split(self.leaves, world).unwrap();
                let buffer = group.buffer::<f32>(len * tree.blocks(rank).len())?;
                let call = AllReduce {
                    op: reduction,
                    tree: Some(tree),
                    len,
                    bucket: Some(self.bucket),
                    step: self.step,
                };
                group.all_reduce_async(buffer, call).wait().map(drop)
            }
            "bucket-scatter" => {
                let tree = Tree::split(self.leaves, world).unwrap();
                let buffer = group.buffer::<f32>(block * tree.blocks(rank).len())?;
                let call = ReduceScatter {
                    op: reduction,
                    tree: Some(tree),
                    counts,
                    bucket: Some(self.bucket),
                    step: self.step,
                };
                group.reduce_scatter_async(buffer, call).wait().map(drop)
            }
            "bucket-gather" => {
                let buffer = group.buffer::<f32>(block)?;
                let call = AllGather {
                    counts,
                    bucket: Some(self.bucket),
                    step: self.step,
                };
                group.all_gather_async(buffer, call).wait().map(drop)
            }
            other => panic!("no operation is called {other}"),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            len,
            root,
            leaves,
            bucket,
            step,
            ..
        } = self;
        let (wide, max) = (u8::from(self.wide), u8::from(self.max));
        write!(
            f,
            "{kind} {len} {wide} {max} {root} {leaves} {bucket} {step}"
        )?;
        self.counts
            .iter()
            .try_for_each(|count| write!(f, " {count}"))
    }
}
