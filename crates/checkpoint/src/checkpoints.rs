//! `Checkpoints`: a job's checkpoint folder, written in the background by rank 0 and read back for all ranks.

mod lane;

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::SystemTime;

use burn::module::Module;
use paceline_collective::ProcessGroup;
use paceline_ddp::sampler::StepPlan;
use paceline_ddp::{Ddp, DdpError, Recovery};
use paceline_rendezvous::notice;
use paceline_rendezvous::page::Phase;

use self::lane::{Deferred, Lane, Medium, Rest};
use crate::checkpoint::Checkpoint;
use crate::decide::by_rank_0_slowly;
use crate::digests::Recorder;
use crate::error::{CheckpointError, failed_in, not_locked, unusable};
use crate::folder::{self, Writing};
use crate::ledger::{self, Committed, Ledger};
use crate::left;
use crate::lock::FolderLock;
use crate::memory::{self, Copies, Copying};
use crate::remote::{Remote, Uploader};
use crate::saved::{Places, Saved};
use crate::snapshot::Snapshots;

/// Number of checkpoints kept by default.
const KEEP: usize = 3;

/// The checkpoints of a job.
///
/// Rank 0 reads and writes and sends the contents to the other ranks, so only its host needs to see the folder. All ranks
/// call the same functions.
///
/// *Background*: [`save`](Self::save) copies the state and returns; a thread serialises, checksums, writes and syncs it. Where each
/// rank has a part of the state, a thread of each rank sends it. One checkpoint is written at a time: a new save waits until the
/// previous one is on disk, so none is skipped and memory holds at most one copy.
///
/// *Errors* of the background thread are returned by the next `save` or by [`finish`](Self::finish). Without either, dropping
/// waits for the thread and reports its error on stderr.
///
/// *A lost rank 0* on another host may be frozen or cut off, and keep the folder's lock for a while. The next one then trains on, keeps its
/// records and its newest save in memory, and writes them when the lock is free; after two minutes it fails.
///
/// *Example*:
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Tensor};
/// use paceline_checkpoint::{Checkpoint, Checkpoints};
/// use paceline_collective::{GroupOptions, ProcessGroup};
/// use paceline_ddp::sampler::BatchOptions;
/// use paceline_ddp::{Ddp, DdpOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # let group = ProcessGroup::local(1, &GroupOptions::default())?.remove(0);
/// # let device = Device::flex().autodiff();
/// # let model: Linear = LinearConfig::new(4, 2).init(&device);
/// # let mut optimizer = SgdConfig::new().init();
/// let (mut ddp, mut model) = Ddp::new(group, model, DdpOptions::default())?;
/// let mut batches = ddp.batches(64, BatchOptions::new(16).epochs(2))?;
/// let mut best = f64::MAX;
///
/// let mut checkpoints = Checkpoints::open(folder, ddp.group())?.keep(2);
/// if let Some(mut saved) = checkpoints.resume(&mut ddp)? {
///     (model, optimizer) = saved.restore(&mut ddp, model, optimizer)?;
///     batches.load_state_dict(saved.sampler()?)?;
///     best = saved.value()?;
/// }
/// for plan in batches {
///     let reduced = ddp.step_on(&model, &plan, |model, indices| {
///         model.forward(Tensor::<2>::ones([indices.len(), 4], &device)).powf_scalar(2.0).mean()
///     })?;
///     model = optimizer.step(0.1, model, reduced.grads);
///     best = best.min(reduced.loss);
///     checkpoints.record(&ddp, &plan)?;
///     if plan.ends_epoch() {
///         let checkpoint = Checkpoint::new(&model, &optimizer).sampler(&plan.after).value(&best);
///         checkpoints.save(&ddp, checkpoint)?;
///     }
///     // In a job that recovers live, replacements of lost ranks go on from here.
///     checkpoints.admit(&mut ddp, &model, || {
///         Checkpoint::new(&model, &optimizer).sampler(&plan.after).value(&best)
///     })?;
/// }
/// checkpoints.finish()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Checkpoints {
    group: ProcessGroup,
    metadata: BTreeMap<String, String>,
    files: Lane,
    /// Those in this host's memory, if the launcher offers a folder there.
    memory: Option<Lane>,
    copies: Copies,
    /// Where copies go besides.
    remote: Option<Arc<Remote>>,
    /// On a rank that has saved a checkpoint with a copy there.
    uploader: Option<Arc<Uploader>>,
    /// Of which steps used which samples; on rank 0 only, from the first recorded step on.
    ledger: Option<Ledger>,
    snapshots: Snapshots,
    /// Whether the ranks have gone back since the last recorded step.
    has_gone_back: bool,
    /// Whether this rank leaves its state if another one is lost.
    leaves: bool,
    /// On a rank that goes on or leaves its state if rank 0 is lost: the last records, which rank 0 may not have written. On a rank 0
    /// without the lock: those that it has still to write.
    unwritten: Vec<Committed>,
    /// Why there is this generation of the ranks, if others were lost.
    why: Option<String>,
    /// The newest save of a rank 0 without the lock.
    deferred: Option<Deferred>,
    /// Of this rank's gradients, from the first recorded step on.
    digests: Option<Recorder>,
    opened: SystemTime,
    /// The lock on the folder; held on rank 0 only.
    lock: FolderLock,
}

