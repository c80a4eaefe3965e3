//! Plans ready to run, kept between calls: training issues the same ones in every step.

use std::collections::{HashSet, VecDeque};

use crate::call::Call;
use crate::plan::{INLINE_BYTES_MAX, Layout, Place, Plan, Share, Space, Spec};

/// Plans kept. A step of training has one for each bucket and few others.
const PLANS_MAX: usize = 64;
/// Alignment of what lies in staging memory.
///
/// *Units*: elements; a cache line even of bytes.
const LINE: usize = 64;

/// A plan, and what is worth computing once of it.
#[derive(Debug)]
pub(super) struct Prepared {
    spec: Spec,
    rank: usize,
    pub(super) plan: Plan,
    /// By rank, `In` and `Out`; only of this rank, and what its tasks touch of others: an uneven layout is as long as the world.
    layouts: Vec<[Option<Layout>; 2]>,
    /// Whose memory its tasks touch: this rank is not among them.
    pub(super) touched: Vec<(usize, Space)>,
    /// By round: what is copied into staging before it, and out of it after.
    pub(super) stage: Vec<Vec<(Place, usize)>>,
    pub(super) unstage: Vec<Vec<(Place, usize)>>,
    /// First element of each `Temp` slot, and the end of the last.
    temp: Vec<usize>,
    /// Elements that the largest `In` has, if one meeting is all the plan needs.
    one_pull: Option<usize>,
    /// Elements that peers read of this rank, or that it stores into their memory.
    sent: usize,
}

impl Prepared {
    fn new(spec: Spec, rank: usize) -> Self {
        let plan = Plan::new(&spec, rank);
        let tasks = || plan.rounds.iter().flat_map(|round| &round.tasks);
        let spots = || tasks().flat_map(|task| task.inputs.iter().chain(&task.outputs));
        let others = spots().filter(|spot| spot.rank != rank);
        let touched: HashSet<_> = others.map(|spot| (spot.rank, spot.place.space)).collect();
        let mut touched: Vec<(usize, Space)> = touched.into_iter().collect();
        touched.sort_unstable_by_key(|(rank, _)| *rank);
        let mut layouts = vec![[None, None]; spec.world()];
        let own = [(rank, Space::In), (rank, Space::Out)];
        for (one, space) in touched.iter().copied().chain(own) {
            let made = &mut layouts[one][usize::from(space != Space::In)];
            made.get_or_insert_with(|| Layout::of(&spec, one, space));
        }
        let mut temp = vec![0];
        for elements in &plan.temp {
            temp.push(temp[temp.len() - 1] + elements.next_multiple_of(LINE));
        }
        // Stream peers are sent this rank's own memory, unless its tasks overwrite it, and store there.
        let mapped = |share: &&Share| spec.hosts.host(share.peer) == spec.hosts.host(rank);
        let staged = |share: &&Share| mapped(share) || plan.lends_copies;
        let stage = plan.lends.iter();
        let stage = stage.map(|shares| disjoint(shares.iter().filter(staged)));
        let unstage = plan.gets.iter();
        let unstage = unstage.map(|shares| disjoint(shares.iter().filter(mapped)));
        let lent = plan.lends.iter().flatten().map(|share| share.len);
        let given = tasks().map(|task| {
            let others = task.outputs.iter().filter(|spot| spot.rank != rank);
            task.len * others.count()
        });
        Self {
            sent: lent.chain(given).sum(),
            stage: stage.collect(),
            unstage: unstage.collect(),
            one_pull: spec.is_one_pull().then(|| spec.largest_input()),
            rank,
            layouts,
            touched,
            temp,
            plan,
            spec,
        }
    }

    /// Bytes that leave this rank, if an element has `size`.
    pub(super) fn sent_bytes(&self, size: usize) -> u64 {
        (self.sent * size) as u64
    }

    pub(super) fn layout(&self, rank: usize, space: Space) -> &Layout {
        let made = self.layouts[rank][usize::from(space != Space::In)].as_ref();
        made.expect("a touched rank's layout")
    }

    pub(super) fn layouts_len(&self) -> usize {
        self.layouts.len()
    }

    pub(super) fn in_place(&self) -> bool {
        self.spec.pattern.in_place()
    }

    /// Whether what ranks lend fits their cells. The same on all ranks.
    pub(super) fn is_inline(&self, size: usize) -> bool {
        self.one_pull
            .is_some_and(|elements| elements * size <= INLINE_BYTES_MAX)
    }

    pub(super) fn temp_bytes(&self, size: usize) -> usize {
        self.temp[self.temp.len() - 1] * size
    }

    pub(super) fn temp_start(&self, slot: usize) -> usize {
        self.temp[slot]
    }

    /// First element of each staged space.
    pub(super) fn staging_starts(&self) -> [usize; 2] {
        let input = self.layout(self.rank, Space::In).total();
        match self.in_place() {
            true => [0; 2],
            false => [0, input.next_multiple_of(LINE)],
        }
    }

    /// Room for both staged spaces.
    pub(super) fn staging_bytes(&self, size: usize) -> usize {
        let [input, output] =
            [Space::In, Space::Out].map(|space| self.layout(self.rank, space).total());
        let [_, start] = self.staging_starts();
        input.max(start + output) * size
    }
}

/// The places of shares without those that are there twice: several peers may read the same.
fn disjoint<'a>(shares: impl Iterator<Item = &'a Share>) -> Vec<(Place, usize)> {
    let key = |share: &Share| {
        let space = u8::from(share.place.space != Space::In);
        (space, share.place.slot, share.place.at)
    };
    let mut sorted: Vec<&Share> = shares.collect();
    sorted.sort_by_key(|share| key(share));
    let mut places: Vec<(Place, usize)> = Vec::new();
    for share in sorted {
        match places.last_mut() {
            Some((place, len))
                if place.space == share.place.space
                    && place.slot == share.place.slot
                    && share.place.at <= place.at + *len =>
            {
                *len = (*len).max(share.place.at + share.len - place.at);
            }
            _ => places.push((share.place, share.len)),
        }
    }
    places
}

/// The plans of the last calls, the latest first.
#[derive(Debug, Default)]
pub(super) struct Cache {
    plans: VecDeque<Prepared>,
}

impl Cache {
    /// The plan of the piece of a call that begins with element `first`.
    pub(super) fn get(&mut self, call: &Call, rank: usize, first: usize) -> &Prepared {
        let (total, piece) = (call.header.total, call.header.piece);
        let cut;
        let spec = if piece >= total {
            &call.spec
        } else {
            let pattern = call.spec.pattern.piece(first, piece);
            cut = Spec {
                pattern,
                ..call.spec.clone()
            };
            &cut
        };
        if let Some(found) = self.plans.iter().position(|kept| kept.spec.is(spec)) {
            // Calls come in a fixed order; what is in front is looked at first.
            if found > 0 {
                self.plans.swap(0, found);
            }
        } else {
            self.plans.truncate(PLANS_MAX - 1);
            self.plans.push_front(Prepared::new(spec.clone(), rank));
        }
        &self.plans[0]
    }
}
