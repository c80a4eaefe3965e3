//! A line to one process over MPI: bytes in order, in both directions, without ever waiting.
//!
//! MPI works on memory that belongs to the line alone. If a call fails, a message may still be on its way for ever, and cannot
//! be called back: its memory is then never freed, and the caller's memory is out of MPI's reach.
#![allow(unsafe_code)]

use std::io::IoSlice;
use std::ptr::NonNull;
use std::sync::Arc;

use super::messages::{Address, Messages, Request};

/// Messages on their way in each direction: one is filled or emptied while others travel.
const SLOTS: usize = 4;

/// Longest message. Open MPI sends up to 64 KiB over TCP without asking the receiver first: 16 MiB took 8.5 ms on
/// loopback with a little less, 15 with 128 KiB, 12 with 32 KiB. Over shared memory there was no such difference.
const MESSAGE_BYTES_MAX: usize = 63 << 10;
/// Longest where there are so many ranks that memory counts.
const MESSAGE_BYTES_MIN: usize = 4 << 10;
/// What one message from each rank of a group may take together before messages become shorter.
const MESSAGES_BYTES: usize = 8 << 20;

/// The greatest length of a message in a group of `world` ranks.
pub(crate) fn message_bytes(world: usize) -> usize {
    (MESSAGES_BYTES / world.max(1)).clamp(MESSAGE_BYTES_MIN, MESSAGE_BYTES_MAX)
}

/// A line to one process. Both ends have messages of the same greatest length.
#[derive(Debug)]
pub(crate) struct Line {
    messages: Arc<dyn Messages>,
    to: Address,
    from: Address,
    message_bytes: usize,
    sending: Ring,
    receiving: Ring,
}

/// Messages in the order in which they leave or arrive.
#[derive(Debug, Default)]
struct Ring {
    slots: [Slot; SLOTS],
    next: usize,
}

/// Room for one message.
#[derive(Debug, Default)]
struct Slot {
    memory: Option<NonNull<[u8]>>,
    /// MPI has the memory until it is done.
    request: Option<Request>,
    /// What has arrived and was not read: bytes `start..end`.
    start: usize,
    end: usize,
}

// SAFETY: a slot's memory is its own, and is accessed through the slot alone.
unsafe impl Send for Slot {}
// SAFETY: the same; shared references give no access to it.
unsafe impl Sync for Slot {}

impl Line {
    /// `to` is where this process sends, `from` whence it receives, with a tag of its own.
    pub(crate) fn new(
        messages: Arc<dyn Messages>,
        to: Address,
        from: Address,
        message_bytes: usize,
    ) -> Self {
        Self {
            messages,
            to,
            from,
            message_bytes,
            sending: Ring::default(),
            receiving: Ring::default(),
        }
    }

    /// Says the first word on the line.
    pub(crate) fn greet(&mut self, word: &str) -> Result<(), String> {
        self.write(&[IoSlice::new(word.as_bytes())]).map(drop)
    }

    /// Whether the other end's first word has come.
    ///
    /// *Errors*: it is not the one that was expected.
    pub(crate) fn hear(&mut self, word: &str) -> Result<bool, String> {
        let mut said = vec![0; word.len()];
        let heard = self.read(&mut said)?;
        match heard {
            Some(len) if said[..len] != *word.as_bytes() => {
                Err("what MPI brings from it does not begin with its word".into())
            }
            heard => Ok(heard.is_some()),
        }
    }

