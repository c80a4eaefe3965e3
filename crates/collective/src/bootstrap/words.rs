//! What a rank that gives up while its group forms tells the others, and what it hears from them first.
//!
//! The ranks of a formed group have connections on which they tell each other why they go. While a group forms some of
//! these are missing, or nobody reads them yet. So a rank that gives up leaves its word in the job's store as well, before
//! it ends any connection; and whoever sees a connection end looks there before it blames anybody: a rank that has left a
//! word was not the first to fail.

use std::time::{Duration, Instant};

use paceline_rendezvous::store::{Client, Store as _, StoreError};
use serde::{Deserialize, Serialize};

use super::Forming;
use crate::error::{Error, Ranks};
use crate::mesh::{self, Counsel};
use crate::message::Abort;
use crate::socket::Socket;

/// How long a rank whose deadline is over may take to say for whom it waited: half of it to hear of the others. Less than
/// an operation's deadline leaves for that, which whoever has formed the group nevertheless waits in.
const WORD_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest encoded word that is read.
const WORD_BYTES_MAX: usize = 64 << 10;

/// What a rank says in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Word {
    /// The rank that was first with this cause.
    by: usize,
    /// Whom it waits for, or blames.
    blames: Vec<usize>,
    /// Whether it gives up with this. Before that it only says for whom it waits, and listens.
    is_last: bool,
    /// Whether its time was over.
    deadline: bool,
    /// The cause in its own words.
    text: String,
}

/// What there is of a rank in the store.
enum Heard {
    Word(Word),
    Nothing,
    /// The store does not answer.
    NoStore,
}

