//! The words of pages and pictures, each in both languages.

use paceline_words::Word;

/// The table of words.
macro_rules! words {
    ($($name:ident: $en:literal, $ko:literal;)*) => {
        $(
            #[doc = concat!("\"", $en, "\"")]
            pub const $name: Word = Word::new($en, $ko);
        )*
    };
}

words! {
    STARTING: "starting", "시작 중";
    RENDEZVOUS: "rendezvous", "랑데부";
    DATA: "data", "데이터";
    FORWARD: "forward", "순전파";
    BACKWARD: "backward", "역전파";
    COMMUNICATION: "communication", "통신";
    WAITS: "waiting", "대기";
    OPTIMIZER: "optimizer", "옵티마이저";
    STEPS_OF_RANKS: "Steps, rank by rank", "랭크별 스텝";
    STEP_OF_RANKS: "What the ranks did in step {}", "스텝 {}에서 각 랭크가 한 일";
    SLOWEST_RANK: "Rank {} worked longest: {} ms, the others {} ms on average.", "랭크 {}의 작업 시간이 가장 깁니다: {} ms, 다른 랭크는 평균 {} ms.";
    COMMUNICATED:
        "{} % of the communication hidden behind computing (operations: {}, {} MB, {} ms, of these {} ms until the last rank had come).",
        "통신 시간의 {} %가 계산과 겹침. 랭크 간 연산 {}개, {} MB, {} ms(마지막 랭크 대기 {} ms).";
    BETWEEN_RANKS: "Between ranks", "랭크 간 통신";
    BUCKET: "operation", "연산";
    BUCKET_SIZE: "MB", "크기(MB)";
    BUCKET_TIME: "took, ms", "소요 시간(ms)";
    BUCKET_LATE: "until the last rank had come, ms", "마지막 랭크 대기(ms)";
    BUCKETS_LEFT_OUT: "{} more", "외 {}개";
    STEP_TIME: "Time of a step, ms", "스텝 시간, ms";
    STEP_TIME_SHORT: "step time", "스텝 시간";
    ROWS_LEFT_OUT: "Of {} ranks, the {} that worked longest and the {} that worked least are shown.", "랭크 {}개 중 작업 시간이 가장 긴 {}개와 가장 짧은 {}개만 표시했습니다.";
    GONE: "ended", "프로세스 종료됨";
    OWN_CODE: "own code", "사용자 코드";
    EVALUATION: "evaluation", "평가";
    CHECKPOINT: "checkpoint", "체크포인트";
    FINISHED: "finished", "종료";
    RUN: "run", "실행";
    STATE: "state", "상태";
    ENDED: "ended", "완료";
    NOT_ENDED: "running, or cut off", "진행 중이거나 중단됨";
    RUNS: "Runs", "실행 목록";
    NO_RUN: "There is no run yet.", "아직 실행이 없습니다.";
    WRITTEN: "last written", "마지막 기록";
    JUST_NOW: "just now", "방금";
    MINUTES_AGO: "{} min ago", "{}분 전";
    HOURS_AGO: "{} h ago", "{}시간 전";
    DAYS_AGO: "{} d ago", "{}일 전";
    CHOOSE: "choose", "선택";
    COMPARE: "Compare the chosen runs", "선택한 실행 비교";
    COMPARE_NOTE: "(up to {})", "(최대 {}개)";
    CUT_OFF: "The connection is lost; it is tried again.", "연결이 끊겼습니다. 다시 연결하는 중입니다.";
    TRAINING: "training", "학습 중";
    STEP: "step", "스텝";
    STEPS: "steps", "스텝 수";
    EPOCH: "epoch", "에폭";
    EPOCHS: "epochs", "에폭 수";
    LOSS: "Loss", "손실";
    LOSS_HELD_OUT: "Loss on held-out data", "평가 데이터 손실";
    METRIC: "{} on held-out data", "평가 데이터 {}";
    TRAIN_LOSS: "train loss", "학습 손실";
    HELD_OUT_LOSS: "held-out loss", "평가 손실";
    HELD_OUT:
        "The line is the loss in training, the dots are the loss on held-out data. Long curves show means of parts, and the shade is the range of each part.",
        "선은 학습 손실, 점은 평가 데이터의 손실입니다. 긴 곡선은 구간별 평균이며, 옅은 영역은 각 구간의 최솟값과 최댓값 사이입니다.";
    ACCURACY: "Accuracy on held-out data", "평가 데이터 정확도";
    LOSS_SHORT: "loss", "손실";
    RATE_SHORT: "throughput", "처리량";
    LEARNING_RATE_SHORT: "learning rate", "학습률";
    GRADIENT_NORM_SHORT: "gradients", "그래디언트";
    ACCURACY_SHORT: "accuracy", "정확도";
    SAMPLES_RATE: "Samples per second", "초당 샘플 수";
    TOKENS_RATE: "Tokens per second", "초당 토큰 수";
    WAITED_SHORT: "waited {} %", "대기 {} %";
    SAMPLES_PER_SECOND: "{} samples/s", "초당 {} 샘플";
    TOKENS_PER_SECOND: "{} tokens/s", "초당 {} 토큰";
    LEFT: "{} left", "{} 남음";
    WHOLE: "all steps", "전체 스텝";
    LAST_SHARE: "last {} % of the steps", "마지막 {} % 스텝";
    NO_VALUE: "no values yet", "아직 값이 없음";
    DEVICES: "Devices", "장치";
    DEVICE: "device", "장치";
    UTILIZATION: "{} % in use", "사용률 {} %";
    MEMORY_USED: "{} of {} GiB", "메모리 {}/{} GiB";
    MORE_DEVICES: "and {} more", "외 {}개";
    KEYS: "q quit  tab, 1-9 chart  z zoom  ? help", "q 종료  tab, 1-9 차트  z 확대  ? 도움말";
    HELP: "q, Esc, Ctrl-C: quit|tab, right, l: the next chart; shift-tab, left, h: the one before; 1 to 9: this one|z, +: the last 10 %, the last 1 %, all steps; -: back|Lines are figures of each step, points those of held-out data. Without colours each run is drawn with its number.|Any key closes this page.", "q, Esc, Ctrl-C: 종료|tab, →, l: 다음 차트, shift-tab, ←, h: 이전 차트, 1-9: 해당 차트|z, +: 마지막 10 %, 마지막 1 %, 전체 순서로 확대, -: 되돌리기|선은 스텝별 값, 점은 평가 데이터의 값입니다. 색을 쓰지 않으면 실행 번호로 그립니다.|아무 키나 누르면 닫힙니다.";
    WAITED: "Share of a step in which rank 0 waited for others, %", "랭크 0이 다른 랭크를 기다린 시간의 비율, %";
    LEARNING_RATE: "Learning rate", "학습률";
    GRADIENT_NORM: "Norm of the gradients", "그래디언트 노름";
    BEST_EPOCH: "Best epoch: {}, with {} {}", "최고 에폭: {} ({} {})";
    CLASSES: "Classes", "클래스";
    CLASS: "class", "클래스";
    SAMPLES: "samples", "샘플 수";
    PRECISION: "precision", "정밀도";
    RECALL: "recall", "재현율";
    F1: "F1", "F1 점수";
    CONFUSION: "Confusion matrix", "혼동 행렬";
    TAKEN_FOR: "taken for", "예측";
    CONFUSION_NOTE:
        "A row has the samples of a class, a column what they were taken for. Shades are shares of the row; those of errors are raised, so that few are seen too.",
        "행은 실제 클래스, 열은 예측한 클래스입니다. 색이 진할수록 행에서 차지하는 비율이 높습니다. 오류는 적어도 눈에 띄도록 더 진하게 칠했습니다.";
    CONFUSED_PAIR: "{} taken for {} ({})", "{} → {} ({}건)";
    MOST_CONFUSED: "Confused most often: {}.", "가장 많이 혼동한 경우(실제 → 예측): {}";
    TOO_MANY_CLASSES: "A matrix of {} classes would be too large to read.", "클래스가 {}개나 되어 혼동 행렬은 그리지 않았습니다.";
    ENVIRONMENT: "Environment", "실행 환경";
    HOST: "host", "호스트";
    CPU: "processor", "프로세서";
    CORES: "cores", "코어 수";
    MEMORY: "memory", "메모리";
    OS: "operating system", "운영체제";
    VERSION: "version of Paceline", "Paceline 버전";
    ADVICE: "what to do: {}", "해결 방법: {}";
    OUTPUT: "its output: {}", "출력: {}";
    RANKS: "Ranks", "랭크";
    RANK: "rank", "랭크";
    COMPUTED: "computing", "계산";
    WAITED_RANKS: "waited for ranks", "랭크 대기";
    WAITED_DATA: "waited for data", "데이터 대기";
    PEAK: "peak memory", "최대 메모리";
    SENT: "sent", "보낸 양";
    AT_ONCE: "share of time in which all ranks computed", "모든 랭크가 동시에 계산한 비율";
    OF_TIME: "Time in which so many ranks computed at once", "동시에 계산한 랭크 수별 시간";
    TOTAL: "time in steps", "스텝에 쓴 시간";
    INCIDENTS: "Incidents", "이벤트";
    NO_INCIDENT: "none", "없음";
    SKIPPED: "skipped: its loss or a gradient was not finite", "건너뜀: 손실이나 그래디언트가 유한하지 않음";
    WENT_BACK: "all ranks went back to step", "모든 랭크가 이전 스텝으로 되돌아감:";
    RESUMED: "resumed on {} ranks", "랭크 {}개로 다시 시작함";
    RANKS_NOW: "the job went on with other ranks:", "랭크 수가 바뀜:";
    STOPPED: "stopped by {}", "{} 시그널로 중단됨";
    FAILED: "failed", "실패";
    SLOW: "slow: {} s for a shard, the others {} s", "느림: 조각 하나에 {}초, 다른 랭크는 {}초";
    MORE: "{} earlier ones are left out", "이전 {}건은 생략함";
    UNREAD: "lines of metrics.jsonl that could not be read: {}", "metrics.jsonl에서 {}줄을 읽지 못함";
    SETTINGS: "Settings", "설정";
    DIFFERENT: "Settings that differ", "서로 다른 설정";
    SETTING: "setting", "설정";
    VALUE: "value", "값";
    SOURCE: "source", "출처";
    OF_FLAG: "flag", "옵션";
    OF_ENVIRONMENT: "environment", "환경 변수";
    OF_FILE: "file", "파일";
    OF_RUN: "run", "실행";
    OF_LAUNCHER: "launcher of this rank", "런처";
    OF_DEFAULT: "default", "기본값";
    WEIGHTS: "weights, SHA-256", "가중치 SHA-256";
    SAME_WEIGHTS: "All runs ended with the same weights, bit for bit.", "모든 실행이 비트까지 같은 가중치로 끝났습니다.";
    ANY_RATE: "Samples or tokens per second", "초당 샘플 또는 토큰 수";
    SINCE: "Since the last start or change of ranks", "마지막으로 시작했거나 랭크가 바뀐 뒤부터";
}
