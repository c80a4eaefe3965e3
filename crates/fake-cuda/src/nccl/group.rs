//! Grouped calls: calls between `ncclGroupStart` and `ncclGroupEnd` all begin at the end of the group.

use std::cell::RefCell;
use std::sync::Arc;

use super::comm::Comm;
use super::op::{Numbered, Op, run};
use crate::code::Reply;
use crate::device::{Stream, Work};
use crate::machine::{Effect, Kind};

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// One call and its stream.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) comm: Arc<Comm>,
    pub(crate) stream: Arc<Stream>,
    pub(crate) op: Op,
    /// Its fault.
    pub(crate) effect: Option<Effect>,
}

/// A thread's calls that wait for the end of their group.
#[derive(Debug, Default)]
pub(crate) struct Group {
    depth: u32,
    tasks: Vec<Task>,
    joining: Vec<Arc<Comm>>,
    failure: Option<Reply>,
}

impl Group {
    pub(crate) fn start() {
        GROUP.with_borrow_mut(|group| group.depth += 1);
    }

    /// Ends the innermost group; the end of the outermost begins the calls.
    pub(crate) fn end() -> Reply {
        let ended = GROUP.with_borrow_mut(|group| {
            group.depth = group.depth.checked_sub(1)?;
            Some((group.depth == 0).then(|| std::mem::take(group)))
        });
        let group = match ended {
            None => return Reply::INVALID_USAGE,
            Some(None) => return Reply::SUCCESS,
            Some(Some(group)) => group,
        };
        if let Some(reply) = group.failure {
            return reply;
        }
        let mut joined = group.joining.iter().map(reply_to_join);
        let failed = joined.find(|reply| *reply != Reply::SUCCESS);
        failed.unwrap_or_else(|| begin(group.tasks))
    }

    /// Begins a call, at once or with its group.
    pub(crate) fn add(task: Task) -> Reply {
        let alone = GROUP.with_borrow_mut(|group| {
            if group.depth == 0 {
                return Some(task);
            }
            group.tasks.push(task);
            None
        });
        alone.map_or(Reply::SUCCESS, |task| begin(vec![task]))
    }

    /// Waits for a join, at once or with its group.
    pub(crate) fn await_join(comm: Arc<Comm>) -> Reply {
        let alone = GROUP.with_borrow_mut(|group| {
            if group.depth == 0 {
                return Some(comm);
            }
            group.joining.push(comm);
            None
        });
        alone.map_or(Reply::SUCCESS, |comm| reply_to_join(&comm))
    }

    /// Whether this thread has an open group.
    pub(crate) fn is_open() -> bool {
        GROUP.with_borrow(|group| group.depth > 0)
    }

    /// Records that a call of the group failed, so that none begins.
    pub(crate) fn fail(reply: Reply) {
        GROUP.with_borrow_mut(|group| {
            if group.depth > 0 {
                group.failure.get_or_insert(reply);
            }
        });
    }
}

fn reply_to_join(comm: &Arc<Comm>) -> Reply {
    if comm.is_blocking {
        comm.wait_until_settled()
    } else {
        comm.reply()
    }
}

/// The calls of one communicator on one stream: one piece of work.
struct Piece {
    comm: Arc<Comm>,
    stream: Arc<Stream>,
    ops: Vec<Numbered>,
    effect: Option<Effect>,
}

/// Puts calls on their streams.
fn begin(tasks: Vec<Task>) -> Reply {
    let mut pieces: Vec<Piece> = Vec::new();
    for task in tasks {
        let Task {
            comm,
            stream,
            op,
            effect,
        } = task;
        let numbered = op.number(&comm);
        let is_its = |piece: &&mut Piece| {
            Arc::ptr_eq(&piece.comm, &comm) && Arc::ptr_eq(&piece.stream, &stream)
        };
        match pieces.iter_mut().find(is_its) {
            Some(piece) => {
                piece.ops.push(numbered);
                piece.effect = piece.effect.or(effect);
            }
            None => pieces.push(Piece {
                comm,
                stream,
                ops: vec![numbered],
                effect,
            }),
        }
    }
    let mut reply = Reply::SUCCESS;
    // A communicator's background work completes as a whole.
    let (now, mut later): (Vec<Piece>, Vec<Piece>) =
        pieces.into_iter().partition(|piece| piece.comm.is_blocking);
    now.into_iter().for_each(submit);
    while let Some(first) = later.first() {
        let comm = first.comm.clone();
        let (own, others) = later
            .into_iter()
            .partition(|piece| Arc::ptr_eq(&piece.comm, &comm));
        later = others;
        let own: Vec<Piece> = own;
        own.iter().for_each(|piece| piece.comm.promise());
        comm.later(move || own.into_iter().for_each(submit_promised));
        reply = Reply::IN_PROGRESS;
    }
    reply
}

fn submit(piece: Piece) {
    piece.comm.promise();
    submit_promised(piece);
}

fn submit_promised(piece: Piece) {
    let Piece {
        comm,
        stream,
        ops,
        effect,
    } = piece;
    stream.device.submit(&stream, work(comm, ops, effect));
}

fn work(comm: Arc<Comm>, ops: Vec<Numbered>, effect: Option<Effect>) -> Work {
    let work = move || {
        comm.keep_promise(|| match effect {
            Some(Effect::Hang) => Err(comm.wait_for_abort()),
            Some(Effect::Async(code)) => {
                comm.fail(Reply(code), "the work fails as it is told to");
                Err(comm.wait_for_abort())
            }
            _ => run(&comm, &ops),
        });
        Ok(())
    };
    Work::new(Kind::Nccl, work)
}
