//! What is read of the lines of `metrics.jsonl`.

use paceline_usage::busy::BusyTime;
use serde::{Deserialize, Deserializer};

/// Most classes whose figures a run writes. A damaged file may say more.
pub(crate) const CLASSES_MAX: usize = 100;

/// How a job began.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Start {
    /// Steps that were done before.
    pub step: u64,
    /// Ranks.
    pub world: u64,
    /// The ranks' device.
    #[serde(default)]
    pub device: Option<String>,
    /// Compute threads of each rank.
    #[serde(default)]
    pub threads: Option<u64>,
    /// Epochs of the job; 0 where it has not said so.
    #[serde(default)]
    pub epochs: u64,
    /// Steps of the job; 0 where it has not said so.
    #[serde(default)]
    pub steps: u64,
    /// The machine of its first rank; older runs say nothing of it.
    #[serde(default, deserialize_with = "lenient")]
    pub environment: Environment,
}

/// The machine and the program.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Environment {
    /// Name of the machine.
    pub host: Option<String>,
    /// Name of its processor.
    pub cpu: Option<String>,
    /// Cores that the job may use.
    pub cores: Option<u64>,
    /// Its memory.
    pub memory_bytes: Option<u64>,
    /// Its operating system.
    pub os: Option<String>,
    /// Version of Paceline.
    pub version: Option<String>,
}

/// Nothing, if a part of a record has another form: the rest is still of use.
fn lenient<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: serde::de::DeserializeOwned + Default,
{
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).unwrap_or_default())
}

/// The end of a job. One that other programs have trained says only that it has come.
#[derive(Clone, Debug, Deserialize)]
pub struct End {
    /// Hash of the weights.
    pub weights_sha256: Option<String>,
    /// When ranks computed.
    #[serde(default = "unknown")]
    pub usage: BusyTime,
    /// What each rank has done.
    #[serde(default)]
    pub ranks: Vec<RankEnd>,
    #[serde(default)]
    pub(crate) stragglers: Vec<Straggler>,
    pub(crate) best: Option<BestEpoch>,
    /// Whether `--patience` ended it.
    #[serde(default)]
    pub stopped_early: bool,
    #[serde(default)]
    pub(crate) classes: Vec<Class>,
    /// What was taken for what, of the same samples.
    #[serde(default)]
    pub(crate) confusion: Vec<Confused>,
}

fn unknown() -> BusyTime {
    BusyTime::new(0)
}

impl End {
    /// Whether its parts fit each other.
    pub(crate) fn is_sound(&self) -> bool {
        let classes = self.classes.len();
        self.usage.busy_ns.len() == self.ranks.len()
            && (self.confusion.iter()).all(|pair| pair.of.max(pair.taken_for) < classes)
    }
}

/// The epoch with the best figure.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct BestEpoch {
    pub(crate) epoch: u64,
    pub(crate) monitor: String,
    /// `None` if it was infinite.
    pub(crate) value: Option<f64>,
}

/// How well a class was predicted at the end, as shares.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Class {
    pub(crate) name: String,
    pub(crate) samples: u64,
    pub(crate) precision: Option<f64>,
    pub(crate) recall: Option<f64>,
    pub(crate) f1: Option<f64>,
}

/// How many samples of a class were taken for one, which may be the same.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Confused {
    pub(crate) of: usize,
    pub(crate) taken_for: usize,
    pub(crate) count: u64,
}

/// What a rank has done with its time.
#[derive(Clone, Debug, Deserialize)]
pub struct RankEnd {
    /// Time lost waiting for other ranks, in nanoseconds.
    pub waited_for_ranks_ns: u64,
    /// Time lost waiting for data, in nanoseconds.
    pub waited_for_data_ns: u64,
    /// Largest resident memory, in bytes.
    pub peak_bytes: Option<u64>,
    /// Bytes sent to other ranks.
    pub sent_bytes: u64,
}

/// A slow rank, with mean times for a shard in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Straggler {
    /// The rank.
    pub rank: usize,
    /// Its time.
    pub seconds: f64,
    /// The time of the others.
    pub others_seconds: f64,
}

/// What is read of any line.
#[derive(Deserialize)]
pub(crate) struct Line {
    pub(crate) kind: String,
    #[serde(default)]
    pub(crate) step: u64,
    #[serde(default)]
    pub(crate) epoch: u64,
    pub(crate) loss: Option<f64>,
    pub(crate) lr: Option<f64>,
    pub(crate) samples: Option<f64>,
    pub(crate) tokens: Option<f64>,
    pub(crate) grad_norm: Option<f64>,
    pub(crate) skipped: Option<bool>,
    pub(crate) back_to: Option<u64>,
    pub(crate) seconds: Option<f64>,
    pub(crate) waited_seconds: Option<f64>,
    pub(crate) train_loss: Option<f64>,
    pub(crate) held_out_loss: Option<f64>,
    pub(crate) signal: Option<String>,
    pub(crate) before: Option<u64>,
    pub(crate) now: Option<u64>,
    pub(crate) why: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_of_another_form_leaves_the_start_readable() {
        let start = |environment: &str| -> Start {
            let line = format!(
                r#"{{"kind":"start","step":0,"world":2,"epochs":1,"steps":9{environment}}}"#
            );
            serde_json::from_str(&line).expect("a start")
        };
        let known = start(r#","environment":{"host":"node1","cores":2,"later":1}"#);
        assert_eq!(known.environment.host.as_deref(), Some("node1"));
        assert_eq!(known.environment.cores, Some(2));
        for other in [
            "",
            r#","environment":null"#,
            r#","environment":7"#,
            r#","environment":{"cores":"x"}"#,
        ] {
            assert_eq!(start(other).environment, Environment::default(), "{other}");
        }
    }
}
