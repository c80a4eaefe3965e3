//! What was taken for what, as a matrix of heat.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write as _;

use paceline_usage::figures::thousands;
use paceline_words::{Lang, joined};

use crate::chart::escaped;
use crate::records::{CLASSES_MAX, Class, Confused};
use crate::words;

/// Most pairs that are named.
const PAIRS_MAX: usize = 5;
/// Steps of heat; the style has a class for each.
const HEATS: f64 = 9.0;
/// Names up to this length stand upright above their column.
const UPRIGHT_MAX: usize = 3;

/// The matrix, and the pairs that were confused most often; nothing without counts.
pub(super) fn confusion(classes: &[Class], pairs: &[Confused], lang: Lang) -> String {
    if pairs.is_empty() {
        return String::new();
    }
    let most = most_confused(classes, pairs, lang);
    if classes.len() > CLASSES_MAX {
        let text = words::TOO_MANY_CLASSES.filled(lang, &[&thousands(classes.len() as u64)]);
        return format!("<p>{text}</p>\n{most}");
    }
    let explained = words::CONFUSION_NOTE.of(lang);
    format!("<p>{explained}</p>\n{}{most}", matrix(classes, pairs, lang))
}

/// A row for each class, a column for what it was taken for. Names stay in sight while the box is scrolled.
fn matrix(classes: &[Class], pairs: &[Confused], lang: Lang) -> String {
    let counts: HashMap<(usize, usize), u64> = pairs
        .iter()
        .map(|pair| ((pair.of, pair.taken_for), pair.count))
        .collect();
    let is_long = |class: &Class| class.name.chars().count() > UPRIGHT_MAX;
    let upright = match classes.iter().any(is_long) {
        true => " class=\"long\"",
        false => "",
    };
    let corner = format!(
        "{}\u{a0}↓ · {}\u{a0}→",
        words::CLASS.of(lang),
        words::TAKEN_FOR.of(lang)
    );
    let mut html = format!(
        "<div class=\"wide tall\"><table class=\"confusion\">\n<thead><tr{upright}><th>{corner}</th>"
    );
    for class in classes {
        let _ = write!(html, "<th><span>{}</span></th>", escaped(&class.name));
    }
    html += "</tr></thead>\n";
    for (of, class) in classes.iter().enumerate() {
        let _ = write!(html, "<tr><th><span>{}</span></th>", escaped(&class.name));
        let samples = counts_of(pairs, of).max(1);
        for taken_for in 0..classes.len() {
            match counts.get(&(of, taken_for)) {
                None | Some(0) => html += "<td></td>",
                Some(count) => {
                    let share = *count as f64 / samples as f64;
                    let (kind, heat) = match of == taken_for {
                        true => ("right", share),
                        // A few errors in many samples are seen too.
                        false => ("wrong", share.sqrt()),
                    };
                    let heat = (heat * HEATS).ceil().clamp(1.0, HEATS);
                    let _ = write!(
                        html,
                        "<td class=\"{kind} h{heat}\">{}</td>",
                        thousands(*count)
                    );
                }
            }
        }
        html += "</tr>\n";
    }
    html + "</table></div>\n"
}

fn counts_of(pairs: &[Confused], of: usize) -> u64 {
    let own = pairs.iter().filter(|pair| pair.of == of);
    own.fold(0, |sum, pair| sum.saturating_add(pair.count))
}

fn most_confused(classes: &[Class], pairs: &[Confused], lang: Lang) -> String {
    let mut wrong: Vec<&Confused> = pairs
        .iter()
        .filter(|pair| pair.of != pair.taken_for && pair.count > 0)
        .collect();
    if wrong.is_empty() {
        return String::new();
    }
    wrong.sort_by_key(|pair| Reverse(pair.count));
    let name = |class: usize| escaped(&classes[class].name);
    let named = wrong.iter().take(PAIRS_MAX).map(|pair| {
        let count = thousands(pair.count);
        words::CONFUSED_PAIR.filled(lang, &[&name(pair.of), &name(pair.taken_for), &count])
    });
    let named = joined(named.collect(), PAIRS_MAX, lang);
    format!("<p>{}</p>\n", words::MOST_CONFUSED.filled(lang, &[&named]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn classes(names: &[&str]) -> Vec<Class> {
        let class = |name: &&str| Class {
            name: (*name).to_owned(),
            samples: 10,
            precision: None,
            recall: None,
            f1: None,
        };
        names.iter().map(class).collect()
    }

    fn pairs(counts: &[[u64; 3]]) -> Vec<Confused> {
        let pair = |[of, taken_for, count]: &[u64; 3]| Confused {
            of: *of as usize,
            taken_for: *taken_for as usize,
            count: *count,
        };
        counts.iter().map(pair).collect()
    }

    #[test]
    fn cells_have_counts_and_the_heat_of_their_share_of_the_row() {
        let pairs = pairs(&[[0, 0, 9], [0, 1, 1], [1, 1, 4], [2, 0, 3]]);
        let html = confusion(&classes(&["cat", "<dog>", "3"]), &pairs, Lang::En);
        for part in [
            "<tr class=\"long\"><th>class\u{a0}↓ · taken for\u{a0}→</th><th><span>cat</span></th><th><span>&lt;dog&gt;</span></th>",
            "<tr><th><span>cat</span></th><td class=\"right h9\">9</td><td class=\"wrong h3\">1</td><td></td></tr>",
            "<tr><th><span>3</span></th><td class=\"wrong h9\">3</td><td></td><td></td></tr>",
            "Confused most often: 3 taken for cat (3) and cat taken for &lt;dog&gt; (1).",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
        assert_eq!(confusion(&classes(&["a"]), &[], Lang::En), "");
    }

    #[test]
    fn of_many_classes_only_the_most_confused_are_named() {
        let names: Vec<String> = (0..=CLASSES_MAX).map(|class| format!("c{class}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let counts: Vec<[u64; 3]> = (0..100)
            .map(|class| [class, class + 1, class + 1])
            .collect();
        let html = confusion(&classes(&names), &pairs(&counts), Lang::Ko);
        assert!(!html.contains("<table"), "{html}");
        assert!(html.contains("클래스가 101개"), "{html}");
        assert!(
            html.contains("c99 → c100 (100건), c98 → c99 (99건)"),
            "{html}"
        );
    }

    #[test]
    fn a_hundred_classes_that_are_all_confused_make_a_bounded_page() {
        let names: Vec<String> = (0..CLASSES_MAX).map(|class| class.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let all = (0..100).flat_map(|of| (0..100).map(move |taken_for| [of, taken_for, 12_345]));
        let html = confusion(&classes(&names), &pairs(&all.collect::<Vec<_>>()), Lang::En);
        assert!(html.len() < 400_000, "{} bytes", html.len());
    }
}
