//! Calls that are made together: what stands between `ncclGroupStart` and `ncclGroupEnd` begins at its end, at once.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::comm::Comm;
use super::op::{Numbered, Op, run};
use crate::code::Reply;
use crate::device::{Stream, Work};
use crate::machine::{Effect, Kind};

thread_local! {
    static GROUP: RefCell<Group> = const { RefCell::new(Group { depth: 0, tasks: Vec::new(), joining: Vec::new(), failure: None }) };
}

/// One call, and where it is to be done.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) comm: Arc<Comm>,
    pub(crate) stream: Arc<Stream>,
    pub(crate) op: Op,
    /// What goes wrong with it.
    pub(crate) effect: Option<Effect>,
}

/// Calls of a thread that wait for their group's end.
#[derive(Debug)]
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

    /// Ends the innermost group; with the outermost all begins.
    pub(crate) fn end() -> Reply {
        let ended = GROUP.with_borrow_mut(|group| {
            group.depth = group.depth.checked_sub(1)?;
            let parts = (
                std::mem::take(&mut group.tasks),
                std::mem::take(&mut group.joining),
                group.failure.take(),
            );
            if group.depth == 0 {
                Some(Some(parts))
            } else {
                (group.tasks, group.joining, group.failure) = parts;
                Some(None)
            }
        });
        let (tasks, joining, failure) = match ended {
            None => return Reply::INVALID_USAGE,
            Some(None) => return Reply::SUCCESS,
            Some(Some(parts)) => parts,
        };
        if let Some(reply) = failure {
            return reply;
        }
        let joined = joining
            .iter()
            .map(reply_to_join)
            .find(|reply| *reply != Reply::SUCCESS);
        joined.unwrap_or_else(|| begin(tasks))
    }

    /// Begins a call, now or with its group.
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

    /// Waits for a communicator to be joined, now or with its group.
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

    /// A call of the group has failed: at its end nothing begins.
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

/// Puts calls on their streams: those of one communicator on one stream are one piece of work.
fn begin(tasks: Vec<Task>) -> Reply {
    let mut pieces: Vec<(Arc<Comm>, Arc<Stream>, Vec<Numbered>, Option<Effect>)> = Vec::new();
    for Task {
        comm,
        stream,
        op,
        effect,
    } in tasks
    {
        let numbered = op.number(&comm);
        let is_its = |piece: &&mut (Arc<Comm>, Arc<Stream>, Vec<Numbered>, Option<Effect>)| {
            Arc::ptr_eq(&piece.0, &comm) && Arc::ptr_eq(&piece.1, &stream)
        };
        match pieces.iter_mut().find(is_its) {
            Some(piece) => {
                piece.2.push(numbered);
                piece.3 = piece.3.or(effect);
            }
            None => pieces.push((comm, stream, vec![numbered], effect)),
        }
    }
    let mut later: BTreeMap<*const Comm, (Arc<Comm>, Vec<(Arc<Stream>, Work)>)> = BTreeMap::new();
    for (comm, stream, ops, effect) in pieces {
        comm.promise();
        let work = work(comm.clone(), ops, effect);
        if comm.is_blocking {
            stream.device.submit(&stream, work);
        } else {
            let (_, works) = later
                .entry(Arc::as_ptr(&comm))
                .or_insert_with(|| (comm, Vec::new()));
            works.push((stream, work));
        }
    }
    let is_later = !later.is_empty();
    for (comm, works) in later.into_values() {
        comm.later(move || {
            for (stream, work) in works {
                stream.device.submit(&stream, work);
            }
        });
    }
    if is_later {
        Reply::IN_PROGRESS
    } else {
        Reply::SUCCESS
    }
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
    Work::Do(Kind::Nccl, Box::new(work))
}
