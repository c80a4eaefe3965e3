//! Failure notices: what a rank that gives up while its group forms tells the others, and what it hears from them first.
//!
//! The ranks of a formed group have connections on which they tell each other why they leave. While a group forms, some of
//! these are missing, or nobody reads them yet. So a rank that gives up also leaves a notice in the job's store, before it
//! ends any connection. A rank that sees a connection end looks there before it blames a peer: a rank that has left a notice
//! was not the first to fail.

use std::time::{Duration, Instant};

use paceline_rendezvous::store::{Client, Store as _, StoreError};
use serde::{Deserialize, Serialize};

use super::Forming;
use super::record::read_json;
use crate::error::{Error, Ranks};
use crate::mesh::{self, Advice};
use crate::message::Abort;
use crate::socket::Socket;
use crate::status::answer_timeout;

/// What a rank says in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FailureNotice {
    /// The rank that was first with this cause.
    by: usize,
    /// The ranks that it waits for, or blames.
    blames: Vec<usize>,
    /// Whether it gives up with this. Before that it only says for which ranks it waits, and listens.
    is_last: bool,
    /// Whether its time was over.
    deadline: bool,
    /// The cause in its own notices.
    text: String,
}

/// The store does not answer.
struct NoStore;

impl FailureNotice {
    fn of(me: usize, error: &Error, is_last: bool) -> Self {
        let Abort {
            by, culprit, text, ..
        } = Abort::of(me, error);
        let blames = match error {
            Error::Absent { missing, .. } => missing.clone(),
            // These concern no other rank.
            Error::System { .. } | Error::Interface { .. } => vec![me],
            _ => culprit.into_iter().collect(),
        };
        Self {
            by,
            blames,
            is_last,
            deadline: error.is_deadline(),
            text,
        }
    }

    fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a notice has string keys only")
    }

    /// The notice, if the bytes are one of a world of this size.
    fn decode(bytes: &[u8], world: usize) -> Option<Self> {
        let notice: Self = read_json(bytes, "notice").ok()?;
        let known = notice.by < world && notice.blames.iter().all(|rank| *rank < world);
        known.then_some(notice)
    }

    fn into_error(self) -> Error {
        Error::Aborted {
            by: self.by,
            culprit: self.blames.first().copied(),
            cause: self.text,
            deadline: self.deadline,
        }
    }
}

/// What the end of a connection turns out to be.
pub(super) enum Behind {
    /// The peer gave up because of this.
    Cause(Error),
    /// The peer has left no notice.
    Itself,
    /// The store does not answer.
    Unknown,
}

impl Forming<'_> {
    /// The error of a rank whose deadline is over while it waits for the `missing` ranks. It says so in the store, so that
    /// the ranks that wait for it blame those it waits for instead.
    ///
    /// *Blocks*: for [`answer_timeout`], unless all of them have a notice there.
    pub(super) fn absent(
        &self,
        missing: Vec<usize>,
        what: &'static str,
        mut detail: String,
    ) -> Error {
        let me = self.env.rank;
        let until = Instant::now() + answer_timeout(self.options.timeout);
        let waited = self.started.elapsed();
        let error = |missing, detail| Error::Absent {
            rank: me,
            missing,
            what,
            waited,
            detail,
        };
        self.say(&FailureNotice::of(
            me,
            &error(missing.clone(), String::new()),
            false,
        ));
        let notices = missing.iter().map(|peer| {
            let left = until.saturating_duration_since(Instant::now());
            self.notice_of(*peer, left).ok().flatten()
        });
        let notices: Vec<Option<FailureNotice>> = notices.collect();
        // A rank that gave up before its deadline knows more than those that only wait.
        let knows = |notice: &&FailureNotice| {
            notice.is_last && !notice.deadline && !notice.blames.contains(&me)
        };
        if let Some(notice) = notices.iter().flatten().find(knows) {
            return notice.clone().into_error();
        }
        let said = notices
            .into_iter()
            .map(|notice| notice.map(|notice| notice.blames));
        let (accused, more) = accused(me, &missing, &said.collect::<Vec<_>>());
        detail += &more;
        error(accused, detail)
    }

    /// Why the connection to a rank has ended, on which the rank said nothing.
    pub(super) fn behind_the_end_of(&self, peer: usize) -> Behind {
        match self.notice_of(peer, Duration::ZERO) {
            Ok(Some(notice)) if notice.is_last => Behind::Cause(notice.into_error()),
            Ok(_) => Behind::Itself,
            Err(NoStore) => Behind::Unknown,
        }
    }

    /// Leaves this rank's last notice in the store, if that can be reached; the first one stays.
    pub(super) fn leave_notice(&self, error: &Error) {
        self.parted
            .get_or_init(|| self.say(&FailureNotice::of(self.env.rank, error, true)));
    }

    /// Keeps the store that this rank hosts until the others have left their notices.
    ///
    /// *Blocks*: at most for twice [`answer_timeout`]: they hear of others for half of it. That is less than the deadline of an
    /// operation leaves to say who is to blame, because ranks that have formed the group wait in one.
    pub(super) fn await_notices(&self) {
        let Some(store) = self.notices() else { return };
        let others = (0..self.env.world).filter(|rank| *rank != self.env.rank);
        let keys: Vec<String> = others.map(|rank| self.key("parted", rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        // A rank without a notice by then has nothing to say, or has formed the group.
        let _ = store.wait(&keys, answer_timeout(self.options.timeout) * 2);
    }

    fn say(&self, notice: &FailureNotice) {
        let me = self.env.rank;
        let (key, parted, bytes) = (
            self.key("notice", me),
            self.key("parted", me),
            notice.encode(),
        );
        let entries: [(&str, &[u8]); 2] = [(&key, &bytes), (&parted, b"")];
        let entries = match notice.is_last {
            true => &entries[..],
            false => &entries[..1],
        };
        if let Some(store) = self.notices() {
            // Without the store there are only the connections.
            let _ = store.multi_set(entries);
        }
    }

    /// What the store has of a rank.
    fn notice_of(&self, rank: usize, limit: Duration) -> Result<Option<FailureNotice>, NoStore> {
        let store = self.notices().ok_or(NoStore)?;
        match store.get(&self.key("notice", rank), limit) {
            Ok(bytes) => Ok(FailureNotice::decode(&bytes, self.env.world)),
            Err(StoreError::TimedOut { .. }) => Ok(None),
            Err(_) => Err(NoStore),
        }
    }

    fn key(&self, name: &str, rank: usize) -> String {
        format!("{}/{name}/{rank}", self.prefix)
    }

    /// A connection to the store for notices alone, with a shorter limit than others have.
    pub(super) fn notices(&self) -> Option<&Client> {
        let connect = || {
            let limit = answer_timeout(self.options.timeout);
            let (server, env) = (self.client.server(), self.env);
            let client = Client::connect_as(server, &env.token, env.tls, limit).ok()?;
            Some(client.with_answer_timeout(limit))
        };
        self.notices.get_or_init(connect).as_ref()
    }
}

impl Advice for Forming<'_> {
    fn revoked(&self) -> Result<(), Error> {
        self.health()
    }

    fn gave_up(&self, peer: usize) -> Result<(), Error> {
        match self.notice_of(peer, Duration::ZERO) {
            // A rank that waited for this one has nothing to add: the connection between the two is what fails.
            Ok(Some(notice)) if notice.is_last && !notice.blames.contains(&self.env.rank) => {
                Err(notice.into_error())
            }
            _ => Ok(()),
        }
    }

    fn absent(&self, missing: Vec<usize>, detail: String) -> Error {
        self.absent(missing, "connect", detail)
    }

    fn part(&self, links: &[Option<Socket>], error: &Error) {
        mesh::farewell(self.env.rank, links, error);
        self.leave_notice(error);
    }
}

