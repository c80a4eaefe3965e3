//! What was found about links, for people.

use paceline_doctor::links::Judgement;
use paceline_gpu::columns::aligned;
use paceline_nccl::pairs::{Link, LinkReport, Outcome};
use paceline_words::{Lang, count, say};

/// Devices, a matrix for each way, and the findings.
pub(super) fn of(report: &LinkReport, judgement: &Judgement, lang: Lang) -> String {
    let devices = count(lang, report.devices.len(), "device", "장치");
    let (cuda, size) = (report.cuda, report.message_bytes >> 20);
    let mut text = say!(
        lang,
        "{devices}, driver for CUDA {cuda}, copies of {size} MiB\n\n",
        "{devices}, CUDA {cuda}용 드라이버, 복사 크기 {size} MiB\n\n"
    );
    let rows = report.devices.iter().enumerate();
    let rows = rows.map(|(number, place)| {
        vec![
            format!("GPU{number}"),
            place.name.clone(),
            place.bus.clone(),
        ]
    });
    text.push_str(&aligned(&rows.collect::<Vec<_>>()));
    if report.links.is_empty() {
        text += &say!(
            lang,
            "\nnothing to test between fewer than two devices\n",
            "\n장치가 2개 미만이라 시험할 것이 없음\n"
        );
        return text;
    }
    text += &say!(
        lang,
        "\npeer-to-peer, GB/s from row to column\n",
        "\nP2P 직접 통신, 행에서 열로 GB/s\n"
    );
    text.push_str(&matrix(report, |link| &link.peer));
    text += &say!(
        lang,
        "\nthrough the host's memory, GB/s from row to column\n",
        "\n호스트 메모리 경유, 행에서 열로 GB/s\n"
    );
    text.push_str(&matrix(report, |link| &link.host));
    text.push('\n');
    if judgement.findings.is_empty() {
        text += &say!(
            lang,
            "all links work: nothing has to be set\n",
            "모든 연결이 동작함: 설정할 것 없음\n"
        );
    }
    let findings = judgement.findings.iter();
    let findings: Vec<String> = findings.map(|finding| finding.text(lang)).collect();
    text.push_str(&findings.join("\n"));
    for (name, value) in &judgement.variables {
        text.push_str(&format!("\n{name}={value}\n"));
    }
    text
}

/// One cell for each pair, in rows and columns of devices.
fn matrix(report: &LinkReport, way: impl Fn(&Link) -> &Outcome) -> String {
    let devices = 0..report.devices.len();
    let name = |number: usize| format!("GPU{number}");
    let head = std::iter::once(String::new()).chain(devices.clone().map(name));
    let mut rows: Vec<Vec<String>> = vec![head.collect()];
    for from in devices.clone() {
        let cell = |to: usize| {
            let mut links = report.links.iter();
            let link = links.find(|link| (link.from, link.to) == (from, to));
            link.map_or_else(|| "-".to_owned(), |link| word(way(link)))
        };
        let row = std::iter::once(name(from)).chain(devices.clone().map(cell));
        rows.push(row.collect());
    }
    aligned(&rows)
}

fn word(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Fine { gb_per_second } => format!("{gb_per_second:.1}"),
        Outcome::Wrong { .. } => "WRONG".to_owned(),
        Outcome::Stuck => "STUCK".to_owned(),
        Outcome::Failed { .. } => "FAILED".to_owned(),
        Outcome::NotSupported => "NS".to_owned(),
        Outcome::NotTried => "?".to_owned(),
    }
}