impl Checkpoints {
    /// Opens `folder`. Rank 0 creates it and locks it until the value is dropped.
    ///
    /// *Errors*: `InUse` if another job has it; I/O errors.
    pub fn open(folder: impl Into<PathBuf>, group: &ProcessGroup) -> Result<Self, CheckpointError> {
        let folder = folder.into();
        // A replacement of rank 0 is another rank when it joins.
        let is_first = group.rank() == 0 && !group.is_joining();
        let mut lock = FolderLock::new(&folder, Some(group.env()));
        if is_first {
            lock.attempt().map_err(not_locked(&folder))?;
        }
        let memory = group.env().memory_folder.as_ref();
        Ok(Self {
            group: group.clone(),
            metadata: BTreeMap::new(),
            files: Lane::new(folder, KEEP),
            memory: memory.map(|folder| Lane::new(folder.into(), 1)),
            copies: Copies::default(),
            remote: None,
            uploader: None,
            ledger: None,
            snapshots: Snapshots::default(),
            has_gone_back: false,
            leaves: false,
            unwritten: Vec::new(),
            why: None,
            deferred: None,
            digests: None,
            opened: SystemTime::now(),
            lock,
        })
    }

    /// Sets how many of the newest checkpoints are kept, at least 1, besides the [best](Checkpoint::best_step). Default: 3.
    #[must_use]
    pub fn keep(mut self, keep: usize) -> Self {
        self.files.keep = keep;
        self
    }

    /// Sets how many steps lie between two [snapshots](Self::snapshot); 0 takes none. Default: 0.
    #[must_use]
    pub fn snapshot_every(mut self, steps: u64) -> Self {
        self.snapshots = Snapshots::every(steps);
        self
    }

    /// Adds an entry to the metadata of every saved model, in the header of `model.safetensors`: for example the
    /// normalisation of the inputs or the names of the classes.
    #[must_use]
    pub fn metadata(mut self, name: &str, value: &str) -> Self {
        self.metadata.insert(name.into(), value.into());
        self
    }

    /// Also keeps a copy of the newest checkpoints, and of the ledger, in an object store, at `s3://BUCKET/PATH`, `gs://BUCKET/PATH` or
    /// `file:///FOLDER`. A job on another machine that has the same URL resumes from there. Each job needs a URL of its own.
    ///
    /// Credentials, region and endpoint come from the environment, for example `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    /// `AWS_REGION` and `AWS_ENDPOINT_URL`, or `GOOGLE_APPLICATION_CREDENTIALS`. Needs the feature `object-store`.
    ///
    /// *Background*: a thread uploads each checkpoint once it is on disk, without delaying a save. If the next ones are faster, only the
    /// newest is uploaded. A store that cannot be reached is named once in a warning; the checkpoints in the folder are unaffected.
    /// [`finish`](Self::finish) waits for the last upload, dropping does not.
    ///
    /// *Errors*: not such a URL; a build without the feature.
    pub fn upload_to(mut self, url: &str) -> Result<Self, CheckpointError> {
        self.remote = Some(Arc::new(Remote::open(url)?));
        Ok(self)
    }

