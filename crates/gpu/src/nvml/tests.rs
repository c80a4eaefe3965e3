use super::*;

#[test]
fn a_version_of_cuda_is_two_numbers() {
    let check = |number: i32, expect: Option<(u32, u32)>| {
        assert_eq!(cuda_version(number).ok(), expect, "{number}");
    };
    check(12080, Some((12, 8)));
    check(13000, Some((13, 0)));
    check(0, None);
    check(-1, None);
}

#[test]
fn a_library_that_is_not_there_is_trouble() {
    let places = Places {
        library: Some("/nowhere/libnvidia-ml.so.1".into()),
        ..Places::default()
    };
    match open(&places) {
        Err(DriverError::NoLibrary(words)) => assert!(words.contains("/nowhere"), "{words}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_library_that_is_no_library_is_trouble() {
    let places = Places {
        library: Some("/proc/self/status".into()),
        ..Places::default()
    };
    assert!(matches!(open(&places), Err(DriverError::NoLibrary(_))));
}
