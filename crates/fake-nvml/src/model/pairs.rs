//! What holds between two devices: one word for all pairs, or a table of them.

use serde::Deserialize;

use super::answer::Code;

/// One word for all pairs, or one row of words for each device. A word is one of nvidia-smi's, a number, `!` and the name of
/// an error, or `X` for a device and itself.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum Pairs {
    All(String),
    Each(Vec<String>),
}

impl Default for Pairs {
    fn default() -> Self {
        Self::All("!NOT_SUPPORTED".into())
    }
}

impl Pairs {
    /// What holds between two devices, in the numbers that `number` gives the words.
    pub(crate) fn between(
        &self,
        from: u32,
        to: u32,
        number: fn(&str) -> Option<u32>,
    ) -> Result<u32, Code> {
        let word = match self {
            Self::All(word) => word,
            Self::Each(rows) => rows
                .get(from as usize)
                .and_then(|row| row.split_whitespace().nth(to as usize))
                .ok_or(Code::NOT_SUPPORTED)?,
        };
        if let Some(name) = word.strip_prefix('!') {
            return Err(Code::named(name).unwrap_or(Code::UNKNOWN));
        }
        number(word)
            .or_else(|| word.parse().ok())
            .ok_or(Code::INVALID_ARGUMENT)
    }
}

/// *Source*: `nvmlGpuP2PStatus_t`.
pub(crate) fn p2p_status(word: &str) -> Option<u32> {
    let words = ["OK", "CNS", "GNS", "TNS", "DR", "NS", "U"];
    let place = words.iter().position(|known| *known == word)?;
    u32::try_from(place).ok()
}

/// *Source*: `nvmlGpuTopologyLevel_t`.
pub(crate) fn level(word: &str) -> Option<u32> {
    let words = ["BOARD", "PIX", "PXB", "PHB", "NODE", "SYS"];
    let place = words.iter().position(|known| *known == word)?;
    u32::try_from(place * 10).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_one_word_or_a_table() {
        let check = |json: &str, expect: Result<u32, Code>| {
            let pairs: Pairs = serde_json::from_str(json).expect(json);
            assert_eq!(pairs.between(0, 1, p2p_status), expect, "{json}");
        };
        check(r#""NS""#, Ok(5));
        check(r#"["X TNS", "U X"]"#, Ok(3));
        check(r#"["X 77"]"#, Ok(77));
        check(r#"["X !UNKNOWN"]"#, Err(Code::UNKNOWN));
        check(r#"["X"]"#, Err(Code::NOT_SUPPORTED));
        check(r#"["OK X"]"#, Err(Code::INVALID_ARGUMENT));
        assert_eq!(level("PHB"), Some(30));
    }
}
