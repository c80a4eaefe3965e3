//! The report's sentences in each language.

use paceline_gpu::sample::Throttle;
use paceline_gpu::snapshot::{DriverError, Gap};
use paceline_words::say;

use super::super::Lang;
use super::super::report::{AtOnce, IdleCause, Missing, Note, Range, Subject};
use super::missing::Absence;
use super::{is_gap_told, moment, numbers, percent};

/// Sentences in one language.
#[derive(Clone, Copy)]
pub(crate) struct Words(pub(crate) Lang);

/// Sentences without numbers, in English and Korean.
macro_rules! constants {
    ($($name:ident: $en:literal, $ko:literal;)*) => {
        $(pub(crate) fn $name(self) -> &'static str {
            self.of($en, $ko)
        })*
    };
}

/// Sentences with arguments, in English and Korean; times come as `clock` and `moment` write them.
macro_rules! sentences {
    ($($name:ident($($argument:ident: $type:ty),*): $en:literal, $ko:literal;)*) => {
        $(pub(crate) fn $name(self, $($argument: $type),*) -> String {
            say!(self.0, $en, $ko)
        })*
    };
}

impl Words {
    /// The one of two that is in this language.
    fn of<'a>(self, en: &'a str, ko: &'a str) -> &'a str {
        match self.0 {
            Lang::En => en,
            Lang::Ko => ko,
        }
    }

    constants! {
        title: "Run time summary", "실행 시간 요약";
        total: "Total run time", "전체 실행 시간";
        devices: "Devices", "장치";
        nothing_to_see: "none was seen", "확인된 장치가 없습니다";
        not_observed: "not observed", "관측하지 못함";
        too_short: "too short to sample", "너무 짧아 측정하지 못함";
        bounds: "Weighted by utilisation", "사용률을 반영한 비율";
        unobserved: "Time not observed", "관측하지 못한 시간";
        each_gpu: "Each GPU, with its peak memory:", "GPU별 최대 메모리와 사용량:";
        idle_gpus: "No GPU was busy, but memory of theirs was held:", "사용된 GPU는 없지만 메모리는 점유됨:";
        each_rank: "Processor time of each rank (busy: half a core or more):", "랭크별 CPU 사용량(코어 반 개 이상 쓰면 사용 중):";
        memory_unknown: "memory unknown", "메모리 정보 없음";
        what_is_missing: "What is missing:", "빠진 내용:";
        busy_head: "busy", "사용 비율";
        all_at_once: "all", "동시";
        legend_mean: "mean utilisation", "평균 사용률";
        legend_most: "highest reading", "최고 사용률";
        legend_all: "all busy at once (share of the time)", "모두 동시에 사용한 시간의 비율";
    }

    sentences! {
        clock_beside_share(clock: &str): "{clock} (shares are of the rest)", "{clock} (비율은 나머지 시간 기준)";
        busy(share: &str, clock: &str): "busy {share} ({clock})", "사용 {share} ({clock})";
        sm_active(mean: f64): "multiprocessors active {mean:.1}% on average", "멀티프로세서(SM) 평균 활성 {mean:.1}%";
        tensor_active(mean: f64): "tensor cores {mean:.1}%", "텐서 코어 {mean:.1}%";
        temperature(peak: u32): "{peak} °C at most", "최고 온도 {peak} °C";
        traffic(name: &str, sent: &str, received: &str):
            "{name} about {sent} sent and {received} received", "{name} 송신 약 {sent}, 수신 약 {received}";
        held(clock: &str): "memory held while idle {clock}", "유휴 상태로 메모리 점유 {clock}";
        throttled(why: &str, clock: &str): "clocks held down by {why} {clock}", "클럭 제한({why}) {clock}";
        others(numbers: &str): "Not used by this job: GPU {numbers}", "이 작업이 사용하지 않은 GPU: {numbers}";
        cores(cores: f64): "{cores:.2} cores on average", "평균 {cores:.2}코어";
        cpu_time(clock: &str): "processor time {clock}", "CPU 시간 {clock}";
        resident(megabytes: u64): "peak memory {megabytes}MB", "최대 메모리 {megabytes}MB";
        not_drawn(count: usize): "{count} more not drawn", "그 밖에 {count}개는 그리지 않음";
        nothing_drawn(clock: &str):
            "Nothing was seen of devices or ranks in {clock}", "{clock} 동안 확인된 장치나 랭크가 없습니다";
        hung(since: &str): "the driver has not answered since {since}; the job was not held up by it",
            "드라이버가 {since}부터 응답하지 않음(작업에는 영향 없음)";
        no_driver(why: &str): "no GPU was watched: {why}", "GPU를 관측하지 못함: {why}";
        ended(at: &str): "the tracker failed after {at} and saw nothing more", "추적기가 {at} 이후 오류로 멈춤";
        not_started(why: &str): "the tracker could not be started: {why}", "추적기를 시작하지 못함: {why}";
        file(path: &str, why: &str): "{path} cannot be written: {why}", "{path} 파일을 쓸 수 없음: {why}";
        shared(ranks: &str, gpu: &u32): "ranks {ranks} were all on GPU {gpu}", "랭크 {ranks}: 모두 GPU {gpu}에서 실행됨";
        opened(ranks: &str): "rank {ranks} opened it and ran next to nothing on it",
            "랭크 {ranks}: 장치를 열었지만 거의 사용하지 않음";
        idle_ranks(ranks: &str, of: usize): "rank {ranks} of {of} ranks did no work: it used next to no processor time",
            "랭크 {of}개 중 작업하지 않은 랭크 {ranks}: CPU 시간을 거의 사용하지 않음";
    }