/// The ranks that rank `me` blames: of the `missing` ones, some of which have `said` for which ranks they wait, or others;
/// and why, if it blames others.
fn accused(me: usize, missing: &[usize], said: &[Option<Vec<usize>>]) -> (Vec<usize>, String) {
    // A rank that waits for this one has nothing to add: the connection between the two is what fails.
    let speaks = |rank: &usize| {
        let at = missing.iter().position(|other| other == rank);
        let said = at.and_then(|at| said[at].as_ref());
        said.is_some_and(|ranks| !ranks.contains(&me))
    };
    let silent: Vec<usize> = missing
        .iter()
        .copied()
        .filter(|rank| !speaks(rank))
        .collect();
    if !silent.is_empty() {
        return (silent, String::new());
    }
    let mut named: Vec<usize> = said.iter().flatten().flatten().copied().collect();
    named.retain(|rank| !speaks(rank));
    named.sort_unstable();
    named.dedup();
    match named.is_empty() {
        true => (missing.to_vec(), String::new()),
        false => (named, format!("; {} waited for the same", Ranks(missing))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_itself_is_not_accused_but_whom_it_waits_for() {
        let check = |missing: &[usize], said: &[Option<Vec<usize>>], expect: &[usize]| {
            assert_eq!(accused(1, missing, said).0, expect, "{said:?}");
        };
        check(&[2, 3], &[None, None], &[2, 3]);
        check(&[2, 3], &[Some(vec![3]), None], &[3]);
        check(&[2, 3], &[Some(vec![0]), Some(vec![0])], &[0]);
        check(&[2], &[Some(vec![1])], &[2]);
        check(&[0], &[Some(vec![1, 2])], &[0]);
        check(&[2, 3], &[Some(vec![3]), Some(vec![2])], &[2, 3]);
        assert_eq!(
            accused(1, &[2], &[Some(vec![0])]).1,
            "; rank 2 waited for the same"
        );
    }

    #[test]
    fn a_notice_survives_the_store_and_names_the_rank_that_was_first() {
        let died = Error::PeerLost {
            rank: 2,
            place: "host b, pid 7".into(),
            during: None,
        };
        let told = Abort::of(1, &died).into_error();
        for (error, expect, culprit) in [
            (&died, "rank 3 gave up: rank 2 (host b, pid 7) died", 2),
            (&told, "rank 1 gave up: rank 2 (host b, pid 7) died", 2),
            (
                &Error::System {
                    rank: 3,
                    doing: "listen".into(),
                    reason: "no".into(),
                },
                "rank 3 gave up: rank 3 could not listen: no",
                3,
            ),
        ] {
            let notice = FailureNotice::of(3, error, true);
            let again = FailureNotice::decode(&notice.encode(), 4).unwrap();
            assert_eq!(again, notice);
            assert_eq!(
                (again.clone().into_error().to_string(), again.blames),
                (expect.into(), vec![culprit])
            );
            // It is about no rank of a smaller world.
            assert_eq!(FailureNotice::decode(&notice.encode(), 2), None);
        }
        assert_eq!(FailureNotice::decode(b"notice", 4), None);
    }
}
