use super::*;

const MS: Duration = Duration::from_millis(1);
const US: Duration = Duration::from_micros(1);

fn pace(soonest: Duration, latest_s: u64, share: u32) -> Pace {
    Pace {
        soonest,
        latest: Duration::from_secs(latest_s),
        share,
    }
}

#[test]
fn dear_values_are_asked_less_often() {
    let check = |cost: Duration, devices: usize, expect: Duration| {
        let pause = usual_pause(pace(1000 * MS, 60, 10), cost, devices);
        assert_eq!(pause, expect, "{cost:?} on {devices}");
    };
    check(3 * US, 8, 1000 * MS);
    check(500 * US, 8, 4000 * MS);
    check(9 * MS, 2, 18_000 * MS);
    check(9 * MS, 8, 60_000 * MS);
    check(Duration::MAX, usize::MAX, 60_000 * MS);
}

#[test]
fn cheap_values_are_asked_with_every_sample() {
    let pause = usual_pause(Group::Utilization.pace(), 3 * US, 8);
    assert!(pause < 100 * MS, "{pause:?}");
}

#[test]
fn what_the_device_does_not_have_is_asked_again_after_a_minute() {
    let check = |answer: Answer, expect: Duration| {
        let found = pause(&answer, pace(Duration::ZERO, 2, 10), Duration::ZERO, 1);
        assert_eq!(found, expect, "{answer:?}");
    };
    check(Answer::Known, Duration::ZERO);
    check(Answer::NextSample, Duration::ZERO);
    check(Answer::Missing(Gap::NotSupported), 60_000 * MS);
    check(Answer::Missing(Gap::NoFunction), 60_000 * MS);
    check(Answer::Missing(Gap::Other("odd".to_owned())), 1000 * MS);
}

#[test]
fn one_slow_call_does_not_make_a_value_rare() {
    let after = settled(10 * US, 50 * MS);
    assert_eq!(after, 20 * US);
    assert_eq!(settled(after, 4 * US), 12 * US);
    let many = (0..20).fold(10 * US, |cost, _| settled(cost, 3 * MS));
    assert_eq!(many, 3 * MS, "what is always slow is known to be");
}

#[test]
fn without_a_driver_there_are_no_devices_and_a_reason() {
    let places = Places {
        library: Some("/nowhere/libnvidia-ml.so.1".into()),
        ..Places::default()
    };
    let mut sampler = Sampler::open(&places).only(&[0, 1]);
    assert!(matches!(sampler.trouble(), Some(Trouble::NoLibrary(_))));
    for at in [0, 100, 200] {
        let sample = sampler.sample(at * MS);
        assert_eq!((sample.at, sample.devices.len()), (at * MS, 0));
    }
}

#[test]
fn a_sampler_may_live_on_a_thread_of_its_own() {
    fn check<T: Send + 'static>() {}
    check::<Sampler>();
}
