//! The page's bytes: the structures drawn in the parent module, and how values are written into their atomics.

use std::sync::atomic::{
    AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst,
};

use super::Revocation;
use super::activity::{Activity, OpActivity, Phase};

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"PACEPAGE");
pub(super) const VERSION: u32 = 7;

/// Longest text of a revocation in bytes.
pub const REVOCATION_TEXT_BYTES_MAX: usize = 1000;

/// Longest address of a generation's store in bytes.
const STORE_BYTES_MAX: usize = 308;

/// Longest reason for a generation in bytes.
const WHY_BYTES_MAX: usize = 312;

/// Words that are polled, words that are written and the text lie in cache lines of their own.
#[repr(C, align(64))]
pub(super) struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    slots: AtomicU32,
    bytes: AtomicU64,
    _identity_line: [u8; 40],
    pub(super) revoked: AtomicU32,
    pub(super) generation: AtomicU32,
    /// The bound and the culprit, [`tagged`].
    pub(super) ended: AtomicU64,
    pub(super) changes: AtomicU32,
    pub(super) recovers: AtomicU32,
    pub(super) begun: AtomicU32,
    /// The generation that is held back, plus one.
    pub(super) held: AtomicU32,
    _revoked_line: [u8; 32],
    pub(super) stop_signal: AtomicI32,
    _stop_line: [u8; 60],
    culprit: AtomicU32,
    cause: RawText<REVOCATION_TEXT_BYTES_MAX>,
    _rest: [u8; 80],
    /// The generation that has begun and the one after it, in either order.
    pub(super) generations: [RawGeneration; 2],
    /// The generation that `why` is about.
    pub(super) explained: AtomicU32,
    pub(super) why: RawText<WHY_BYTES_MAX>,
}

#[repr(C, align(64))]
pub(super) struct RawGeneration {
    pub(super) number: AtomicU32,
    pub(super) world: AtomicU32,
    /// Empty for the job's first store.
    pub(super) store: RawText<STORE_BYTES_MAX>,
}

#[repr(C)]
pub(super) struct RawText<const BYTES_MAX: usize> {
    bytes: AtomicU32,
    text: [AtomicU8; BYTES_MAX],
}

#[repr(C, align(64))]
pub(super) struct RawSlot {
    step: AtomicU64,
    seq: AtomicU64,
    since_ns: AtomicU64,
    phase: AtomicU32,
    operation: AtomicU32,
    bucket: AtomicU32,
    pub(super) awaits: AtomicU32,
    pub(super) pid: AtomicU32,
    pub(super) rank: AtomicU32,
    pub(super) polls_stop: AtomicU32,
    pub(super) stopped_by: AtomicI32,
    pub(super) stopped_at: AtomicU64,
    pub(super) misconfigured: AtomicU32,
    pub(super) recovers: AtomicU32,
    /// The generation and the culprit, [`tagged`].
    pub(super) blame: AtomicU64,
    /// For each place in the header's `generations`, the generation and the rank in it, [`tagged`].
    pub(super) member_of: [AtomicU64; 2],
    pub(super) admits: AtomicU32,
    pub(super) joins: AtomicU32,
    pub(super) timeout_ms: AtomicU32,
    pub(super) finishes: AtomicU32,
    pub(super) leaves_state: AtomicU32,
    pub(super) life: AtomicU32,
    pub(super) weights: AtomicU64,
    pub(super) weights_bytes: AtomicU64,
    pub(super) differed_at: AtomicU64,
    pub(super) differed: AtomicU32,
    pub(super) differences: AtomicU32,
    _rest: [u8; 104],
}

