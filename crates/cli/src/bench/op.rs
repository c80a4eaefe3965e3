//! The operations that are measured: names, and nccl-tests' factors.

macro_rules! operations {
    ($($op:ident = $name:literal, $doc:literal;)*) => {
        /// An operation to measure.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum Op {
            $(#[doc = $doc] $op,)*
        }

        impl Op {
            /// All of them.
            pub(crate) const ALL: &[Self] = &[$(Self::$op),*];

            /// The name in settings and reports.
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Self::$op => $name,)*
                }
            }
        }
    };
}

operations! {
    AllReduce = "all-reduce", "All ranks get the reduction of all ranks' data, in place.";
    Reduce = "reduce", "The root gets it, in place.";
    Broadcast = "broadcast", "All ranks get the root's data, in place.";
    AllGather = "all-gather", "All ranks get all ranks' data.";
    ReduceScatter = "reduce-scatter", "Each rank gets its slice of the reduction.";
    Gather = "gather", "The root gets all ranks' data.";
    Scatter = "scatter", "Each rank gets its slice of the root's data.";
    AllToAll = "all-to-all", "Each rank gets its slice of every rank's data.";
    SendRecv = "send-recv", "Each rank sends to the next one and receives from the one before, in a ring.";
    Barrier = "barrier", "All ranks meet.";
}

impl Op {
    /// Whether it combines numbers.
    pub(crate) fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::Reduce | Self::ReduceScatter)
    }

    /// Whether one rank is different from the others.
    pub(crate) fn has_root(self) -> bool {
        matches!(
            self,
            Self::Reduce | Self::Broadcast | Self::Gather | Self::Scatter
        )
    }

    /// Whether the size is that of `world` equal slices.
    pub(super) fn is_sliced(self) -> bool {
        matches!(
            self,
            Self::AllGather | Self::ReduceScatter | Self::Gather | Self::Scatter | Self::AllToAll
        )
    }

    /// What the algorithm bandwidth (bytes by time) is multiplied with to be the bus bandwidth: the speed of the hardware
    /// that the operation needs, comparable between operations and numbers of ranks. None where nothing is moved.
    ///
    /// *Source*: nccl-tests, `doc/PERFORMANCE.md`.
    pub(crate) fn bus_factor(self, world: usize) -> Option<f64> {
        let world = world as f64;
        match self {
            Self::AllReduce => Some(2.0 * (world - 1.0) / world),
            Self::Reduce | Self::Broadcast | Self::SendRecv => Some(1.0),
            Self::AllGather
            | Self::ReduceScatter
            | Self::Gather
            | Self::Scatter
            | Self::AllToAll => Some((world - 1.0) / world),
            Self::Barrier => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_bandwidth_has_the_factors_of_nccl_tests() {
        let check = |op: Op, world, expect: Option<f64>| {
            assert_eq!(op.bus_factor(world), expect, "{op:?}");
        };
        check(Op::AllReduce, 2, Some(1.0));
        check(Op::AllReduce, 4, Some(1.5));
        check(Op::AllReduce, 1, Some(0.0));
        check(Op::Reduce, 4, Some(1.0));
        check(Op::Broadcast, 4, Some(1.0));
        check(Op::AllGather, 4, Some(0.75));
        check(Op::ReduceScatter, 4, Some(0.75));
        check(Op::Gather, 4, Some(0.75));
        check(Op::Scatter, 4, Some(0.75));
        check(Op::AllToAll, 4, Some(0.75));
        check(Op::SendRecv, 4, Some(1.0));
        check(Op::Barrier, 4, None);
    }
}
