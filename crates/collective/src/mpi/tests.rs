//! Lines over a stand-in for MPI: messages in this process's memory, matched by process and tag, in order.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::io::IoSlice;
use std::sync::Arc;

use parking_lot::Mutex;

use super::messages::{Address, Messages, Request};
use super::{Library, Line};

type Waiting = HashMap<(i32, i32), VecDeque<(usize, Room, usize)>>;

/// Messages between processes 0 and 1 of a job.
#[derive(Debug, Default)]
struct Exchange {
    next: usize,
    /// By receiver's process and tag, receives that wait: their request, room and length.
    posted: Waiting,
    /// By receiver's process and tag, sends that wait for a receive.
    sent: Waiting,
    /// Requests that are done, with the length of their message.
    done: HashMap<usize, usize>,
}

#[derive(Debug, Clone, Copy)]
struct Room(*mut u8);

// SAFETY: those who give an address keep it valid until their request is done.
unsafe impl Send for Room {}

/// One process's side. Every message waits for its receive, as long ones do in MPI.
#[derive(Debug)]
struct Process {
    number: i32,
    exchange: Arc<Mutex<Exchange>>,
}

impl Exchange {
    fn request(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    fn matched(&mut self, key: (i32, i32)) {
        let (Some(posted), Some(sent)) = (self.posted.get_mut(&key), self.sent.get_mut(&key))
        else {
            return;
        };
        while let (Some(receive), Some(send)) = (posted.front(), sent.front()) {
            let ((receive, room, limit), (send, bytes, len)) = (*receive, *send);
            assert!(len <= limit, "a message of {len} bytes in room for {limit}");
            // SAFETY: both are valid until the requests are done, which they are not yet.
            unsafe { room.0.copy_from_nonoverlapping(bytes.0, len) };
            self.done.extend([(receive, len), (send, 0)]);
            posted.pop_front();
            sent.pop_front();
        }
    }
}

impl Messages for Process {
    unsafe fn send(&self, to: Address, bytes: *const u8, len: usize) -> Result<Request, String> {
        let mut exchange = self.exchange.lock();
        let (request, key) = (exchange.request(), (to.process, to.tag));
        let waiting = exchange.sent.entry(key).or_default();
        waiting.push_back((request, Room(bytes.cast_mut()), len));
        exchange.matched(key);
        Ok(Request(request))
    }

    unsafe fn receive(&self, from: Address, room: *mut u8, len: usize) -> Result<Request, String> {
        let mut exchange = self.exchange.lock();
        let (request, key) = (exchange.request(), (self.number, from.tag));
        let waiting = exchange.posted.entry(key).or_default();
        waiting.push_back((request, Room(room), len));
        exchange.matched(key);
        Ok(Request(request))
    }

    fn test(&self, request: &mut Request) -> Result<Option<usize>, String> {
        Ok(self.exchange.lock().done.remove(&request.0))
    }

    fn end(&self, request: Request, receives: bool) -> bool {
        let mut exchange = self.exchange.lock();
        for waiting in exchange.posted.values_mut().filter(|_| receives) {
            if let Some(at) = waiting.iter().position(|one| one.0 == request.0) {
                waiting.remove(at);
                return true;
            }
        }
        exchange.done.remove(&request.0).is_some()
    }
}

/// Both ends of a line whose messages have at most `message_bytes` bytes.
fn pair_of(message_bytes: usize) -> (Line, Line) {
    let exchange = Arc::new(Mutex::new(Exchange::default()));
    let end = |number: i32| {
        let process = Process {
            number,
            exchange: exchange.clone(),
        };
        let at = |process: i32| Address {
            process,
            tag: 1 + process,
        };
        let from = Address {
            process: 1 - number,
            ..at(number)
        };
        Line::new(Arc::new(process), at(1 - number), from, message_bytes)
    };
    (end(0), end(1))
}

/// For tests of what goes over lines.
pub(crate) fn pair() -> (Line, Line) {
    pair_of(10_000)
}

fn write(line: &mut Line, text: &str) -> usize {
    let (one, two) = text.as_bytes().split_at(text.len() / 2);
    let parts = [IoSlice::new(one), IoSlice::new(two)];
    line.write(&parts).unwrap()
}

fn read(line: &mut Line, most: usize) -> Option<String> {
    let mut bytes = vec![0; most];
    let n = line.read(&mut bytes).unwrap()?;
    Some(String::from_utf8(bytes[..n].to_vec()).unwrap())
}

#[test]
fn bytes_arrive_in_order_whatever_the_messages_were() {
    let (mut here, mut there) = pair_of(6);
    assert_eq!(read(&mut there, 9), None, "nothing has come");
    assert_eq!(write(&mut here, "abc"), 3);
    assert_eq!(write(&mut here, "defghijk"), 6, "no more than a message");
    assert_eq!(read(&mut there, 2).as_deref(), Some("ab"));
    assert_eq!(read(&mut there, 9).as_deref(), Some("c"));
    assert_eq!(read(&mut there, 9).as_deref(), Some("defghi"));
    assert_eq!(read(&mut there, 9), None);
    assert_eq!(write(&mut there, "back"), 4);
    assert_eq!(read(&mut here, 9).as_deref(), Some("back"));
}

#[test]
fn a_line_takes_no_more_than_it_has_room_for_and_says_what_has_not_left() {
    let (mut here, mut there) = pair_of(4);
    let taken: Vec<usize> = (0..6).map(|_| write(&mut here, "abcd")).collect();
    assert_eq!(taken, [4, 4, 4, 4, 0, 0]);
    assert!(!here.flush().unwrap() && here.holds_unsent());
    assert_eq!((here.bytes(), there.bytes()), (16, 0));
    let mut arrived = 0;
    while let Some(text) = read(&mut there, 9) {
        assert_eq!(text, "abcd");
        arrived += 1;
    }
    assert_eq!(arrived, 4);
    assert!(here.flush().unwrap() && !here.holds_unsent());
    assert_eq!(write(&mut here, "more"), 4);
    assert_eq!(read(&mut there, 9).as_deref(), Some("more"));
}

#[test]
fn what_is_still_on_its_way_when_a_line_ends_keeps_its_memory() {
    let (mut here, mut there) = pair_of(4);
    assert_eq!(write(&mut here, "late"), 4);
    drop(here);
    // A peer that was stopped for long still gets the bytes that were sent.
    assert_eq!(read(&mut there, 9).as_deref(), Some("late"));
}

#[test]
fn a_library_that_is_none_is_refused_in_words() {
    let refused = |name: &str| Library::open(name).unwrap_err();
    let missing = refused("libmpi.so.4711");
    assert!(
        missing.contains("cannot open shared object file"),
        "{missing}"
    );
    assert_eq!(
        refused("libc.so.6"),
        "it has no function MPI_Get_library_version"
    );
}