    /// The newest whole checkpoint in the folder or in [memory](Self::save_in_memory), the same one on all ranks; `None` if there is
    /// no checkpoint at all. Damaged checkpoints are skipped with a warning, and [named](Saved::damaged). If the
    /// [object store](Self::upload_to) has a newer one than the folder, it is downloaded into it first.
    ///
    /// *Blocks*: until rank 0 has read it. If only another host has the newest one in its memory, that is sent to rank 0's before.
    ///
    /// *Errors*: `NoneValid` if all checkpoints are damaged (`Rank0` on the other ranks); failed collectives; an object store that
    /// cannot be used, if the folder has no checkpoint.
    pub fn latest(&self) -> Result<Option<Saved>, CheckpointError> {
        self.group.set_phase(Phase::Checkpoint, 0);
        if let Some(remote) = &self.remote {
            by_rank_0_slowly(&self.group, || match remote.download(&self.files.folder) {
                Err(error @ CheckpointError::Remote { .. })
                    if !folder::list(&self.files.folder).is_empty() =>
                {
                    notice!(
                        WARN,
                        "{error}; the newest checkpoint in {} is used",
                        self.files.folder.display()
                    );
                    Ok(false)
                }
                downloaded => downloaded,
            })??;
        }
        let joined = self.join_left()?;
        let memory = self.memory.as_ref().map(|lane| &*lane.folder);
        let is_brought = self.copies.bring(&self.group, memory)?;
        let places = Places {
            files: &self.files.folder,
            memory,
            joined: joined.as_deref(),
            is_brought,
        };
        let saved = Saved::newest(u64::MAX, &places, &self.group)?;
        if self.group.rank() == 0 {
            for reason in saved.iter().flat_map(Saved::damaged) {
                notice!(WARN, "skipped a damaged checkpoint: {reason}");
            }
        }
        Ok(saved)
    }

    /// Makes a checkpoint of what the ranks of the last start have [left](Self::leave).
    fn join_left(&self) -> Result<Option<PathBuf>, CheckpointError> {
        if self.group.env().restart_count == 0 {
            return Ok(None);
        }
        let joined = by_rank_0_slowly(&self.group, || {
            let Some(Lane { folder, .. }) = &self.memory else {
                return Ok::<_, CheckpointError>(None);
            };
            let saved = [folder, &self.files.folder].map(|folder| folder::list(folder).pop());
            let saved = saved
                .iter()
                .flatten()
                .filter_map(|path| folder::step_of(path));
            let joined = left::join(folder, saved.max(), self.metadata.clone(), |missed| {
                self.record_missed(missed)
            });
            Ok(joined.unwrap_or_else(|error| {
                notice!(
                    WARN,
                    "the state of the surviving ranks is of no use: {error}"
                );
                None
            }))
        });
        joined?
    }

    /// Appends to the ledger what a lost rank 0 has not.
    fn record_missed(&self, missed: &[Committed]) -> Result<(), CheckpointError> {
        if missed.is_empty() {
            return Ok(());
        }
        let record = || {
            let mut ledger = Ledger::open(&self.files.folder, self.opened)?;
            let missed = missed.iter();
            let missed: Vec<_> = missed.filter(|step| ledger.has_missed(step)).collect();
            missed.into_iter().try_for_each(|step| ledger.record(step))
        };
        record().map_err(|source| CheckpointError::Ledger {
            action: "continue",
            path: ledger::path(&self.files.folder),
            source,
        })
    }

    /// As [`latest`](Self::latest); in a process that has [joined](Ddp::has_joined) the job in place of a lost rank, the state of
    /// the other ranks, from [`admit`](Self::admit), without any file.
    ///
    /// *Blocks*, *Errors*: as `latest`; in that process, `Misfit` if the state cannot be read.
    pub fn resume(&self, ddp: &mut Ddp) -> Result<Option<Saved>, CheckpointError> {
        match ddp.take_handover() {
            Some(state) => Saved::from_peer(&self.files.folder, state).map(Some),
            None if ddp.has_joined() => Ok(None),
            None => self.latest(),
        }
    }