// Processes of different builds may share a page of one version: its layout must not drift unnoticed.
const _: () = {
    assert!(size_of::<Header>() == 2240 && size_of::<RawSlot>() == 256);
    assert!(std::mem::offset_of!(Header, generations) == 1280 && size_of::<RawGeneration>() == 320);
    assert!(std::mem::offset_of!(Header, revoked) == 64);
    assert!(std::mem::offset_of!(Header, ended) == 72);
    assert!(std::mem::offset_of!(Header, recovers) == 84);
    assert!(std::mem::offset_of!(Header, begun) == 88);
    assert!(std::mem::offset_of!(Header, held) == 92);
    assert!(std::mem::offset_of!(Header, stop_signal) == 128);
    assert!(std::mem::offset_of!(Header, culprit) == 192);
    assert!(std::mem::offset_of!(Header, cause) == 196);
    assert!(std::mem::offset_of!(Header, explained) == 1920);
    assert!(std::mem::offset_of!(RawSlot, since_ns) == 16);
    assert!(std::mem::offset_of!(RawSlot, awaits) == 36);
    assert!(std::mem::offset_of!(RawSlot, rank) == 44);
    assert!(std::mem::offset_of!(RawSlot, stopped_at) == 56);
    assert!(std::mem::offset_of!(RawSlot, misconfigured) == 64);
    assert!(std::mem::offset_of!(RawSlot, blame) == 72);
    assert!(std::mem::offset_of!(RawSlot, member_of) == 80);
    assert!(std::mem::offset_of!(RawSlot, joins) == 100);
    assert!(std::mem::offset_of!(RawSlot, timeout_ms) == 104);
    assert!(std::mem::offset_of!(RawSlot, finishes) == 108);
    assert!(std::mem::offset_of!(RawSlot, leaves_state) == 112);
    assert!(std::mem::offset_of!(RawSlot, life) == 116);
    assert!(std::mem::offset_of!(RawSlot, weights) == 120);
    assert!(std::mem::offset_of!(RawSlot, differed) == 144);
};

pub(super) const fn page_bytes(slots: usize) -> usize {
    size_of::<Header>() + slots * size_of::<RawSlot>()
}

impl Header {
    /// Fresh memory is zero, which already means: not revoked, no stop, no activity.
    pub(super) fn initialise(&self, slots: usize) {
        self.version.store(VERSION, Relaxed);
        // SLOTS_MAX keeps the number far below u32's range.
        self.slots.store(slots as u32, Relaxed);
        self.bytes.store(page_bytes(slots) as u64, Relaxed);
        self.magic.store(MAGIC, Relaxed);
    }

    /// The number of slots, or what is wrong with a mapping of `bytes` bytes.
    pub(super) fn validate(&self, bytes: usize) -> Result<usize, String> {
        let magic = self.magic.load(Relaxed);
        if magic != MAGIC {
            return Err(format!(
                "it starts with {magic:#018x} in place of {MAGIC:#018x}"
            ));
        }
        let version = self.version.load(Relaxed);
        if version != VERSION {
            return Err(format!(
                "it has version {version}, but this program knows version {VERSION}"
            ));
        }
        let slots = self.slots.load(Relaxed) as usize;
        let stated = self.bytes.load(Relaxed);
        if slots == 0
            || slots > super::SLOTS_MAX
            || page_bytes(slots) != bytes
            || stated != bytes as u64
        {
            return Err(format!(
                "it says {slots} slots in {stated} bytes, and has {bytes} bytes"
            ));
        }
        Ok(slots)
    }

    pub(super) fn write_cause(&self, cause: &Revocation) {
        self.cause.write(&cause.text);
        self.culprit.store(encode(cause.rank), Relaxed);
    }

    pub(super) fn read_cause(&self) -> Revocation {
        Revocation {
            rank: decode(self.culprit.load(Relaxed)),
            text: self.cause.read(),
        }
    }
}

impl<const BYTES_MAX: usize> RawText<BYTES_MAX> {
    /// Writes the text, or as much of it as fits.
    pub(super) fn write(&self, text: &str) {
        let bytes = text.floor_char_boundary(BYTES_MAX);
        for (cell, byte) in self.text.iter().zip(&text.as_bytes()[..bytes]) {
            cell.store(*byte, Relaxed);
        }
        self.bytes.store(bytes as u32, Relaxed);
    }

