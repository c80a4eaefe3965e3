//! The prefix of each line: torchrun's template, or `[rank 3] `, for one rank or for several at once.

use std::str::FromStr;

use super::options::OptionError;

/// Longest template.
const TEMPLATE_BYTES_MAX: usize = 1024;
/// Runs of ranks that are named; the rest is a number.
const RUNS_MAX: usize = 6;

/// Text with torchrun's macros `${role_name}`, `${local_rank}`, `${rank}` and `${hostname}`.
///
/// `$name` means the same as `${name}`, `$$` is a dollar sign, and what is no macro stays as it is.
///
/// ```
/// use paceline_launch::PrefixTemplate;
///
/// assert!("[${hostname} ${rank}]: ".parse::<PrefixTemplate>().is_ok());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixTemplate(String);

/// The ranks that a prefix names: one, or several that printed the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Who<'a> {
    pub(crate) ranks: &'a [usize],
    pub(crate) local_ranks: &'a [usize],
    pub(crate) role: &'a str,
    pub(crate) host: &'a str,
}

impl PrefixTemplate {
    fn text(&self, who: &Who<'_>) -> String {
        let mut text = String::new();
        let mut rest = self.0.as_str();
        while let Some((plain, after)) = rest.split_once('$') {
            text.push_str(plain);
            rest = after;
            if let Some(after) = rest.strip_prefix('$') {
                text.push('$');
                rest = after;
            } else if let Some((value, after)) = macro_at(rest, who) {
                text.push_str(&value);
                rest = after;
            } else {
                text.push('$');
            }
        }
        text + rest
    }
}

/// The prefix with the default in place of a template.
pub(crate) fn prefix(template: Option<&PrefixTemplate>, who: &Who<'_>) -> String {
    match (template, who.ranks) {
        (Some(template), _) => template.text(who),
        (None, [rank]) => format!("[rank {rank}] "),
        (None, ranks) => format!("[ranks {}] ", ranges(ranks)),
    }
}

impl FromStr for PrefixTemplate {
    type Err = OptionError;

    fn from_str(template: &str) -> Result<Self, OptionError> {
        if template.len() > TEMPLATE_BYTES_MAX {
            let got = template.len();
            return Err(OptionError(format!(
                "the prefix has {got} bytes, at most {TEMPLATE_BYTES_MAX} are allowed"
            )));
        }
        Ok(Self(template.to_owned()))
    }
}

/// The value of the macro whose name is at the start of `text`, behind its dollar sign, and the text that follows.
fn macro_at<'t>(text: &'t str, who: &Who<'_>) -> Option<(String, &'t str)> {
    let (name, rest) = match text.strip_prefix('{') {
        Some(inner) => inner.split_once('}')?,
        None => {
            let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
            text.split_at(text.find(|c| !is_name(c)).unwrap_or(text.len()))
        }
    };
    let value = match name {
        "role_name" => who.role.to_owned(),
        "local_rank" => ranges(who.local_ranks),
        "rank" => ranges(who.ranks),
        "hostname" => who.host.to_owned(),
        _ => return None,
    };
    Some((value, rest))
}

/// Ascending numbers, short: `0-3,8`.
fn ranges(ranks: &[usize]) -> String {
    let runs: Vec<_> = ranks.chunk_by(|a, b| a + 1 == *b).collect();
    let mut text = String::new();
    for run in runs.iter().take(RUNS_MAX) {
        if !text.is_empty() {
            text.push(',');
        }
        match run {
            [first, .., last] => text.push_str(&format!("{first}-{last}")),
            few => few.iter().for_each(|rank| text.push_str(&rank.to_string())),
        }
    }
    match runs
        .iter()
        .skip(RUNS_MAX)
        .map(|run| run.len())
        .sum::<usize>()
    {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(template: Option<&str>, ranks: &[usize], expect: &str) {
        let template = template.map(|template| template.parse::<PrefixTemplate>().unwrap());
        let local_ranks: Vec<_> = ranks.iter().map(|rank| rank - 8).collect();
        let who = Who {
            ranks,
            local_ranks: &local_ranks,
            role: "trainer",
            host: "node1",
        };
        assert_eq!(prefix(template.as_ref(), &who), expect, "{template:?}");
    }

    #[test]
    fn without_a_template_a_prefix_names_the_rank_or_the_ranks() {
        check(None, &[9], "[rank 9] ");
        check(None, &[8, 9, 10, 12], "[ranks 8-10,12] ");
    }

    #[test]
    fn torchruns_macros_are_replaced_and_all_else_stays() {
        check(Some("[${role_name}${local_rank}]:"), &[9], "[trainer1]:");
        check(Some("$hostname/$rank> "), &[9], "node1/9> ");
        check(Some("${rank}${rank}"), &[9], "99");
        check(
            Some("costs $$5 ${other} $ ${rank"),
            &[9],
            "costs $5 ${other} $ ${rank",
        );
        check(Some("${rank}|"), &[8, 9], "8-9|");
        check(Some(""), &[9], "");
    }

    #[test]
    fn many_scattered_ranks_are_counted() {
        let even: Vec<_> = (4..20).map(|half| 2 * half).collect();
        check(None, &even, "[ranks 8,10,12,14,16,18 and 10 more] ");
    }

    #[test]
    fn a_template_has_a_bound() {
        let error = "x".repeat(2000).parse::<PrefixTemplate>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "the prefix has 2000 bytes, at most 1024 are allowed"
        );
    }
}