    /// Takes in the replacements of lost ranks that wait, with [`Ddp::admit`]: they go on from `checkpoint`, which is the state after
    /// the last step. All ranks call it after each step; it is called on one rank, when there is a replacement.
    ///
    /// *Cost*: without replacements, none. *Blocks*, *Errors*: as [`Ddp::admit`].
    pub fn admit<'a, M: Module + 'a>(
        &mut self,
        ddp: &mut Ddp,
        model: &M,
        checkpoint: impl FnOnce() -> Checkpoint<'a, M>,
    ) -> Result<(), CheckpointError> {
        let (folder, generation) = (&self.files.folder, ddp.group().generation());
        let checkpoint = LazyCell::new(checkpoint);
        ddp.admit(model, |ddp, give| {
            Saved::to_peer(folder, &checkpoint, ddp, give)
        })?;
        if ddp.group().generation() != generation {
            self.snapshots.clear();
        }
        Ok(())
    }

    /// From now on, [`leave`](Self::leave) leaves this rank's state if another one is lost. For jobs that start again after a loss, and
    /// whose ranks together have the state more than once. All ranks call it once, after [`Ddp::new`]. Says whether it will.
    ///
    /// It will not if the launcher does not start the ranks again, if the job has several hosts, with live recovery, if no other
    /// rank has what this one has, and with a communication hook that keeps a state.
    pub fn leave_after_a_loss(&mut self, ddp: &Ddp) -> bool {
        let env = self.group.env();
        self.leaves = self.memory.is_some()
            && env.node_count == 1
            && env.restart_count < env.max_restarts
            && ddp.recovery() != Recovery::Live
            && ddp.group().world() > 1
            && !ddp.has_hook_state()
            && !ddp.has_own_optimizers();
        if self.leaves {
            self.group.slot().set_leaves_state();
        }
        self.leaves
    }

    /// After a step that failed with `error`: if that is the [loss](DdpError::is_loss) of another rank, leaves the state before the step
    /// in this host's memory, for the ranks that the launcher starts in place of all. If the ranks that were left had all of the
    /// state, [`latest`](Self::latest) finds it there, and no step is lost although nothing was saved.
    ///
    /// If the weights of replicas [differ](DdpError::Diverged), what the ranks have left does not count.
    ///
    /// A rank calls it alone, and only if model and optimizer are those before the step. It does nothing without
    /// [`leave_after_a_loss`](Self::leave_after_a_loss), for state on a GPU, and for an optimizer whose state is dealt to the ranks.
    ///
    /// *Blocks*: until the state is in `/dev/shm`. If that fails, there is a warning.
    pub fn leave<'a, M: Module + 'a>(
        &self,
        ddp: &Ddp,
        error: &DdpError,
        checkpoint: impl FnOnce() -> Checkpoint<'a, M>,
    ) {
        let Some(Lane { folder, .. }) = self.memory.as_ref().filter(|_| self.leaves) else {
            return;
        };
        let left = if matches!(error, DdpError::Diverged { .. }) {
            left::refuse(folder)
        } else if error.is_loss() {
            self.group.set_phase(Phase::Checkpoint, ddp.next_step());
            left::write(folder, ddp, &checkpoint(), &self.unwritten)
        } else {
            Ok(())
        };
        if let Err(error) = left {
            notice!(WARN, "this rank leaves no state: {error}");
        }
    }

    /// Keeps the state before the next step in memory, if that is [due](Self::snapshot_every), to [go back](Self::go_back) to. All ranks
    /// call it before each step, also before the first; `checkpoint` is called when one is due.
    ///
    /// *Cost*: no message: a digest of the state takes the place of the step's fingerprint. One step in so many, three copies of the
    /// state and its SHA-256. *Memory*: one copy of the state, two of them during one step.
    ///
    /// *Errors*: state that is dealt to the ranks.
    pub fn snapshot<'a, M: Module + 'a>(
        &mut self,
        ddp: &mut Ddp,
        checkpoint: impl FnOnce() -> Checkpoint<'a, M>,
    ) -> Result<(), CheckpointError> {
        if !self.snapshots.is_due(ddp) {
            return Ok(());
        }
        ddp.synchronize()?;
        let kept = self.snapshots.keep(&self.files.folder, ddp, &checkpoint());
        kept.map_err(|what| CheckpointError::File {
            action: "keep a snapshot for",
            path: self.files.folder.clone(),
            source: io::Error::other(what),
        })
    }