impl Word {
    fn of(me: usize, error: &Error, is_last: bool) -> Self {
        let Abort {
            by, culprit, text, ..
        } = Abort::of(me, error);
        let blames = match error {
            Error::Absent { missing, .. } => missing.clone(),
            // Nobody else has to do with these.
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
        serde_json::to_vec(self).expect("a word has string keys only")
    }

    /// A word, unless the bytes are none of a world of this size.
    fn decode(bytes: &[u8], world: usize) -> Option<Self> {
        if bytes.len() > WORD_BYTES_MAX {
            return None;
        }
        let word: Self = serde_json::from_slice(bytes).ok()?;
        let known = word.by < world && word.blames.iter().all(|rank| *rank < world);
        known.then_some(word)
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
    /// The peer has left no word.
    Itself,
    /// The store does not answer.
    Unknown,
}

impl Forming<'_> {
    /// The error of a rank whose deadline is over while it waits for the `missing` ranks. It says so in the store: who says
    /// so keeps nobody waiting by itself, but those do for whom it waits.
    ///
    /// *Blocks*: for half of [`WORD_TIMEOUT`], unless all of them have a word there.
    pub(super) fn absent(
        &self,
        missing: Vec<usize>,
        what: &'static str,
        mut detail: String,
    ) -> Error {
        let me = self.env.rank;
        let until = Instant::now() + WORD_TIMEOUT / 2;
        let waited = self.started.elapsed();
        let error = |missing, detail| Error::Absent {
            rank: me,
            missing,
            what,
            waited,
            detail,
        };
        self.say(&Word::of(me, &error(missing.clone(), String::new()), false));
        let words = missing.iter().map(|peer| {
            let left = until.saturating_duration_since(Instant::now());
            match self.word_of(*peer, left) {
                Heard::Word(word) => Some(word),
                Heard::Nothing | Heard::NoStore => None,
            }
        });
        let words: Vec<Option<Word>> = words.collect();
        // Who gave up for another reason than that its time was over knows what those who only wait do not.
        let knows = |word: &&Word| word.is_last && !word.deadline && !word.blames.contains(&me);
        if let Some(word) = words.iter().flatten().find(knows) {
            return word.clone().into_error();
        }
        let said = words.into_iter().map(|word| word.map(|word| word.blames));
        let (accused, more) = accused(me, &missing, &said.collect::<Vec<_>>());
        detail += &more;
        error(accused, detail)
    }

    /// What is behind the end of the connection to a rank, which has said nothing there.
    pub(super) fn behind_the_end_of(&self, peer: usize) -> Behind {
        match self.word_of(peer, Duration::ZERO) {
            Heard::Word(word) if word.is_last => Behind::Cause(word.into_error()),
            Heard::Word(_) | Heard::Nothing => Behind::Itself,
            Heard::NoStore => Behind::Unknown,
        }
    }

    /// Leaves this rank's last word in the store, as far as that can be reached; the first one stays.
    pub(super) fn leave_word(&self, error: &Error) {
        self.parted
            .get_or_init(|| self.say(&Word::of(self.env.rank, error, true)));
    }

    /// Keeps the store that this rank hosts until the others have had their say.
    ///
    /// *Blocks*: at most for [`WORD_TIMEOUT`].
    pub(super) fn await_words(&self) {
        let Some(store) = self.words() else { return };
        let others = (0..self.env.world).filter(|rank| *rank != self.env.rank);
        let keys: Vec<String> = others.map(|rank| self.key("parted", rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        // Whoever says nothing by then is silent, or has formed the group.
        let _ = store.wait(&keys, WORD_TIMEOUT);
    }

    fn say(&self, word: &Word) {
        let me = self.env.rank;
        let (key, parted, bytes) = (self.key("word", me), self.key("parted", me), word.encode());
        let entries: [(&str, &[u8]); 2] = [(&key, &bytes), (&parted, b"")];
        let entries = match word.is_last {
            true => &entries[..],
            false => &entries[..1],
        };
        if let Some(store) = self.words() {
            // Without the store there are only the connections.
            let _ = store.multi_set(entries);
        }
    }

    fn word_of(&self, rank: usize, limit: Duration) -> Heard {
        let Some(store) = self.words() else {
            return Heard::NoStore;
        };
        match store.get(&self.key("word", rank), limit) {
            Ok(bytes) => Word::decode(&bytes, self.env.world).map_or(Heard::Nothing, Heard::Word),
            Err(StoreError::TimedOut { .. }) => Heard::Nothing,
            Err(_) => Heard::NoStore,
        }
    }

    fn key(&self, name: &str, rank: usize) -> String {
        format!("{}/{name}/{rank}", self.prefix)
    }

    /// A connection to the store for words alone: it is not given the time that the others' answers are.
    fn words(&self) -> Option<&Client> {
        let connect = || {
            let limit = WORD_TIMEOUT / 2;
            let (server, env) = (self.client.server(), self.env);
            let client = Client::connect_as(server, &env.token, env.tls, limit).ok()?;
            Some(client.with_answer_timeout(limit))
        };
        self.words.get_or_init(connect).as_ref()
    }
}

impl Counsel for Forming<'_> {
    fn revoked(&self) -> Result<(), Error> {
        self.health()
    }

    fn gave_up(&self, peer: usize) -> Result<(), Error> {
        match self.word_of(peer, Duration::ZERO) {
            // Who waited for this rank while this rank dials it has nothing to add: it is that connection that fails.
            Heard::Word(word) if word.is_last && !word.blames.contains(&self.env.rank) => {
                Err(word.into_error())
            }
            _ => Ok(()),
        }
    }

    fn absent(&self, missing: Vec<usize>, detail: String) -> Error {
        self.absent(missing, "connect", detail)
    }

    fn part(&self, links: &[Option<Socket>], error: &Error) {
        mesh::farewell(self.env.rank, links, error);
        self.leave_word(error);
    }
}

/// Whom rank `me` blames of those that are `missing`, of whom some have `said` for whom they wait; and, where it blames
/// others than those, why.
fn accused(me: usize, missing: &[usize], said: &[Option<Vec<usize>>]) -> (Vec<usize>, String) {
    // Who waits for this rank while this rank waits for it has nothing to add: it is that connection that fails.
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
    fn a_word_survives_the_store_and_names_the_rank_that_was_first() {
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
            let word = Word::of(3, error, true);
            let again = Word::decode(&word.encode(), 4).unwrap();
            assert_eq!(again, word);
            assert_eq!(
                (again.clone().into_error().to_string(), again.blames),
                (expect.into(), vec![culprit])
            );
            // It is about no rank of a smaller world.
            assert_eq!(Word::decode(&word.encode(), 2), None);
        }
        assert_eq!(Word::decode(b"word", 4), None);
    }
}
