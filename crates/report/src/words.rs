//! The words of the page, each in both languages.

use paceline_usage::Lang;

/// English and Korean.
#[derive(Clone, Copy)]
pub(crate) struct Word(&'static str, &'static str);

impl Word {
    pub(crate) fn of(self, lang: Lang) -> &'static str {
        match lang {
            Lang::En => self.0,
            Lang::Ko => self.1,
        }
    }
}

pub(crate) const RUN: Word = Word("run", "실행");
pub(crate) const STATE: Word = Word("state", "상태");
pub(crate) const ENDED: Word = Word("ended", "완료");
pub(crate) const NOT_ENDED: Word = Word("running, or cut off", "진행 중이거나 중단됨");
pub(crate) const STEP: Word = Word("step", "스텝");
pub(crate) const STEPS: Word = Word("steps", "스텝 수");
pub(crate) const EPOCHS: Word = Word("epochs", "에폭 수");
pub(crate) const LOSS: Word = Word("Loss", "손실");
pub(crate) const TRAIN_LOSS: Word = Word("train loss", "학습 손실");
pub(crate) const HELD_OUT_LOSS: Word = Word("held-out loss", "평가 손실");
pub(crate) const HELD_OUT: Word = Word(
    "The line is the loss in training, the dots are the loss on held-out data. Long curves show means of parts, and the shade is the range of each part.",
    "선은 학습 손실, 점은 평가 데이터의 손실입니다. 긴 곡선은 구간별 평균이며, 옅은 영역은 각 구간의 최솟값과 최댓값 사이입니다.",
);
pub(crate) const ACCURACY: Word = Word("Accuracy on held-out data, %", "평가 데이터 정확도, %");
pub(crate) const ACCURACY_SHORT: Word = Word("accuracy", "정확도");
pub(crate) const SAMPLES_RATE: Word = Word("Samples per second", "초당 샘플 수");
pub(crate) const TOKENS_RATE: Word = Word("Tokens per second", "초당 토큰 수");
pub(crate) const WAITED: Word = Word(
    "Share of a step in which rank 0 waited for others, %",
    "랭크 0이 다른 랭크를 기다린 시간의 비율, %",
);
pub(crate) const LEARNING_RATE: Word = Word("Learning rate", "학습률");
pub(crate) const GRADIENT_NORM: Word = Word("Norm of the gradients", "그래디언트 노름");
pub(crate) const BEST_EPOCH: Word = Word("Best epoch: {}, with {} {}", "최고 에폭: {} ({} {})");
pub(crate) const CLASSES: Word = Word("Classes", "클래스");
pub(crate) const CLASS: Word = Word("class", "클래스");
pub(crate) const SAMPLES: Word = Word("samples", "샘플 수");
pub(crate) const PRECISION: Word = Word("precision", "정밀도");
pub(crate) const RECALL: Word = Word("recall", "재현율");
pub(crate) const F1: Word = Word("F1", "F1");
pub(crate) const RANKS: Word = Word("Ranks", "랭크");
pub(crate) const RANK: Word = Word("rank", "랭크");
pub(crate) const COMPUTED: Word = Word("computing", "계산");
pub(crate) const WAITED_RANKS: Word = Word("waited for ranks", "랭크 대기");
pub(crate) const WAITED_DATA: Word = Word("waited for data", "데이터 대기");
pub(crate) const PEAK: Word = Word("peak memory", "최대 메모리");
pub(crate) const SENT: Word = Word("sent", "보낸 양");
pub(crate) const AT_ONCE: Word = Word(
    "share of time in which all ranks computed",
    "모든 랭크가 동시에 계산한 비율",
);
pub(crate) const OF_TIME: Word = Word(
    "Time in which so many ranks computed at once",
    "동시에 계산한 랭크 수별 시간",
);
pub(crate) const TOTAL: Word = Word("time in steps", "스텝에 쓴 시간");
pub(crate) const INCIDENTS: Word = Word("Incidents", "이벤트");
pub(crate) const NO_INCIDENT: Word = Word("none", "없음");
pub(crate) const SKIPPED: Word = Word(
    "skipped: its loss or a gradient was not finite",
    "건너뜀: 손실이나 그래디언트가 유한하지 않음",
);
pub(crate) const WENT_BACK: Word = Word(
    "all ranks went back to step",
    "모든 랭크가 이전 스텝으로 되돌아감:",
);
pub(crate) const RANKS_NOW: Word = Word("the job went on with other ranks:", "랭크 수가 바뀜:");
pub(crate) const STOPPED: Word = Word("stopped by", "시그널로 중단됨:");
pub(crate) const SLOW: Word = Word(
    "slow: {} s for a shard, the others {} s",
    "느림: 조각 하나에 {}초, 다른 랭크는 {}초",
);
pub(crate) const MORE: Word = Word("and {} more", "{}건 더 있음");
pub(crate) const UNREAD: Word = Word(
    "lines of metrics.jsonl that could not be read: {}",
    "metrics.jsonl에서 {}줄을 읽지 못함",
);
pub(crate) const SETTINGS: Word = Word("Settings", "설정");
pub(crate) const DIFFERENT: Word = Word("Settings that differ", "서로 다른 설정");
pub(crate) const SETTING: Word = Word("setting", "설정");
pub(crate) const VALUE: Word = Word("value", "값");
pub(crate) const SOURCE: Word = Word("source", "출처");
pub(crate) const WEIGHTS: Word = Word("weights, SHA-256", "가중치 SHA-256");
pub(crate) const SAME_WEIGHTS: Word = Word(
    "All runs ended with the same weights, bit for bit.",
    "모든 실행이 비트까지 같은 가중치로 끝났습니다.",
);
pub(crate) const ANY_RATE: Word = Word("Samples or tokens per second", "초당 샘플 또는 토큰 수");
pub(crate) const SINCE: Word = Word(
    "Since the last start or change of ranks",
    "마지막으로 시작했거나 랭크가 바뀐 뒤부터",
);