    /// After a step that failed with `error`: the state to go back to if the ranks' weights [differ](DdpError::Diverged) and all had
    /// the same at a [snapshot](Self::snapshot). [Restore](Saved::restore) it and continue after its [position](Saved::sampler): the
    /// repeated steps then give the bits of an undisturbed run. All ranks call it.
    ///
    /// Checkpoints and records of later steps, which are wrong, are removed or cancelled; those in an [object store](Self::upload_to) are
    /// removed in the background, before another one is uploaded.
    ///
    /// It is `None` for any other error, without a snapshot, and the fourth time in a row for one snapshot: then the cause is not
    /// a passing one. Without a majority, rank 0 says after the repeated step which rank was wrong, if that can be told.
    ///
    /// *Blocks*: on rank 0, until the last save is on disk. *Errors*: those of that save.
    pub fn go_back(
        &mut self,
        ddp: &Ddp,
        error: &DdpError,
    ) -> Result<Option<Saved>, CheckpointError> {
        if !matches!(error, DdpError::Diverged { .. }) {
            return Ok(None);
        }
        let Some(saved) = self.snapshots.go_back(ddp) else {
            return Ok(None);
        };
        self.follow(ddp)?;
        self.has_gone_back = true;
        self.unwritten.clear();
        self.remove_after(saved.step())?;
        if self.group.rank() == 0 {
            notice!(WARN, "{error}: all ranks go back to step {}", saved.step());
        }
        Ok(Some(saved))
    }

    /// After a step that was [skipped](paceline_ddp::Reduced::skipped), in place of [`record`](Self::record): goes back to the newest
    /// [snapshot](Self::snapshot) that a finite step has followed, but not to its samples. [Restore](Saved::restore) the state:
    /// step, seed and scaler stay those of now, and the [position](Saved::sampler) is that after `plan`. Also returns the step of
    /// the snapshot. The [ledger](crate::ledger) says that the steps after that one were given up. All ranks call it.
    ///
    /// Checkpoints of steps that were given up are removed. Without a snapshot it is `None`, and the step remains skipped.
    ///
    /// *Blocks*: on rank 0, until the last save is on disk. *Errors*: those of that save and of `record`.
    ///
    /// *Source*: PaLM (Chowdhery et al., 2022) went back some 100 steps before a spike of the loss and skipped the batches.
    pub fn give_up(
        &mut self,
        ddp: &Ddp,
        plan: &StepPlan,
    ) -> Result<Option<(u64, Saved)>, CheckpointError> {
        let given_up = self.snapshots.give_up(ddp, plan.after);
        let back_to = given_up.as_ref().map(|(step, _)| *step);
        self.record_step(ddp, plan, back_to)?;
        back_to.map_or(Ok(()), |step| self.remove_after(step))?;
        Ok(given_up)
    }

    /// Removes the checkpoints of later steps, whose weights are not to be used.
    fn remove_after(&mut self, step: u64) -> Result<(), CheckpointError> {
        if self.group.rank() == 0 {
            self.wait()?;
            folder::remove_after(&self.files.folder, step);
            if let Some(uploader) = self.uploader()? {
                uploader.remove_after(step);
            }
        }
        // Any host may have a copy. The rank that may write the next one there removes it, because others may come later.
        if let Some(memory) = &mut self.memory {
            memory.wait()?;
            if self.group.env().local_rank == 0 {
                folder::remove_after(&memory.folder, step);
            }
        }
        Ok(())
    }

