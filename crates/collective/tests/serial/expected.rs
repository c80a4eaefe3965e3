//! All operations for one type and length, each compared byte by byte with the serial reference.

use std::sync::Arc;

use paceline_collective::{AllGather, AllReduce, ProcessGroup, ReduceOp, ReduceScatter};

use super::{Tested, assert_same, reduced, reductions, values};

/// What every operation must give for one type and length; computed once, not by every rank.
pub struct Expected<T> {
    len: usize,
    /// One length for each rank, some of them nothing.
    uneven: Vec<usize>,
    reduced: Vec<(ReduceOp, Vec<T>)>,
    /// The reduction of inputs `world` times as long.
    scattered: Vec<(ReduceOp, Vec<T>)>,
    /// All ranks' values, each `world` times the length.
    all: Vec<Vec<T>>,
}

impl<T: Tested> Expected<T> {
    pub fn new(world: usize, len: usize) -> Self {
        Self {
            len,
            uneven: (0..world)
                .map(|rank| (rank * 7 + 3) % 5 * len / 4)
                .collect(),
            reduced: reductions::<T>()
                .map(|op| (op, reduced(op, world, len)))
                .collect(),
            scattered: reductions::<T>()
                .map(|op| (op, reduced(op, world, len * world)))
                .collect(),
            all: (0..world).map(|rank| values(rank, len * world)).collect(),
        }
    }

    /// Where the slots of different lengths begin.
    fn starts(&self) -> Vec<usize> {
        let sums = self.uneven.iter().scan(0, |end, count| {
            let start = *end;
            *end += count;
            Some(start)
        });
        sums.collect()
    }

    /// Runs all operations on one rank and compares what they give.
    pub fn check(&self, group: &ProcessGroup, what: &str) {
        let rank = group.rank();
        let what = format!(
            "{what}: {} {} on rank {rank} of {}",
            self.len,
            T::DTYPE,
            group.world()
        );
        self.check_reductions(group, &what);
        self.check_copies(group, &what);
        self.check_uneven(group, &what);
        group.barrier().unwrap();
    }

    fn check_reductions(&self, group: &ProcessGroup, what: &str) {
        let (rank, world, len) = (group.rank(), group.world(), self.len);
        for (op, expected) in &self.reduced {
            let mut data: Vec<T> = values(rank, len);
            group.all_reduce(&mut data, *op).unwrap();
            assert_same(&data, expected, &format!("all-reduce ({op}), {what}"));
            let mut data: Vec<T> = values(rank, len);
            group.reduce(&mut data, *op, len % world).unwrap();
            if rank == len % world {
                assert_same(&data, expected, &format!("reduce ({op}), {what}"));
            }
            let mut buffer = group.buffer::<T>(len).unwrap();
            buffer.copy_from_slice(&values::<T>(rank, len));
            let call = AllReduce::new(*op, len);
            let done = group.all_reduce_async(buffer, call).wait().unwrap();
            assert_same(
                &done.buffer,
                expected,
                &format!("all-reduce in place ({op}), {what}"),
            );
        }
        let mut output = vec![T::default(); len];
        for (op, expected) in &self.scattered {
            group
                .reduce_scatter(&self.all[rank], &mut output, *op)
                .unwrap();
            let expected = &expected[rank * len..][..len];
            assert_same(&output, expected, &format!("reduce-scatter ({op}), {what}"));
            let mut buffer = group.buffer::<T>(len * world).unwrap();
            buffer.copy_from_slice(&self.all[rank]);
            let call = scattering(*op, None);
            let done = group.reduce_scatter_async(buffer, call).wait().unwrap();
            let slice = &done.buffer[rank * len..][..len];
            assert_same(
                slice,
                expected,
                &format!("reduce-scatter in place ({op}), {what}"),
            );
        }
    }

