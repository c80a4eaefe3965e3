//! Samples of performance counters that programs hold, each with the device and the order in which it was filled.

use std::collections::BTreeMap;

use crate::model::Code;

/// All samples of a copy of the library.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    held: BTreeMap<usize, Option<Filled>>,
    allocated: usize,
    filled: u64,
}

#[derive(Debug, Clone, Copy)]
struct Filled {
    device: u32,
    turn: u64,
}

impl Samples {
    /// The number of an empty one; no number comes twice.
    pub(crate) fn allocate(&mut self) -> usize {
        self.allocated += 1;
        self.held.insert(self.allocated, None);
        self.allocated
    }

    pub(crate) fn free(&mut self, number: usize) -> Result<(), Code> {
        let freed = self.held.remove(&number);
        freed.map(|_| ()).ok_or(Code::INVALID_ARGUMENT)
    }

    pub(crate) fn fill(&mut self, number: usize, device: u32) -> Result<(), Code> {
        let place = self.held.get_mut(&number).ok_or(Code::INVALID_ARGUMENT)?;
        self.filled += 1;
        *place = Some(Filled {
            device,
            turn: self.filled,
        });
        Ok(())
    }

    /// The device that two samples are of, the earlier one first.
    pub(crate) fn device_between(&self, [earlier, later]: [usize; 2]) -> Option<u32> {
        let filled = |number| *self.held.get(&number)?;
        let (earlier, later): (Filled, Filled) = (filled(earlier)?, filled(later)?);
        let is_pair = earlier.device == later.device && earlier.turn < later.turn;
        is_pair.then_some(later.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_samples_of_one_device_in_their_order_are_a_pair() {
        let mut samples = Samples::default();
        let [a, b] = [samples.allocate(), samples.allocate()];
        assert_eq!(samples.device_between([a, b]), None, "both are empty");
        assert_eq!(samples.fill(a, 1), Ok(()));
        assert_eq!(samples.fill(b, 1), Ok(()));
        assert_eq!(samples.device_between([a, b]), Some(1));
        assert_eq!(samples.device_between([b, a]), None, "the wrong way round");
        assert_eq!(samples.fill(a, 2), Ok(()));
        assert_eq!(samples.device_between([b, a]), None, "of two devices");
        assert_eq!(samples.free(b), Ok(()));
        assert_eq!(samples.free(b), Err(Code::INVALID_ARGUMENT), "freed twice");
        assert_eq!(samples.fill(b, 1), Err(Code::INVALID_ARGUMENT));
    }
}