    /// Takes as many of the bytes as there is room for; how many.
    pub(crate) fn write(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, String> {
        let slot = &mut self.sending.slots[self.sending.next];
        if !slot.is_free(&*self.messages)? {
            return Ok(0);
        }
        let room = slot.room(self.message_bytes);
        let mut len = 0;
        for part in parts {
            let taken = part.len().min(room.len() - len);
            room[len..len + taken].copy_from_slice(&part[..taken]);
            len += taken;
        }
        let start = room.as_ptr();
        // SAFETY: the slot's memory is not touched before the request is done, and never freed before that.
        slot.request = Some(unsafe { self.messages.send(self.to, start, len) }?);
        self.sending.next = (self.sending.next + 1) % SLOTS;
        Ok(len)
    }

    /// Moves on what has been taken; whether all of it has left.
    pub(crate) fn flush(&mut self) -> Result<bool, String> {
        for slot in &mut self.sending.slots {
            slot.is_free(&*self.messages)?;
        }
        Ok(!self.holds_unsent())
    }

    /// Whether something that was taken had not left when that was last looked at.
    pub(crate) fn holds_unsent(&self) -> bool {
        let mut slots = self.sending.slots.iter();
        slots.any(|slot| slot.request.is_some())
    }

    /// Gives what has arrived; how many bytes, or nothing if nothing has.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> Result<Option<usize>, String> {
        self.listen()?;
        let slot = &mut self.receiving.slots[self.receiving.next];
        if !slot.is_free(&*self.messages)? {
            return Ok(None);
        }
        let (start, end) = (slot.start, slot.end);
        let n = (end - start).min(into.len());
        into[..n].copy_from_slice(&slot.room(self.message_bytes)[start..start + n]);
        slot.start += n;
        if slot.start == end {
            slot.receive(&*self.messages, self.from, self.message_bytes)?;
            self.receiving.next = (self.receiving.next + 1) % SLOTS;
        }
        Ok(Some(n))
    }

    /// Has MPI receive into all slots, from the first read on: a line that is not used needs no memory.
    fn listen(&mut self) -> Result<(), String> {
        for slot in &mut self.receiving.slots {
            if slot.memory.is_none() {
                slot.receive(&*self.messages, self.from, self.message_bytes)?;
            }
        }
        Ok(())
    }

    /// Memory for messages.
    pub(crate) fn bytes(&self) -> usize {
        let slots = self.sending.slots.iter().chain(&self.receiving.slots);
        slots.filter(|slot| slot.memory.is_some()).count() * self.message_bytes
    }
}

impl Slot {
    /// Whether MPI is done with the memory.
    fn is_free(&mut self, messages: &dyn Messages) -> Result<bool, String> {
        let Some(request) = &mut self.request else {
            return Ok(true);
        };
        let Some(len) = messages.test(request)? else {
            return Ok(false);
        };
        self.request = None;
        (self.start, self.end) = (0, len);
        Ok(true)
    }

    /// The memory, which must be free.
    fn room(&mut self, bytes: usize) -> &mut [u8] {
        assert!(self.request.is_none(), "MPI has this memory");
        let made = || NonNull::from(Box::leak(vec![0; bytes].into_boxed_slice()));
        let mut memory = *self.memory.get_or_insert_with(made);
        // SAFETY: it was allocated here, and nobody else has it now.
        unsafe { memory.as_mut() }
    }

    fn receive(
        &mut self,
        messages: &dyn Messages,
        from: Address,
        bytes: usize,
    ) -> Result<(), String> {
        let room = self.room(bytes).as_mut_ptr();
        // SAFETY: the slot's memory is not touched before the request is done, and never freed before that.
        self.request = Some(unsafe { messages.receive(from, room, bytes) }?);
        Ok(())
    }

    /// Frees the memory, unless MPI has it and does not give it back.
    fn free(&mut self, messages: &dyn Messages, receives: bool) {
        let request = self.request.take();
        let is_free = request.is_none_or(|request| messages.end(request, receives));
        if let Some(memory) = self.memory.take().filter(|_| is_free) {
            // SAFETY: it came from a box, and nobody has it any more.
            drop(unsafe { Box::from_raw(memory.as_ptr()) });
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        for (ring, receives) in [(&mut self.sending, false), (&mut self.receiving, true)] {
            for slot in &mut ring.slots {
                slot.free(&*self.messages, receives);
            }
        }
    }
}
