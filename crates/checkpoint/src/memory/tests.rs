use paceline_collective::GroupOptions;

use super::*;

/// A checkpoint of this step with one file of each length.
fn save(folder: &Path, step: u64, lens: &[usize]) -> PathBuf {
    prepare(folder, 0).expect("a folder");
    let writing = Writing::begin(folder, step).expect("a place");
    for len in lens {
        let bytes: Vec<u8> = (0..*len).map(|at| at as u8 ^ step as u8).collect();
        fs::write(writing.path().join(format!("file-{len}")), bytes).expect("written");
    }
    writing.publish(1).expect("published")
}

fn files(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(checkpoint).expect("a checkpoint");
    let read = |entry: fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        (name, fs::read(entry.path()).expect("readable"))
    };
    entries
        .map(|entry| read(entry.expect("an entry")))
        .collect()
}

/// Each rank has a host with a folder of its own, with what `has` puts there.
fn hosts<R: Send>(
    has: impl Fn(usize, &Path) + Sync,
    then: impl Fn(&ProcessGroup, &Path) -> R + Sync,
) -> (tempfile::TempDir, Vec<R>) {
    let root = tempfile::tempdir().expect("a folder");
    let groups = ProcessGroup::local(3, &GroupOptions::default()).expect("a local group");
    let done = paceline_testing::on_threads(groups, |group: ProcessGroup| {
        let folder = root.path().join(group.rank().to_string());
        has(group.rank(), &folder);
        group.barrier().expect("all are ready");
        then(&group, &folder)
    });
    (root, done)
}

#[test]
fn rank_0_gets_the_newest_copy_of_all_hosts() {
    let lens = [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 3];
    let has = |rank, folder: &Path| {
        if rank > 0 {
            save(folder, 10 * rank as u64, &lens);
        }
    };
    let (root, brought) = hosts(has, |group, folder| {
        let copies = Copies::default();
        let bring = || copies.bring(group, Some(folder)).expect("brought");
        // The second time it is there.
        [bring(), bring()]
    });
    assert_eq!(brought, [[true, false], [false; 2], [false; 2]]);
    let [own, other] = ["0", "2"].map(|host| root.path().join(host).join("step-0000000020"));
    assert_eq!(files(&own).len(), lens.len());
    assert!(files(&own) == files(&other));
}

#[test]
fn the_neighbour_gets_what_rank_0_has_written_and_keeps_nothing_else() {
    let has = |rank, folder: &Path| {
        if rank == 1 {
            // Of a step that the job has gone back from.
            save(folder, 90, &[5]);
        }
    };
    let (root, _) = hosts(has, |group, folder| {
        let copying = |step| {
            let written = match group.rank() {
                0 => Ok(Some(save(folder, step, &[3, 4]))),
                _ => Ok(None),
            };
            let copying = Copying {
                job: group.clone(),
                group: group.clone(),
                neighbour: Some(1),
                folder: folder.to_path_buf(),
                has_warned: Arc::default(),
            };
            copying.finish(written);
        };
        (7..9).for_each(copying);
    });
    let [written, copy] = ["0", "1"].map(|host| folder::list(&root.path().join(host)));
    assert!(files(&written[0]) == files(&copy[0]));
    assert!(copy[0].ends_with("step-0000000008"));
    assert_eq!((written.len(), copy.len()), (1, 1));
}

#[test]
fn a_copy_that_cannot_be_written_is_a_warning_and_the_next_one_is_tried() {
    let has = |rank, folder: &Path| {
        if rank == 1 {
            fs::write(folder, "in the way").expect("a file");
        }
    };
    let (root, _) = hosts(has, |group, folder| {
        for step in 1..3 {
            let written = match group.rank() {
                0 => Ok(Some(save(folder, step, &[PIECE_BYTES + 1, 2]))),
                _ => Ok(None),
            };
            let copying = Copying {
                job: group.clone(),
                group: group.clone(),
                neighbour: Some(1),
                folder: folder.to_path_buf(),
                has_warned: Arc::default(),
            };
            copying.finish(written);
            if (group.rank(), step) == (1, 1) {
                fs::remove_file(folder).expect("removed");
            }
        }
        group.health().expect("the group works");
    });
    let copy = folder::list(&root.path().join("1"));
    assert_eq!(files(&copy[0]).len(), 2);
}

#[test]
fn a_folder_without_room_is_refused_with_both_sizes() {
    let root = tempfile::tempdir().expect("a folder");
    let error = prepare(&root.path().join("job"), u64::MAX).expect_err("too much");
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    let told = error.to_string();
    assert!(
        told.starts_with(&format!("{} bytes are needed, ", u64::MAX)),
        "{told}"
    );
}
