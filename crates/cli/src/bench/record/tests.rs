//! What a record says, and records for tests of others.

use super::*;

/// An all-reduce of 2 ranks in the arena.
pub(crate) fn timing(bytes: usize, p50_us: f64) -> Timing {
    Timing {
        library: "paceline",
        operation: "all-reduce",
        transport: "shm",
        world: 2,
        memory: Some("arena"),
        bytes,
        elements: bytes / 4,
        dtype: Some("f32".into()),
        reduction: Some("sum".into()),
        root: None,
        algorithm: Some("direct".into()),
        iterations: 100,
        min_us: p50_us / 2.0,
        p50_us,
        p99_us: p50_us * 2.0,
        algbw_gb_s: Some(bytes as f64 / p50_us / 1e3),
        busbw_gb_s: Some(bytes as f64 / p50_us / 1e3),
        wrong: Some(0),
    }
}

pub(crate) fn streaming() -> Streaming {
    Streaming {
        library: "paceline",
        world: 2,
        bytes: 64 << 20,
        passes: 9,
        ordinary_gb_s: 20.0,
        non_temporal_gb_s: Some(40.0),
        gb_s: 40.0,
        shares: Vec::new(),
    }
}

#[test]
fn the_share_is_what_must_be_moved_by_time_and_bound() {
    let timings = [
        timing(64_000_000, 8000.0),
        timing(1000, 1.0),
        timing(20_000_000, 400.0),
    ];
    let shares = streaming().with_shares(&timings).shares;
    // 2 ranks read and write 64 MB each: 256 MB in 8 ms.
    let large = Share {
        bytes: 64_000_000,
        moved_bytes: 256_000_000,
        gb_s: 32.0,
        share: 0.8,
    };
    assert_eq!(shares.len(), 2, "the small one is in the caches");
    assert_eq!(shares[1], large);
    assert_eq!(shares[0].bytes, 20_000_000);
    let tcp = Timing {
        transport: "tcp",
        ..timing(64_000_000, 8000.0)
    };
    assert_eq!(streaming().with_shares(&[tcp]).shares, []);
}

#[test]
fn a_record_says_what_it_is() {
    let json = serde_json::to_value(Record::Timing(timing(8, 1.5))).unwrap();
    assert_eq!(json["record"], "timing");
    assert_eq!(json["p50_us"], 1.5);
    assert_eq!(json["root"], serde_json::Value::Null);
    let json = serde_json::to_value(Record::Streaming(streaming())).unwrap();
    assert_eq!(json["record"], "streaming");
}