    fn check_copies(&self, group: &ProcessGroup, what: &str) {
        let (rank, world, len) = (group.rank(), group.world(), self.len);
        let mine = &self.all[rank][..len];
        let gathered: Vec<T> = self
            .all
            .iter()
            .flat_map(|all| &all[..len])
            .copied()
            .collect();
        let mut output = vec![T::default(); len * world];
        group.all_gather(mine, &mut output).unwrap();
        assert_same(&output, &gathered, &format!("all-gather, {what}"));
        let mut buffer = group.buffer::<T>(len * world).unwrap();
        buffer[rank * len..][..len].copy_from_slice(mine);
        let call = AllGather::default();
        let done = group.all_gather_async(buffer, call).wait().unwrap();
        assert_same(
            &done.buffer,
            &gathered,
            &format!("all-gather in place, {what}"),
        );
        let exchanged: Vec<T> = self
            .all
            .iter()
            .flat_map(|all| &all[rank * len..][..len])
            .copied()
            .collect();
        group.all_to_all(&self.all[rank], &mut output).unwrap();
        assert_same(&output, &exchanged, &format!("all-to-all, {what}"));
        let mut buffer = group.buffer::<T>(2 * len * world).unwrap();
        buffer[..len * world].copy_from_slice(&self.all[rank]);
        let done = group.all_to_all_async(buffer).wait().unwrap();
        let half = &done.buffer[len * world..];
        assert_same(half, &exchanged, &format!("all-to-all in place, {what}"));
        for root in [0, world - 1] {
            let is_root = rank == root;
            let mut data = mine.to_vec();
            group.broadcast(&mut data, root).unwrap();
            let expected = &self.all[root][..len];
            assert_same(&data, expected, &format!("broadcast from {root}, {what}"));
            let mut output = vec![T::default(); len * world];
            group
                .gather(mine, is_root.then_some(&mut output[..]), root)
                .unwrap();
            if is_root {
                assert_same(&output, &gathered, &format!("gather to {root}, {what}"));
            }
            let mut output = vec![T::default(); len];
            group
                .scatter(is_root.then_some(&self.all[root][..]), &mut output, root)
                .unwrap();
            let expected = &self.all[root][rank * len..][..len];
            assert_same(&output, expected, &format!("scatter from {root}, {what}"));
        }
    }

    /// The forms with a length for each rank.
    fn check_uneven(&self, group: &ProcessGroup, what: &str) {
        let (rank, world) = (group.rank(), group.world());
        let (counts, starts) = (&self.uneven, self.starts());
        let total: usize = counts.iter().sum();
        let count = counts[rank];
        let mine = &self.all[rank][..count];
        let gathered: Vec<T> = (0..world)
            .flat_map(|from| &self.all[from][..counts[from]])
            .copied()
            .collect();
        let mut output = vec![T::default(); total];
        group.all_gather_v(mine, &mut output, counts).unwrap();
        assert_same(&output, &gathered, &format!("all-gather-v, {what}"));
        let mut buffer = group.buffer::<T>(total + 3).unwrap();
        buffer[starts[rank]..][..count].copy_from_slice(mine);
        let call = AllGather {
            counts: Some(counts.as_slice().into()),
            ..AllGather::default()
        };
        let done = group.all_gather_async(buffer, call).wait().unwrap();
        assert_same(
            &done.buffer[..total],
            &gathered,
            &format!("all-gather-v in place, {what}"),
        );
        for (op, expected) in self.scattered.iter().take(1) {
            let mut output = vec![T::default(); count];
            group
                .reduce_scatter_v(&self.all[rank][..total], &mut output, counts, *op)
                .unwrap();
            let expected = &expected[starts[rank]..][..count];
            assert_same(
                &output,
                expected,
                &format!("reduce-scatter-v ({op}), {what}"),
            );
            let mut buffer = group.buffer::<T>(total + 3).unwrap();
            buffer[..total].copy_from_slice(&self.all[rank][..total]);
            let call = scattering(*op, Some(counts.as_slice().into()));
            let done = group.reduce_scatter_async(buffer, call).wait().unwrap();
            assert_same(
                &done.buffer[starts[rank]..][..count],
                expected,
                &format!("reduce-scatter-v in place ({op}), {what}"),
            );
        }
        // Rank a sends counts[(a + b) % world] elements to rank b.
        let between = |from: usize, to: usize| counts[(from + to) % world];
        let sent: Vec<usize> = (0..world).map(|to| between(rank, to)).collect();
        let received: Vec<usize> = (0..world).map(|from| between(from, rank)).collect();
        let start = |from: usize| (0..rank).map(|to| between(from, to)).sum::<usize>();
        let expected: Vec<T> = (0..world)
            .flat_map(|from| &self.all[from][start(from)..][..between(from, rank)])
            .copied()
            .collect();
        let mut output = vec![T::default(); received.iter().sum()];
        let input = &self.all[rank][..sent.iter().sum()];
        group
            .all_to_all_v(input, &sent, &mut output, &received)
            .unwrap();
        assert_same(&output, &expected, &format!("all-to-all-v, {what}"));
    }
}

fn scattering(op: ReduceOp, counts: Option<Arc<[usize]>>) -> ReduceScatter {
    ReduceScatter {
        op,
        tree: None,
        counts,
        bucket: None,
        step: 0,
    }
}