    /// `0 h 32 min 12 s`, to the second.
    pub(crate) fn clock(self, seconds: f64) -> String {
        let seconds = seconds.max(0.0).round() as u64;
        let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        say!(
            self.0,
            "{hours} h {minutes} min {seconds} s",
            "{hours}시간 {minutes}분 {seconds}초"
        )
    }

    pub(crate) fn no_gpu_worked(self, is_known: bool) -> &'static str {
        match is_known {
            true => self.of("no GPU was busy", "사용된 GPU가 없습니다"),
            false => self.of(
                "no GPU could say what it does",
                "사용률을 읽을 수 있는 GPU가 없습니다",
            ),
        }
    }

    pub(crate) fn all_busy(self, subject: Subject) -> String {
        match (self.0, subject) {
            (Lang::En, Subject::Gpus(1)) => "GPU busy".into(),
            (Lang::En, Subject::Gpus(n)) => format!("{n} GPUs busy at once"),
            (Lang::En, Subject::Ranks(1)) => "Rank busy".into(),
            (Lang::En, Subject::Ranks(n)) => format!("{n} ranks busy at once"),
            (Lang::Ko, Subject::Gpus(1)) => "GPU 사용 시간".into(),
            (Lang::Ko, Subject::Gpus(n)) => format!("GPU {n}대 동시 사용 시간"),
            (Lang::Ko, Subject::Ranks(1)) => "랭크 작업 시간".into(),
            (Lang::Ko, Subject::Ranks(n)) => format!("랭크 {n}개 동시 작업 시간"),
            (_, Subject::Nothing) => self.devices().into(),
        }
    }

    pub(crate) fn share(self, subject: Subject) -> &'static str {
        match subject {
            Subject::Gpus(1) => self.of("Share of the time", "사용 비율"),
            Subject::Ranks(1) => self.of("Share of the time", "작업 비율"),
            Subject::Ranks(_) => self.of("Share of the time", "동시 작업 비율"),
            _ => self.of("Share of the time", "동시 사용 비율"),
        }
    }

    pub(crate) fn least_to_most(self, least: &str, most: &str) -> String {
        if least == most {
            return least.to_owned();
        }
        format!("{least} {} {most}", self.of("to", "~"))
    }

    pub(crate) fn at_once(self, subject: Subject) -> &'static str {
        match subject {
            Subject::Ranks(_) => self.of("Ranks busy at once", "동시에 작업한 랭크 수"),
            _ => self.of("GPUs busy at once", "동시에 사용한 GPU 수"),
        }
    }

    pub(crate) fn number(self, subject: Subject, from: usize, to: usize) -> String {
        let number = match from == to {
            true => from.to_string(),
            false => format!("{from}–{to}"),
        };
        let unit = match subject {
            Subject::Ranks(_) => self.of(" for", "개"),
            _ => self.of(" for", "대"),
        };
        number + unit
    }

    pub(crate) fn busy_short(self, share: &str) -> String {
        format!("{} {share:>7}", self.of("busy", "사용"))
    }

    pub(crate) fn utilization(self, mean: f64, busy: Option<f64>) -> String {
        match (self.0, busy) {
            (Lang::En, Some(busy)) => {
                format!("utilisation {mean:.1}% on average, {busy:.1}% while busy")
            }
            (Lang::En, None) => format!("utilisation {mean:.1}% on average"),
            (Lang::Ko, Some(busy)) => format!("평균 사용률 {mean:.1}% (사용 중 {busy:.1}%)"),
            (Lang::Ko, None) => format!("평균 사용률 {mean:.1}%"),
        }
    }

    pub(crate) fn utilization_short(self, mean: f64) -> String {
        format!("{} {mean:>5.1}%", self.of("utilisation", "평균 사용률"))
    }

    pub(crate) fn energy(self, joules: f64, estimated: f64) -> String {
        let estimate = match estimated / joules {
            share if share > 0.99 => self.of(" (estimated from power)", " (전력으로 추정)"),
            share if share > 0.01 => {
                self.of(" (partly estimated from power)", " (일부는 전력으로 추정)")
            }
            _ => "",
        };
        let name = self.of("energy", "에너지");
        format!("{name} {:.2} Wh{estimate}", joules / 3600.0)
    }

    pub(crate) fn all_energy(self, joules: f64) -> String {
        let name = self.of("Energy of all", "전체 에너지");
        format!("{name}: {:.2} Wh", joules / 3600.0)
    }

    pub(crate) fn power(self, mean: f64, peak: f64, limit: Option<f64>) -> String {
        match self.0 {
            Lang::En => {
                let limit = limit.map_or_else(String::new, |w| format!(" (limit {w:.0} W)"));
                format!("power {mean:.0} W on average, {peak:.0} W at most{limit}")
            }
            Lang::Ko => {
                let limit = limit.map_or_else(String::new, |w| format!(" (한도 {w:.0} W)"));
                format!("전력 평균 {mean:.0} W, 최대 {peak:.0} W{limit}")
            }
        }
    }

    pub(crate) fn clock_mhz(self, mhz: &Range) -> String {
        let Range { least, mean, most } = mhz;
        match self.0 {
            Lang::En if least == most => format!("clock while busy {most} MHz"),
            Lang::Ko if least == most => format!("사용 중 클럭 {most} MHz"),
            Lang::En => format!("clock while busy {mean:.0} MHz on average, {least} to {most} MHz"),
            Lang::Ko => format!("사용 중 클럭 평균 {mean:.0} MHz, {least} ~ {most} MHz"),
        }
    }

    pub(crate) fn throttle(self, why: Throttle) -> &'static str {
        match why {
            Throttle::PowerCap => self.of("the power limit", "전력 한도"),
            Throttle::Thermal => self.of("heat", "온도"),
            Throttle::HardwareThermal => self.of("heat (hardware)", "온도, 하드웨어"),
            Throttle::PowerBrake => self.of("the power supply", "전원 공급 장치"),
            Throttle::Hardware => self.of("hardware", "하드웨어"),
            Throttle::SyncBoost => self.of("another GPU of its group", "같은 그룹의 다른 GPU"),
            Throttle::ClocksSetting => self.of("a setting", "설정"),
            Throttle::DisplayClock => self.of("the display", "디스플레이"),
        }
    }

    pub(crate) fn left_out(self, count: usize, [least, mean, most]: &[String; 3]) -> String {
        say!(
            self.0,
            "and {count} more between them; busy {least} at least, {mean} on average, {most} at most",
            "그 밖에 {count}개; 사용 최소 {least}, 평균 {mean}, 최대 {most}"
        )
    }

    pub(crate) fn rank(self, rank: u32) -> String {
        format!("{} {rank}", self.of("rank", "랭크"))
    }

    pub(crate) fn restarts(self, count: u64) -> String {
        match (self.0, count) {
            (Lang::En, 1) => "started again once".into(),
            (Lang::En, _) => format!("started again {count} times"),
            (Lang::Ko, _) => format!("다시 시작 {count}회"),
        }
    }

    pub(crate) fn missing_gpus(self, gpus: &str, missing: &Missing, absence: Absence) -> String {
        let (why, since) = (self.gap(&missing.why), moment(missing.since_s));
        let clock = self.clock(missing.for_s);
        match (self.0, absence) {
            (Lang::En, Absence::NeverKnown) => {
                format!("GPU {gpus}: utilisation cannot be read: {why}")
            }
            (Lang::En, Absence::OfSome) => format!(
                "GPU {gpus}: no reading for {clock} from {since} on, counted as not busy: {why}"
            ),
            (Lang::En, Absence::OfAll) => {
                format!("GPU {gpus}: no reading for {clock} from {since} on, not observed: {why}")
            }
            (Lang::Ko, Absence::NeverKnown) => format!("GPU {gpus}: 사용률을 읽을 수 없음: {why}"),
            (Lang::Ko, Absence::OfSome) => format!(
                "GPU {gpus}: {since}부터 {clock} 동안 값을 읽지 못해 사용하지 않은 것으로 계산: {why}"
            ),
            (Lang::Ko, Absence::OfAll) => {
                format!("GPU {gpus}: {since}부터 {clock} 동안 값을 읽지 못해 관측하지 못함: {why}")
            }
        }
    }

    pub(crate) fn missing_ranks(self, ranks: &str, missing: &Missing) -> String {
        let (why, since) = (self.gap(&missing.why), moment(missing.since_s));
        let clock = self.clock(missing.for_s);
        say!(
            self.0,
            "rank {ranks}: no processor time for {clock} from {since} on: {why}",
            "랭크 {ranks}: {since}부터 {clock} 동안 CPU 시간을 읽지 못함: {why}"
        )
    }

    fn gap(self, gap: &Gap) -> String {
        if self.0 == Lang::En {
            return gap.to_string();
        }
        match gap {
            Gap::NotRead => "읽지 않음".into(),
            Gap::NotSupported => "지원하지 않음".into(),
            Gap::NoPermission => "권한 없음".into(),
            Gap::NoFunction => "드라이버가 오래되어 알려 주지 않음".into(),
            Gap::Lost => "장치가 응답하지 않음(버스에서 사라짐)".into(),
            Gap::Other(text) => text.clone(),
        }
    }

    /// A warning above the summary: what is so, why, and what to do.
    pub(crate) fn warning(self, note: &Note) -> String {
        let (what, why, fix) = match note {
            Note::IdleGpus {
                gpus,
                busy,
                ranks,
                cause,
            } => self.idle_gpus_warning(&numbers(gpus), &numbers(busy), *ranks, cause),
            Note::IdleRanks { ranks, of } => self.idle_ranks_warning(&numbers(ranks), *of),
            _ => return String::new(),
        };
        say!(
            self.0,
            "warning: {what}\n  why: {why}\n  fix: {fix}\n",
            "경고: {what}\n  원인: {why}\n  조치: {fix}\n"
        )
    }

    fn idle_gpus_warning(
        self,
        gpus: &str,
        busy: &str,
        ranks: usize,
        cause: &IdleCause,
    ) -> (String, String, &'static str) {
        let what = match (self.0, busy) {
            (Lang::En, "") => format!("GPU {gpus} did no work while {ranks} ranks ran"),
            (Lang::En, busy) => {
                format!("GPU {gpus} did no work while {ranks} ranks ran; only GPU {busy} was busy")
            }
            (Lang::Ko, "") => {
                format!("랭크 {ranks}개가 실행되는 동안 작업하지 않은 GPU: {gpus}")
            }
            (Lang::Ko, busy) => format!(
                "랭크 {ranks}개가 실행되는 동안 작업하지 않은 GPU: {gpus}, 사용된 GPU: {busy}"
            ),
        };
        let each_its_own = self.of(
            "give each rank the device of its LOCAL_RANK: `paceline::device::of_rank(&group)`, or \
             `torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"]))`; and do not set CUDA_VISIBLE_DEVICES to one device \
             for all ranks",
            "각 랭크가 LOCAL_RANK에 해당하는 장치를 사용하도록 설정: `paceline::device::of_rank(&group)` 또는 \
             `torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"]))`. CUDA_VISIBLE_DEVICES를 모든 랭크에 같은 장치 하나로 \
             지정하지 말 것",
        );
        let (why, fix) = match cause {
            IdleCause::Shared { gpu, ranks } => (self.shared(&numbers(ranks), gpu), each_its_own),
            IdleCause::Opened { ranks } => (
                self.opened(&numbers(ranks)),
                self.of(
                    "check that the model and the batches of that rank are moved to its device, and that it is not left \
                     waiting for data or for another rank",
                    "해당 랭크의 모델과 배치를 그 장치로 옮겼는지, 데이터나 다른 랭크를 기다리고 있지 않은지 확인",
                ),
            ),
            IdleCause::Unknown => {
                let why = self.of(
                    "usually all ranks compute on the first device, because the program does not use its local rank or \
                     CUDA_VISIBLE_DEVICES names one device",
                    "대개 프로그램이 로컬 랭크를 사용하지 않거나 CUDA_VISIBLE_DEVICES가 장치 하나만 지정하여 모든 랭크가 첫 번째 \
                     장치에서 실행됨",
                );
                (why.to_owned(), each_its_own)
            }
        };
        (what, why, fix)
    }

    fn idle_ranks_warning(self, ranks: &str, of: usize) -> (String, String, &'static str) {
        let why = self.of(
            "usually it waits: for data, for another rank, or in a sleep",
            "대개 데이터나 다른 랭크를 기다리거나 sleep 상태임",
        );
        let fix = self.of(
            "look at that rank's own output, and check that the work is divided by RANK and WORLD_SIZE",
            "해당 랭크의 출력을 확인하고, 작업을 RANK와 WORLD_SIZE로 나누었는지 확인",
        );
        (self.idle_ranks(ranks, of), why.to_owned(), fix)
    }

    /// A note among those at the end; nothing for one that [`Self::warning`] tells.
    pub(crate) fn note(self, note: &Note) -> Option<String> {
        let told = match note {
            Note::IdleGpus { .. } | Note::IdleRanks { .. } => return None,
            Note::Late {
                count,
                for_s,
                since_s,
            } => {
                let (clock, since) = (self.clock(*for_s), moment(*since_s));
                match (self.0, count) {
                    (Lang::En, 1) => format!(
                        "nothing was sampled for {clock} from {since} on: that time is not observed"
                    ),
                    (Lang::En, _) => format!(
                        "samples came late {count} times, first at {since}: {clock} are not observed"
                    ),
                    (Lang::Ko, _) => {
                        format!("샘플이 {count}번 늦음(처음 {since}): {clock}는 관측하지 못함")
                    }
                }
            }
            Note::Hung { since_s } => self.hung(&moment(*since_s)),
            Note::NoDriver { trouble } => self.no_driver(&self.driver_error(trouble)),
            Note::Ended { at_s } => self.ended(&moment(*at_s)),
            Note::NotStarted { why } => self.not_started(why),
            Note::File { path, why } => self.file(path, why),
        };
        Some(told)
    }

    fn driver_error(self, error: &DriverError) -> String {
        if self.0 == Lang::En {
            return error.to_string();
        }
        match error {
            DriverError::NoLibrary(_) => "NVIDIA 드라이버 라이브러리가 설치되어 있지 않음".into(),
            DriverError::NoDriver => "NVIDIA 커널 모듈이 로드되어 있지 않음".into(),
            DriverError::Static => {
                "정적으로 링크된 프로그램이어서 NVIDIA 드라이버 라이브러리를 로드할 수 없음".into()
            }
            DriverError::NoPermission => "권한 없음".into(),
            DriverError::VersionMismatch => "NVIDIA 라이브러리와 커널 모듈의 버전이 다름".into(),
            DriverError::Other(text) => text.clone(),
        }
    }

    pub(crate) fn picture_title(self, subject: Subject, all: &AtOnce, total_s: f64) -> String {
        let (share, busy) = (percent(all.all_busy_share), self.all_busy(subject));
        let is_whole = !is_gap_told(total_s, all.observed_s);
        let clock = self.clock(if is_whole { total_s } else { all.observed_s });
        match (self.0, is_whole) {
            (Lang::En, true) => format!("{busy}: {share} of {clock}"),
            (Lang::En, false) => format!("{busy}: {share} of the {clock} observed"),
            (Lang::Ko, true) => format!("{busy}: {clock} 중 {share}"),
            (Lang::Ko, false) => format!("{busy}: 관측한 {clock} 중 {share}"),
        }
    }

    pub(crate) fn picture_subtitle(self, subject: Subject) -> &'static str {
        match subject {
            Subject::Ranks(_) => self.of(
                "Processor time over time, 0 to 100% of one core in each strip",
                "시간에 따른 CPU 사용률 (각 띠는 코어 하나의 0 ~ 100%)",
            ),
            _ => self.of(
                "Utilisation over time, 0 to 100% in each strip",
                "시간에 따른 사용률 (각 띠는 0 ~ 100%)",
            ),
        }
    }
}
