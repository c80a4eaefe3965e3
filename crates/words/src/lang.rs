//! Which language people are told things in.

/// A language that people are told things in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Lang {
    /// English.
    #[default]
    En,
    /// Korean.
    Ko,
}

impl Lang {
    /// Names for a command's flag.
    pub const NAMES: [&str; 2] = ["en", "ko"];

    /// The language of one of [`Self::NAMES`].
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "en" => Some(Self::En),
            "ko" => Some(Self::Ko),
            _ => None,
        }
    }

    /// The language that the locale names, English where we have no other; `variable` looks up a variable of the
    /// environment.
    ///
    /// *Source*: POSIX: the first of `LC_ALL`, `LC_MESSAGES` and `LANG` that is set and not empty counts.
    ///
    /// *Example*:
    /// ```
    /// use paceline_words::Lang;
    ///
    /// let lang = Lang::from_env(|name| (name == "LANG").then(|| "ko_KR.UTF-8".to_owned()));
    /// assert_eq!(lang, Lang::Ko);
    /// ```
    pub fn from_env(variable: impl Fn(&str) -> Option<String>) -> Self {
        let locale = ["LC_ALL", "LC_MESSAGES", "LANG"]
            .into_iter()
            .filter_map(variable)
            .find(|value| !value.is_empty());
        let locale = locale.unwrap_or_default();
        let language = locale.split(['_', '.', '@', '-']).next();
        language.and_then(Self::named).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_variable_that_says_something_counts() {
        let check = |set: &[(&str, &str)], expect| {
            let variable = |name: &str| {
                let found = set.iter().find(|(set, _)| *set == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            assert_eq!(Lang::from_env(variable), expect, "{set:?}");
        };
        check(&[], Lang::En);
        check(&[("LANG", "ko_KR.UTF-8")], Lang::Ko);
        check(&[("LANG", "ko")], Lang::Ko);
        check(&[("LANG", "kok_IN")], Lang::En);
        check(&[("LANG", "ko_KR"), ("LC_ALL", "C")], Lang::En);
        check(&[("LANG", "ko_KR"), ("LC_ALL", "")], Lang::Ko);
        check(&[("LANG", "en_US"), ("LC_MESSAGES", "ko_KR")], Lang::Ko);
        check(&[("LANG", "de_DE.UTF-8")], Lang::En);
    }
}
