//! One answer: a value, an error, or several in turn.

use nvml_wrapper_sys::bindings::*;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// What NVML returns: 0 is success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) nvmlReturn_t);

/// Names of the codes from 0 on, without `NVML_ERROR_`.
const CODES: &str = "SUCCESS UNINITIALIZED INVALID_ARGUMENT NOT_SUPPORTED NO_PERMISSION ALREADY_INITIALIZED NOT_FOUND \
    INSUFFICIENT_SIZE INSUFFICIENT_POWER DRIVER_NOT_LOADED TIMEOUT IRQ_ISSUE LIBRARY_NOT_FOUND FUNCTION_NOT_FOUND \
    CORRUPTED_INFOROM GPU_IS_LOST RESET_REQUIRED OPERATING_SYSTEM LIB_RM_VERSION_MISMATCH IN_USE MEMORY NO_DATA \
    VGPU_ECC_NOT_SUPPORTED INSUFFICIENT_RESOURCES FREQ_NOT_SUPPORTED ARGUMENT_VERSION_MISMATCH DEPRECATED NOT_READY \
    GPU_NOT_FOUND INVALID_STATE RESET_TYPE_NOT_SUPPORTED";

impl Code {
    pub(crate) const SUCCESS: Self = Self(nvmlReturn_enum_NVML_SUCCESS);
    pub(crate) const UNINITIALIZED: Self = Self(nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
    pub(crate) const INVALID_ARGUMENT: Self = Self(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    pub(crate) const NOT_SUPPORTED: Self = Self(nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    pub(crate) const NOT_FOUND: Self = Self(nvmlReturn_enum_NVML_ERROR_NOT_FOUND);
    pub(crate) const INSUFFICIENT_SIZE: Self = Self(nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
    pub(crate) const ARGUMENT_VERSION_MISMATCH: Self =
        Self(nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    pub(crate) const UNKNOWN: Self = Self(nvmlReturn_enum_NVML_ERROR_UNKNOWN);

    pub(crate) fn named(name: &str) -> Option<Self> {
        let name = name
            .trim_start_matches("NVML_")
            .trim_start_matches("ERROR_");
        if name == "UNKNOWN" {
            return Some(Self::UNKNOWN);
        }
        let code = CODES.split_whitespace().position(|known| known == name)?;
        nvmlReturn_t::try_from(code).ok().map(Self)
    }
}

impl<'de> Deserialize<'de> for Code {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(name) => {
                Self::named(&name).ok_or_else(|| D::Error::custom(format!("no code {name}")))
            }
            other => nvmlReturn_t::deserialize(other)
                .map(Self)
                .map_err(D::Error::custom),
        }
    }
}

/// A value, `{"error": code}`, or `{"series": [answers]}` of which each tick takes the next.
#[derive(Debug, Clone)]
pub(crate) enum Answer<T> {
    Value(T),
    Error(Code),
    Series(Vec<Answer<T>>),
}

impl<T> Default for Answer<T> {
    fn default() -> Self {
        Self::Error(Code::NOT_SUPPORTED)
    }
}

impl<T> Answer<T> {
    /// The answer at a tick.
    pub(crate) fn at(&self, tick: u64) -> Result<&T, Code> {
        match self {
            Self::Value(value) => Ok(value),
            Self::Error(code) => Err(*code),
            Self::Series(answers) => {
                let turn = tick.checked_rem(answers.len() as u64);
                let answer = turn.and_then(|turn| answers.get(turn as usize));
                answer.ok_or(Code::NOT_SUPPORTED)?.at(tick)
            }
        }
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Answer<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        if let Some(code) = value.get("error") {
            return Code::deserialize(code)
                .map(Self::Error)
                .map_err(D::Error::custom);
        }
        if let Some(series) = value.get("series") {
            return Vec::deserialize(series)
                .map(Self::Series)
                .map_err(D::Error::custom);
        }
        T::deserialize(value)
            .map(Self::Value)
            .map_err(D::Error::custom)
    }
}

/// A string, `{"bytes": [..]}` of any bytes, or `{"endless": "x"}` that fills what it is written to and has no end.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Text {
    Plain(String),
    Bytes { bytes: Vec<u8> },
    Endless { endless: String },
}

/// A number, or one that grows by so much each tick.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(crate) enum Count {
    Fixed(u64),
    Growing { from: u64, per_tick: u64 },
}

impl Count {
    pub(crate) fn at(self, tick: u64) -> u64 {
        match self {
            Self::Fixed(count) => count,
            Self::Growing { from, per_tick } => from.saturating_add(per_tick.saturating_mul(tick)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_value_an_error_or_several_in_turn() {
        let check = |json: &str, expect: [Result<u32, u32>; 3]| {
            let answer: Answer<u32> = serde_json::from_str(json).expect(json);
            let got = [0, 1, 2].map(|tick| answer.at(tick).copied().map_err(|code| code.0));
            assert_eq!(got, expect, "{json}");
        };
        check("7", [Ok(7); 3]);
        check(r#"{"error": "GPU_IS_LOST"}"#, [Err(15); 3]);
        check(r#"{"error": 12345}"#, [Err(12345); 3]);
        check(
            r#"{"series": [7, {"error": "UNKNOWN"}]}"#,
            [Ok(7), Err(999), Ok(7)],
        );
        check(r#"{"series": []}"#, [Err(3); 3]);
    }

    #[test]
    fn a_count_grows_with_the_ticks_and_stops_at_the_largest() {
        let growing = Count::Growing {
            from: u64::MAX - 5,
            per_tick: 3,
        };
        assert_eq!(
            [0, 1, 2].map(|tick| growing.at(tick)),
            [u64::MAX - 5, u64::MAX - 2, u64::MAX]
        );
    }

    #[test]
    fn codes_have_names_and_numbers() {
        for (name, code) in [
            ("SUCCESS", 0),
            ("RESET_TYPE_NOT_SUPPORTED", 30),
            ("UNKNOWN", 999),
        ] {
            assert_eq!(Code::named(name), Some(Code(code)));
        }
        assert_eq!(Code::named("NVML_ERROR_TIMEOUT"), Some(Code(10)));
        assert_eq!(Code::named("TIMEOUTS"), None);
    }
}
