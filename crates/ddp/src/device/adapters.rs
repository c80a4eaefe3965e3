//! The choice among a graphics API's adapters: pure functions over their list.

/// The class of an adapter, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Sort {
    /// A separate card.
    Discrete,
    /// A part of the processor.
    Integrated,
    /// A virtual machine's.
    Virtual,
    /// A software renderer on the CPU, such as llvmpipe.
    Software,
    /// Anything that Burn does not classify.
    Other,
}

/// An adapter as its driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Adapter {
    pub(super) name: String,
    pub(super) sort: Sort,
    /// PCI address, `0000:01:00.0`; empty if the driver does not report it.
    pub(super) pci: String,
}

/// An adapter that ranks may compute on, as Burn addresses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Usable {
    pub(super) name: String,
    pub(super) sort: Sort,
    /// Its number among the adapters of its class.
    pub(super) index: usize,
}

/// The adapters of the best class present, each card once.
///
/// Mixing classes would make every GPU wait for the slowest. Software is used only if nothing else is visible, for example
/// because Vulkan's own variables, such as `VK_DRIVER_FILES`, hide the rest. A card appears twice if two drivers list it.
pub(super) fn usable(adapters: &[Adapter]) -> Vec<Usable> {
    let known = |adapter: &&Adapter| adapter.sort != Sort::Other;
    let Some(best) = adapters
        .iter()
        .filter(known)
        .map(|adapter| adapter.sort)
        .min()
    else {
        return Vec::new();
    };
    let mut cards: Vec<&str> = Vec::new();
    let of_best = adapters.iter().filter(|adapter| adapter.sort == best);
    // Burn can address only the first software adapter.
    let limit = if best == Sort::Software {
        1
    } else {
        usize::MAX
    };
    let mut found = Vec::new();
    for (index, adapter) in of_best.enumerate().take(limit) {
        if !adapter.pci.is_empty() {
            if cards.contains(&adapter.pci.as_str()) {
                continue;
            }
            cards.push(&adapter.pci);
        }
        found.push(Usable {
            name: adapter.name.clone(),
            sort: adapter.sort,
            index,
        });
    }
    found
}

/// Explains why there is no usable adapter, from the adapters found and the graphics library's message.
pub(super) fn why_none(adapters: &[Adapter], api: &str, said: &str) -> String {
    if !adapters.is_empty() {
        let names: Vec<&str> = adapters
            .iter()
            .map(|adapter| adapter.name.as_str())
            .collect();
        return format!("only adapters of an unknown sort: {}", names.join(", "));
    }
    // The message covers every API: "...; noop not requested, vulkan found no adapters, metal not requested".
    let sentence = said.split_once("; ").map_or(said, |(_, each)| each);
    let mut parts = sentence.split(", ");
    let part = parts.find_map(|part| part.strip_prefix(api)?.strip_prefix(' '));
    match part {
        Some("found no adapters") => "its library is there, but no driver has an adapter".into(),
        Some(why) => why.to_owned(),
        None => said.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(name: &str, sort: Sort, pci: &str) -> Adapter {
        Adapter {
            name: name.into(),
            sort,
            pci: pci.into(),
        }
    }

    #[test]
    fn ranks_compute_on_the_adapters_of_the_best_sort_each_card_once() {
        let check = |adapters: &[Adapter], expect: &[(&str, usize)]| {
            let found = usable(adapters);
            assert!(found.windows(2).all(|pair| pair[0].sort == pair[1].sort));
            let found: Vec<(&str, usize)> = found
                .iter()
                .map(|usable| (usable.name.as_str(), usable.index))
                .collect();
            assert_eq!(found, expect, "{adapters:?}");
        };
        let card = |name, pci| adapter(name, Sort::Discrete, pci);
        let chip = adapter("chip", Sort::Integrated, "0000:00:02.0");
        let software = adapter("llvmpipe", Sort::Software, "");
        let odd = adapter("odd", Sort::Other, "");

        check(&[], &[]);
        check(std::slice::from_ref(&odd), &[]);
        check(std::slice::from_ref(&software), &[("llvmpipe", 0)]);
        check(&[odd.clone(), software.clone()], &[("llvmpipe", 0)]);
        check(&[software.clone(), software.clone()], &[("llvmpipe", 0)]);
        check(&[software.clone(), chip.clone()], &[("chip", 0)]);
        let guest = adapter("guest", Sort::Virtual, "");
        check(&[guest.clone(), software.clone()], &[("guest", 0)]);
        check(&[guest, chip.clone()], &[("chip", 0)]);
        check(
            &[chip, card("a", "1"), software, card("b", "2")],
            &[("a", 0), ("b", 1)],
        );
        // Two drivers for one card: numbers skip the duplicate, since Burn counts both.
        check(
            &[card("a", "1"), card("a again", "1"), card("b", "2")],
            &[("a", 0), ("b", 2)],
        );
        // Without PCI addresses, cards cannot be told apart.
        check(&[card("a", ""), card("a", "")], &[("a", 0), ("a", 1)]);
    }

    #[test]
    fn what_the_graphics_library_says_of_all_apis_is_cut_to_the_one_in_question() {
        let check = |said: &str, expect: &str| assert_eq!(why_none(&[], "vulkan", said), expect);
        check(
            "No suitable graphics adapter found; noop not requested, vulkan found no adapters, metal not requested",
            "its library is there, but no driver has an adapter",
        );
        check(
            "No suitable graphics adapter found; noop not requested, vulkan drivers/libraries could not be loaded",
            "drivers/libraries could not be loaded",
        );
        check("something new", "something new");
    }

    #[test]
    fn adapters_that_burn_has_no_name_for_are_told_of() {
        let odd = [
            adapter("odd", Sort::Other, ""),
            adapter("odder", Sort::Other, ""),
        ];
        assert_eq!(
            why_none(&odd, "vulkan", ""),
            "only adapters of an unknown sort: odd, odder"
        );
    }
}