    /// Notes in the run's [ledger](crate::ledger) that the step of `plan` is done. Call it on all ranks once the optimizer's step is
    /// applied, and before [`save`](Self::save). Rank 0 writes; with live recovery the other ranks keep what it may not have written.
    /// With [`DdpOptions::record`](paceline_ddp::DdpOptions::record) each rank also writes the [digests](crate::digests) of its
    /// gradients.
    ///
    /// *Cost*: no message; a checksum of the indices and one line appended to a file. For digests, one line for each shard.
    ///
    /// *Errors*: the ledger or the digests cannot be written, or were damaged before.
    pub fn record(&mut self, ddp: &Ddp, plan: &StepPlan) -> Result<(), CheckpointError> {
        self.record_step(ddp, plan, None)
    }

    fn record_step(
        &mut self,
        ddp: &Ddp,
        plan: &StepPlan,
        back_to: Option<u64>,
    ) -> Result<(), CheckpointError> {
        self.follow(ddp)?;
        if let Some(keep) = ddp.record() {
            let digests = match &mut self.digests {
                Some(digests) => digests,
                none => {
                    let started = self.group.started_rank(self.group.rank());
                    none.insert(Recorder::open(&self.files.folder, started, keep)?)
                }
            };
            digests.append(ddp.next_step(), self.group.generation(), ddp.digests())?;
        }
        let goes_back = std::mem::take(&mut self.has_gone_back);
        let committed = || {
            let committed = Committed::new(&self.group, ddp, plan, self.why.clone());
            committed.after(goes_back).giving_up(back_to)
        };
        if self.group.rank() == 0 {
            let committed = committed();
            if self.lock.is_held() {
                return self.append(&committed, |_| true);
            }
            self.unwritten.push(committed);
        } else if ddp.recovery() == Recovery::Live || self.leaves {
            let committed = committed();
            // Rank 0 has taken part in this step, so it has written all steps before it, unless it is a new one.
            let last = self.unwritten.last();
            if last.is_some_and(|last| last.generation() == committed.generation()) {
                self.unwritten.clear();
            }
            self.unwritten.push(committed);
        }
        Ok(())
    }

    /// Goes on with the ranks that are left if some were lost. The new rank 0 locks the folder and continues the ledger.
    fn follow(&mut self, ddp: &Ddp) -> Result<(), CheckpointError> {
        // Along a mesh, the replicas are fewer than the job's ranks, but of the same generation.
        if ddp.group().generation() != self.group.generation() {
            self.group = ddp.group().clone();
            self.why = self.group.why_generation();
            self.copies = Copies::default();
            for lane in self.memory.iter_mut().chain([&mut self.files]) {
                lane.saves = None;
            }
        }
        if self.group.rank() > 0 || self.lock.is_held() {
            return Ok(());
        }
        let attempt = self.lock.attempt();
        match attempt.map_err(not_locked(&self.files.folder))? {
            true => self.take_over(),
            false => Ok(()),
        }
    }

    /// Writes what the ranks of this job have not, once this one has the lock.
    fn take_over(&mut self) -> Result<(), CheckpointError> {
        for committed in std::mem::take(&mut self.unwritten) {
            self.append(&committed, |ledger| ledger.lacks(&committed))?;
        }
        match self.deferred.take() {
            Some(Deferred(write)) => self.files.start("rank0/save".into(), write),
            None => Ok(()),
        }
    }

    /// Appends to the ledger, if `is_needed`.
    fn append(
        &mut self,
        committed: &Committed,
        is_needed: impl FnOnce(&Ledger) -> bool,
    ) -> Result<(), CheckpointError> {
        let failed = |action| {
            let path = ledger::path(&self.files.folder);
            move |source| CheckpointError::Ledger {
                action,
                path,
                source,
            }
        };
        let ledger = match &mut self.ledger {
            Some(ledger) => ledger,
            none => {
                let opened = Ledger::open(&self.files.folder, self.opened);
                none.insert(opened.map_err(failed("continue"))?)
            }
        };
        match is_needed(ledger) {
            true => ledger.record(committed).map_err(failed("write")),
            false => Ok(()),
        }
    }

