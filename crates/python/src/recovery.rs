//! The C functions of live recovery: a group is followed by one of the ranks that are left, and of replacements.
#![allow(unsafe_code)]

use paceline_collective::{Place, ProcessGroup, Standing};
use serde::Serialize;

use crate::abi::{OK, PENDING, keep, say, status};
use crate::failure::Failure;
use crate::group::Group;
use crate::handles::tables;

/// Tells the launcher: 1 that this program goes on when ranks are lost, 2 that it takes in replacements, 3 that this process has joined as
/// one. [`OK`], or for 1 [`PENDING`] if no launcher recovers the job live.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_declare(group: u64, word: u32) -> i32 {
    status(|| {
        let group = tables().groups.get(group)?;
        let group = group.processes();
        match word {
            1 if !group.declare_recovery() => return Ok(PENDING),
            1 => {}
            2 => group.declare_admission(),
            3 => group.declare_joined(),
            _ => {
                return Err(Failure::new(
                    "bug",
                    format!("no word has the number {word}"),
                ));
            }
        }
        Ok(OK)
    })
}

/// What is the matter with a group: 0 nothing that another generation would mend, 1 a rank is lost and the others can go on, 2 replacements
/// wait, 3 this process is a replacement that has not joined. *Cost*: a few loads.
///
/// # Safety
///
/// `outlook` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_outlook(group: u64, outlook: *mut u32) -> i32 {
    status(|| {
        let group = tables().groups.get(group)?;
        // SAFETY: the caller's contract.
        unsafe { outlook.write(outlook_of(group.processes())) };
        Ok(OK)
    })
}

fn outlook_of(group: &ProcessGroup) -> u32 {
    match () {
        () if group.is_lost() => 1,
        () if group.is_joining() => 3,
        () if group.is_invited() => 2,
        () => 0,
    }
}

/// Waits while the launchers hold the group back, because the job has too few nodes.
///
/// *Blocks*: for as long as they do.
#[unsafe(no_mangle)]
pub extern "C" fn paceline_wait_while_held(group: u64) -> i32 {
    status(|| {
        tables().groups.get(group)?.processes().wait_while_held();
        Ok(OK)
    })
}

/// The generation after a group: of the ranks that are left, or of all and their replacements if no rank is lost. The text has this
/// process's `rank` and the `world`. The group before it stays as it is.
///
/// *Blocks*: until the launcher has published the generation and its ranks have connected; a replacement for as long as the job runs.
///
/// # Safety
///
/// `next` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_next_generation(group: u64, next: *mut u64) -> i32 {
    #[derive(Serialize)]
    struct Member {
        rank: usize,
        world: usize,
    }
    status(|| {
        let group = tables().groups.get(group)?.next_generation()?;
        let (rank, world) = (group.processes().rank(), group.processes().world());
        // SAFETY: the caller's contract.
        unsafe { next.write(keep(group)) };
        say(&Member { rank, world });
        Ok(OK)
    })
}

/// Compares how far the ranks of a new generation have come. All of them call it before anything else: `place` is 0 in a commit, 1 between two, 2 for a
/// replacement without state, and `completed` counts the commits. The text has the commits that hold (`completed`), the rank that hands its
/// state over (`giver`, or null), and the ranks without state (`new`).
#[unsafe(no_mangle)]
pub extern "C" fn paceline_settle(group: u64, place: u32, completed: u64) -> i32 {
    #[derive(Serialize)]
    struct Settled {
        completed: u64,
        giver: Option<usize>,
        new: Vec<usize>,
    }
    status(|| {
        let place = match place {
            0 => Place::Within,
            1 => Place::Between,
            2 => Place::New,
            _ => {
                return Err(Failure::new(
                    "bug",
                    format!("no place has the number {place}"),
                ));
            }
        };
        let group = tables().groups.get(group)?;
        let settled = settle(&group, Standing { place, completed })?;
        say(&Settled {
            completed: settled.completed,
            giver: settled.giver,
            new: settled.new,
        });
        Ok(OK)
    })
}

fn settle(group: &Group, own: Standing) -> Result<paceline_collective::Settlement, Failure> {
    let group = group.processes();
    let all = group.all_gather_bytes(&own.encode());
    let all = all.map_err(|error| Failure::during("all-gather", group, &error))?;
    let all: Vec<Standing> = all.iter().map(|bytes| Standing::decode(bytes)).collect();
    paceline_collective::settle(&all).map_err(|apart| {
        group.abort(&apart.to_string());
        Failure::new("other", apart.to_string()).hint(
            "all ranks must call SameBits.backward and SameBits.with_recovery in the same order",
        )
    })
}
