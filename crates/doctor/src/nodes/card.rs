//! What nodes tell one another through the store: their names, and the nodes that they reach. Bounded and checked on reading.

use std::net::SocketAddr;

use paceline_words::{Lang, Word};
use serde::{Deserialize, Serialize};

use crate::finding::{Finding, plain};

/// A node as it describes itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Card {
    /// A number of its own, by which a peer that dials it recognises it.
    pub id: u64,
    /// Paceline's version.
    pub version: String,
    /// What it is called.
    pub host: String,
    /// The boot of its machine: equal for containers of one machine.
    pub boot: String,
    /// Addresses under which it may be reached. The first is the one that its launcher would tell the others.
    pub addrs: Vec<String>,
    /// Where it listens for this check.
    pub port: u16,
    /// Release of its kernel.
    pub kernel: String,
    /// Its processors' architecture.
    pub arch: String,
    /// Cores that threads can run on.
    pub cores: usize,
    /// Memory, by its container's limit where that is less.
    pub memory_bytes: u64,
    /// Files that a process may have open.
    pub files: u64,
    /// Ranks that are to run there.
    pub ranks: usize,
    /// A firewall that seems to be on.
    pub firewall: Option<String>,
    /// From which its system chooses ports.
    pub ports: Option<(u16, u16)>,
    /// What it found on itself, notes left out.
    pub findings: Vec<Finding>,
    /// The same in Korean, for the reports of other nodes; the report takes it out, as its JSON is English.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) korean: Vec<Finding>,
}

/// Whom a node reaches.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// One for each address of each other node, in the order in which that node gave them.
    pub reaches: Vec<Reach>,
}

/// One attempt to reach a node at one address.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reach {
    /// The node's number.
    pub to: usize,
    /// The address as that node gave it.
    pub addr: String,
    /// What the address came to here, and the port.
    pub at: Option<SocketAddr>,
    /// How it went.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The node answered there.
    Reached(Measured),
    /// It did not.
    Failed(Miss),
}

/// What was measured over one connection.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Median of the round trips, in microseconds.
    pub round_trip_us: u64,
    /// The other node's wall clock less this one's, in microseconds.
    pub clock_offset_us: i64,
    /// How far off that may be: half of the shortest round trip.
    pub clock_error_us: u64,
    /// Bytes in a second to the other node, of a short sample; taken at one address of each node.
    pub bytes_per_second: Option<u64>,
}

/// Why a node was not reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Miss {
    /// What kind.
    pub kind: MissKind,
    /// In words.
    pub text: String,
}

/// Kinds of not being reached, as far as they need different advice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MissKind {
    /// Nothing answered: packets are dropped.
    Silent,
    /// The machine refuses: no program listens there, or a firewall rejects.
    Refused,
    /// No way leads there.
    NoRoute,
    /// The name has no address here.
    Unresolved,
    /// Another machine or program answers there.
    Stranger,
    /// It was not tried before time was up.
    Untried,
    /// Anything else.
    Broken,
}

impl MissKind {
    /// In a word or two.
    pub(crate) fn word(self) -> Word {
        const SILENT: Word = Word::new("no answer", "응답 없음");
        const REFUSED: Word = Word::new("refused", "거부됨");
        const NO_ROUTE: Word = Word::new("no route", "경로 없음");
        const UNRESOLVED: Word = Word::new("unknown name", "알 수 없는 이름");
        const STRANGER: Word = Word::new("somebody else", "다른 상대");
        const BROKEN: Word = Word::new("broken", "끊김");
        const UNTRIED: Word = Word::new("not tried", "시도하지 않음");
        match self {
            Self::Silent => SILENT,
            Self::Refused => REFUSED,
            Self::NoRoute => NO_ROUTE,
            Self::Unresolved => UNRESOLVED,
            Self::Stranger => STRANGER,
            Self::Broken => BROKEN,
            Self::Untried => UNTRIED,
        }
    }
}

/// Longest card that is believed.
const CARD_BYTES_MAX: usize = 256 << 10;
/// Longest row that is believed: a thousand nodes of a few addresses each.
const ROW_BYTES_MAX: usize = 8 << 20;
/// Addresses of a node that are tried.
pub(crate) const ADDRESSES_MAX: usize = 16;
const ADDRESS_CHARS_MAX: usize = 255;
const FINDINGS_MAX: usize = 32;

/// What a node sent is not what nodes send.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("what it sent cannot be read: {0}")]
pub(crate) struct Malformed(String);