    /// Saves the state after the last step. The ranks copy what they have and continue; rank 0 writes in the background, and receives
    /// what other ranks have, one tensor after another, over a group of its own.
    ///
    /// *Memory*: on each rank a copy of what it has of the state, where the ranks have parts; otherwise on rank 0 a copy of it.
    ///
    /// *Blocks*: until this rank has done its part of the previous save and has copied the state. If gradients stay on a GPU, also
    /// until the device has finished. The first save of dealt state also waits for the other ranks.
    ///
    /// *Errors*: those of the previous save; a failed device; a type that cannot be saved.
    pub fn save<M: Module>(
        &mut self,
        ddp: &Ddp,
        checkpoint: Checkpoint<'_, M>,
    ) -> Result<(), CheckpointError> {
        self.save_in(Medium::Files, ddp, checkpoint)
    }

    /// Saves the state as [`save`](Self::save) does, but in the memory of rank 0's host, and with several hosts on another one too. It
    /// replaces the one before, outlives the ranks, and ends with the job. [`latest`](Self::latest) finds it if the ranks are started
    /// again. If there is no room for it, that is a warning.
    ///
    /// *Memory*: on these hosts twice the size of a checkpoint while one replaces another, in `/dev/shm`; and that of `save`.
    ///
    /// *Blocks*: as `save`; a save in the folder and one in memory do not wait for each other.
    ///
    /// *Errors*: `NoMemory` in a job that Paceline's launcher has not started; a failed device; a type that cannot be saved.
    pub fn save_in_memory<M: Module>(
        &mut self,
        ddp: &Ddp,
        checkpoint: Checkpoint<'_, M>,
    ) -> Result<(), CheckpointError> {
        self.save_in(Medium::Memory, ddp, checkpoint)
    }

    fn lane(&mut self, medium: Medium) -> Result<&mut Lane, CheckpointError> {
        match medium {
            Medium::Files => Ok(&mut self.files),
            Medium::Memory => self.memory.as_mut().ok_or(CheckpointError::NoMemory),
        }
    }

    fn save_in<M: Module>(
        &mut self,
        medium: Medium,
        ddp: &Ddp,
        checkpoint: Checkpoint<'_, M>,
    ) -> Result<(), CheckpointError> {
        self.follow(ddp)?;
        // Unfinished work on a device may still fail and must not be saved.
        ddp.synchronize()?;
        let rank = self.group.rank();
        let is_dealt = checkpoint.is_dealt(ddp);
        let folder = self.lane(medium)?.folder.clone();
        let copying = match medium {
            Medium::Files => None,
            Medium::Memory => {
                // A group of its own: if a copy takes too long, the job goes on.
                let group = match self.group.env().node_count {
                    1 => self.group.clone(),
                    _ => self.lane(medium)?.group_of_saves(ddp)?,
                };
                Some(self.copies.begin(&self.group, group, &folder)?)
            }
        };
        let is_copied = copying.as_ref().is_some_and(Copying::is_on_this_rank);
        if rank != 0 && !is_dealt && !is_copied {
            return Ok(());
        }
        self.group.set_phase(Phase::Checkpoint, ddp.next_step());
        let last = self.lane(medium)?.wait();
        let dealt = match is_dealt {
            true => {
                let group = self.lane(medium)?.group_of_saves(ddp)?;
                Some((group, checkpoint.copy_dealt(ddp)?))
            }
            false => None,
        };
        let syncs_ledger = copying.as_ref().is_none_or(Copying::has_neighbour);
        let rest = last.and_then(|()| match rank {
            0 => self.rest(ddp, &checkpoint, syncs_ledger).map(Some),
            _ => Ok(None),
        });
        let whole = match (&dealt, &rest) {
            (None, Ok(Some(_))) => Some(checkpoint.copy().map_err(unusable(&folder))?),
            _ => None,
        };
        let uploader = match (medium, rank) {
            (Medium::Files, 0) => self.uploader()?,
            _ => None,
        };
        let metadata = self.metadata.clone();
        // The other ranks send even if rank 0 cannot write.
        let (rest, failed) = match rest {
            Ok(rest) => (rest, None),
            Err(error) if is_dealt => (None, Some(error)),
            Err(error) => return Err(error),
        };
        let room = copying.as_ref().map(|_| checkpoint.bytes(ddp));
        let (keep, within) = (self.lane(medium)?.keep, folder.clone());
        let write = move || {
            let begun = rest.map(|rest| {
                if let Some(bytes) = room {
                    memory::prepare(&within, bytes).map_err(failed_in(&within))?;
                }
                let writing = Writing::begin(&within, rest.state.ddp.step)?;
                Ok::<_, CheckpointError>((rest, writing))
            });
            let begun = begun.transpose();
            let written = begun.as_ref().ok().and_then(Option::as_ref);
            let folder = written.map(|(_, writing)| writing.path());
            let hash = match (dealt, whole, written) {
                (Some((group, dealt)), ..) => dealt.write(&group, folder, metadata),
                (None, Some(whole), Some((_, writing))) => {
                    let hash = whole.write(writing.path(), metadata);
                    hash.map_err(writing.failed())
                }
                _ => Ok(String::new()),
            };
            match begun? {
                Some((rest, writing)) => {
                    let place = rest.finish(writing, hash?, keep, uploader.as_deref());
                    place.map(Some)
                }
                None => hash.map(|_| None),
            }
        };
        let write = move || match copying {
            None => write().map(drop),
            Some(copying) => {
                copying.finish(write());
                Ok(())
            }
        };
        let name = match medium {
            Medium::Files => format!("rank{rank}/save"),
            Medium::Memory => format!("rank{rank}/memory"),
        };
        if medium == Medium::Files && rank == 0 && !self.lock.is_held() {
            self.deferred = Some(Deferred(Box::new(write)));
        } else {
            self.lane(medium)?.start(name, write)?;
        }
        failed.map_or(Ok(()), Err)
    }

