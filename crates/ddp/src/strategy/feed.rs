//! Each shard's slice of a burn-train loader, read one batch ahead.

use std::ops::Range;
use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::tensor::Device;
use burn::train::Interrupter;

type Loader<I> = Arc<dyn DataLoader<I>>;

/// A rank's shards of a loader, for all epochs.
pub(super) struct Slices<I> {
    /// One per shard; `None` for a shard without items.
    loaders: Vec<Option<Loader<I>>>,
    items: usize,
}

/// One epoch of [`Slices`].
pub(super) struct Feeds<'a, I> {
    feeds: Vec<Feed<'a, I>>,
}

/// A shard's batches for one step.
pub(super) struct Portion<I> {
    pub(super) batches: Vec<Batch<I>>,
    /// Whether there is a batch for another step.
    pub(super) more: bool,
}

pub(super) struct Batch<I> {
    pub(super) input: I,
    pub(super) items: usize,
}

impl<I> Slices<I> {
    /// Cuts `loader` into `shards` slices and keeps those of `own`.
    pub(super) fn new(
        loader: &Loader<I>,
        shards: usize,
        own: Range<usize>,
        device: &Device,
    ) -> Self {
        let items = loader.num_items();
        // Every rank makes all slices, because each draws its seed from the loader's generator in this order.
        let slice = |shard: usize| match slice_of(items, shards, shard) {
            _ if shards == 1 => Some(loader.to_device(device)),
            range if range.is_empty() => None,
            range => Some(loader.slice(range.start, range.end).to_device(device)),
        };
        let loaders = (0..shards).map(slice);
        Self {
            loaders: loaders.skip(own.start).take(own.len()).collect(),
            items,
        }
    }

    /// Items of all shards of all ranks.
    pub(super) fn items(&self) -> usize {
        self.items
    }

    /// Starts an epoch.
    pub(super) fn open(&self, interrupter: &Interrupter) -> Feeds<'_, I> {
        let mut feeds = Vec::with_capacity(self.loaders.len());
        for loader in &self.loaders {
            let mut feed = Feed {
                iterator: loader.as_deref().map(|loader| loader.iter()),
                ahead: None,
                counted: 0,
            };
            feed.advance(interrupter);
            feeds.push(feed);
        }
        Feeds { feeds }
    }
}

impl<I> Feeds<'_, I> {
    /// The next batches of every shard, at most `count` each.
    ///
    /// A read error stops `interrupter` and ends the shard's epoch.
    pub(super) fn take(&mut self, count: usize, interrupter: &Interrupter) -> Vec<Portion<I>> {
        let feeds = self.feeds.iter_mut();
        feeds.map(|feed| feed.take(count, interrupter)).collect()
    }
}

struct Feed<'a, I> {
    iterator: Option<Box<dyn DataLoaderIterator<I> + 'a>>,
    ahead: Option<Batch<I>>,
    /// Items in the iterator's last progress.
    counted: usize,
}

impl<I> Feed<'_, I> {
    fn take(&mut self, count: usize, interrupter: &Interrupter) -> Portion<I> {
        let mut batches = Vec::new();
        while batches.len() < count
            && let Some(batch) = self.ahead.take()
        {
            batches.push(batch);
            self.advance(interrupter);
        }
        Portion {
            batches,
            more: self.ahead.is_some(),
        }
    }

    fn advance(&mut self, interrupter: &Interrupter) {
        let Some(iterator) = &mut self.iterator else {
            return;
        };
        match iterator.next() {
            Some(Ok(input)) => {
                let counted = iterator.progress().items_processed;
                // For a loader that does not count, all batches have the same weight.
                let items = counted.saturating_sub(self.counted).max(1);
                self.counted = counted;
                self.ahead = Some(Batch { input, items });
            }
            Some(Err(error)) => {
                self.iterator = None;
                interrupter.fail(error);
            }
            None => self.iterator = None,
        }
    }
}

impl<I> Default for Portion<I> {
    fn default() -> Self {
        Self {
            batches: Vec::new(),
            more: false,
        }
    }
}

/// The items of `shard` when `items` are cut into `shards` slices: the first `items % shards` have one more.
fn slice_of(items: usize, shards: usize, shard: usize) -> Range<usize> {
    let (each, larger) = (items / shards, items % shards);
    let start = shard * each + shard.min(larger);
    start..start + each + usize::from(shard < larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_all_items_and_differ_by_at_most_one() {
        let check = |items, shards, starts: &[usize]| {
            let slices = (0..shards).map(|s| slice_of(items, shards, s));
            let found: Vec<_> = slices.clone().map(|slice| slice.start).collect();
            assert_eq!(found, starts, "{items} items, {shards} shards");
            let ends: Vec<_> = slices.map(|slice| slice.end).collect();
            assert_eq!(ends, [&starts[1..], &[items]].concat());
        };
        check(8, 2, &[0, 4]);
        check(8, 3, &[0, 3, 6]);
        check(2, 4, &[0, 1, 2, 2]);
        check(0, 2, &[0, 0]);
        check(5, 1, &[0]);
    }
}
