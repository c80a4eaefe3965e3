//! Why nodes did not meet, and what to do about it. Does no I/O.

use paceline_rendezvous::auth::AuthError;
use paceline_rendezvous::store::StoreError;
use paceline_rendezvous::token::TOKEN_VARIABLE;
use paceline_words::{Lang, Text, say};

use crate::checks;
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
    Odd(Text),
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
pub(crate) fn judge(why: &NotMet, endpoint: &str, nodes: usize, lang: Lang) -> Finding {
    let mut notes = Notes::new(lang);
    let mut sheet = notes.sheet(checks::MEETING);
    match why {
        NotMet::Store(error) => of_store(error, endpoint, lang, &mut sheet),
        NotMet::NotADoctor => sheet.error(
            say!(
                lang,
                "a store answers at {endpoint} that belongs to a running job",
                "{endpoint}에서 실행 중인 작업의 스토어가 응답함"
            ),
            say!(
                lang,
                "it knows the same token, so this is the endpoint of a job that runs, or that was started in place of this check",
                "토큰이 같으므로, 실행 중인 작업의 엔드포인트이거나 이 점검 대신 시작된 작업입니다"
            ),
            say!(
                lang,
                "wait until that job is over, or name another port: --rdzv-endpoint HOST:PORT, the same on every node",
                "그 작업이 끝나기를 기다리거나, 모든 노드에 다른 포트를 똑같이 지정하세요: --rdzv-endpoint HOST:PORT"
            ),
        ),
        NotMet::TooMany => sheet.error(
            say!(
                lang,
                "{nodes} nodes have come to {endpoint} already; this one is too many",
                "{endpoint}에 이미 노드 {nodes}개가 모여 더 받을 수 없음"
            ),
            say!(
                lang,
                "the command runs on more machines than --nnodes says, or twice on one",
                "--nnodes보다 많은 머신에서 실행했거나, 한 머신에서 두 번 실행했습니다"
            ),
            say!(
                lang,
                "give the true number: --nnodes N, the same on every node",
                "모든 노드에 올바른 수를 똑같이 주세요: --nnodes N"
            ),
        ),
        NotMet::Twice(number) => sheet.error(
            say!(
                lang,
                "another node has come to {endpoint} with --node-rank {number} too",
                "{endpoint}에 --node-rank {number}인 노드가 이미 있음"
            ),
            say!(
                lang,
                "every node needs a number of its own; the job would wait for the missing one",
                "노드마다 번호가 달라야 합니다. 이대로면 작업은 빠진 번호를 계속 기다립니다"
            ),
            say!(
                lang,
                "give each node another --node-rank, from 0 up",
                "노드마다 다른 --node-rank를 0부터 주세요"
            ),
        ),
        NotMet::TooLate => sheet.error(
            say!(
                lang,
                "the others at {endpoint} had begun without this node",
                "{endpoint}의 다른 노드들이 이 노드 없이 시작함"
            ),
            say!(
                lang,
                "it came after the time that they wait",
                "다른 노드가 기다리는 시간이 지난 뒤에 왔습니다"
            ),
            say!(
                lang,
                "start it on all nodes within --timeout, or give more: --timeout SECONDS, the same on every node",
                "--timeout 안에 모든 노드에서 시작하거나, 모든 노드에 더 긴 시간을 똑같이 주세요: --timeout SECONDS"
            ),
        ),
        NotMet::Odd(what) => {
            let what = plain(what.of(lang));
            sheet.error(
                say!(
                    lang,
                    "the nodes at {endpoint} do not understand each other: {what}",
                    "{endpoint}의 노드들이 서로의 메시지를 이해하지 못함: {what}"
                ),
                say!(
                    lang,
                    "another version of Paceline may run there",
                    "다른 버전의 Paceline이 실행되고 있을 수 있습니다"
                ),
                say!(
                    lang,
                    "start the same command with the same version on every node",
                    "모든 노드에서 같은 버전으로 같은 명령을 시작하세요"
                ),
            );
        }
    }
    notes.findings.swap_remove(0)
}