impl Card {
    pub(crate) fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut card: Self = decode(bytes, CARD_BYTES_MAX)?;
        if card.addrs.len() > ADDRESSES_MAX
            || card.addrs.iter().any(|addr| addr.len() > ADDRESS_CHARS_MAX)
        {
            return Err(Malformed("more or longer addresses than a node has".into()));
        }
        for text in [
            &mut card.version,
            &mut card.host,
            &mut card.boot,
            &mut card.kernel,
            &mut card.arch,
        ] {
            *text = plain(text);
        }
        card.addrs.iter_mut().for_each(|addr| *addr = plain(addr));
        card.firewall = card.firewall.as_deref().map(plain);
        card.findings.truncate(FINDINGS_MAX);
        card.korean.truncate(FINDINGS_MAX);
        for finding in card.findings.iter_mut().chain(&mut card.korean) {
            for text in [
                &mut finding.check,
                &mut finding.what,
                &mut finding.why,
                &mut finding.fix,
            ] {
                *text = plain(text);
            }
            finding.nodes.clear();
        }
        Ok(card)
    }

    /// Its findings in this language, and takes the Korean ones out. An older version sends English alone.
    pub(crate) fn take_findings(&mut self, lang: Lang) -> Vec<Finding> {
        let korean = std::mem::take(&mut self.korean);
        match lang == Lang::Ko && !korean.is_empty() {
            true => korean,
            false => self.findings.clone(),
        }
    }
}

impl Row {
    pub(crate) fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut row: Self = decode(bytes, ROW_BYTES_MAX)?;
        for reach in &mut row.reaches {
            reach.addr = plain(&reach.addr);
            if let Outcome::Failed(miss) = &mut reach.outcome {
                miss.text = plain(&miss.text);
            }
        }
        Ok(row)
    }

    /// The attempts at one node.
    pub(crate) fn to(&self, node: usize) -> impl Iterator<Item = &Reach> {
        self.reaches.iter().filter(move |reach| reach.to == node)
    }

    /// What was measured at the first address that worked.
    pub(crate) fn measured(&self, node: usize) -> Option<Measured> {
        self.to(node).find_map(|reach| match reach.outcome {
            Outcome::Reached(measured) => Some(measured),
            Outcome::Failed(_) => None,
        })
    }
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain structs become JSON")
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8], most: usize) -> Result<T, Malformed> {
    if bytes.len() > most {
        return Err(Malformed(format!(
            "{} bytes, at most {most} are expected",
            bytes.len()
        )));
    }
    serde_json::from_slice(bytes).map_err(|error| Malformed(plain(&error.to_string())))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::finding::Severity;

    pub(crate) fn card(host: &str, addr: &str) -> Card {
        Card {
            id: 7,
            version: "0.1.0".into(),
            host: host.into(),
            boot: format!("boot of {host}"),
            addrs: vec![addr.into()],
            port: 4711,
            kernel: "6.8.0".into(),
            arch: "x86_64".into(),
            cores: 8,
            memory_bytes: 16 << 30,
            files: 4096,
            ranks: 8,
            firewall: None,
            ports: Some((32_768, 60_999)),
            findings: Vec::new(),
            korean: Vec::new(),
        }
    }

    #[test]
    fn cards_and_rows_go_there_and_back() {
        let card = card("a", "10.0.0.1");
        assert_eq!(Card::decode(&card.encode()), Ok(card));
        let reach = |outcome| Reach {
            to: 1,
            addr: "node1".into(),
            at: Some("10.0.0.1:5".parse().expect("an address")),
            outcome,
        };
        let row = Row {
            reaches: vec![
                reach(Outcome::Failed(Miss {
                    kind: MissKind::NoRoute,
                    text: "no".into(),
                })),
                reach(Outcome::Reached(Measured {
                    round_trip_us: 5,
                    clock_offset_us: -7,
                    clock_error_us: 2,
                    bytes_per_second: None,
                })),
            ],
        };
        assert_eq!(Row::decode(&row.encode()), Ok(row));
    }

    #[test]
    fn what_no_node_sends_is_refused_or_cut() {
        for bytes in [
            &b""[..],
            b"{}",
            b"\xff",
            b"[1,2]",
            br#"{"reaches":[{"to":-1}]}"#,
            &vec![b' '; CARD_BYTES_MAX + 1],
        ] {
            assert!(Card::decode(bytes).is_err());
        }
        assert!(Row::decode(br#"{"reaches":[{"to":-1}]}"#).is_err());
        let many = Card {
            addrs: vec!["a".into(); ADDRESSES_MAX + 1],
            ..card("a", "")
        };
        assert!(Card::decode(&many.encode()).is_err());
        let finding = Finding {
            severity: Severity::Error,
            check: "c".into(),
            what: "a\u{1b}[2Jb".into(),
            why: String::new(),
            fix: String::new(),
            nodes: vec!["me".into(); 9],
        };
        let rude = Card {
            host: "a\nb".into(),
            findings: vec![finding.clone(); 99],
            korean: vec![finding; 99],
            ..card("a", "")
        };
        let read = Card::decode(&rude.encode()).expect("read");
        assert_eq!(
            (read.host.as_str(), read.findings.len()),
            ("a b", FINDINGS_MAX)
        );
        assert_eq!(read.findings[0].what, "a [2Jb");
        assert!(read.findings[0].nodes.is_empty());
        assert_eq!(read.korean, read.findings);
    }
}