    /// Another process wrote this: neither length nor text is trusted.
    pub(super) fn read(&self) -> String {
        let bytes = (self.bytes.load(Relaxed) as usize).min(BYTES_MAX);
        let cells = self.text[..bytes].iter();
        let text: Vec<u8> = cells.map(|cell| cell.load(Relaxed)).collect();
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl RawSlot {
    /// Zeroes all of it, for another process.
    pub(super) fn clear(&self) {
        let Self {
            step,
            seq,
            since_ns,
            phase,
            operation,
            bucket,
            awaits,
            pid,
            rank,
            polls_stop,
            stopped_by,
            stopped_at,
            misconfigured,
            recovers,
            blame,
            member_of: [one, other],
            admits,
            joins,
            timeout_ms,
            finishes,
            leaves_state,
            life,
            differences,
            weights,
            weights_bytes,
            differed_at,
            differed,
            _rest: _,
        } = self;
        for word in [
            step,
            seq,
            since_ns,
            stopped_at,
            blame,
            one,
            other,
            weights,
            weights_bytes,
            differed_at,
        ] {
            word.store(0, SeqCst);
        }
        stopped_by.store(0, SeqCst);
        for word in [
            phase,
            operation,
            bucket,
            awaits,
            pid,
            rank,
            polls_stop,
            misconfigured,
            recovers,
            admits,
            joins,
            timeout_ms,
            finishes,
            leaves_state,
            life,
            differences,
            differed,
        ] {
            word.store(0, SeqCst);
        }
    }

    pub(super) fn store(&self, activity: &Activity, now_ns: u64) {
        let (operation, seq, bucket) = match &activity.op {
            Some(op) => (
                op.code.saturating_add(1),
                op.seq,
                op.bucket.map_or(0, |bucket| bucket.saturating_add(1)),
            ),
            None => (0, 0, 0),
        };
        self.phase.store(activity.phase.code(), Relaxed);
        self.operation.store(operation, Relaxed);
        self.step.store(activity.step, Relaxed);
        self.seq.store(seq, Relaxed);
        self.bucket.store(bucket, Relaxed);
        self.since_ns.store(now_ns, Relaxed);
    }

    pub(super) fn load(&self) -> Option<(Activity, u64)> {
        let phase = Phase::from_code(self.phase.load(Relaxed))?;
        let operation = self.operation.load(Relaxed).checked_sub(1);
        let op = operation.map(|code| OpActivity {
            code,
            seq: self.seq.load(Relaxed),
            bucket: self.bucket.load(Relaxed).checked_sub(1),
        });
        Some((
            Activity {
                phase,
                step: self.step.load(Relaxed),
                op,
            },
            self.since_ns.load(Relaxed),
        ))
    }
}

/// An optional rank as `rank + 1`, so that zeroed memory says none. Ranks beyond u32 do not exist (`env::WORLD_MAX`).
pub(super) fn encode(rank: Option<usize>) -> u32 {
    rank.and_then(|rank| u32::try_from(rank).ok())
        .map_or(0, |rank| rank.saturating_add(1))
}

pub(super) fn decode(word: u32) -> Option<usize> {
    word.checked_sub(1).map(|rank| rank as usize)
}

/// A rank and the number of a generation in one word, so that no reader sees one without the other.
pub(super) fn tagged(rank: Option<usize>, generation: u32) -> u64 {
    u64::from(encode(rank)) << 32 | u64::from(generation)
}

pub(super) fn untagged(word: u64) -> (Option<usize>, u32) {
    (decode((word >> 32) as u32), word as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Header {
        /// What a broken process may have left behind the identity.
        pub(in crate::page) fn fill_for_test(&self, byte: u8) {
            let text = self.cause.text.iter();
            text.for_each(|cell| cell.store(byte, Relaxed));
            self.cause.bytes.store(u32::MAX, Relaxed);
            self.culprit.store(u32::MAX, Relaxed);
        }
    }

    impl RawSlot {
        pub(in crate::page) fn fill_for_test(&self) {
            for word in [
                &self.phase,
                &self.operation,
                &self.bucket,
                &self.awaits,
                &self.pid,
                &self.rank,
                &self.joins,
            ] {
                word.store(u32::MAX, Relaxed);
            }
            for word in self.member_of.iter().chain([&self.blame]) {
                word.store(u64::MAX, Relaxed);
            }
        }
    }
}
