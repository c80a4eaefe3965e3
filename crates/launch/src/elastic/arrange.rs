//! Rank order: which agents make up a round, and in which order. Pure.

use paceline_words::{Text, say};

use super::record::{AgentId, Member, Page};

/// Chooses at most `most` of the agents that can take part, and puts them in order.
///
/// Those of the round before keep their order and come before newcomers; newcomers in the order in which they came. An
/// agent whose host is in the order already goes next to it, so that ranks of one host are neighbours.
pub(crate) fn arrange(before: &[AgentId], able: &[&Page], most: usize) -> Vec<Member> {
    let place = |page: &Page| before.iter().position(|id| *id == page.id);
    let mut chosen = able.to_vec();
    chosen.sort_by_key(|page| (place(page).unwrap_or(usize::MAX), page.joined, page.id));
    chosen.truncate(most);
    let mut order: Vec<Member> = Vec::with_capacity(chosen.len());
    for page in chosen {
        let is_new = place(page).is_none();
        let neighbour = order
            .iter()
            .rposition(|member| is_new && member.host == page.host);
        let at = neighbour.map_or(order.len(), |neighbour| neighbour + 1);
        order.insert(at, page.as_member());
    }
    order
}

/// The order that `--node-rank` asks for, or what is wrong with it, in words.
pub(crate) fn by_node_rank(able: &[&Page], nodes: usize) -> Result<Vec<Member>, Text> {
    let mut order: Vec<Option<&Page>> = vec![None; nodes];
    for page in able {
        let rank = page.node_rank.unwrap_or(0);
        let Some(slot) = order.get_mut(rank) else {
            let (host, last) = (&page.host, nodes - 1);
            return Err(Text::new(|lang| {
                say!(
                    lang,
                    "host {host} has --node-rank {rank}, expected 0 to {last}",
                    "호스트 {host}: --node-rank {rank}, 가능한 값은 0~{last}"
                )
            }));
        };
        if let Some(other) = slot {
            let (one, another) = (&other.host, &page.host);
            return Err(Text::new(|lang| {
                say!(
                    lang,
                    "hosts {one} and {another} both have --node-rank {rank}",
                    "호스트 {one}, {another}: 같은 --node-rank {rank}"
                )
            }));
        }
        *slot = Some(page);
    }
    Ok(order.into_iter().flatten().map(Page::as_member).collect())
}

/// An agent that was told other settings than `own`, in words.
pub(crate) fn disagreement(own: &Page, pages: &[&Page]) -> Option<Text> {
    let key = |page: &Page| (page.node_rank, page.joined);
    let others = pages.iter().filter(|page| page.settings != own.settings);
    let other = others.min_by_key(|page| key(page))?;
    // The same words on both nodes.
    let (first, second) = match key(own) <= key(other) {
        true => (own, *other),
        false => (*other, own),
    };
    let (one, another) = first.settings.difference(&second.settings)?;
    Some(Text::new(|lang| {
        let (first, second) = (first.name(lang), second.name(lang));
        say!(
            lang,
            "the nodes disagree: {one} on {first}, {another} on {second}",
            "노드의 설정이 다름: {first} {one}, {second} {another}"
        )
    }))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::elastic::record::Settings;

    fn page(id: u64, host: &str, joined: i64) -> Page {
        Page {
            host: host.into(),
            node_rank: usize::try_from(joined).ok(),
            joined,
            ..Page::new(AgentId(id))
        }
    }

    fn check(before: &[u64], able: &[(u64, &str)], most: usize, expect: &[u64]) {
        let before: Vec<_> = before.iter().copied().map(AgentId).collect();
        let pages: Vec<_> = able
            .iter()
            .zip(0..)
            .map(|((id, host), joined)| page(*id, host, joined))
            .collect();
        let order = arrange(&before, &pages.iter().collect::<Vec<_>>(), most);
        let ids: Vec<_> = order.iter().map(|member| member.id.0).collect();
        assert_eq!(ids, expect, "{before:?} {able:?}");
    }

    #[test]
    fn agents_come_in_the_order_of_their_arrival_beside_their_host() {
        check(&[], &[(1, "a"), (2, "b"), (3, "a")], 9, &[1, 3, 2]);
        check(&[], &[(1, "a"), (2, "b"), (3, "c")], 2, &[1, 2]);
    }

    #[test]
    fn who_was_there_keeps_its_place_and_a_newcomer_sits_beside_its_host() {
        let able = [(4, "b"), (1, "a"), (2, "b"), (3, "c")];
        check(&[3, 2, 1], &able, 9, &[3, 2, 4, 1]);
        check(&[3, 2, 1], &able, 3, &[3, 2, 1]);
        check(&[3, 9, 1], &able, 3, &[3, 1, 4]);
    }

    #[test]
    fn node_ranks_are_obeyed_or_refused_by_name() {
        let pages = [page(1, "a", 1), page(2, "b", 0), page(3, "c", 1)];
        let order = by_node_rank(&[&pages[0], &pages[1]], 2).unwrap();
        assert_eq!(order[0].host, "b");
        let both = by_node_rank(&[&pages[0], &pages[2]], 2).unwrap_err();
        assert_eq!(both.to_string(), "hosts a and c both have --node-rank 1");
        let beyond = by_node_rank(&[&pages[0]], 1).unwrap_err();
        assert_eq!(
            beyond.to_string(),
            "host a has --node-rank 1, expected 0 to 0"
        );
    }

    #[test]
    fn both_nodes_name_the_first_setting_that_differs() {
        let told = |id, host: &str, settings| Page {
            settings,
            ..page(id, host, id as i64)
        };
        let check = |settings: [Settings; 2], expect: Option<&str>| {
            let pages = [told(0, "a", settings[0]), told(1, "b", settings[1])];
            let expect = expect.map(|text| format!("the nodes disagree: {text}"));
            for own in &pages {
                let told = disagreement(own, &[&pages[0], &pages[1]]);
                assert_eq!(told.map(|told| told.to_string()), expect);
            }
        };
        let two = Settings {
            nodes_min: 2,
            nodes_max: 2,
            is_static: true,
            lease: Duration::from_secs(3),
            ..Settings::default()
        };
        let with = |nodes_min, nodes_max| Settings {
            nodes_min,
            nodes_max,
            ..two
        };
        check([two, two], None);
        let expect = "--nnodes 2 on node 0 on a, --nnodes 3 on node 1 on b";
        check([two, with(3, 3)], Some(expect));
        let expect = "--nnodes 2 on node 0 on a, --nnodes 1:3 on node 1 on b";
        check([two, with(1, 3)], Some(expect));
        let restarts = Settings {
            max_restarts: 1,
            ..two
        };
        let expect = "--max-restarts 0 on node 0 on a, --max-restarts 1 on node 1 on b";
        check([two, restarts], Some(expect));
        let recovery = Settings {
            recovers_live: true,
            ..two
        };
        let expect =
            "--recovery restart or none on node 0 on a, --recovery auto or live on node 1 on b";
        check([two, recovery], Some(expect));
        let lease = Settings {
            lease: Duration::from_millis(1500),
            ..two
        };
        let expect = "--rdzv-conf lease=3 on node 0 on a, --rdzv-conf lease=1.5 on node 1 on b";
        check([two, lease], Some(expect));
    }
}
