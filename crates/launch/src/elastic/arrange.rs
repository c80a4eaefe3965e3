//! Rank order: which agents make up a round, and in which order. Pure.

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
pub(crate) fn by_node_rank(able: &[&Page], nodes: usize) -> Result<Vec<Member>, String> {
    let mut order: Vec<Option<&Page>> = vec![None; nodes];
    for page in able {
        let rank = page.node_rank.unwrap_or(0);
        let Some(slot) = order.get_mut(rank) else {
            return Err(format!(
                "host {} has --node-rank {rank}, expected 0 to {}",
                page.host,
                nodes - 1
            ));
        };
        if let Some(other) = slot {
            return Err(format!(
                "hosts {} and {} both have --node-rank {rank}",
                other.host, page.host
            ));
        }
        *slot = Some(page);
    }
    Ok(order.into_iter().flatten().map(Page::as_member).collect())
}

/// Two agents that were told different fixed numbers of nodes, in words.
pub(crate) fn different_nodes(able: &[&Page]) -> Option<String> {
    let is_fixed = |page: &&&Page| page.nodes.0 == page.nodes.1;
    let mut fixed: Vec<_> = able.iter().filter(is_fixed).collect();
    fixed.sort_by_key(|page| (page.node_rank, page.joined));
    let first = fixed.first()?;
    let other = fixed.iter().find(|page| page.nodes != first.nodes)?;
    let told = |page: &Page| format!("--nnodes {} on {}", page.nodes.1, page.name());
    Some(format!(
        "the nodes disagree: {}, {}",
        told(first),
        told(other)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(both, "hosts a and c both have --node-rank 1");
        let beyond = by_node_rank(&[&pages[0]], 1).unwrap_err();
        assert_eq!(beyond, "host a has --node-rank 1, expected 0 to 0");
    }

    #[test]
    fn different_fixed_numbers_of_nodes_are_named() {
        let told = |id, host: &str, nodes| Page {
            nodes,
            ..page(id, host, id as i64)
        };
        let check = |nodes: [(usize, usize); 2], expect: Option<&str>| {
            let pages = [told(0, "a", nodes[0]), told(1, "b", nodes[1])];
            let found = different_nodes(&[&pages[0], &pages[1]]);
            assert_eq!(found.as_deref(), expect);
        };
        let expect = "the nodes disagree: --nnodes 2 on node 0 on a, --nnodes 3 on node 1 on b";
        check([(2, 2), (3, 3)], Some(expect));
        check([(2, 2), (2, 2)], None);
        check([(2, 2), (1, 3)], None);
    }
}
