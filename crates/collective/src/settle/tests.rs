use super::*;

#[test]
fn the_rank_that_is_ahead_lends_to_all_that_are_behind() {
    let standings = |completed: &[u64]| {
        let within = |completed| Standing {
            place: Place::Within,
            completed,
        };
        completed.iter().copied().map(within).collect::<Vec<_>>()
    };
    for (completed, lender) in [
        (&[3, 3, 3][..], None),
        (&[2, 3, 3], Some(1)),
        (&[3, 2, 2], Some(0)),
        (&[0, 0, 1], Some(2)),
        (&[0], None),
    ] {
        let settled = settle(&standings(completed)).expect("at most one apart");
        assert_eq!(settled.lender, lender, "{completed:?}");
        assert_eq!((settled.giver, settled.new), (None, vec![]));
    }
    let error = settle(&standings(&[3, 1, 2])).expect_err("two apart");
    assert_eq!(
        error.to_string(),
        "rank 1 has completed 1 steps and other agreements, but another rank 3: expected a difference of at most one"
    );
}

#[test]
fn a_rank_between_two_steps_hands_its_state_over_to_new_ones() {
    use Place::{Between, New, Within};
    for (all, lender, giver, new) in [
        (
            &[(Between, 7), (Between, 7), (New, 0)][..],
            None,
            Some(0),
            &[2][..],
        ),
        // Rank 0 lacks the last result, and is not where it could hand anything over.
        (
            &[(Within, 6), (Between, 7), (New, 0), (New, 0)],
            Some(1),
            Some(1),
            &[2, 3],
        ),
        (&[(Between, 7), (Between, 7)], None, Some(0), &[]),
        (&[(Within, 7), (New, 0)], None, None, &[1]),
    ] {
        let standings = all.iter().map(|(place, completed)| Standing {
            place: *place,
            completed: *completed,
        });
        let standings: Vec<Standing> = standings.collect();
        let expected = Settlement {
            completed: 7,
            lender,
            giver,
            new: new.to_vec(),
        };
        let settled = settle(&standings).expect("a new rank is behind nobody");
        assert_eq!(settled, expected, "{all:?}");
        for standing in standings {
            assert_eq!(Standing::decode(&standing.encode()), standing);
        }
    }
}
