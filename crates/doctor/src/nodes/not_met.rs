//! Why nodes did not meet, and what to do about it. Does no I/O.

use paceline_rendezvous::auth::AuthError;
use paceline_rendezvous::store::StoreError;
use paceline_rendezvous::token::TOKEN_VARIABLE;

use crate::finding::{Finding, Notes, Sheet, plain};

/// Why nodes did not meet.
#[derive(Debug)]
pub(crate) enum NotMet {
    Store(StoreError),
    /// A store answers that is no doctor's.
    NotADoctor,
    /// More nodes came than were asked for.
    TooMany,
    /// Another node has this number.
    Twice(usize),
    /// The others had begun.
    TooLate,
    /// What a node says makes no sense.
    Odd(String),
}

impl NotMet {
    pub(crate) fn is_late(&self) -> bool {
        match self {
            Self::Store(error) => error.is_deadline(),
            Self::TooLate => true,
            _ => false,
        }
    }
}

/// The finding for nodes that did not meet.
pub(crate) fn judge(why: &NotMet, endpoint: &str, nodes: usize) -> Finding {
    let mut notes = Notes::default();
    let mut sheet = notes.sheet("meeting");
    match why {
        NotMet::Store(error) => of_store(error, endpoint, &mut sheet),
        NotMet::NotADoctor => sheet.error(
            format!("a store answers at {endpoint} that belongs to a running job"),
            "it knows the same token, so this is the endpoint of a job that runs, or that was started in place of this check",
            "wait until that job is over, or name another port: --rdzv-endpoint HOST:PORT, the same on every node",
        ),
        NotMet::TooMany => sheet.error(
            format!("{nodes} nodes have come to {endpoint} already; this one is too many"),
            "the command runs on more machines than --nnodes says, or twice on one",
            "give the true number: --nnodes N, the same on every node",
        ),
        NotMet::Twice(number) => sheet.error(
            format!("another node has come to {endpoint} with --node-rank {number} too"),
            "every node needs a number of its own; the job would wait for the missing one",
            "give each node another --node-rank, from 0 up",
        ),
        NotMet::TooLate => sheet.error(
            format!("the others at {endpoint} had begun without this node"),
            "it came after the time that they wait",
            "start it on all nodes within --timeout, or give more: --timeout SECONDS, the same on every node",
        ),
        NotMet::Odd(what) => sheet.error(
            format!("the nodes at {endpoint} do not understand each other: {}", plain(what)),
            "another version of Paceline may run there",
            "start the same command with the same version on every node",
        ),
    }
    notes.findings.swap_remove(0)
}

fn of_store(error: &StoreError, endpoint: &str, sheet: &mut Sheet<'_>) {
    let what = format!("cannot meet the other nodes at {endpoint}: {error}");
    let what = plain(&what);
    match error {
        StoreError::Connect { reason, .. } if reason.contains("does not resolve") => sheet.error(
            what,
            "the endpoint's name means nothing on this machine",
            "use its address in place of the name, or add a line to /etc/hosts here",
        ),
        StoreError::Connect { reason, .. } if reason.contains("refused") => sheet.error(
            what,
            "the machine is there, but no program listens at that port: the command does not run there (yet), or a firewall rejects",
            "start the same command on the endpoint's host; if it runs there, let its firewall accept this TCP port",
        ),
        StoreError::Connect { .. } => sheet.error(
            what,
            "nothing answers: the machine is down, the address leads elsewhere, or a firewall drops what is sent",
            "try `ping` and `nc -vz HOST PORT` from here; open this TCP port on the endpoint's host; check the address",
        ),
        StoreError::Auth { source: AuthError::Refused | AuthError::WrongProof, .. } => sheet.error(
            what,
            format!("{TOKEN_VARIABLE} is not the same here and there"),
            format!("export {TOKEN_VARIABLE} with the same value on every node; once: `openssl rand -hex 32`"),
        ),
        StoreError::Auth { source: AuthError::PlainPeer | AuthError::TlsPeer, .. } => sheet.error(
            what,
            "a job whose nodes differ in this does not start",
            "set PACELINE_TLS to the same value on every node",
        ),
        StoreError::Auth { .. } => sheet.error(
            what,
            "another program listens at that port",
            "name another port: --rdzv-endpoint HOST:PORT, the same on every node",
        ),
        StoreError::Bind { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse => sheet.error(
            what,
            "this node hosts the meeting, and another program has the port; `paceline run` would fail alike",
            format!(
                "end that program (`ss -ltnp | grep :{}` shows it), or name another port on every node",
                endpoint.rsplit(':').next().unwrap_or_default()
            ),
        ),
        error => sheet.error(
            what,
            "the node that hosts the meeting went away, or no longer answers",
            error.hint().unwrap_or_else(|| "start the command on all nodes again".to_owned()),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::finding::Severity;

    #[test]
    fn why_nodes_did_not_meet_is_said_with_what_to_type() {
        let connect = |reason: &str| {
            NotMet::Store(StoreError::Connect {
                server: "node1:29400".into(),
                waited: Duration::from_secs(60),
                attempts: 9,
                reason: reason.into(),
            })
        };
        let auth = |source| {
            NotMet::Store(StoreError::Auth {
                server: "node1:29400".into(),
                source,
            })
        };
        let bind = |kind: std::io::ErrorKind| {
            NotMet::Store(StoreError::Bind {
                addr: "[::]:29400".parse().expect("an address"),
                source: Arc::new(kind.into()),
            })
        };
        for (reason, is_late, fix) in [
            (
                connect("the name does not resolve: x"),
                true,
                "use its address",
            ),
            (
                connect("10.0.0.1:29400: Connection refused"),
                true,
                "start the same command",
            ),
            (
                connect("10.0.0.1:29400: connection timed out"),
                true,
                "try `ping`",
            ),
            (auth(AuthError::Refused), false, "export PACELINE_JOB_TOKEN"),
            (auth(AuthError::TlsPeer), false, "set PACELINE_TLS"),
            (
                auth(AuthError::Foreign { got: [1; 4] }),
                false,
                "name another port",
            ),
            (
                bind(std::io::ErrorKind::AddrInUse),
                false,
                "end that program (`ss -ltnp | grep :29400`",
            ),
            (
                bind(std::io::ErrorKind::PermissionDenied),
                false,
                "rank 0 must run on",
            ),
            (NotMet::NotADoctor, false, "wait until that job is over"),
            (NotMet::TooMany, false, "give the true number"),
            (NotMet::Twice(1), false, "give each node another"),
            (NotMet::TooLate, true, "start it on all nodes"),
            (
                NotMet::Odd("\u{1b}x".into()),
                false,
                "start the same command",
            ),
        ] {
            assert_eq!(reason.is_late(), is_late, "{reason:?}");
            let finding = judge(&reason, "node1:29400", 2);
            assert_eq!(finding.severity, Severity::Error);
            assert!(finding.fix.starts_with(fix), "{reason:?}: {}", finding.fix);
            assert!(!finding.what.contains('\u{1b}'));
        }
    }
}