    /// What rank 0 adds to the tensors.
    fn rest<M: Module>(
        &self,
        ddp: &Ddp,
        checkpoint: &Checkpoint<'_, M>,
        syncs_ledger: bool,
    ) -> Result<Rest, CheckpointError> {
        let folder = &self.files.folder;
        let (state, schedule) = (checkpoint.state(ddp), checkpoint.schedule_state());
        let has_ledger = self.ledger.is_some() || !self.unwritten.is_empty();
        Ok(Rest {
            schedule: schedule.map_err(unusable(folder))?,
            state: state.map_err(unusable(folder))?,
            ledger: (has_ledger && syncs_ledger).then(|| ledger::path(folder)),
        })
    }

    /// The thread that copies the next checkpoint once it is on disk.
    fn uploader(&mut self) -> Result<Option<Arc<Uploader>>, CheckpointError> {
        if let (None, Some(remote)) = (&self.uploader, &self.remote) {
            let started = Uploader::start(remote.clone(), self.files.keep, self.group.rank());
            let started = started.map_err(failed_in(&self.files.folder))?;
            self.uploader = Some(Arc::new(started));
        }
        Ok(self.uploader.clone())
    }

    /// Waits until the last saves are done.
    ///
    /// *Errors*: those of the last save on disk.
    pub fn wait(&mut self) -> Result<(), CheckpointError> {
        if self.group.rank() == 0 && (self.deferred.is_some() || !self.unwritten.is_empty()) {
            let held = self.lock.hold();
            held.map_err(not_locked(&self.files.folder))?;
            self.take_over()?;
        }
        let in_memory = self.memory.as_mut().map_or(Ok(()), Lane::wait);
        self.files.wait().and(in_memory)
    }

    /// Waits until the last save is on disk, and uploaded if it can be. Call it at the end of a program.
    ///
    /// *Errors*: those of the last save on disk.
    pub fn finish(mut self) -> Result<(), CheckpointError> {
        self.wait()?;
        if let Some(uploader) = self.uploader.take().and_then(Arc::into_inner) {
            uploader.finish();
        }
        Ok(())
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        let memory = self.memory.as_mut().into_iter();
        for lane in memory.chain([&mut self.files]) {
            // A thread that panicked has printed its panic on stderr.
            if let Some(Ok(Err(error))) = lane.writing.take().map(JoinHandle::join) {
                notice!(ERROR, "{error}");
            }
        }
        if self.deferred.take().is_some() {
            let folder = self.files.folder.display();
            notice!(WARN, "the last save is lost: {folder} is still locked");
        }
        if let Some(uploader) = self.uploader.take().and_then(Arc::into_inner) {
            uploader.abandon();
        }
    }
}