fn of_store(error: &StoreError, endpoint: &str, lang: Lang, sheet: &mut Sheet<'_>) {
    let what = say!(
        lang,
        "cannot meet the other nodes at {endpoint}: {error}",
        "{endpoint}에서 다른 노드와 만나지 못함: {error}"
    );
    let what = plain(&what);
    match error {
        StoreError::Connect { reason, .. } if reason.contains("does not resolve") => sheet.error(
            what,
            say!(
                lang,
                "the endpoint's name means nothing on this machine",
                "이 머신에서 엔드포인트 이름의 주소를 찾을 수 없습니다"
            ),
            say!(
                lang,
                "use its address in place of the name, or add a line to /etc/hosts here",
                "이름 대신 주소를 쓰거나, 이 머신의 /etc/hosts에 추가하세요"
            ),
        ),
        StoreError::Connect { reason, .. } if reason.contains("refused") => sheet.error(
            what,
            say!(
                lang,
                "the machine is there, but no program listens at that port: the command does not run there (yet), or a firewall rejects",
                "머신은 있지만 그 포트를 연 프로그램이 없습니다. 아직 명령을 실행하지 않았거나 방화벽이 거부합니다"
            ),
            say!(
                lang,
                "start the same command on the endpoint's host; if it runs there, let its firewall accept this TCP port",
                "엔드포인트 호스트에서 같은 명령을 시작하세요. 이미 실행 중이라면 그 호스트의 방화벽에서 이 TCP 포트를 허용하세요"
            ),
        ),
        StoreError::Connect { .. } => sheet.error(
            what,
            say!(
                lang,
                "nothing answers: the machine is down, the address leads elsewhere, or a firewall drops what is sent",
                "응답이 없습니다. 머신이 꺼져 있거나, 주소가 다른 곳을 가리키거나, 방화벽이 패킷을 버립니다"
            ),
            say!(
                lang,
                "try `ping` and `nc -vz HOST PORT` from here; open this TCP port on the endpoint's host; check the address",
                "여기서 `ping`과 `nc -vz HOST PORT`를 실행해 보고, 엔드포인트 호스트에서 이 TCP 포트를 여세요. 주소도 확인하세요"
            ),
        ),
        StoreError::Auth {
            source: AuthError::Refused | AuthError::WrongProof,
            ..
        } => sheet.error(
            what,
            say!(
                lang,
                "{TOKEN_VARIABLE} is not the same here and there",
                "{TOKEN_VARIABLE} 값이 서로 다릅니다"
            ),
            say!(
                lang,
                "export {TOKEN_VARIABLE} with the same value on every node; once: `openssl rand -hex 32`",
                "`openssl rand -hex 32`로 값을 한 번 만들고, 모든 노드에서 {TOKEN_VARIABLE}에 같은 값을 export하세요"
            ),
        ),
        StoreError::Auth {
            source: AuthError::PlainPeer | AuthError::TlsPeer,
            ..
        } => sheet.error(
            what,
            say!(
                lang,
                "a job whose nodes differ in this does not start",
                "노드마다 이 설정이 다르면 작업이 시작되지 않습니다"
            ),
            say!(
                lang,
                "set PACELINE_TLS to the same value on every node",
                "모든 노드에서 PACELINE_TLS를 같은 값으로 설정하세요"
            ),
        ),
        StoreError::Auth { .. } => sheet.error(
            what,
            say!(
                lang,
                "another program listens at that port",
                "다른 프로그램이 그 포트를 쓰고 있습니다"
            ),
            say!(
                lang,
                "name another port: --rdzv-endpoint HOST:PORT, the same on every node",
                "모든 노드에 다른 포트를 똑같이 지정하세요: --rdzv-endpoint HOST:PORT"
            ),
        ),
        StoreError::Bind { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse => {
            let port = endpoint.rsplit(':').next().unwrap_or_default();
            sheet.error(
                what,
                say!(
                    lang,
                    "this node hosts the meeting, and another program has the port; `paceline run` would fail alike",
                    "이 노드에서 만나야 하는데 다른 프로그램이 포트를 쓰고 있습니다. `paceline run`도 똑같이 실패합니다"
                ),
                say!(
                    lang,
                    "end that program (`ss -ltnp | grep :{port}` shows it), or name another port on every node",
                    "그 프로그램을 끝내거나(`ss -ltnp | grep :{port}` 명령으로 확인), 모든 노드에 다른 포트를 지정하세요"
                ),
            );
        }
        error => {
            let again = || {
                say!(
                    lang,
                    "start the command on all nodes again",
                    "모든 노드에서 명령을 다시 시작하세요"
                )
            };
            // Hints of errors are in English.
            let hint = error.hint().filter(|_| lang == Lang::En);
            sheet.error(
                what,
                say!(
                    lang,
                    "the node that hosts the meeting went away, or no longer answers",
                    "만남을 주관하는 노드가 사라졌거나 더 이상 응답하지 않습니다"
                ),
                hint.unwrap_or_else(again),
            );
        }
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
                NotMet::Odd(Text::new(|_| "\u{1b}x".to_owned())),
                false,
                "start the same command",
            ),
        ] {
            assert_eq!(reason.is_late(), is_late, "{reason:?}");
            let finding = judge(&reason, "node1:29400", 2, Lang::En);
            assert_eq!(finding.severity, Severity::Error);
            assert!(finding.fix.starts_with(fix), "{reason:?}: {}", finding.fix);
            assert!(!finding.what.contains('\u{1b}'));
        }
    }
}
